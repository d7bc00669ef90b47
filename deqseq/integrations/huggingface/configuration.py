"""What the configurations of all implicit models share."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar, no_type_check

from huggingface_hub.dataclasses import strict
from packaging.version import Version
from transformers import PreTrainedConfig

from deqseq import __version__
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.gradients import Gradient, Phantom
from deqseq.integrations.huggingface.names import check_known
from deqseq.integrations.huggingface.objects import Json, Kind, from_json, to_json
from deqseq.integrations.reference_config import from_reference_config
from deqseq.models import LanguageModelSpec, Solving
from deqseq.models.implicit import Start
from deqseq.solvers import Relaxed, Solver
from deqseq.stop import Stop

SOLVING: dict[str, Kind] = {
    "solver": "solver",
    "eval_solver": "solver",
    "stop": "stop",
    "eval_stop": "stop",
    "gradient": "gradient",
}
"""The fields that hold our objects, as JSON."""

FROM_TRANSFORMERS = (
    "attn_implementation",
    "auto_map",
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
"""What transformers itself writes into a configuration, or passes to one, without declaring it; besides, what begins
with an underscore."""

C = TypeVar("C", bound="ImplicitConfig")


@no_type_check  # strict checks the fields; another check of the signature would refuse what transformers passes
@strict
class ImplicitConfig(PreTrainedConfig):
    """The fields that do not depend on the backbone; :class:`ImplicitMamba2Config` and its like say the rest.

    A field that does not exist is an error. Solvers, stopping rules and the gradient are given as our objects or their
    JSON, and held as JSON. All fields are keyword arguments.

    Attributes:
        vocab_size: tokens.
        hidden_size: width.
        num_hidden_layers: blocks.
        dropout: probability, in [0, 1), inside the layers; one mask a solve.
        embedding_dropout: probability, in [0, 1), that a number of an embedded token is zero in training.
        weight_norm: whether linear maps and convolutions are weight-normalised, as in the paper.
        initializer_range: standard deviation of the initial embedding, and of a head with weights of its own.
        tie_word_embeddings: whether the head is the embedding.
        implicit: whether the blocks are iterated to a fixed point; otherwise they run once, without an injection, and
            the next six fields mean nothing.
        solver: the algorithm, as ``{"name": "Relaxed", "damping": 0.8}``.
        eval_solver: the same in eval mode; None: ``solver``.
        stop: tolerances and budget, as ``{"rtol": 1e-3, "max_steps": 64}``.
        eval_stop: the same in eval mode; None: ``stop``.
        gradient: the estimator, as ``{"name": "Phantom", "steps": 4, "damping": 0.8}``.
        start: where the iteration begins: at ``"zero"``, or at the embedded tokens, ``"input"``.
        use_cache: whether a call in eval mode returns a cache.
        pad_token_id: the token that fills rows up.
        bos_token_id: the token that begins a sequence.
        eos_token_id: the token, or tokens, that end one.
        deqseq_version: what wrote the file; an older deqseq refuses to read it.
        registered_by: a note for whoever opens the file: the import that makes the model type known to transformers.

    Raises:
        ValueError: an unknown field or name, with the nearest known one; a file of a newer deqseq.
        StrictDataclassError: a field of the wrong type, or numbers that do not fit together.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "stats", "status"]
    sizes: ClassVar[dict[str, str]] = {}
    """The backbone's name of each field that both have."""

    vocab_size: int = 50277
    hidden_size: int = 768
    num_hidden_layers: int = 24
    dropout: float = 0.0
    embedding_dropout: float = 0.0
    weight_norm: bool = True
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    implicit: bool = True
    solver: dict[str, Any] | str | Solver = Relaxed(0.8)
    eval_solver: dict[str, Any] | str | Solver | None = None
    stop: dict[str, Any] | Stop = Stop()
    eval_stop: dict[str, Any] | Stop | None = None
    gradient: dict[str, Any] | str | Gradient = Phantom()
    start: Start = "zero"
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    deqseq_version: str = __version__
    registered_by: str = "deqseq.integrations.huggingface"

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_newer(self.deqseq_version)
        self.deqseq_version = __version__
        self._check_names(kwargs)
        super().__post_init__(**kwargs)

    def __setattr__(self, key: str, value: Any) -> None:
        if key in SOLVING and value is not None:
            value = to_json(from_json(SOLVING[key], value, f"{type(self).__name__}.{key}"))
        super().__setattr__(key, value)

    def specification(self) -> LanguageModelSpec:
        """The model that this describes, in this library's terms.

        Raises:
            ValueError: sizes that do not fit together.
        """
        how = {name: getattr(self, name) for name in SOLVING}
        objects = {name: from_json(SOLVING[name], part, name) for name, part in how.items() if part is not None}
        return LanguageModelSpec(
            self.vocab_size,
            self.backbone(),
            Solving(**objects, start=self.start) if self.implicit else None,
            tied=self.tie_word_embeddings,
            embedding_std=self.initializer_range,
            embedding_dropout=self.embedding_dropout,
        )

    def backbone(self) -> Mamba2Config | LlamaConfig:
        """Sizes of the backbone, in this library's terms; ``injection`` follows ``implicit``."""
        raise NotImplementedError(f"{type(self).__name__} is abstract: take the configuration of a model type")

    @classmethod
    def from_specification(cls: type[C], spec: LanguageModelSpec, **more: Any) -> C:
        """The configuration of a model that is described in this library's terms.

        Args:
            spec: the description.
            **more: fields of which it says nothing, as ``eos_token_id``.

        Returns:
            A configuration with ``specification()`` equal to ``spec``, but for sizes that were left to defaults.

        Raises:
            ValueError: the backbone of another model type, or an unknown field.
            TypeError: a solver or gradient that a configuration cannot name.

        Example:
            >>> import deqseq as dq
            >>> from deqseq.integrations.huggingface import ImplicitMamba2Config
            >>> spec = dq.preset("mamba2-130m-implicit")
            >>> ImplicitMamba2Config.from_specification(spec).specification() == spec
            True
        """
        how = {} if spec.solving is None else {name: getattr(spec.solving, name) for name in (*SOLVING, "start")}
        return cls(
            vocab_size=spec.vocab_size,
            tie_word_embeddings=spec.tied,
            initializer_range=spec.embedding_std,
            embedding_dropout=spec.embedding_dropout,
            implicit=spec.solving is not None,
            **cls.of_backbone(spec.backbone),
            **how,
            **more,
        )

    @classmethod
    def of_backbone(cls, backbone: Mamba2Config | LlamaConfig) -> Json:
        """The fields that describe a backbone.

        Args:
            backbone: its sizes, in this library's terms.

        Returns:
            Arguments of the class.

        Raises:
            ValueError: the backbone of another model type.
        """
        raise NotImplementedError(f"{cls.__name__} is abstract: take the configuration of a model type")

    @classmethod
    def from_dict(cls, config_dict: Json, **kwargs: Any) -> Any:
        """As in transformers, but a keyword that is no field is an error unless the caller asks for the unused ones.

        A configuration of the paper's reference code, which has a ``backbone_config``, is translated.

        Args:
            config_dict: the fields.
            **kwargs: fields that replace them, and arguments of transformers.

        Returns:
            The configuration; with ``return_unused_kwargs=True`` also the keywords that are no field.
        """
        returned = kwargs.pop("return_unused_kwargs", False)
        ours = cls._of_reference(config_dict) if "backbone_config" in config_dict else dict(config_dict)
        loaded: Any = super().from_dict(ours, return_unused_kwargs=True, **kwargs)
        config, unused = loaded
        config.validate()  # keywords have changed fields since
        if returned:
            return config, unused
        config._check_names(unused)
        return config

    @classmethod
    def _of_reference(cls, config: Json) -> Json:
        """Our fields for those of the reference code."""
        spec = from_reference_config({name: value for name, value in config.items() if not name.startswith("_")})
        kept = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype")}
        kept["dtype"] = kept["dtype"] or config.get("torch_dtype")
        return cls.from_specification(spec, **kept).to_dict()

    def validate_architecture(self) -> None:
        """Refuse sizes that do not fit together by a ValueError of the backbone, with the names that they have here."""
        try:
            self.specification()
        except ValueError as error:
            text = str(error)
            theirs = {
                core: name for core, name in self.sizes.items() if core != name and re.search(rf"\b{core}\b", text)
            }
            legend = ", ".join(f"{core} is {name}" for core, name in theirs.items())
            raise ValueError(f"{type(self).__name__}: {text}" + (f" (here {legend})" if legend else "")) from error

    def _check_names(self, given: Mapping[str, Any]) -> None:
        """Refuse what is no field; of another model type first, because then nothing fits."""
        model_type = given.get("model_type", self.model_type)
        if model_type != self.model_type:
            raise ValueError(
                f"this is the configuration of a {model_type!r}, and {type(self).__name__} is that of a "
                f"{self.model_type!r}: load it with transformers.AutoConfig"
            )
        known = [field.name for field in fields(type(self))]
        for name in given:
            if name not in FROM_TRANSFORMERS and not name.startswith("_"):
                check_known(f"{type(self).__name__} field", name, known)


def refuse_newer(written: str) -> None:
    """Refuse what a newer deqseq wrote: it may mean something that this one does not know.

    Args:
        written: the version that wrote it; a newer patch of the same release is read.

    Raises:
        ValueError: names both versions.

    Example:
        >>> refuse_newer(__version__)
    """
    if Version(written).release[:2] > Version(__version__).release[:2]:
        raise ValueError(
            f"this configuration was written by deqseq {written}, and this is deqseq {__version__}, which may not know "
            "all it says: pip install --upgrade deqseq"
        )
