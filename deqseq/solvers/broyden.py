"""Broyden's method."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.solvers.base import Solver
from deqseq.types import RowIndex, State

Vectors = Float[Tensor, "batch size"]


class BroydenMemory(NamedTuple):
    """The last evaluation, and the low-rank part of the inverse Jacobian, one pair a past step.

    Rows are flattened and in float32 at least. ``left`` and ``right`` have room for all pairs; ``pairs`` are filled.
    """

    point: Vectors
    residual: Vectors
    direction: Vectors
    left: Float[Tensor, "batch room size"]
    right: Float[Tensor, "batch room size"]
    pairs: int


@dataclass(frozen=True)
class Broyden(Solver[BroydenMemory | None]):
    r"""Broyden's good method on :math:`g(z) = f(z) - z`, limited in memory, each row on its own.

    .. math:: z \leftarrow z - H g(z), \qquad H = -I + \sum_i u_i v_i^\top, \qquad
              v = H^\top s, \quad u = \frac{s - H y}{v^\top y}

    with the last step :math:`s` and the change :math:`y` of :math:`g` along it. It finds fixed points at which
    plain iteration diverges. When the memory is full the low-rank part is dropped and the method starts afresh.

    Args:
        memory: pairs :math:`(u_i, v_i)` that are kept, at least 1; each costs two states.

    Raises:
        ValueError: a memory below 1.

    References:
        Bai, Kolter and Koltun, Deep Equilibrium Models, NeurIPS 2019, arXiv 1909.01377 (appendix B).

    Example:
        >>> import torch, deqseq as dq
        >>> f = lambda z: 3 * z - 2         # plain iteration leaves the fixed point 1
        >>> dq.solve(f, torch.zeros(1, 1), solver=dq.Broyden(), stop=dq.Stop(rtol=1e-6)).value
        tensor([[1.]])
    """

    memory: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.memory, int):
            raise ValueError(f"Broyden.memory must be an integer >= 1, got {self.memory!r}")
        if self.memory < 1:
            raise ValueError(f"Broyden.memory must be >= 1, got {self.memory!r}")

    def init(self, z0: State) -> None:
        return None

    def step(self, z: State, fz: State, state: BroydenMemory | None) -> tuple[State, BroydenMemory]:
        accumulate = torch.promote_types(z.dtype, torch.float32)
        point = z.reshape(z.shape[0], -1).to(accumulate)
        residual = fz.reshape(z.shape[0], -1).to(accumulate) - point
        if state is None:
            room = point.new_empty(point.shape[0], self.memory, point.shape[1])
            state = BroydenMemory(point, residual, -residual, room, torch.empty_like(room), 0)
            direction = -residual
        else:
            direction, state = self._update(point, residual, state)
        proposal = (point - direction).to(z.dtype).reshape(z.shape)
        return proposal, state._replace(point=point, residual=residual, direction=direction)

    def select(self, state: BroydenMemory | None, rows: RowIndex) -> BroydenMemory | None:
        if state is None:
            return None
        tensors = (x[rows] for x in state[:-1])
        return BroydenMemory(*tensors, pairs=state.pairs)

    def _update(self, point: Vectors, residual: Vectors, state: BroydenMemory) -> tuple[Vectors, BroydenMemory]:
        """Take in the last step, and return the new direction ``H g``."""
        if state.pairs == self.memory:
            state = state._replace(pairs=0, direction=-state.residual)
        left, right, pairs = state.left, state.right, state.pairs
        moved, change = point - state.point, residual - state.residual
        direction = _apply(left, right, pairs, residual)
        image = direction - state.direction  # H y, from what is known of H g at both ends of the step
        covector = _apply(right, left, pairs, moved)
        update = (moved - image) * _safe_reciprocal(covector, change)
        direction = torch.addcmul(direction, update, _products(covector, residual))
        left, right = _with(left, pairs, update), _with(right, pairs, covector)
        return direction, state._replace(left=left, right=right, pairs=pairs + 1)


def _apply(left: Tensor, right: Tensor, pairs: int, x: Vectors) -> Vectors:
    """The operator ``-I + sum_i left_i right_i^T`` on each row; with the sides swapped, its transpose."""
    if pairs == 0:
        return -x
    weights = torch.bmm(x[:, None], right[:, :pairs].transpose(1, 2))
    return torch.baddbmm(x[:, None], weights, left[:, :pairs], beta=-1)[:, 0]


def _with(stack: Tensor, pairs: int, x: Vectors) -> Tensor:
    """``stack`` with ``x`` at place ``pairs``: written in place, unless that would break a graph."""
    if x.requires_grad or stack.requires_grad:
        return torch.cat([stack[:, :pairs], x[:, None]], dim=1)
    stack[:, pairs] = x
    return stack


def _products(x: Vectors, y: Vectors) -> Float[Tensor, "batch 1"]:
    """Inner product of each row."""
    return torch.linalg.vecdot(x, y)[:, None]


def _safe_reciprocal(x: Vectors, y: Vectors) -> Float[Tensor, "batch 1"]:
    """``1 / (x . y)``, or zero (no update) where the two are as good as orthogonal, or zero."""
    products, size = _products(x, y), x.norm(dim=1, keepdim=True) * y.norm(dim=1, keepdim=True)
    usable = products.abs() > torch.finfo(products.dtype).eps * size
    return torch.where(usable, products, torch.ones_like(products)).reciprocal() * usable
