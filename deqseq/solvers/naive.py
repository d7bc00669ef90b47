"""Plain fixed-point iteration."""

from dataclasses import dataclass

from deqseq.solvers.base import Solver
from deqseq.types import State


@dataclass(frozen=True)
class Naive(Solver[None]):
    r"""Plain (Picard) iteration.

    .. math:: z \leftarrow f(z)

    Converges where the map contracts; the cheapest step there is.

    Example:
        >>> import torch, deqseq as dq
        >>> dq.solve(torch.cos, torch.zeros(1), solver=dq.Naive(), stop=dq.Stop(rtol=1e-6)).value
        tensor([0.7391])
    """

    def init(self, z0: State) -> None:
        return None

    def step(self, z: State, fz: State, state: None) -> tuple[State, None]:
        return fz, None
