"""The state-space-dual scan in pure PyTorch: the CPU path, and the oracle of faster kernels."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.ops.ssd.chunks import FORGOTTEN, Chunks, advance, chunk, chunks_in_turn, gained_by
from deqseq.ops.step_sizes import StepSizes

CHUNK = 64  # what suits a CPU's caches


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    steps: StepSizes,
    before: Tensor | None,
    want_state: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:
    """The scan, chunk by chunk in matrix products, in float32 at least; :func:`deqseq.ops.ssd.ssd` documents it."""
    size, dtype = chunk_size or CHUNK, torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):  # it would take the matrix products to half precision
        step = steps.of(dt.to(dtype)).transpose(1, 2).contiguous()
        inner, B, C = (m.to(dtype).transpose(1, 2) for m in (x, B, C))
        many = (inner, step, step * A.to(dtype)[:, None], B, C)
        before = None if before is None else before.to(dtype)
        if x.shape[1] == 1 and before is not None:
            y, state = advance(*many, before)
        elif x.shape[1] <= size:
            y, state = chunk(*many, before, want_state)
        elif torch.compiler.is_compiling():
            y, state = chunks_in_turn(*many, before, want_state, size)
        else:
            y, *_, state = Chunks.apply(*many, before, want_state, size, torch.is_grad_enabled())
        if D is not None:
            y = torch.addcmul(y, inner, D.to(dtype)[:, None, None])
    return y.transpose(1, 2).to(x.dtype), state


def state_after(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    steps: StepSizes,
    before: Tensor | None,
    counts: Int64[Tensor, " batch"] | None,
) -> Float[Tensor, "batch heads headdim d_state"]:
    """The state after the last token, or after the first so many of each row."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        step = steps.of(dt.to(dtype))
        if counts is not None:
            beyond = torch.arange(x.shape[1], device=x.device) >= counts[:, None]
            step = step.masked_fill(beyond[..., None], 0)
        step = step.transpose(1, 2)
        rates = step * A.to(dtype)[:, None]
        # summed from the end: what matters most, the decay of the latest tokens, is a sum of few small numbers
        left = rates.flip(2).cumsum(2).flip(2) - rates
        x, B = (m.to(dtype).transpose(1, 2) for m in (x, B))
        gained = gained_by(x * (step * left.clamp(FORGOTTEN).exp())[..., None], B)
        if before is None:
            return gained
        return torch.addcmul(gained, before.to(dtype), rates.sum(2).clamp(FORGOTTEN).exp()[..., None, None])
