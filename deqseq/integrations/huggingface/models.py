"""The public model classes: a model type each."""

from deqseq.integrations.huggingface.configuration_llama import ImplicitLlamaConfig
from deqseq.integrations.huggingface.configuration_mamba2 import ImplicitMamba2Config
from deqseq.integrations.huggingface.modeling import ImplicitBaseModel
from deqseq.integrations.huggingface.modeling_causal_lm import ImplicitCausalLM


class ImplicitMamba2Model(ImplicitBaseModel):
    """An embedding and an implicit Mamba2, or an explicit one.

    Args:
        config: an :class:`ImplicitMamba2Config`.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> import torch
        >>> config = ImplicitMamba2Config(vocab_size=9, hidden_size=16, head_dim=8, num_hidden_layers=1)
        >>> ImplicitMamba2Model(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 16])
    """

    config_class = ImplicitMamba2Config


class ImplicitMamba2ForCausalLM(ImplicitCausalLM):
    """An implicit Mamba2, or an explicit one, with a language model's head.

    Args:
        config: an :class:`ImplicitMamba2Config`.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> import torch
        >>> config = ImplicitMamba2Config(vocab_size=9, hidden_size=16, head_dim=8, num_hidden_layers=1)
        >>> model = ImplicitMamba2ForCausalLM(config)
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])
    """

    config_class = ImplicitMamba2Config
    base_class = ImplicitMamba2Model


class ImplicitLlamaModel(ImplicitBaseModel):
    """An embedding and an implicit Llama, or an explicit one.

    Args:
        config: an :class:`ImplicitLlamaConfig`.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> import torch
        >>> config = ImplicitLlamaConfig(vocab_size=9, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
        >>> ImplicitLlamaModel(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 16])
    """

    config_class = ImplicitLlamaConfig


class ImplicitLlamaForCausalLM(ImplicitCausalLM):
    """An implicit Llama, or an explicit one, with a language model's head.

    Args:
        config: an :class:`ImplicitLlamaConfig`.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> import torch
        >>> config = ImplicitLlamaConfig(vocab_size=9, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
        >>> output = ImplicitLlamaForCausalLM(config)(torch.tensor([[1, 2, 3]]))
        >>> output.logits.shape, output.stats.steps.shape
        (torch.Size([1, 3, 9]), torch.Size([1]))
    """

    config_class = ImplicitLlamaConfig
    base_class = ImplicitLlamaModel
