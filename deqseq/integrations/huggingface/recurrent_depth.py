"""Recurrent-depth models as models of transformers: configuration and models."""

# fields whose default is the decoder's may be None at first
# pyright: reportIncompatibleVariableOverride=false

import copy
from typing import Any, ClassVar, no_type_check

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.configuration_utils import SubConfigSpec

from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.check import check_choice, check_integer, check_number
from deqseq.integrations.huggingface.blocks import is_normalised
from deqseq.integrations.huggingface.configuration import ImplicitConfig
from deqseq.integrations.huggingface.modeling import ImplicitBaseModel, ImplicitClassifier
from deqseq.integrations.huggingface.modeling_causal_lm import ImplicitCausalLM
from deqseq.integrations.huggingface.objects import Json, from_json, to_json
from deqseq.integrations.huggingface.parts import PARTS, joined
from deqseq.integrations.huggingface.retrofit import INJECTIONS, split
from deqseq.models import RecurrentDepth

_OF_DECODER = ("vocab_size", "hidden_size", "initializer_range", "tie_word_embeddings")
_OF_DECODER += ("pad_token_id", "bos_token_id", "eos_token_id")


@no_type_check  # strict checks the fields; a check of the signature would refuse what transformers passes
@strict
class RecurrentDepthConfig(ImplicitConfig):
    """A prelude, an iterated core and a coda: layers of a decoder of transformers, or of this library.

    All fields are keyword arguments; the others are those of
    :class:`~deqseq.integrations.huggingface.configuration.ImplicitConfig`. With a decoder, sizes and tokens have its
    values by default.

    Attributes:
        decoder_config: the decoder's own configuration, of a family that :class:`DecoderBackbone` runs. Default: a
            Llama, unless ``layers`` are given.
        layers: instead of a decoder, the backbones of the three parts, ``{"prelude": ..., "core": ..., "coda": ...}``,
            each a :class:`deqseq.LlamaConfig` or :class:`deqseq.Mamba2Config` or its JSON, ``{"name": "LlamaConfig",
            "d_model": 64}``; kept as JSON.
        norm: with ``layers``, ``"coda"`` applies the coda's last norm also to the core's states before the coda, as in
            Huginn. Default: no norm there.
        prelude: how many layers run once, before the core. Default: those of ``layers``, or the decoder's first 4.
        core: how many layers are iterated. Default: those of ``layers``, or 24 of the decoder.
        coda: how many layers run once, after the core. Default: those of ``layers``, or the decoder's last 4.
        dropped: how many layers of the decoder between prelude and core are left out.
        injection: how the prelude's output enters each iteration: ``"concat"``, ``"add"`` or ``"decay"``; None, with
            ``layers``: by the core's own ``injection=True``, if at all.
        vocab_size: tokens; may differ from the decoder's.
        hidden_size: width; that of the layers.
        num_hidden_layers: layers of the three parts.
        initializer_range: standard deviation of a new embedding or head.
        tie_word_embeddings: whether the head is the embedding.

    Raises:
        ValueError: both a decoder and ``layers``; layers that do not add up; an unknown name or field; or a size that
            is not that of the layers.

    Example:
        >>> from transformers import Qwen3Config
        >>> config = RecurrentDepthConfig(decoder_config=Qwen3Config(num_hidden_layers=8), prelude=2, core=4, coda=2)
        >>> config.hidden_size == config.decoder_config.hidden_size
        True
        >>> one, two = ({"name": "Mamba2Config", "d_model": 64, "n_layers": n, "injection": False} for n in (1, 2))
        >>> RecurrentDepthConfig(layers={"prelude": one, "core": two, "coda": one}).num_hidden_layers
        4
    """

    model_type: ClassVar[str] = "recurrent_depth"
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "decoder_config": SubConfigSpec(config_class=AutoConfig, model_type="llama", optional=True)
    }

    decoder_config: Any = None
    layers: dict[str, Any] | None = None
    norm: str | None = None
    prelude: int | None = None
    core: int | None = None
    coda: int | None = None
    dropped: int = 0
    injection: str | None = "concat"
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    initializer_range: float | None = None
    tie_word_embeddings: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layers is None and self.decoder_config is None:
            self.decoder_config = {}
        super().__post_init__(**kwargs)
        source, sizes = self.decoder_config, {"prelude": 4, "core": 24, "coda": 4}
        if self.layers is not None:
            source, backbones = ImplicitConfig, self._backbones()
            sizes = {part: backbone.n_layers for part, backbone in backbones.items()}
            sizes["hidden_size"] = backbones["core"].d_model
        own = {name: name for name in _OF_DECODER} | {"logit_softcap": "final_logit_softcapping"}
        for name, value in ({name: getattr(source, theirs, None) for name, theirs in own.items()} | sizes).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.num_hidden_layers is None:
            self.num_hidden_layers = sum(getattr(self, part) for part in PARTS)

    def __setattr__(self, key: str, value: Any) -> None:
        if key == "layers" and value is not None:
            where = f"{type(self).__name__}.layers"
            if set(value) != set(PARTS):
                raise ValueError(f"{where} must have the keys {', '.join(PARTS)}, got {', '.join(value) or 'none'}")
            value = {part: to_json(from_json("backbone", value[part], f"{where}[{part!r}]")) for part in PARTS}
        super().__setattr__(key, value)

    def to_dict(self) -> Json:
        """As in transformers; the dtype is that of the whole model."""
        fields = super().to_dict()
        if self.decoder_config is not None:
            fields["decoder_config"].pop("dtype", None)
        return fields

    def follow_weight_norm(self, core: nn.Module) -> None:
        """Say which parts of ``core`` have weight normalisation now."""
        if self.layers is not None:
            now = {part: {"weight_norm": is_normalised(getattr(core, part))} for part in PARTS}
            self.layers = {part: backbone | now[part] for part, backbone in self.layers.items()}

    def validate_architecture(self) -> None:
        """Check sizes; ValueError for parts that do not add up, or that are not those of the decoder or the layers."""
        name, own = type(self).__name__, self.layers is not None
        if own == (self.decoder_config is not None):
            raise ValueError(f"{name}: give either decoder_config or layers, not both")
        check_choice(f"{name}.injection", self.injection, (*INJECTIONS, None) if own else INJECTIONS)
        for part, least in (("prelude", 1), ("core", 1), ("coda", 1), ("dropped", 0)):
            check_integer(f"{name}.{part}", getattr(self, part), least)
        check_number(f"{name}.embedding_dropout", self.embedding_dropout, "[0, 1)")
        check_number(f"{name}.embedding_scale", self.embedding_scale, "(0, inf)")
        if self.logit_softcap is not None:
            check_number(f"{name}.logit_softcap", self.logit_softcap, "(0, inf)")
        layers = sum(getattr(self, part) for part in PARTS)
        sizes = self._sizes_of_layers() if own else {"hidden_size": self.decoder_config.hidden_size, "norm": None}
        for field, value in (sizes | {"num_hidden_layers": layers}).items():
            if getattr(self, field) != value:
                raise ValueError(f"{name}.{field} must be {value}, as its parts have, got {getattr(self, field)}")
        whole = layers if own else self.decoder_config.num_hidden_layers
        if layers + self.dropped != whole:
            raise ValueError(
                f"{name}: prelude, core, coda and dropped must add up to the decoder's {whole} layers, got "
                f"{layers + self.dropped}"
            )

    def build(self) -> tuple[RecurrentDepth, nn.Embedding]:
        """The model between embedding and head, and the embedding, freshly initialised as their family does."""
        solves = self.solve_config("solve"), self.solve_config("eval_solve") if self.eval_solve else None
        fields: Any = self  # none of these is None any more
        if self.layers is not None:
            model = joined(self._backbones(), self.injection, *solves, shared_norm=self.norm is not None)
            return model, nn.Embedding(fields.vocab_size, fields.hidden_size)
        config = copy.deepcopy(self.decoder_config)
        config.vocab_size = self.vocab_size
        decoder = AutoModel.from_config(config, dtype=torch.get_default_dtype())
        sizes = (fields.prelude, fields.core, fields.coda, self.dropped)
        return split(decoder, sizes, fields.injection, *solves), decoder.get_input_embeddings()

    def _backbones(self) -> dict[str, LlamaConfig | Mamba2Config]:
        return {part: from_json("backbone", backbone, part) for part, backbone in (self.layers or {}).items()}

    def _sizes_of_layers(self) -> Json:
        """The fields that follow from ``layers``; ValueError if these do not fit together."""
        name, backbones = type(self).__name__, self._backbones()
        widths = [backbone.d_model for backbone in backbones.values()]
        if len(set(widths)) > 1:
            raise ValueError(f"{name}.layers: prelude, core and coda must have the same d_model, got {widths}")
        check_choice(f"{name}.norm", self.norm, (None, "coda"))
        coda = backbones["coda"]
        if self.norm is not None and not (isinstance(coda, LlamaConfig) and coda.final_norm):
            raise ValueError(f"{name}.norm must be None where the coda is no Llama with final_norm=True, got 'coda'")
        sizes = {part: backbone.n_layers for part, backbone in backbones.items()}
        return {"hidden_size": widths[0], "dropped": 0} | sizes


