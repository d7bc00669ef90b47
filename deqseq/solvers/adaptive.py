"""Damping found on the way."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.norms import token_norms
from deqseq.solvers.base import Solver
from deqseq.types import State

FALL, RISE, LEAST = 0.6, 1.07, 0.2  # of the limit of a row
PATIENCE = 3  # iterations without progress before it falls


class AdaptiveMemory(NamedTuple):
    """The last residual, and the damping that led away from it; numbers are in float32 at least.

    ``level`` is the mean logarithm of the relative residuals of a row's tokens, the least one since the limit fell, and
    ``waited`` the iterations since then.
    """

    residual: State
    damping: Float[Tensor, "batch tokens"]
    limit: Float[Tensor, "batch 1"]
    level: Float[Tensor, "batch 1"]
    waited: Float[Tensor, "batch 1"]


@dataclass(frozen=True)
class Adaptive(Solver[AdaptiveMemory]):
    r"""Relaxed iteration that finds the damping of every token on the way.

    .. math:: z_t \leftarrow z_t + \beta_t\, r_t, \qquad r = f(z) - z, \qquad
              \beta_t \leftarrow \min\left(\ell,\;
              \beta_t\, \frac{\lVert r_t^- \rVert^2}{\langle r_t^-,\; r_t^- - r_t \rangle}\right)

    for token :math:`t`, with its residual :math:`r^-` of the iteration before. :math:`\beta` times the fraction is the
    step of Barzilai and Borwein: where the residual reverses, as in a limit cycle, it becomes shorter at once. Where
    the residual has grown along the last one, or there was none, the step is :math:`\ell`.

    The limit :math:`\ell` of a row starts at 1. It is multiplied by 0.6 when three iterations have not lowered the
    row's residual, as in a map that rotates and expands, and by 1.07 when one has; it stays in [0.2, 1]. That residual
    is the geometric mean over the tokens: in a causal model tokens settle from left to right, and the row makes
    progress while some of them do. Later tokens may have to settle again when an earlier one changes; a limit that
    fell further would only delay them.

    A token is the last dimension of the state, as for :class:`deqseq.Stop`. The memory is one state. The sliding window
    starts it afresh after each commit; one iteration is enough to find the step again.

    References:
        Barzilai and Borwein, Two-Point Step Size Gradient Methods, IMA Journal of Numerical Analysis 1988. Movahedi et
        al., Fixed-Point RNNs: Interpolating from Diagonal to Dense, 2025, arXiv 2503.10799 (appendix D.3), lower the
        damping of a row where its largest residual does not improve, and do not raise it again.

    Example:
        >>> import torch, deqseq as dq
        >>> f = lambda z: 1 - z             # plain iteration alternates for ever
        >>> solution = dq.solve(f, torch.zeros(1, 1), solver=dq.Adaptive(), stop=dq.Stop(rtol=1e-6))
        >>> solution.value, solution.stats.iterations
        (tensor([[0.5000]]), tensor([3]))
    """

    def init(self, z0: State) -> AdaptiveMemory:
        damping = torch.ones_like(token_norms(z0.detach()))
        limit = damping[:, :1]
        level, waited = torch.full_like(limit, torch.inf), torch.zeros_like(limit)
        return AdaptiveMemory(torch.zeros_like(z0), damping, limit, level, waited)

    def step(self, z: State, fz: State, state: AdaptiveMemory) -> tuple[State, AdaptiveMemory]:
        residual = fz - z
        limit, level, waited = _limited(_level(residual, fz), state)
        square = token_norms(state.residual).square()
        turned = square - _products(state.residual, residual)
        usable = turned > 0  # else the residual has grown along the last one, or there was none
        secant = state.damping * torch.where(usable, square, 1) / torch.where(usable, turned, 1)
        damping = torch.where(usable, secant, 1).minimum(limit)
        weight = damping.to(z.dtype).reshape(z.shape if z.ndim == 1 else (*z.shape[:-1], 1))
        return torch.lerp(z, fz, weight), AdaptiveMemory(residual, damping, limit, level, waited)


def _limited(level: Tensor, state: AdaptiveMemory) -> tuple[Tensor, Tensor, Tensor]:
    """The limit of each row after an iteration with this level, and what decides the next one."""
    lower = level < state.level
    waited = torch.where(lower, 0, state.waited + 1)
    stuck = waited >= PATIENCE
    limit = (state.limit * torch.where(stuck, FALL, torch.where(lower, RISE, 1))).clamp(LEAST, 1)
    return limit, torch.where(lower | stuck, level, state.level), torch.where(stuck, 0, waited)


def _products(x: State, y: State) -> Float[Tensor, "batch tokens"]:
    """Inner product of each token, in at least float32."""
    accumulate = torch.promote_types(x.dtype, torch.float32)
    x, y = x.to(accumulate), y.to(accumulate)
    return (x * y)[:, None] if x.ndim == 1 else torch.linalg.vecdot(x, y).reshape(len(x), -1)


@torch.no_grad()
def _level(residual: State, fz: State) -> Float[Tensor, "batch 1"]:
    """Mean logarithm of the relative residuals; those below the precision of the state count as that."""
    limits = torch.finfo(residual.dtype)
    relative = token_norms(residual) / token_norms(fz).clamp_min(limits.tiny)
    return relative.clamp_min(limits.eps).log().mean(dim=1, keepdim=True)
