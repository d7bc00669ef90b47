"""What the configurations of all models share."""

from collections.abc import Iterable
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, no_type_check

from huggingface_hub.dataclasses import strict
from packaging.version import Version
from torch import nn
from transformers import PreTrainedConfig

from deqseq import __version__
from deqseq.check import check_known
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface.objects import Json, from_json, to_json
from deqseq.models import ExplicitModel, ImplicitModel, RecurrentDepth

FROM_TRANSFORMERS = (
    *("attn_implementation", "distributed_config", "experts_implementation", "fusion_config"),
    *("gradient_checkpointing", "model_type", "name_or_path", "num_labels", "output_attentions"),
    *("quantization_config", "tokenizer_class", "torch_dtype", "transformers_weights"),
)
"""What transformers writes into a configuration, or passes to one, without declaring it; also any name that begins with
an underscore."""

DEFAULTS = {"initializer_range", "max_position_embeddings"}
"""Fields that may be given although the model has its own: they change nothing that it computes."""

CODE = "deqseq_models"
"""The module beside a saved configuration from which transformers loads our classes."""


@no_type_check  # strict checks the fields; a check of the signature would refuse what transformers passes
@strict
class ImplicitConfig(PreTrainedConfig):
    """The fields that do not depend on the layers; the configurations of model types add the others.

    All fields are keyword arguments, and an unknown one is an error. How the model is solved is one section, ``solve``,
    given as a :class:`deqseq.SolveConfig` or as JSON, and kept as JSON. A mapping replaces the fields that it names,
    and the others stay as they are: ``config.solve = {"stop": {"max_steps": 8}}`` keeps the tolerance.

    A model reads its configuration when it is built. To change how a built model is solved, pass ``solve`` in the call,
    or set ``model.base_model.solved.solve``, a :class:`deqseq.SolveConfig`; ``save_pretrained`` writes what is set
    there.

    Attributes:
        vocab_size: tokens.
        hidden_size: width.
        num_hidden_layers: blocks.
        embedding_dropout: probability, in [0, 1), that a number of an embedded token is zero in training.
        embedding_scale: multiplies the embedded tokens.
        logit_softcap: bound of the logits, which become ``cap * tanh(logits / cap)``. Default: none.
        initializer_range: standard deviation of the initial embedding, and of a head with weights of its own.
        tie_word_embeddings: whether the head is the embedding.
        solve: how the fixed point is found and differentiated, as ``{"solver": {"name": "Relaxed", "damping": 0.5},
            "stop": {"rtol": 1e-3, "max_steps": 64}, "gradient": {"name": "Phantom", "steps": 4}, "sweep":
            "Simultaneous", "start": "zero"}``. What a new configuration leaves out has :class:`deqseq.SolveConfig`'s
            defaults.
        eval_solve: the same in eval mode; what it leaves out is as in ``solve``. Default: ``solve``.
        use_cache: whether a call in eval mode returns a cache.
        pad_token_id: the padding token.
        bos_token_id: the token that begins a sequence.
        eos_token_id: the token, or tokens, that end one.
        deqseq_version: the version that wrote the file; an older deqseq refuses to read it.
        auto_map: where transformers finds our classes with ``trust_remote_code=True``; always the same.

    Raises:
        ValueError: an unknown field or name, with the nearest known one; a file of a newer deqseq.
        StrictDataclassError: a field of the wrong type, or numbers that do not fit together.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "stats", "status"]

    vocab_size: int = 50277
    hidden_size: int = 768
    num_hidden_layers: int = 24
    embedding_dropout: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    solve: dict[str, Any] | SolveConfig = SolveConfig()
    eval_solve: dict[str, Any] | SolveConfig | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    deqseq_version: str = __version__
    auto_map: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if Version(self.deqseq_version).release[:2] > Version(__version__).release[:2]:  # newer patches can be read
            raise ValueError(
                f"this configuration was written by deqseq {self.deqseq_version}, and this is deqseq {__version__}, "
                "which may not know all of its fields: pip install --upgrade deqseq"
            )
        self.deqseq_version = __version__
        if (given := kwargs.get("model_type")) not in (None, self.model_type):
            raise ValueError(
                f"this is the configuration of a {given!r}, but {type(self).__name__} is for {self.model_type!r}: load "
                "it with transformers.AutoConfig"
            )
        self._check_names(kwargs)
        name = type(self).__name__.removesuffix("Config")
        heads = {"": "Model", "ForCausalLM": "ForCausalLM", "ForSequenceClassification": "ForSequenceClassification"}
        self.auto_map = {f"AutoModel{auto}": f"{CODE}.{name}{ours}" for auto, ours in heads.items()}
        self.auto_map["AutoConfig"] = f"{CODE}.{name}Config"
        super().__post_init__(**kwargs)

    def __setattr__(self, key: str, value: Any) -> None:
        if key in ("solve", "eval_solve") and value is not None:
            value = to_json(from_json("solve", value, f"{type(self).__name__}.{key}", self.solve_config(key)))
        super().__setattr__(key, value)

    def build(self) -> tuple[ImplicitModel | ExplicitModel | RecurrentDepth, nn.Embedding]:
        """The model between embedding and head, and the embedding, freshly initialised."""
        raise NotImplementedError

    def solve_config(self, key: Literal["solve", "eval_solve"]) -> SolveConfig:
        """``solve`` or ``eval_solve``, which is the ``key``, as an object."""
        return from_json("solve", getattr(self, key) or self.solve, f"{type(self).__name__}.{key}")

    def follow_weight_norm(self, core: nn.Module) -> None:
        """Say which parts of ``core`` have weight normalisation now; the layers of a decoder never do."""

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """As in transformers, but what loading would refuse is refused, and a module is written for ``auto_map``.

        Args:
            save_directory: made if missing.
            push_to_hub: as in transformers.
            **kwargs: of transformers.

        Raises:
            ValueError: an unknown field, such as a misspelt one that was set on the object.
            StrictDataclassError: a field of the wrong type, or numbers that do not fit together.
        """
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
        """Nothing to do for ``auto_class``: ``auto_map`` is always written, and names installed classes."""

    @classmethod
    def from_dict(cls, config_dict: Json, **kwargs: Any) -> Any:
        """As in transformers, but an unknown keyword that is not None is an error, unless unused ones are asked for.

        ``solve`` given here changes the stored ``eval_solve``, too, unless that is given as well.

        Args:
            config_dict: the fields.
            **kwargs: fields that replace them, and arguments of transformers.

        Returns:
            The configuration; with ``return_unused_kwargs=True`` also the unknown keywords.
        """
        returned = kwargs.pop("return_unused_kwargs", False)
        ours = dict(config_dict)
        if kwargs.get("solve") is not None and ours.get("eval_solve") is not None:
            kwargs.setdefault("eval_solve", kwargs["solve"])  # a loaded model is in eval mode
        loaded: Any = super().from_dict(ours, return_unused_kwargs=True, **kwargs)
        config, unused = loaded
        config.validate()  # keywords have replaced fields
        if returned:
            return config, unused
        config._check_names(name for name, value in unused.items() if value is not None)
        return config

    def _check_names(self, given: Iterable[str]) -> None:
        """Refuse unknown fields."""
        known = [field.name for field in fields(type(self))]
        for name in given:
            if name not in FROM_TRANSFORMERS and not name.startswith("_"):
                check_known(f"{type(self).__name__} field", name, known)


def joined_fields(own: Json, given: Json) -> Json:
    """The fields that describe a model, and others; ValueError for a field that the model decides."""
    if decided := sorted(own.keys() & given.keys() - DEFAULTS):
        raise ValueError(f"leave out {', '.join(decided)}: the model has its own")
    return own | given
