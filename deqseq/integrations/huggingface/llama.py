"""The implicit Llama: its configuration and its models."""

from typing import Any, ClassVar, no_type_check

from huggingface_hub.dataclasses import strict

from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.integrations.fields import Fields
from deqseq.integrations.foreign.pretrained import LLAMA_SIZES, ROTARY_SCALING, rotary
from deqseq.integrations.huggingface.modeling import ImplicitBaseModel, ImplicitClassifier
from deqseq.integrations.huggingface.modeling_causal_lm import ImplicitCausalLM
from deqseq.integrations.huggingface.objects import Json
from deqseq.integrations.huggingface.one_backbone import OneBackboneConfig


@no_type_check  # strict checks the fields; a check of the signature would refuse what transformers passes
@strict
class ImplicitLlamaConfig(OneBackboneConfig):
    """Sizes of an implicit Llama, or of the explicit one, under the names that transformers gives a Llama.

    All fields are keyword arguments; the others are those of
    :class:`~deqseq.integrations.huggingface.one_backbone.OneBackboneConfig`.

    Attributes:
        num_hidden_layers: blocks.
        num_attention_heads: heads of the queries.
        num_key_value_heads: heads of keys and values; divides ``num_attention_heads``. Default: as many.
        head_dim: channels per head, even. Default: ``hidden_size / num_attention_heads``.
        intermediate_size: hidden width of the feed-forward layers. Default: ``int(2/3 * 4 * hidden_size)``.
        rms_norm_eps: epsilon of all norms.
        norms: where the norms of a block stand, ``"pre"``, ``"post"``, ``"sandwich"`` or ``"closed"``; this and the
            next four are fields of :class:`deqseq.LlamaConfig`.
        qk_norm: whether queries and keys are normalised.
        qk_bias: whether the projections to queries and keys have a bias.
        final_norm: whether a norm follows the last block.
        float32_rotary: whether rotary angles are float32 in models of any dtype.
        rope_parameters: the rotary embedding, as ``{"rope_type": "default", "rope_theta": 500000.0}``, or of type
            ``"llama3"`` with its four numbers.
        max_position_embeddings: the length that the model was trained for; tools ask for it, the model does not.

    Example:
        >>> config = ImplicitLlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
        >>> config.head_dim, config.rope_parameters["rope_theta"]
        (16, 500000.0)
    """

    model_type: ClassVar[str] = "implicit_llama3"
    backbone_class = LlamaConfig
    default_theta: ClassVar[float] = 500_000.0
    sizes: ClassVar[dict[str, str]] = (
        OneBackboneConfig.sizes
        | {ours: name for ours, (name, _) in LLAMA_SIZES.items()}
        | {name: name for name in ("norms", "qk_norm", "qk_bias", "final_norm", "float32_rotary")}
    )

    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rms_norm_eps: float = 1e-5
    norms: str = "pre"
    qk_norm: bool = False
    qk_bias: bool = False
    final_norm: bool = True
    float32_rotary: bool = True
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads and self.hidden_size % self.num_attention_heads == 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = int(8 * self.hidden_size / 3)
        legacy = {name: kwargs.pop(name) for name in ("rope_theta", "rope_scaling") if name in kwargs}
        given = dict(legacy.pop("rope_scaling", None) or self.rope_parameters or {})  # transformers writes into it
        self.rope_parameters = {"rope_theta": self.default_theta} | legacy | given
        super().__post_init__(**kwargs)

    def sizes_of_backbone(self) -> Json:
        """Sizes under our names; ValueError for a rotary embedding that is not computed here."""
        theta, scaling = rotary(Fields({"rope_parameters": self.rope_parameters}, ""), self.default_theta)
        return super().sizes_of_backbone() | {"rope_theta": theta, "rope_scaling": scaling}

    @classmethod
    def of_backbone(cls, backbone: Mamba2Config | LlamaConfig) -> Json:
        """The fields that describe a Llama; TypeError for another backbone."""
        given = super().of_backbone(backbone)
        assert isinstance(backbone, LlamaConfig)
        rope: Json = {"rope_type": "default", "rope_theta": backbone.rope_theta}
        scaling = backbone.rope_scaling
        if scaling is None:
            return given | {"rope_parameters": rope}
        rope |= {"rope_type": "llama3"} | {name: getattr(scaling, core) for core, (name, _) in ROTARY_SCALING.items()}
        longest = int(scaling.factor * scaling.original_length)
        return given | {"rope_parameters": rope, "max_position_embeddings": longest}


class ImplicitLlamaModel(ImplicitBaseModel):
    """An embedding and an implicit Llama, or an explicit one.

    Args:
        config: an :class:`ImplicitLlamaConfig`.
    """

    config_class = ImplicitLlamaConfig


class ImplicitLlamaForCausalLM(ImplicitCausalLM):
    """An implicit Llama, or an explicit one, with the head of a language model.

    Args:
        config: an :class:`ImplicitLlamaConfig`.

    Example:
        >>> import torch
        >>> config = ImplicitLlamaConfig(vocab_size=9, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
        >>> output = ImplicitLlamaForCausalLM(config)(torch.tensor([[1, 2, 3]]))
        >>> output.logits.shape, output.stats.iterations.shape
        (torch.Size([1, 3, 9]), torch.Size([1, 3]))
    """

    config_class = ImplicitLlamaConfig
    base_class = ImplicitLlamaModel


class ImplicitLlamaForSequenceClassification(ImplicitClassifier):
    """An implicit Llama, or an explicit one, that classifies sequences by the state of their last token.

    Args:
        config: an :class:`ImplicitLlamaConfig`.
        **unknown: refused, with the nearest known name.
    """

    config_class = ImplicitLlamaConfig
