"""A whole language model as data: what presets, files and other libraries translate to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from deqseq.arguments import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    checked,
)
from deqseq.backbones import (
    AddInjection,
    Backbone,
    ConcatInjection,
    DecayInjection,
    Injected,
    Injection,
    Llama,
    LlamaConfig,
    Looped,
    Mamba2,
    Mamba2Config,
)
from deqseq.config import SolveConfig
from deqseq.models.base import ExplicitModel
from deqseq.models.causal_lm import CausalLM
from deqseq.models.implicit import ImplicitModel
from deqseq.models.recurrent_depth import RecurrentDepth
from deqseq.start import Start

Name = Literal["concat", "add", "decay"]
"""An injection of the model's width, as a file or a command line names it."""
INJECTIONS: Mapping[str, Callable[[int], Injection]] = {
    "concat": ConcatInjection,
    "add": lambda d_model: AddInjection(),
    "decay": DecayInjection,
}


@checked
@dataclass(frozen=True)
class DecoderLayers:
    """Some layers of a transformers decoder; building the model needs that decoder.

    Args:
        d_model: width.
        first: number of the first layer, from 0.
        end: number of the layer after the last one.
        final_norm: whether the decoder's final norm follows.

    Raises:
        ValueError: ``end`` is not above ``first``.

    Example:
        >>> from deqseq.models.specification import DecoderLayers
        >>> DecoderLayers(64, 4, 12).n_layers
        8
    """

    d_model: PositiveInt
    first: NonNegativeInt
    end: PositiveInt
    final_norm: bool = False

    def __post_init__(self) -> None:
        if self.end <= self.first:
            raise ValueError(
                f"DecoderLayers.end must be above first = {self.first}, got {self.end}"
            )

    @property
    def n_layers(self) -> int:
        """How many layers they are."""
        return self.end - self.first


BACKBONES: Mapping[type, Callable[[Any], Backbone[Any]]] = {
    Mamba2Config: Mamba2,
    LlamaConfig: Llama,
}
"""The backbone of each class of sizes; :class:`DecoderLayers` take another library."""
Sizes = Mamba2Config | LlamaConfig | DecoderLayers
Decoder = Callable[[DecoderLayers], Backbone[Any]]


@checked
@dataclass(frozen=True)
class LanguageModelSpec:
    """Everything that defines a :class:`deqseq.CausalLM` except its weights.

    Args:
        vocab_size: number of tokens.
        backbone: sizes of the backbone, or of the core of a recurrent-depth model: a
            :class:`Mamba2Config`, :class:`LlamaConfig` or :class:`DecoderLayers`. Its own
            ``injection`` is used in implicit and looped models if ``injection`` is not set here.
        solve: how the fixed point is found and differentiated. None makes an explicit model, which
            runs the layers once, or ``steps`` times.
        eval_solve: the same in eval mode. Default: ``solve``.
        tied: whether the head has the embedding's weights.
        embedding_std: standard deviation of the initial embedding.
        embedding_dropout: probability that an element of an embedded token is zero in training.
        embedding_scale: factor of the embedded tokens.
        logit_softcap: bound of the logits. Default: none.
        prelude: sizes of the layers that run once before the backbone, as in
            :class:`deqseq.RecurrentDepth`. Default: none.
        coda: sizes of the layers that run once after it; given with ``prelude``.
        injection: how the input enters each iteration, by :class:`deqseq.Injected`: ``"concat"``,
            ``"add"`` or ``"decay"``. Default: by the backbone's own ``injection``, if at all.
        norm: ``"coda"`` applies the coda's last norm also to the states before the coda, as in
            Huginn.
        steps: how often the backbone of an explicit model runs, as in :class:`deqseq.Looped`.
            Default: once.
        loop_start: where these steps begin, the ``start`` of :class:`deqseq.Looped`.

    Raises:
        ValueError: fields that do not go together.

    Example:
        >>> from deqseq import LanguageModelSpec, Mamba2Config
        >>> spec = LanguageModelSpec(10, Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> type(spec.build().model).__name__, type(spec.explicit().build().model).__name__
        ('ImplicitModel', 'ExplicitModel')
    """

    vocab_size: PositiveInt
    backbone: Sizes
    solve: SolveConfig | None = SolveConfig()
    eval_solve: SolveConfig | None = None
    tied: bool = True
    embedding_std: NonNegativeFloat = 0.02
    embedding_dropout: Probability = 0.0
    embedding_scale: PositiveFloat = 1.0
    logit_softcap: PositiveFloat | None = None
    prelude: Sizes | None = None
    coda: Sizes | None = None
    injection: Name | None = None
    norm: Literal["coda"] | None = None
    steps: PositiveInt | None = None
    loop_start: Start = "input"

    def __post_init__(self) -> None:
        if self.solve is None and self.eval_solve is not None:
            raise ValueError(
                "LanguageModelSpec.eval_solve must be None if solve is, for an explicit model "
                "solves nothing"
            )
        if self.solve is not None and self.steps is not None:
            raise ValueError(
                f"LanguageModelSpec.steps must be None in an implicit model, got {self.steps}: "
                "or give solve=None"
            )
        if self.solve is None and self.steps is None and self.injection is not None:
            raise ValueError(
                "LanguageModelSpec.injection must be None if the backbone runs once, "
                f"got {self.injection!r}"
            )
        if (self.prelude is None) != (self.coda is None):
            missing = "prelude" if self.prelude is None else "coda"
            raise ValueError(
                f"LanguageModelSpec.{missing} must be given, too: prelude and coda belong together"
            )
        widths = [part.d_model for part in self.parts.values()]
        if len(set(widths)) > 1:
            raise ValueError(
                f"LanguageModelSpec: {', '.join(self.parts)} must have the same d_model, "
                f"got {widths}"
            )
        has_norm = isinstance(self.coda, LlamaConfig) and self.coda.final_norm
        if self.norm is not None and not has_norm:
            raise ValueError(
                "LanguageModelSpec.norm must be None where the coda is not a Llama with "
                "final_norm=True, got 'coda'"
            )

    @property
    def parts(self) -> dict[str, Sizes]:
        """The sizes of all backbones, in the order in which they run."""
        every = {"prelude": self.prelude, "backbone": self.backbone, "coda": self.coda}
        return {name: sizes for name, sizes in every.items() if sizes is not None}

    def explicit(self) -> "LanguageModelSpec":
        """The explicit model of the same layers, without a solve: run once, or ``steps`` times."""
        return replace(self, solve=None, eval_solve=None, injection=None)

    def build_model(
        self, decoder: Decoder | None = None
    ) -> ImplicitModel | ExplicitModel | RecurrentDepth:
        """The model between embedding and head, freshly initialised.

        Args:
            decoder: makes backbones of :class:`DecoderLayers`. Default: there are none.

        Raises:
            TypeError: there are such layers, but ``decoder`` is None.
        """
        if self.prelude is None or self.coda is None:
            return self._core(decoder)
        prelude = ExplicitModel(_backbone(self.prelude, decoder))
        core = self._core(decoder)
        coda = _backbone(self.coda, decoder)
        norm = coda.norm if isinstance(coda, Llama) and self.norm else None
        return RecurrentDepth(prelude, core, ExplicitModel(coda), norm)

    def _core(self, decoder: Decoder | None) -> ImplicitModel | ExplicitModel:
        iterated = self.solve is not None or self.steps is not None
        backbone = _backbone(self.backbone, decoder, iterated and self.injection is None)
        if self.injection is not None:
            backbone = Injected(backbone, INJECTIONS[self.injection](backbone.d_model))
        if self.steps is not None:
            backbone = Looped(backbone, self.steps, start=self.loop_start)
        if self.solve is None:
            return ExplicitModel(backbone)
        return ImplicitModel(backbone, self.solve, self.eval_solve)

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


