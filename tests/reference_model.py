"""The small implicit Mamba2 whose numbers tests/data holds, rebuilt from its own weights.

The file comes from the paper's public reference code (float64, solved to 1e-14): logits at the fixed point, and
the gradients of the loss through four phantom steps.
"""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import deqseq as dq

DATA = Path(__file__).parent / "data" / "mamba2.safetensors"
RENAMED = (
    (r"^backbone\.", "model.backbone."),
    (r"^word_emb\.emb\.", "embedding."),
    (r"weight_g$", "parametrizations.weight.original0"),
    (r"weight_v$", "parametrizations.weight.original1"),
)


def load() -> dict[str, Tensor]:
    """Every tensor of the file."""
    return load_file(DATA)


def build(tensors: dict[str, Tensor]) -> dq.CausalLM:
    """Our model with the reference's weights."""
    torch.manual_seed(0)
    config = dq.Mamba2Config(d_model=32, n_layers=2, d_state=16, headdim=16, expand=2)
    model = dq.ImplicitModel(
        dq.Mamba2(config),
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
            for pattern, new in RENAMED:
                ours = re.sub(pattern, new, ours)
            found[ours] = tensor
    return found