class RecurrentDepthModel(ImplicitBaseModel):
    """An embedding, a prelude, an iterated core and a coda.

    Args:
        config: a :class:`RecurrentDepthConfig`.
        **unknown: refused, with the nearest known name.
    """

    config: RecurrentDepthConfig
    config_class = RecurrentDepthConfig
    _tied_weights_keys = {"core.norm.weight": "core.coda.backbone.norm.weight"}  # noqa: RUF012

    def __init__(self, config: RecurrentDepthConfig, **unknown: Any) -> None:
        super().__init__(config, **unknown)
        if config.decoder_config is not None:
            coda: Any = self.core.coda
            self._no_split_modules = {type(coda.backbone.layers[0]).__name__}

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """As in transformers, but a norm that two parts share is tied whether or not the head is the embedding.

        Args:
            all_submodels: of transformers.

        Returns:
            The name of the weight that each tied weight is.
        """
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return {} if self.config.norm is None else dict(self._tied_weights_keys)

    def _init_weights(self, module: nn.Module) -> None:
        """As the decoder's family does: its rotary frequencies, and Gemma's scale, are in no checkpoint."""
        if self.config.decoder_config is None:
            super()._init_weights(module)
            return
        with torch.device("meta"):
            family: Any = AutoModel.from_config(self.config.decoder_config)
        family._init_weights(module)


class RecurrentDepthForCausalLM(ImplicitCausalLM):
    """A recurrent-depth model with the head of a language model.

    :func:`from_causal_lm` makes one of a model from :func:`retrofit`, of a released one from
    :func:`deqseq.integrations.foreign.from_pretrained`, or of your own.

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
    """A recurrent-depth model that classifies sequences by the state of their last token.

    Args:
        config: a :class:`RecurrentDepthConfig`.
        **unknown: refused, with the nearest known name.
    """

    config_class = RecurrentDepthConfig
