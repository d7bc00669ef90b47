"""The fixed-point iteration that can be computed backwards."""

from dataclasses import dataclass

from deqseq.check import check_number
from deqseq.solvers.base import Solver
from deqseq.types import State


@dataclass(frozen=True)
class Coupled(Solver[tuple[State]]):
    r"""Coupled relaxed iteration: each point is a mean of the map at the last point and of the point before that.

    .. math:: z_{n+1} = (1 - \tau)\, z_{n-1} + \tau f(z_n), \qquad z_{-1} = z_0

    Given the last two points, the ones before follow from this equation, so :class:`Reversible` differentiates the
    iteration without storing it. It converges where the map contracts, and on many maps that rotate. Damping does not
    help against an eigenvalue below -1: for that take :class:`Adaptive`.

    Args:
        damping: :math:`\tau`, in (0, 1). Smaller values converge more slowly.

    Raises:
        ValueError: a damping outside (0, 1).

    References:
        McCallum, Arora and Foster, Reversible Deep Equilibrium Models, 2025, arXiv 2509.12917. Their two states
        :math:`y` and :math:`z` are our points in turn: one evaluation per point, two per step of theirs.

    Example:
        >>> import torch, deqseq as dq
        >>> dq.solve(torch.cos, torch.zeros(1), solver=dq.Coupled(0.8), stop=dq.Stop(rtol=1e-6)).value
        tensor([0.7391])
    """

    damping: float = 0.8

    def __post_init__(self) -> None:
        check_number("Coupled.damping", self.damping, "(0, 1)")

    def init(self, z0: State) -> tuple[State]:
        return (z0,)

    def step(self, z: State, fz: State, state: tuple[State]) -> tuple[State, tuple[State]]:
        (before,) = state
        return before * (1 - self.damping) + fz * self.damping, (z,)
