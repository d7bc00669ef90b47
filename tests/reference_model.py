"""The two small implicit models whose numbers tests/data holds, rebuilt from their own weights.

The files come from the paper's public reference code (float64, solved to 1e-14): logits at the fixed point, and the
gradients of the loss through four phantom steps.
"""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import deqseq as dq

DATA = Path(__file__).parent / "data"
RENAMED = (
    (r"^backbone\.", "model.backbone."),
    (r"^word_emb\.emb\.", "embedding."),
    (r"weight_g$", "parametrizations.weight.original0"),
    (r"weight_v$", "parametrizations.weight.original1"),
)
RENAMED_LLAMA = (
    (r"mixer\.w([qkv])\.", r"self_attn.\1_proj."),
    (r"mixer\.out_proj\.", "self_attn.o_proj."),
    (r"mlp\.w1\.", "mlp.gate_proj."),
    (r"mlp\.w3\.", "mlp.up_proj."),
    (r"mlp\.fc2\.", "mlp.down_proj."),
    (r"(\d)\.norm\.", r"\1.input_layernorm."),
    (r"(\d)\.norm2\.", r"\1.post_attention_layernorm."),
    (r"norm_f\.", "norm."),
)


def mamba2() -> dq.Mamba2:
    """The reference's sizes."""
    return dq.Mamba2(dq.Mamba2Config(d_model=32, n_layers=2, d_state=16, headdim=16, expand=2))


def llama() -> dq.Llama:
    """The reference's sizes."""
    return dq.Llama(dq.LlamaConfig(d_model=32, n_layers=2, n_heads=4, mlp_width=64))


BACKBONES = {"mamba2": mamba2, "llama": llama}


def load(name: str) -> dict[str, Tensor]:
    """Every tensor of one model's file."""
    return load_file(DATA / f"{name}.safetensors")


def build(name: str, tensors: dict[str, Tensor]) -> dq.CausalLM:
    """Our model with the reference's weights."""
    torch.manual_seed(0)
    model = dq.ImplicitModel(
        BACKBONES[name](),
        solver=dq.Relaxed(0.8),
        stop=dq.Stop(rtol=1e-14, max_steps=600),
        gradient=dq.Phantom(steps=4, damping=0.8),
    )
    lm = dq.CausalLM(48, model).double()
    lm.load_state_dict(named(tensors, "weight/"))
    return lm


def named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under ``prefix``, by our names."""
    found = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix) and "criterion" not in name:  # the head is the embedding
            ours = name.removeprefix(prefix)
            for pattern, new in RENAMED + RENAMED_LLAMA * any("wq" in other for other in tensors):
                ours = re.sub(pattern, new, ours)
            found[ours] = tensor
    return found
