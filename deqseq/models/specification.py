"""A whole language model as data: presets, files and other libraries' configurations are translated to it."""

from dataclasses import dataclass, replace

from deqseq.backbones import Llama, LlamaConfig, Mamba2, Mamba2Config
from deqseq.check import check_flag, check_integer, check_number, check_type
from deqseq.config import SolveConfig
from deqseq.models.causal_lm import CausalLM
from deqseq.models.explicit import ExplicitModel
from deqseq.models.implicit import ImplicitModel
from deqseq.models.scaling import check_embedding


@dataclass(frozen=True)
class LanguageModelSpec:
    """Everything that decides a :class:`deqseq.CausalLM` except its weights.

    Args:
        vocab_size: tokens, at least 1.
        backbone: sizes of the backbone; its ``injection`` is on for an implicit model, off for an explicit one.
        solve: how the fixed point is found and differentiated; None: an explicit model, which runs the layers once.
        eval_solve: the same in eval mode. Default: ``solve``.
        tied: whether the head is the embedding.
        embedding_std: standard deviation of the initial embedding.
        embedding_dropout: probability that a number of an embedded token is zero in training, in [0, 1).
        embedding_scale: multiplies the embedded tokens.
        logit_softcap: bound of the logits. Default: none.

    Raises:
        TypeError, ValueError: names the field, what it got and what it wants.

    Example:
        >>> spec = LanguageModelSpec(10, Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> type(spec.build().model).__name__, type(spec.explicit().build().model).__name__
        ('ImplicitModel', 'ExplicitModel')
    """

    vocab_size: int
    backbone: Mamba2Config | LlamaConfig
    solve: SolveConfig | None = SolveConfig()
    eval_solve: SolveConfig | None = None
    tied: bool = True
    embedding_std: float = 0.02
    embedding_dropout: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_integer(f"{owner}.vocab_size", self.vocab_size, 1)
        check_type(f"{owner}.backbone", self.backbone, (Mamba2Config, LlamaConfig), "Mamba2Config(d_model=64)")
        for name in ("solve", "eval_solve"):
            check_type(f"{owner}.{name}", getattr(self, name), (SolveConfig, type(None)))
        if self.solve is None and self.eval_solve is not None:
            raise ValueError(f"{owner}.eval_solve must be None if solve is, for an explicit model solves nothing")
        check_flag(f"{owner}.tied", self.tied)
        check_number(f"{owner}.embedding_std", self.embedding_std, "[0, inf)")
        numbers = {"dropout": self.embedding_dropout, "scale": self.embedding_scale, "softcap": self.logit_softcap}
        check_embedding(owner, **numbers)

    def explicit(self) -> "LanguageModelSpec":
        """The baseline of the same layers: run once, without an injection."""
        return replace(self, solve=None, eval_solve=None)

    def build_model(self) -> ImplicitModel | ExplicitModel:
        """The model between embedding and head, freshly initialised."""
        config = replace(self.backbone, injection=self.solve is not None)
        backbone = Llama(config) if isinstance(config, LlamaConfig) else Mamba2(config)
        return ExplicitModel(backbone) if self.solve is None else ImplicitModel(backbone, self.solve, self.eval_solve)

    def build(self) -> CausalLM:
        """The whole model, freshly initialised."""
        return CausalLM(
            self.vocab_size,
            self.build_model(),
            self.embedding_std,
            tied=self.tied,
            embedding_dropout=self.embedding_dropout,
            embedding_scale=self.embedding_scale,
            logit_softcap=self.logit_softcap,
        )
