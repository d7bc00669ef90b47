"""What the configurations of models of one backbone share."""

import re
from typing import Any, ClassVar, TypeVar, no_type_check

from huggingface_hub.dataclasses import strict
from torch import nn

from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.check import check_type
from deqseq.integrations.foreign import from_reference_config
from deqseq.integrations.huggingface.blocks import is_normalised
from deqseq.integrations.huggingface.configuration import ImplicitConfig, joined_fields
from deqseq.integrations.huggingface.objects import Json
from deqseq.models import ExplicitModel, ImplicitModel, LanguageModelSpec

C = TypeVar("C", bound="OneBackboneConfig")


@no_type_check  # strict checks the fields; a check of the signature would refuse what transformers passes
@strict
class OneBackboneConfig(ImplicitConfig):
    """The fields of implicit models of one backbone of this library, and of their explicit baselines.

    All fields are keyword arguments; the others are those of
    :class:`~deqseq.integrations.huggingface.configuration.ImplicitConfig`.

    Attributes:
        dropout: probability, in [0, 1), inside the layers; one mask per solve.
        weight_norm: whether linear maps and convolutions are weight-normalised, as in the paper. Default: they are not,
            because tools that write weights (merging LoRA, quantisation) need plain ones.
        implicit: whether the blocks are iterated to a fixed point; otherwise they run once, without an injection, and
            ``solve`` and ``eval_solve`` are not used.
    """

    sizes: ClassVar[dict[str, str]] = {"dropout": "dropout", "weight_norm": "weight_norm"}
    """The backbone's name of each field that both have."""
    backbone_class: ClassVar[type[Mamba2Config] | type[LlamaConfig]]
    """The backbone's configuration in this library's terms."""

    dropout: float = 0.0
    weight_norm: bool = False
    implicit: bool = True

    def specification(self) -> LanguageModelSpec:
        """The model that this describes, in this library's terms; ValueError if its sizes do not fit together."""
        return LanguageModelSpec(
            self.vocab_size,
            self.backbone(),
            self.solve_config("solve") if self.implicit else None,
            self.solve_config("eval_solve") if self.implicit and self.eval_solve else None,
            tied=self.tie_word_embeddings,
            embedding_std=self.initializer_range,
            embedding_dropout=self.embedding_dropout,
            embedding_scale=self.embedding_scale,
            logit_softcap=self.logit_softcap,
        )

    def build(self) -> tuple[ImplicitModel | ExplicitModel, nn.Embedding]:
        """The model between embedding and head, and the embedding, freshly initialised."""
        return self.specification().build_model(), nn.Embedding(self.vocab_size, self.hidden_size)

    def follow_weight_norm(self, core: nn.Module) -> None:
        """Say whether ``core`` has weight normalisation now."""
        self.weight_norm = is_normalised(core)

    def backbone(self) -> Mamba2Config | LlamaConfig:
        """Sizes of the backbone, in this library's terms; ``injection`` follows ``implicit``."""
        return self.backbone_class(**self.sizes_of_backbone(), injection=self.implicit)

    def sizes_of_backbone(self) -> Json:
        """Sizes under our names; a tuple where JSON has a list."""
        sizes = {core: getattr(self, name) for core, name in self.sizes.items()}
        return {core: tuple(size) if isinstance(size, list) else size for core, size in sizes.items()}

    @classmethod
    def from_specification(cls: type[C], spec: LanguageModelSpec, **more: Any) -> C:
        """The configuration of a model that is described in this library's terms.

        Args:
            spec: the description.
            **more: fields that ``spec`` does not decide, such as ``eos_token_id``.

        Returns:
            A configuration whose ``specification()`` equals ``spec``, except for sizes left to their defaults.

        Raises:
            ValueError: an unknown field, or one that ``spec`` decides.
            TypeError: the backbone of another model type; or a solver, gradient or sweep that a configuration cannot
                name.

        Example:
            >>> import deqseq as dq
            >>> from deqseq.integrations.huggingface import ImplicitMamba2Config
            >>> spec = dq.preset("mamba2-130m-implicit")
            >>> ImplicitMamba2Config.from_specification(spec).specification() == spec
            True
        """
        own = {
            "vocab_size": spec.vocab_size,
            "tie_word_embeddings": spec.tied,
            "initializer_range": spec.embedding_std,
            "embedding_dropout": spec.embedding_dropout,
            "embedding_scale": spec.embedding_scale,
            "logit_softcap": spec.logit_softcap,
            "implicit": spec.solve is not None,
        }
        own |= {} if spec.solve is None else {"solve": spec.solve, "eval_solve": spec.eval_solve}
        return cls(**joined_fields(own | cls.of_backbone(spec.backbone), more))

    @classmethod
    def of_backbone(cls, backbone: Mamba2Config | LlamaConfig) -> Json:
        """The fields that describe ``backbone``; TypeError for that of another model type."""
        check_type("backbone", backbone, cls.backbone_class)
        return {name: getattr(backbone, core) for core, name in cls.sizes.items()}

    @classmethod
    def from_dict(cls, config_dict: Json, **kwargs: Any) -> Any:
        """As of all models; a configuration of the paper's reference code, with a ``backbone_config``, is translated.

        Args:
            config_dict: the fields.
            **kwargs: fields that replace them, and arguments of transformers.

        Returns:
            The configuration; with ``return_unused_kwargs=True`` also the unknown keywords.
        """
        if "backbone_config" in config_dict:
            tokens = {name: config_dict.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
            dtype = config_dict.get("dtype") or config_dict.get("torch_dtype")
            theirs = {name: value for name, value in config_dict.items() if not name.startswith("_")}
            config_dict = cls.from_specification(from_reference_config(theirs), **tokens, dtype=dtype).to_dict()
        return super().from_dict(config_dict, **kwargs)

    def validate_architecture(self) -> None:
        """Check types and sizes; errors have the names of this configuration, too."""
        try:
            self.specification()
        except (TypeError, ValueError) as error:
            renamed = [
                f"{core} is {name}"
                for core, name in self.sizes.items()
                if core != name and re.search(rf"\b{core}\b", str(error))
            ]
            legend = f" (here {', '.join(renamed)})" if renamed else ""
            raise type(error)(f"{type(self).__name__}: {error}{legend}") from error
