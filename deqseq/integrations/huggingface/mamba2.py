"""The implicit Mamba2: its configuration and its models."""

from typing import ClassVar, no_type_check

from huggingface_hub.dataclasses import strict

from deqseq.backbones import Mamba2Config
from deqseq.integrations.foreign.pretrained import MAMBA2_SIZES
from deqseq.integrations.huggingface.modeling import ImplicitBaseModel, ImplicitClassifier
from deqseq.integrations.huggingface.modeling_causal_lm import ImplicitCausalLM
from deqseq.integrations.huggingface.one_backbone import OneBackboneConfig
from deqseq.ops.backend import Backend


@no_type_check  # strict checks the fields; a check of the signature would refuse what transformers passes
@strict
class ImplicitMamba2Config(OneBackboneConfig):
    """Sizes of an implicit Mamba2, or of the explicit one, under the names that transformers gives a Mamba2.

    All fields are keyword arguments; the others are those of
    :class:`~deqseq.integrations.huggingface.one_backbone.OneBackboneConfig`.

    Attributes:
        state_size: size of the state of each channel.
        head_dim: channels per head; divides ``expand * hidden_size``.
        expand: inner width over ``hidden_size``.
        n_groups: groups of heads that share B and C, and are normalised together; divides the number of heads.
        conv_kernel: filter length of the causal convolution.
        intermediate_size: hidden width of a feed-forward layer after each mixer; 0: none.
        chunk_size: tokens per chunk of the scan. Default: 64 in plain PyTorch, 256 in kernels.
        layer_norm_epsilon: epsilon of all norms.
        time_step_limit: bounds of the scan's step sizes.
        backend: what computes convolutions and scans: ``"reference"``, ``"mamba_ssm"``, or ``"auto"``, the kernels
            where they can be used.

    Example:
        >>> config = ImplicitMamba2Config(hidden_size=64, num_hidden_layers=1, solve={"stop": {"rtol": 1e-4}})
        >>> config.specification().solve.stop.rtol
        0.0001
        >>> ImplicitMamba2Config(hiden_size=64)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: ImplicitMamba2Config field 'hiden_size' is unknown; did you mean 'hidden_size'... (known: ...)
    """

    model_type: ClassVar[str] = "implicit_mamba2"
    backbone_class = Mamba2Config
    sizes: ClassVar[dict[str, str]] = (
        OneBackboneConfig.sizes
        | {ours: name for ours, (name, _) in MAMBA2_SIZES.items()}
        | {"mlp_width": "intermediate_size", "chunk_size": "chunk_size", "backend": "backend"}
    )

    state_size: int = 128
    head_dim: int = 64
    expand: int = 2
    n_groups: int = 1
    conv_kernel: int = 4
    intermediate_size: int = 0
    chunk_size: int | None = None
    layer_norm_epsilon: float = 1e-5
    time_step_limit: list[float] | tuple[float, ...] = (0.0, float("inf"))
    backend: Backend = "auto"


class ImplicitMamba2Model(ImplicitBaseModel):
    """An embedding and an implicit Mamba2, or an explicit one.

    Args:
        config: an :class:`ImplicitMamba2Config`.
    """

    config_class = ImplicitMamba2Config


class ImplicitMamba2ForCausalLM(ImplicitCausalLM):
    """An implicit Mamba2, or an explicit one, with the head of a language model.

    Args:
        config: an :class:`ImplicitMamba2Config`.

    Example:
        >>> import torch
        >>> config = ImplicitMamba2Config(vocab_size=9, hidden_size=16, head_dim=8, num_hidden_layers=1)
        >>> _ = torch.manual_seed(0)
        >>> model = ImplicitMamba2ForCausalLM(config)
        >>> solve = {"solver": {"name": "Relaxed", "damping": 0.5}, "stop": {"rtol": 0.1}}
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, solve=solve).shape
        torch.Size([1, 7])
    """

    config_class = ImplicitMamba2Config
    base_class = ImplicitMamba2Model


class ImplicitMamba2ForSequenceClassification(ImplicitClassifier):
    """An implicit Mamba2, or an explicit one, that classifies sequences by the state of their last token.

    Args:
        config: an :class:`ImplicitMamba2Config`.
        **unknown: refused, with the nearest known name.
    """

    config_class = ImplicitMamba2Config
