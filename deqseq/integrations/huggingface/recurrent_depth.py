"""Recurrent-depth models of a decoder's layers, as models of transformers: configuration and models."""

# fields whose default is the decoder's may be None at first
# pyright: reportIncompatibleVariableOverride=false

import copy
from typing import Any, ClassVar, no_type_check

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.configuration_utils import SubConfigSpec

from deqseq.backbones import Injected
from deqseq.check import check_choice, check_integer, check_number
from deqseq.integrations.huggingface.configuration import ImplicitConfig
from deqseq.integrations.huggingface.decoder import DecoderBackbone
from deqseq.integrations.huggingface.modeling import ImplicitBaseModel, ImplicitClassifier
from deqseq.integrations.huggingface.modeling_causal_lm import ImplicitCausalLM
from deqseq.integrations.huggingface.objects import Json
from deqseq.integrations.huggingface.retrofit import INJECTIONS, split
from deqseq.models import RecurrentDepth

_OF_DECODER = ("vocab_size", "hidden_size", "initializer_range", "tie_word_embeddings")
_OF_DECODER += ("pad_token_id", "bos_token_id", "eos_token_id")


@no_type_check  # strict checks the fields; a check of the signature would refuse what transformers passes
@strict
class RecurrentDepthConfig(ImplicitConfig):
    """A decoder of transformers, and how its layers are split into a prelude, an iterated core and a coda.

    All fields are keyword arguments; the others are those of
    :class:`~deqseq.integrations.huggingface.configuration.ImplicitConfig`. Sizes and tokens have the decoder's values
    by default.

    Attributes:
        decoder_config: the decoder's own configuration, of a family that :class:`DecoderBackbone` runs.
        prelude: how many of its first layers run once, before the core.
        core: how many layers are iterated.
        coda: how many of its last layers run once, after the core.
        dropped: how many layers between prelude and core are left out.
        injection: how the prelude's output enters each iteration: ``"concat"``, ``"add"`` or ``"decay"``.
        vocab_size: tokens; may differ from the decoder's.
        hidden_size: width; that of the decoder.
        num_hidden_layers: layers of the three parts.
        initializer_range: standard deviation of a new embedding or head.
        tie_word_embeddings: whether the head is the embedding.

    Raises:
        ValueError: layers that do not add up, an unknown injection, or a size that is not that of the decoder.

    Example:
        >>> from transformers import Qwen3Config
        >>> config = RecurrentDepthConfig(decoder_config=Qwen3Config(num_hidden_layers=8), prelude=2, core=4, coda=2)
        >>> config.hidden_size == config.decoder_config.hidden_size
        True
    """

    model_type: ClassVar[str] = "recurrent_depth"
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "decoder_config": SubConfigSpec(config_class=AutoConfig, model_type="llama")
    }

    decoder_config: Any = None
    prelude: int = 4
    core: int = 24
    coda: int = 4
    dropped: int = 0
    injection: str = "concat"
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    initializer_range: float | None = None
    tie_word_embeddings: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        own = {name: name for name in _OF_DECODER} | {"logit_softcap": "final_logit_softcapping"}
        for name, theirs in own.items():
            if getattr(self, name) is None:
                setattr(self, name, getattr(self.decoder_config, theirs, None))
        if self.num_hidden_layers is None:
            self.num_hidden_layers = self.prelude + self.core + self.coda

    def to_dict(self) -> Json:
        """As in transformers; the dtype is that of the whole model."""
        fields = super().to_dict()
        fields["decoder_config"].pop("dtype", None)
        return fields

    def validate_architecture(self) -> None:
        """Check sizes; ValueError for parts that do not add up, or that are not those of the decoder."""
        name = type(self).__name__
        check_choice(f"{name}.injection", self.injection, INJECTIONS)
        for part, least in (("prelude", 1), ("core", 1), ("coda", 1), ("dropped", 0)):
            check_integer(f"{name}.{part}", getattr(self, part), least)
        for field, interval in (("embedding_dropout", "[0, 1)"), ("embedding_scale", "(0, inf)")):
            check_number(f"{name}.{field}", getattr(self, field), interval)
        if self.logit_softcap is not None:
            check_number(f"{name}.logit_softcap", self.logit_softcap, "(0, inf)")
        layers, whole = self.prelude + self.core + self.coda, self.decoder_config.num_hidden_layers
        wanted = {"num_hidden_layers": layers, "hidden_size": self.decoder_config.hidden_size}
        for field, value in wanted.items():
            if getattr(self, field) != value:
                raise ValueError(f"{name}.{field} must be {value}, as its parts have, got {getattr(self, field)}")
        if layers + self.dropped != whole:
            raise ValueError(
                f"{name}: prelude, core, coda and dropped must add up to the decoder's {whole} layers, got "
                f"{layers + self.dropped}"
            )

    def build(self) -> tuple[RecurrentDepth, nn.Embedding]:
        """The model between embedding and head, and the embedding, freshly initialised as the decoder's family does."""
        config = copy.deepcopy(self.decoder_config)
        config.vocab_size = self.vocab_size
        decoder = AutoModel.from_config(config, dtype=torch.get_default_dtype())
        sizes = (self.prelude, self.core, self.coda, self.dropped)
        eval_solve = self.solve_config("eval_solve") if self.eval_solve else None
        model = split(decoder, sizes, self.injection, self.solve_config("solve"), eval_solve)
        return model, decoder.get_input_embeddings()


