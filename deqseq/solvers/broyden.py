"""Broyden's method."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.solvers.base import Solver
from deqseq.types import RowIndex, State


class BroydenMemory(NamedTuple):
    """The last point and residual, and the low-rank part of the inverse Jacobian, one pair a past step."""

    point: State | None
    residual: State | None
    left: tuple[State, ...]
    right: tuple[State, ...]


@dataclass(frozen=True)
class Broyden(Solver[BroydenMemory]):
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

    def init(self, z0: State) -> BroydenMemory:
        return BroydenMemory(None, None, (), ())

    def step(self, z: State, fz: State, state: BroydenMemory) -> tuple[State, BroydenMemory]:
        dtype = z.dtype
        accumulate = torch.promote_types(dtype, torch.float32)
        z, fz = z.to(accumulate), fz.to(accumulate)
        residual = fz - z
        left, right = state.left, state.right
        if len(left) == self.memory:
            left, right = (), ()
        direction = _apply(left, right, residual)
        if state.point is not None and state.residual is not None:
            moved, change = z - state.point, residual - state.residual
            covector = _apply(right, left, moved)
            update = moved - _apply(left, right, change)
            update = update * _safe_reciprocal(_row_products(covector, change), covector, change)
            direction = direction + update * _row_products(covector, residual)
            left, right = (*left, update), (*right, covector)
        return (z - direction).to(dtype), BroydenMemory(z, residual, left, right)

    def select(self, state: BroydenMemory, rows: RowIndex) -> BroydenMemory:
        if state.point is None or state.residual is None:
            return state
        left, right = (tuple(x[rows] for x in side) for side in (state.left, state.right))
        return BroydenMemory(state.point[rows], state.residual[rows], left, right)


def _apply(left: tuple[State, ...], right: tuple[State, ...], x: State) -> State:
    """The operator ``-I + sum_i left_i right_i^T`` on each row; with the sides swapped, its transpose."""
    total = -x
    for u, v in zip(left, right, strict=True):
        total.addcmul_(u, _row_products(v, x))
    return total


def _row_products(x: State, y: State) -> Float[Tensor, "batch *ones"]:
    """Inner product of each row, shaped to multiply a state."""
    products = torch.linalg.vecdot(x.reshape(x.shape[0], -1), y.reshape(y.shape[0], -1))
    return products.reshape(-1, *[1] * (x.ndim - 1))


def _safe_reciprocal(products: Tensor, x: State, y: State) -> Tensor:
    """``1 / products``, or zero (no update) where the two vectors are as good as orthogonal, or zero."""
    size = (_row_products(x, x) * _row_products(y, y)).sqrt()
    usable = products.abs() > torch.finfo(products.dtype).eps * size
    return torch.where(usable, products, torch.ones_like(products)).reciprocal() * usable
