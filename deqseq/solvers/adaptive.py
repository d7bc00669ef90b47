"""Damping found on the way."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.solvers.base import Solver
from deqseq.stop import token_norms
from deqseq.types import RowIndex, State

# the least change of a residual along itself, in its squared norm, that a step is computed from
FLAT = 1e-6
LOWEST, HIGHEST, RISE = 0.05, 3.0, 1.15  # bounds of a row's limit, and how much it grows
PATIENCE = 5  # iterations between two checks of a row's progress
PROGRESS = 0.01  # the least progress between them: one token's residual loses 1 %
# a row's limit, level and age: at that age the first step is a check, which only sets the level,
# because any residual is lower than infinity
AT_START = HIGHEST, torch.inf, PATIENCE


class AdaptiveMemory(NamedTuple):
    """The last residual, its squared norm, and the damping of the step from it.

    ``level`` has the mean logarithms of the residuals of a row's tokens, relative to the state and
    as they are, at the last check of its progress, ``age`` iterations ago. Numbers are in float32
    at least.
    """

    residual: State
    square: Float[Tensor, "batch tokens"]
    damping: Float[Tensor, "batch tokens"]
    limit: Float[Tensor, "batch 1"]
    level: Float[Tensor, "batch 1 2"]
    age: Float[Tensor, "batch 1"]


@dataclass(frozen=True)
class Adaptive(Solver[AdaptiveMemory]):
    r"""Relaxed (damped) iteration whose step size adapts to every token, up to 3.

    .. math:: z_t \leftarrow z_t + \tau_t\, r_t, \qquad r = f(z) - z, \qquad
              \tau_t \leftarrow \min\left(
              \tau_t\, \frac{\lVert r_t^- \rVert^2}{\langle r_t^-,\; r_t^- - r_t \rangle},\;
              \max(1, \sigma_t),\; \ell\right), \qquad
              \sigma_t = \tau_t\, \frac{\langle r_t^-,\; r_t^- - r_t \rangle}
              {\lVert r_t^- - r_t \rVert^2}

    for token :math:`t`; :math:`r^-` is the residual of the iteration before. :math:`\tau` times
    either fraction is a step of Barzilai and Borwein; :math:`\sigma`, the shorter one, would have
    made the last residual smallest. If the residual reverses, as in a limit cycle, the step becomes
    shorter at once. If it falls slowly in one direction, as in a model with a residual path, the
    step becomes longer than 1, the step of plain iteration. It is 1 at first, and after a residual
    that has grown along the previous one.

    The limit :math:`\ell` of a row starts at 3. At every fifth iteration it grows by 15 % if the
    row's residual is lower than five iterations before. If not, as in a map that rotates and
    expands, it falls to :math:`\sigma`, if that is lower. It stays between 0.05 and 3, or between
    0.05 and 1 if the residual is lower only relative to the state. The residual and :math:`\sigma`
    of a row are geometric means over its tokens: in a causal model tokens converge from left to
    right, and the row makes progress while some of them do.

    A token is a vector along the last dimension, as for :class:`deqseq.Stop`. The memory costs one
    state.

    References:
        Barzilai and Borwein, Two-Point Step Size Gradient Methods, IMA Journal of Numerical
        Analysis 1988. Movahedi et al., Fixed-Point RNNs: Interpolating from Diagonal to Dense,
        2025, arXiv 2503.10799 (appendix D.3), only lower the damping of a row.

    Example:
        >>> import torch, deqseq as dq
        >>> f = lambda z: 1 - z  # plain iteration alternates for ever
        >>> solution = dq.solve(f, torch.zeros(1, 1), solver=dq.Adaptive(), stop=dq.Stop(rtol=1e-6))
        >>> solution.value, solution.stats.iterations
        (tensor([[0.5000]]), tensor([3]))
    """

    per_token = True

    def init(self, z0: State) -> AdaptiveMemory:
        ones = torch.ones_like(token_norms(z0.detach()))
        limit, level, age = (torch.full_like(ones[:, :1], value) for value in AT_START)
        level = level[..., None].repeat(1, 1, 2)
        return AdaptiveMemory(torch.zeros_like(z0), ones, ones, limit, level, age)

    def restart(self, state: AdaptiveMemory, z: State, rows: RowIndex) -> AdaptiveMemory:
        # as init: from a residual of 0 and a square of 1 the next damping is 1
        pairs = zip(state, (0, 1, 1, *AT_START), strict=True)
        return AdaptiveMemory(*(x.index_fill(0, rows, value) for x, value in pairs))

    def step(self, z: State, fz: State, state: AdaptiveMemory) -> tuple[State, AdaptiveMemory]:
        residual = fz - z
        square, product = _products(residual, residual), _products(state.residual, residual)
        fall, least = state.square - product, FLAT * state.square
        positive, is_old = fall.maximum(least), state.age >= PATIENCE
        # the step that would have made the last residual shortest
        shortest = state.damping * positive / (fall + square - product).maximum(least)
        limit, level, age = state.limit, state.level, state.age + 1
        if not z.is_cpu or bool(is_old.any()):  # on a GPU reading it would wait for the device
            # where the residual has grown along the last one, no step would have
            shorter = torch.where(fall > 0, shortest, 1).clamp(FLAT, 1)
            fallen = shorter.log().mean(dim=1, keepdim=True).exp().minimum(limit)
            new_level = _level(square.detach(), fz.detach())
            progress = new_level < level - PROGRESS / square.shape[1]
            moved = torch.where(progress[..., 0], limit * RISE, fallen).clamp_min(LOWEST)
            # longer steps would keep a state that drifts from settling in all but the drift
            moved = moved.minimum(torch.where(progress[..., 1], HIGHEST, 1.0))
            limit = torch.where(is_old, moved, limit)
            level = torch.where(is_old[..., None], new_level, level)
            age = torch.where(is_old, 1, age)
        damping = (state.damping * state.square / positive).minimum(shortest.clamp_min(1))
        damping = damping.minimum(limit)
        weight = damping.to(z.dtype).reshape(z.shape if z.ndim == 1 else (*z.shape[:-1], 1))
        square = square.clamp_min(torch.finfo(square.dtype).tiny)
        memory = AdaptiveMemory(residual, square, damping, limit, level, age)
        return torch.lerp(z, fz, weight), memory


def _products(x: State, y: State) -> Float[Tensor, "batch tokens"]:
    """Inner product of each token, in at least float32."""
    if x.dtype.itemsize < 4:
        x, y = x.float(), y.float()
    if x.ndim == 1:
        return (x * y)[:, None]
    products = torch.linalg.vecdot(x, y)
    return products if products.ndim == 2 else products.reshape(len(x), -1)


def _level(square: Tensor, fz: State) -> Float[Tensor, "batch 1 2"]:
    """Mean logarithms of the residuals, relative and as they are, each at least the precision of
    the state.
    """
    limits, size = torch.finfo(square.dtype), _products(fz, fz)
    squares = torch.stack([square / size.clamp_min(limits.tiny), square], dim=2)
    least = torch.finfo(fz.dtype).eps ** 2 * torch.stack([torch.ones_like(size), size], dim=2)
    # a token at zero has an infinite residual
    squares = squares.maximum(least).clamp(limits.tiny, limits.max)
    return squares.log().mean(dim=1, keepdim=True) / 2