class RecurrentDepthModel(ImplicitBaseModel):
    """An embedding, a prelude, an iterated core and a coda.

    Args:
        config: a :class:`RecurrentDepthConfig`.
        **unknown: refused, with the nearest known name.
    """

    config_class = RecurrentDepthConfig

    def __init__(self, config: RecurrentDepthConfig, **unknown: Any) -> None:
        super().__init__(config, **unknown)
        coda: Any = self.core.coda
        self._no_split_modules = {type(coda.backbone.layers[0]).__name__}

    def _init_weights(self, module: nn.Module) -> None:
        """As the decoder's family does: its rotary frequencies, and Gemma's scale, are in no checkpoint."""
        with torch.device("meta"):
            family: Any = AutoModel.from_config(self.config.decoder_config)  # pyright: ignore[reportAttributeAccessIssue]
        family._init_weights(module)


class RecurrentDepthForCausalLM(ImplicitCausalLM):
    """A recurrent-depth model of a decoder's layers, with the head of a language model.

    :func:`from_causal_lm` makes one of a model from :func:`retrofit`.

    Args:
        config: a :class:`RecurrentDepthConfig`.

    Example:
        >>> from deqseq.integrations.huggingface import from_causal_lm, retrofit
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        >>> theirs = Qwen3ForCausalLM(Qwen3Config(vocab_size=10, num_hidden_layers=4, head_dim=8, **sizes)).eval()
        >>> model = from_causal_lm(retrofit(theirs, prelude=1, core=2, coda=1))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])
    """

    config_class = RecurrentDepthConfig
    base_class = RecurrentDepthModel


class RecurrentDepthForSequenceClassification(ImplicitClassifier):
    """A recurrent-depth model of a decoder's layers that classifies sequences by the state of their last token.

    Args:
        config: a :class:`RecurrentDepthConfig`.
        **unknown: refused, with the nearest known name.
    """

    config_class = RecurrentDepthConfig


def parts_of(model: RecurrentDepth) -> Json:
    """The fields that describe a model from :func:`retrofit`."""
    core: Any = model.core.backbone
    inner = core.backbone if isinstance(core, Injected) else core
    backbones: list[Any] = [model.prelude.backbone, inner, model.coda.backbone]
    if not isinstance(core, Injected) or not all(isinstance(one, DecoderBackbone) for one in backbones):
        found = ", ".join(type(one).__name__ for one in backbones)
        injected = "" if isinstance(core, Injected) else " without an injection"
        raise TypeError(
            "the parts of a RecurrentDepth must be layers of a transformers decoder, as those of retrofit(model, ...), "
            f"got {found}{injected}"
        )
    names = [name for name, make in INJECTIONS.items() if type(core.injection) is type(make(1))]
    if not names:
        raise TypeError(f"a configuration cannot name {type(core.injection).__name__} (known: {', '.join(INJECTIONS)})")
    parts, config = [one.part for one in backbones], backbones[0].config
    prelude, middle, coda = parts
    follow = prelude.start == 0 and middle.stop == coda.start and coda.stop == config.num_hidden_layers
    plain = isinstance(model.norm, nn.Identity) and len({id(one.rotary) for one in backbones}) == 1
    if not follow or not plain or middle.start < prelude.stop:
        raise ValueError(
            "prelude, core and coda must be the layers of one decoder in order, without a norm between, as those of "
            f"retrofit(model, ...), got layers {', '.join(f'{part.start} to {part.stop - 1}' for part in parts)}"
        )
    return {
        "decoder_config": copy.deepcopy(config),
        **{name: len(part) for name, part in zip(("prelude", "core", "coda"), parts, strict=True)},
        "dropped": middle.start - prelude.stop,
        "injection": names[0],
        "solve": model.core.solve,
        "eval_solve": model.core.eval_solve,
    }
