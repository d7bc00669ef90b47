"""Plain float64 computations that the library's fast ones are compared with."""

import torch
from torch import Tensor


def ssd_recurrence(x, dt, A, B, C, D=None, dt_bias=None, dt_limit=None, state=None, softplus=True):
    """The state-space recurrence, one token at a time; it is differentiable."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))
    step = dt if dt_bias is None else dt + dt_bias.double()
    step = torch.log1p(torch.exp(step)) if softplus else step
    step = step if dt_limit is None else step.clamp(*dt_limit)
    h = torch.zeros_like(x[:, 0, ..., None] * B[:, 0, :, None]) if state is None else state.double()
    out = []
    for t in range(x.shape[1]):
        fed = torch.einsum("bh,bhp,bhn->bhpn", step[:, t], x[:, t], B[:, t])
        h = torch.exp(step[:, t] * A)[..., None, None] * h + fed
        y = torch.einsum("bhpn,bhn->bhp", h, C[:, t])
        out.append(y if D is None else y + D.double()[:, None] * x[:, t])
    return torch.stack(out, dim=1), h


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of the oracle's answer."""
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()
