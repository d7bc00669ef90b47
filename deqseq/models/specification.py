"""A whole language model as data: presets, files and other libraries' configurations are translated to it."""

from dataclasses import dataclass, replace
from typing import Annotated

from deqseq.backbones import Llama, LlamaConfig, Mamba2, Mamba2Config
from deqseq.check import AtLeast, Within, checked
from deqseq.config import SolveConfig
from deqseq.models.causal_lm import CausalLM
from deqseq.models.explicit import ExplicitModel
from deqseq.models.implicit import ImplicitModel


@checked
@dataclass(frozen=True)
class LanguageModelSpec:
    """Everything that decides a :class:`deqseq.CausalLM` except its weights.

    Args:
        vocab_size: tokens.
        backbone: sizes of the backbone; its ``injection`` is on for an implicit model, off for an explicit one.
        solve: how the fixed point is found and differentiated; None: an explicit model, which runs the layers once.
        eval_solve: the same in eval mode. Default: ``solve``.
        tied: whether the head is the embedding.
        embedding_std: standard deviation of the initial embedding.
        embedding_dropout: probability that a number of an embedded token is zero in training.
        embedding_scale: multiplies the embedded tokens.
        logit_softcap: bound of the logits. Default: none.

    Raises:
        TypeError, ValueError: names the field, what it got and what it wants.

    Example:
        >>> spec = LanguageModelSpec(10, Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> type(spec.build().model).__name__, type(spec.explicit().build().model).__name__
        ('ImplicitModel', 'ExplicitModel')
    """

    vocab_size: Annotated[int, AtLeast(1)]
    backbone: Mamba2Config | LlamaConfig
    solve: SolveConfig | None = SolveConfig()
    eval_solve: SolveConfig | None = None
    tied: bool = True
    embedding_std: Annotated[float, Within("[0, inf)")] = 0.02
    embedding_dropout: Annotated[float, Within("[0, 1)")] = 0.0
    embedding_scale: Annotated[float, Within("(0, inf)")] = 1.0
    logit_softcap: Annotated[float, Within("(0, inf)")] | None = None

    def __post_init__(self) -> None:
        if self.solve is None and self.eval_solve is not None:
            owner = type(self).__name__
            raise ValueError(f"{owner}.eval_solve must be None if solve is, for an explicit model solves nothing")

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
