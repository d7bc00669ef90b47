"""The configuration of all models: a specification as JSON, and the flat fields that tools read."""

import copy
from collections.abc import Iterable
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, no_type_check

import torch
from huggingface_hub.dataclasses import strict
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from deqseq import __version__
from deqseq.arguments import check_integer, check_known, check_type, checked
from deqseq.as_json import FIELDS, PARTS, SECTIONS, Json, from_json, to_json
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface.decoder import DecoderBackbone
from deqseq.models import ExplicitModel, ImplicitModel, LanguageModelSpec, RecurrentDepth
from deqseq.models.specification import DecoderLayers

FROM_TRANSFORMERS = (
    "attn_implementation",
    "distributed_config",
    "experts_implementation",
    "fusion_config",
    "gradient_checkpointing",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "tokenizer_class",
    "torch_dtype",
    "transformers_weights",
)
"""What transformers writes into a configuration or passes to one without declaring it.

Names that begin with an underscore are its own, too.
"""

CODE = "deqseq_models"
"""The module beside a saved configuration from which transformers loads our classes."""

HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
DERIVED = ("hidden_size", "num_hidden_layers", *HEADS)
"""What tools read; it follows from the backbones."""


# strict checks the fields; a check of the signature would refuse what transformers passes
@no_type_check
@strict
class DeqseqConfig(PreTrainedConfig):
    """A :class:`deqseq.LanguageModelSpec` as a configuration of transformers.

    All fields are keyword arguments, and an unknown one is an error. Backbones and solves are
    sections: each is given as an object of this library or as its JSON, and kept as JSON. A mapping
    replaces only the fields that it names: ``config.solve = {"stop": {"max_steps": 8}}`` keeps the
    tolerance. A model reads ``solve`` and ``eval_solve`` at each call.

    Attributes:
        vocab_size: tokens.
        backbone: a :class:`deqseq.Mamba2Config` or a :class:`deqseq.LlamaConfig`, as ``{"name":
            "LlamaConfig", "d_model": 64}``; or some layers of the decoder, ``{"name":
            "DecoderLayers", "d_model": 64, "first": 4, "end": 12}``.
        solve: how the fixed point is found and differentiated, a :class:`deqseq.SolveConfig`, as
            ``{"solver": {"name": "Relaxed", "damping": 0.5}, "stop": {"rtol": 1e-3}, "sweep":
            "Simultaneous"}``; None: an explicit model.
        eval_solve: the same in eval mode; fields left out are those of ``solve``. Default:
            ``solve``.
        prelude, coda: layers that run once before and after the backbone, in the same form as
            ``backbone``. Default: none.
        injection, norm, steps, loop_start: as in :class:`deqseq.LanguageModelSpec`.
        embedding_dropout, embedding_scale, logit_softcap: as in :class:`deqseq.LanguageModelSpec`.
        initializer_range: standard deviation of the initial embedding, and of a head with weights
            of its own.
        tie_word_embeddings: whether the head is the embedding.
        decoder_config: the configuration of the transformers decoder whose layers are used, of a
            family that :class:`DecoderBackbone` runs. Default: none.
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim: what
            tools read. They follow from the backbones, and another value is an error; None if the
            backbones have none, such as heads in a Mamba2.
        max_position_embeddings: the length that the model was trained for; tools ask for it, the
            model does not. Default: not known.
        use_cache: whether a call in eval mode returns a cache.
        pad_token_id, bos_token_id, eos_token_id: the tokens that pad, begin and end a sequence.
        deqseq_version: the version that wrote the file; an older deqseq refuses to read it.
        auto_map: where transformers finds our classes with ``trust_remote_code=True``; always the
            same.

    Raises:
        TypeError, ValueError: an unknown field or name, with the nearest known one; values that do
            not fit together; a file of a newer deqseq.
        StrictDataclassError: a field of the wrong type.

    Example:
        >>> from deqseq.integrations.huggingface import DeqseqConfig
        >>> sizes = {"name": "LlamaConfig", "d_model": 64, "n_heads": 4}
        >>> config = DeqseqConfig(vocab_size=100, backbone=sizes, solve={"stop": {"rtol": 1e-4}})
        >>> config.hidden_size, config.head_dim, config.specification().solve.stop.rtol
        (64, 16, 0.0001)
        >>> DeqseqConfig(vocab_sise=64)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: DeqseqConfig field 'vocab_sise' is unknown; did you mean 'vocab_size'... (known:
        ...)
    """

    model_type: ClassVar[str] = "deqseq"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "stats", "status"]
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "decoder_config": SubConfigSpec(config_class=AutoConfig, model_type="llama", optional=True)
    }

    vocab_size: int = 50277
    backbone: Any = Mamba2Config(768)
    solve: Any = SolveConfig()
    eval_solve: Any = None
    prelude: Any = None
    coda: Any = None
    injection: str | None = None
    norm: str | None = None
    steps: int | None = None
    loop_start: Any = "input"
    decoder_config: Any = None
    embedding_dropout: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    deqseq_version: str = __version__
    auto_map: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # a newer patch release can be read
        if Version(self.deqseq_version).release[:2] > Version(__version__).release[:2]:
            raise ValueError(
                f"this configuration was written by deqseq {self.deqseq_version}, and this is "
                f"deqseq {__version__}, which may not know all of its fields: pip install "
                "--upgrade deqseq"
            )
        self.deqseq_version = __version__
        model_type = kwargs.get("model_type") or self.model_type
        if model_type != self.model_type:
            raise ValueError(
                f"model_type must be {self.model_type!r}, got {model_type!r}: load it with "
                "AutoConfig"
            )
        self._check_names(kwargs)
        self.auto_map = {
            "AutoConfig": f"{CODE}.DeqseqConfig",
            "AutoModel": f"{CODE}.DeqseqModel",
            "AutoModelForCausalLM": f"{CODE}.DeqseqForCausalLM",
            "AutoModelForSequenceClassification": f"{CODE}.DeqseqForSequenceClassification",
        }
        wanted = (PreTrainedConfig, dict, type(None))
        check_type(f"{type(self).__name__}.decoder_config", self.decoder_config, wanted)
        super().__post_init__(**kwargs)
        self._derive()

    def __setattr__(self, key: str, value: Any) -> None:
        if key in SECTIONS and value is not None:
            base = self.section(key)
            if base is None and key == "eval_solve":
                base = self.section("solve")
            value = to_json(from_json(SECTIONS[key], value, f"{type(self).__name__}.{key}", base))
        initialised = vars(self).get("auto_map") is not None
        super().__setattr__(key, value)
        if initialised and key in PARTS:
            for name in DERIVED:
                super().__setattr__(name, None)
        if initialised and key in (*PARTS, *DERIVED):
            self._derive()

    def specification(self) -> LanguageModelSpec:
        """The model in this library's terms; TypeError or ValueError for fields that do not fit."""
        return LanguageModelSpec(**{field: self.section(name) for field, name in FIELDS.items()})

    def section(self, name: str) -> Any:
        """The value of the field ``name``; a section is given as an object."""
        check_known("section", name, [field.name for field in fields(self)])
        value = getattr(self, name)
        if name not in SECTIONS or value is None:
            return value
        return from_json(SECTIONS[name], value, f"{type(self).__name__}.{name}")

    @classmethod
    @checked
    def from_specification(cls, spec: LanguageModelSpec, **more: Any) -> "DeqseqConfig":
        """The configuration whose ``specification()`` equals ``spec``.

        Args:
            spec: a model in this library's terms.
            **more: fields that ``spec`` does not decide, such as ``eos_token_id``.

        Raises:
            ValueError: an unknown field, or one that ``spec`` decides.
            TypeError: a solver, gradient or sweep that a configuration cannot name.

        Example:
            >>> from deqseq.integrations.huggingface import DeqseqConfig
            >>> import deqseq as dq
            >>> spec = dq.preset("mamba2-130m-implicit")
            >>> DeqseqConfig.from_specification(spec, eos_token_id=0).specification() == spec
            True
        """
        content = {name: getattr(spec, field) for field, name in FIELDS.items()}
        decided = sorted((content.keys() | set(DERIVED)) & more.keys())
        if decided:
            raise ValueError(f"leave out {', '.join(decided)}: the model has its own")
        return cls(**content | more)

    def build(self) -> tuple[ImplicitModel | ExplicitModel | RecurrentDepth, nn.Embedding]:
        """The model between embedding and head, and the embedding, freshly initialised."""
        spec = self.specification()
        if self.decoder_config is None:
            return spec.build_model(), nn.Embedding(spec.vocab_size, spec.backbone.d_model)
        config = copy.deepcopy(self.decoder_config)
        config.vocab_size = self.vocab_size
        decoder = AutoModel.from_config(config, dtype=torch.get_default_dtype())

        def layers(part: DecoderLayers) -> DecoderBackbone:
            return DecoderBackbone(decoder, slice(part.first, part.end), part.final_norm)

        return spec.build_model(layers), decoder.get_input_embeddings()

    def to_dict(self) -> Json:
        """As in transformers; the dtype is that of the whole model."""
        content = super().to_dict()
        if self.decoder_config is not None:
            content["decoder_config"].pop("dtype", None)
        return content

    def save_pretrained(
        self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As in transformers, with a module for ``auto_map``; refuses what loading would refuse."""
        type(self).from_dict(self.to_dict())
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{CODE}.py").write_text(
            '"""The classes of this model are those of the installed deqseq."""\n\n'
            "from deqseq.integrations.huggingface import *  # noqa: F403\n"
        )
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: ``auto_map`` is always written, and names installed classes."""

    @classmethod
    def from_dict(cls, config_dict: Json, **kwargs: Any) -> Any:
        """As in transformers, but an unknown keyword that is not None is an error.

        ``return_unused_kwargs=True`` returns them instead. ``solve`` given here changes the stored
        ``eval_solve``, too, unless that is given as well.
        """
        return_unused = kwargs.pop("return_unused_kwargs", False)
        if kwargs.get("solve") is not None and config_dict.get("eval_solve") is not None:
            kwargs.setdefault("eval_solve", kwargs["solve"])  # a loaded model is in eval mode
        loaded: Any = super().from_dict(dict(config_dict), return_unused_kwargs=True, **kwargs)
        config, unused = loaded
        config._derive()  # keywords have replaced fields
        if return_unused:
            return config, unused
        config._check_names(name for name, value in unused.items() if value is not None)
        return config

    def _derive(self) -> None:
        """Fill in what follows from the backbones; ValueError if a field has another value."""
        owner = type(self).__name__
        spec = self.specification()
        decoder = self.decoder_config
        if self.max_position_embeddings is not None:
            check_integer(f"{owner}.max_position_embeddings", self.max_position_embeddings, 1)
        for name, part in spec.parts.items():
            if not getattr(part, "causal", True):
                raise ValueError(
                    f"{owner}.{name} must be causal, got causal=False: a deqseq.TokenClassifier "
                    "takes such models"
                )
        layers = [part for part in spec.parts.values() if isinstance(part, DecoderLayers)]
        if bool(layers) != (decoder is not None):
            raise ValueError(
                f"{owner}.decoder_config must be given with DecoderLayers, and only with them"
            )
        for part in layers:
            if part.d_model != decoder.hidden_size or part.end > decoder.num_hidden_layers:
                raise ValueError(
                    f"{owner}: DecoderLayers must be some of the decoder's "
                    f"{decoder.num_hidden_layers} layers of width {decoder.hidden_size}, got {part}"
                )
        core = spec.backbone
        if isinstance(core, LlamaConfig):
            heads = (core.n_heads, core.kv_heads, core.head_width)
        elif isinstance(core, Mamba2Config):
            heads = (None, None, core.headdim)
        else:
            heads = [getattr(decoder, name, None) for name in HEADS]
        values = (core.d_model, sum(part.n_layers for part in spec.parts.values()), *heads)
        for name, value in zip(DERIVED, values, strict=True):
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{owner}.{name} must be {value}, which follows from the backbones, got "
                    f"{getattr(self, name)}"
                )
            super().__setattr__(name, value)

    def _check_names(self, names: Iterable[str]) -> None:
        """Refuse unknown fields."""
        declared = [field.name for field in fields(type(self))]
        for name in names:
            if name not in FROM_TRANSFORMERS and not name.startswith("_"):
                check_known(f"{type(self).__name__} field", name, declared)


def _setting(name: str) -> Any:
    """A property that is a section of the configuration, as an object."""

    def read(self: "ConfigSettings") -> SolveConfig | None:
        return self.config.section(name)

    def write(self: "ConfigSettings", solve: SolveConfig | None) -> None:
        setattr(self.config, name, solve)

    return property(read, write)


class ConfigSettings:
    """How a core is solved: read from the configuration at each call, and written to it."""

    def __init__(self, config: DeqseqConfig) -> None:
        self.config: Any = config

    solve = _setting("solve")
    eval_solve = _setting("eval_solve")
