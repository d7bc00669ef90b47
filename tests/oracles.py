"""Plain float64 computations that the library's fast ones are compared with."""

import torch
from torch import Tensor


def ssd_recurrence(x, dt, A, B, C, D=None, dt_bias=None, dt_limit=None, state=None, softplus=True):
    """The state-space recurrence, one token and one head at a time."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    batch, length, heads, headdim = x.shape
    per_group = heads // B.shape[2]
    h = torch.zeros(batch, heads, headdim, B.shape[3], dtype=torch.float64) if state is None else state.double()
    h = h.clone()
    out = torch.zeros_like(x)
    for t in range(length):
        for i in range(heads):
            step = dt[:, t, i] if dt_bias is None else dt[:, t, i] + dt_bias[i].double()
            step = torch.log1p(torch.exp(step)) if softplus else step
            step = step if dt_limit is None else step.clamp(*dt_limit)
            g = i // per_group
            fed = torch.einsum("b,bp,bn->bpn", step, x[:, t, i], B[:, t, g])
            h[:, i] = torch.exp(step * A[i])[:, None, None] * h[:, i] + fed
            out[:, t, i] = torch.einsum("bpn,bn->bp", h[:, i], C[:, t, g])
            if D is not None:
                out[:, t, i] += D[i].double() * x[:, t, i]
    return out, h


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of the oracle's answer."""
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
