"""Small randomly initialised models of transformers, and what their logits are compared by."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers

IDS = torch.randint(0, 50, (3, 13), generator=torch.Generator().manual_seed(0))


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to a fraction of the largest value, which is not small."""
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


ROPE = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE["original_max_position_embeddings"] = 16


def llama(**changes) -> transformers.PreTrainedModel:
    """In eval mode, with grouped heads and a head of its own unless told."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "initializer_range": 0.3}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, **changes})).eval()


def mamba2(**changes) -> transformers.PreTrainedModel:
    """In eval mode, with two groups and a head of its own unless told."""
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "num_heads": 4}
    state = {"n_groups": 2, "state_size": 8, "chunk_size": 8, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**sizes, **state, **changes})).eval()
    with torch.no_grad():
        for block in model.backbone.layers:  # at their initial values these would hide where they belong
            for part in (block.norm.weight, block.mixer.norm.weight, block.mixer.D, block.mixer.conv1d.bias):
                part.uniform_(0.5, 1.5)
    return model


MODELS = pytest.mark.parametrize(
    "make",
    [
        lambda: llama(),
        lambda: llama(rope_parameters=ROPE, tie_word_embeddings=True),
        lambda: llama(num_key_value_heads=4, head_dim=8),
        lambda: mamba2(),
        lambda: mamba2(tie_word_embeddings=True, n_groups=1, conv_kernel=3, time_step_limit=(0.01, 0.5)),
    ],
    ids=["Llama", "Llama 3.x, tied", "Llama, ungrouped", "Mamba2", "Mamba2, tied"],
)