def specification_of(lm: CausalLM, embedding_std: float = 0.02) -> LanguageModelSpec:
    """The specification of a language model as it is now: the inverse of ``build()``.

    Args:
        lm: a model of Mamba2 and Llama backbones, or of the layers of a transformers decoder.
        embedding_std: that of the specification; a model does not remember it.

    Raises:
        TypeError: a part that a specification cannot name.
        ValueError: parts that share weights, or weight normalisation on some layers of a backbone
            only.

    Example:
        >>> from deqseq import LanguageModelSpec, Mamba2Config
        >>> from deqseq.models.specification import specification_of
        >>> spec = LanguageModelSpec(10, Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> specification_of(spec.build()) == spec
        True
    """
    return LanguageModelSpec(
        vocab_size=lm.embedding.num_embeddings,
        tied=lm.head is None or lm.head.weight is lm.embedding.weight,
        embedding_std=embedding_std,
        embedding_dropout=lm.embedding_dropout,
        embedding_scale=lm.embedding_scale,
        logit_softcap=lm.logit_softcap,
        **parts_of(lm.model),
    )


def parts_of(model: nn.Module) -> dict[str, Any]:
    """The fields of a specification that describe the ``model`` between embedding and head."""
    if not isinstance(model, RecurrentDepth):
        return _core_of(model)
    coda: Any = model.coda.backbone
    shared = isinstance(coda, Llama) and coda.config.final_norm and model.norm is coda.norm
    if not shared and not isinstance(model.norm, nn.Identity):
        raise ValueError(
            "the norm of a RecurrentDepth must be None, or the last norm of its coda, a Llama, so "
            f"that a specification can name it, got {model.norm}"
        )
    names = list(model.named_parameters(remove_duplicate=False))
    shared_names = len(names) - len(list(model.parameters()))
    if shared_names > int(shared):
        raise ValueError(
            "prelude, core and coda must have weights of their own: only a norm can be shared"
        )
    norm = "coda" if shared else None
    prelude: Any = model.prelude.backbone
    return _core_of(model.core) | {"prelude": prelude.sizes(), "coda": coda.sizes(), "norm": norm}


def _core_of(model: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(model, name, None) for name in ("solve", "eval_solve")}
    backbone = model.backbone
    if isinstance(backbone, Looped):
        fields |= {"steps": backbone.steps, "loop_start": backbone.start}
        backbone = backbone.backbone
    if isinstance(backbone, Injected):
        kind = type(backbone.injection)
        names = {type(make(1)): name for name, make in INJECTIONS.items()}
        if kind not in names:
            raise TypeError(
                f"a specification cannot name {kind.__name__} (known: {', '.join(INJECTIONS)})"
            )
        fields["injection"] = names[kind]
        backbone = backbone.backbone
    return fields | {"backbone": backbone.sizes()}


def _backbone(sizes: Sizes, decoder: Decoder | None, injection: bool = False) -> Backbone[Any]:
    """A backbone, without its own injection unless ``injection`` is True."""
    if isinstance(sizes, DecoderLayers):
        if decoder is None:
            raise TypeError("decoder must be given to build a model of DecoderLayers, got None")
        return decoder(sizes)
    sizes = replace(sizes, injection=sizes.injection and injection)
    return BACKBONES[type(sizes)](sizes)
