"""A whole language model as data: what presets, files and other libraries' configurations are turned into."""

from dataclasses import dataclass, replace
from typing import Literal

from deqseq.backbones import Llama, LlamaConfig, Mamba2, Mamba2Config
from deqseq.gradients import Gradient, Phantom
from deqseq.models.causal_lm import CausalLM
from deqseq.models.explicit import ExplicitModel
from deqseq.models.implicit import ImplicitModel, Start
from deqseq.solvers import Relaxed, Solver
from deqseq.stop import Stop


@dataclass(frozen=True)
class Solving:
    """How an implicit model is solved and differentiated.

    Args:
        solver: the algorithm.
        stop: tolerances and budget in training.
        gradient: the estimator.
        eval_stop: tolerances and budget in eval mode; None: ``stop``.
        eval_solver: the algorithm in eval mode; None: ``solver``.
        start: where the iteration begins: at ``"zero"``, or at the embedded tokens, ``"input"``.

    Example:
        >>> Solving(stop=Stop.exactly(4), gradient=Phantom(1)).eval_stop is None
        True
    """

    solver: Solver = Relaxed(0.8)
    stop: Stop = Stop()
    gradient: Gradient = Phantom()
    eval_stop: Stop | None = None
    eval_solver: Solver | None = None
    start: Start = "zero"


@dataclass(frozen=True)
class LanguageModelSpec:
    """Everything that a :class:`deqseq.CausalLM` is built from, but its weights.

    Args:
        vocab_size: tokens, at least 1.
        backbone: sizes of the backbone; its ``injection`` follows ``solving``.
        solving: how the fixed point is found and differentiated; None: an explicit model, which runs the layers once.
        tied: whether the head is the embedding.
        embedding_std: standard deviation of the initial embedding.
        embedding_dropout: probability that a number of an embedded token is zero in training, in [0, 1).

    Raises:
        ValueError: a probability outside [0, 1).

    Example:
        >>> spec = LanguageModelSpec(10, Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> type(spec.build().model).__name__, type(spec.explicit().build().model).__name__
        ('ImplicitModel', 'ExplicitModel')
    """

    vocab_size: int
    backbone: Mamba2Config | LlamaConfig
    solving: Solving | None = Solving()
    tied: bool = True
    embedding_std: float = 0.02
    embedding_dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.embedding_dropout < 1:
            raise ValueError(f"embedding_dropout must lie in [0, 1), got {self.embedding_dropout!r}")

    @property
    def kind(self) -> Literal["mamba2", "llama"]:
        """The backbone's name."""
        return "llama" if isinstance(self.backbone, LlamaConfig) else "mamba2"

    def explicit(self) -> "LanguageModelSpec":
        """The baseline of the same layers: run once, without an injection."""
        return replace(self, solving=None)

    def build_model(self) -> ImplicitModel | ExplicitModel:
        """The model between embedding and head, freshly initialised."""
        config = replace(self.backbone, injection=self.solving is not None)
        backbone = Llama(config) if isinstance(config, LlamaConfig) else Mamba2(config)
        if self.solving is None:
            return ExplicitModel(backbone)
        how = self.solving
        return ImplicitModel(
            backbone,
            solver=how.solver,
            stop=how.stop,
            gradient=how.gradient,
            eval_solver=how.eval_solver,
            eval_stop=how.eval_stop,
            start=how.start,
        )

    def build(self) -> CausalLM:
        """The whole model, freshly initialised."""
        return CausalLM(
            self.vocab_size,
            self.build_model(),
            self.embedding_std,
            tied=self.tied,
            embedding_dropout=self.embedding_dropout,
        )
