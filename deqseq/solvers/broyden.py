"""Broyden's method."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.arguments import PositiveInt, checked
from deqseq.rows import put
from deqseq.solvers.base import Solver
from deqseq.types import RowIndex, State, float32_at_least

Vectors = Float[Tensor, "batch size"]


class BroydenMemory(NamedTuple):
    """The last evaluation, and the low-rank part of the inverse Jacobian.

    That is ``scale_i left_i right_i^T`` per past step; the first ``pairs`` places are filled. Rows
    are flattened, in float32 at least. Once some rows have begun anew without the others,
    ``ages`` counts the pairs of each row, and new ones replace the oldest.
    """

    point: Vectors
    residual: Vectors
    direction: Vectors
    left: Float[Tensor, "batch room size"]
    right: Float[Tensor, "batch room size"]
    scale: Float[Tensor, "batch filled"]
    pairs: int
    ages: Int64[Tensor, " batch"] | None = None


@checked
@dataclass(frozen=True)
class Broyden(Solver[BroydenMemory | None]):
    r"""Broyden's good method on :math:`g(z) = f(z) - z`, with limited memory, for each row.

    .. math:: z \leftarrow z - H g(z), \qquad H = -I + \sum_i u_i v_i^\top, \qquad
              v = H^\top s, \quad u = \frac{s - H y}{v^\top y}

    with the last step :math:`s` and the change :math:`y` of :math:`g` along it. It finds fixed
    points at which plain iteration diverges. When the memory is full, the low-rank part is dropped
    and the method restarts.

    Args:
        memory: how many pairs :math:`(u_i, v_i)` are kept, at least 1; each costs two states.

    Raises:
        ValueError: a memory below 1.

    References:
        Bai, Kolter and Koltun, Deep Equilibrium Models, NeurIPS 2019, arXiv 1909.01377 (appendix
        B).

    Example:
        >>> import torch, deqseq as dq
        >>> f = lambda z: 3 * z - 2  # plain iteration leaves the fixed point 1
        >>> dq.solve(f, torch.zeros(1, 1), solver=dq.Broyden(), stop=dq.Stop(rtol=1e-6)).value
        tensor([[1.]])
    """

    combines: ClassVar[bool] = True
    memory: PositiveInt = 16

    def init(self, z0: State) -> None:
        return None

    def step(self, z: State, fz: State, state: BroydenMemory | None) -> tuple[State, BroydenMemory]:
        accumulate = float32_at_least(z)
        point = z.reshape(z.shape[0], -1).to(accumulate)
        residual = fz.reshape(z.shape[0], -1).to(accumulate) - point
        if state is None:
            room = point.new_empty(point.shape[0], self.memory, point.shape[1])
            scale = point.new_empty(point.shape[0], 0)
            direction = -residual
            right = torch.empty_like(room)
            state = BroydenMemory(point, residual, direction, room, right, scale, 0)
        else:
            direction, state = self._update(point, residual, state)
        proposal = (point - direction).to(z.dtype).reshape(z.shape)
        return proposal, state._replace(point=point, residual=residual, direction=direction)

    def restart(
        self, state: BroydenMemory | None, z: State, rows: RowIndex
    ) -> BroydenMemory | None:
        """Pairs of scale 0 do nothing, and a step of length 0 gives no new one."""
        if state is None:
            return None
        here = z[rows].reshape(len(rows), state.point.shape[1]).to(state.point.dtype)
        ages = state.ages
        if ages is None:
            ages = torch.full_like(state.point[:, 0], state.pairs, dtype=torch.int64)
        scale, ages = state.scale.index_fill(0, rows, 0), ages.index_fill(0, rows, -1)
        return state._replace(point=put(state.point, rows, here), scale=scale, ages=ages)

    def _update(
        self, point: Vectors, residual: Vectors, state: BroydenMemory
    ) -> tuple[Vectors, BroydenMemory]:
        """The new direction ``H g``, and the memory with the last step."""
        if state.ages is not None:
            state = self._without_full(state, state.ages)
        elif state.pairs == self.memory:
            state = state._replace(pairs=0, scale=state.scale[:, :0], direction=-state.residual)
        left, right, scale = state.left, state.right, state.scale
        pairs = min(state.pairs, self.memory)
        moved = point - state.point
        direction = _apply(left, right, scale, pairs, residual)
        covector = _apply(right, left, scale, pairs, moved)
        # H y = H g - H g_before, and both are known: s - H y needs no product
        update = torch.sub(moved, direction).add_(state.direction)
        now, before = _products(covector, residual), _products(covector, state.residual)
        norms = (residual.norm(dim=1) + state.residual.norm(dim=1))[:, None]
        size = covector.norm(dim=1, keepdim=True) * norms
        factor = _safe_reciprocal(now - before, size)
        direction = torch.addcmul(direction, update, factor * now)
        place = state.pairs % self.memory
        left, right = _with(left, place, pairs, update), _with(right, place, pairs, covector)
        scale = torch.cat([scale[:, :place], factor, scale[:, place + 1 :]], dim=1)
        return direction, state._replace(left=left, right=right, scale=scale, pairs=state.pairs + 1)

    def _without_full(self, state: BroydenMemory, ages: Tensor) -> BroydenMemory:
        """The low-rank part is dropped in each row that has as many pairs as there is room for."""
        full = (ages == self.memory)[:, None]
        direction = torch.where(full, -state.residual, state.direction)
        scale, ages = state.scale.masked_fill(full, 0), torch.where(full[:, 0], 0, ages) + 1
        return state._replace(direction=direction, scale=scale, ages=ages)


def _apply(left: Tensor, right: Tensor, scale: Tensor, pairs: int, x: Vectors) -> Vectors:
    """``-I + sum_i scale_i left_i right_i^T`` on each row; its transpose, if sides are swapped."""
    if pairs == 0:
        return -x
    weights = torch.bmm(x[:, None], right[:, :pairs].transpose(1, 2)) * scale[:, None]
    return torch.baddbmm(x[:, None], weights, left[:, :pairs], beta=-1)[:, 0]


def _with(stack: Tensor, place: int, pairs: int, x: Vectors) -> Tensor:
    """``stack``, of which ``pairs`` are used, with ``x`` at a place; in place without a graph."""
    if torch.is_grad_enabled():
        return torch.cat([stack[:, :place], x[:, None], stack[:, place + 1 : pairs]], dim=1)
    stack[:, place] = x
    return stack


def _products(x: Vectors, y: Vectors) -> Float[Tensor, "batch 1"]:
    """Inner product of each row."""
    return torch.linalg.vecdot(x, y)[:, None]


def _safe_reciprocal(products: Tensor, size: Tensor) -> Float[Tensor, "batch 1"]:
    """``1 / products``, or zero (no update) where rounding at this ``size`` hides them."""
    limits = torch.finfo(products.dtype)  # the reciprocal of what is below tiny is infinite
    usable = products.abs() > (limits.eps * size).clamp_min(limits.tiny)
    return torch.where(usable, products, torch.ones_like(products)).reciprocal() * usable
