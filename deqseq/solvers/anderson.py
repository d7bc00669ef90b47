"""Anderson acceleration."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.arguments import Between, PositiveFloat, Within, checked
from deqseq.rows import put
from deqseq.solvers.base import Solver
from deqseq.types import RowIndex, State, float32_at_least

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that have no float64: there the small systems are solved on the CPU."""


class AndersonMemory(NamedTuple):
    """The last evaluations, oldest first, and the inner products of their residuals."""

    values: tuple[State, ...]
    residuals: tuple[State, ...]
    gram: Float[Tensor, "batch kept kept"]


@checked
@dataclass(frozen=True)
class Anderson(Solver[AndersonMemory]):
    r"""Anderson acceleration (type II), each row on its own.

    The next point combines the last evaluations with the weights that make their residuals
    :math:`r_i = f(z_i) - z_i` cancel best:

    .. math:: z \leftarrow \sum_i w_i \bigl(f(z_i) - (1 - \beta)\, r_i\bigr), \qquad
              w = \underset{\sum w = 1}{\mathrm{arg\,min}} \left\lVert \sum_i w_i r_i \right\rVert^2

    The normal equations are solved in float64, one small system per row; on the CPU if the device
    has no float64, such as Apple's GPUs.

    Args:
        memory: how many evaluations are combined, at least 2. Each costs two states. On maps that
            contract slowly a larger memory saves evaluations.
        mixing: :math:`\beta`, float above 0 and at most 1: the weight of the map's values against
            the points.
        ridge: Tikhonov term, above 0, relative to the diagonal of the Gram matrix. Default: ten
            times the state's machine epsilon.

    Raises:
        ValueError: a number out of its range.

    References:
        Walker and Ni, Anderson Acceleration for Fixed-Point Iterations, SIAM J. Numer. Anal. 2011.

    Example:
        >>> import torch, deqseq as dq
        >>> f = lambda z: 1 - 0.9 * z  # plain iteration gains a factor 0.9 a step
        >>> solution = dq.solve(f, torch.zeros(1, 1), solver=dq.Anderson(), stop=dq.Stop(rtol=1e-6))
        >>> solution.stats.iterations
        tensor([4])
    """

    combines: ClassVar[bool] = True
    memory: Annotated[int, Between(2)] = 4  # with 1 it would be Relaxed
    mixing: Annotated[float, Within("(0, 1]")] = 1.0
    ridge: PositiveFloat | None = None

    def init(self, z0: State) -> AndersonMemory:
        dtype = torch.float32 if z0.device.type in WITHOUT_FLOAT64 else torch.float64
        return AndersonMemory((), (), z0.new_zeros(z0.shape[0], 0, 0, dtype=dtype))

    def step(self, z: State, fz: State, state: AndersonMemory) -> tuple[State, AndersonMemory]:
        residual = fz - z
        values, residuals = (*state.values, fz), (*state.residuals, residual)
        gram = _bordered(state.gram, _row_products(residuals).to(state.gram.dtype))
        weights = self._weights(gram, z.dtype).to(z.dtype).to(z.device)
        proposal = self._combine(weights, values, residuals)
        kept = min(len(values), int(self.memory) - 1)  # one place is for the next evaluation
        return proposal, AndersonMemory(values[-kept:], residuals[-kept:], gram[:, -kept:, -kept:])

    def restart(self, state: AndersonMemory, z: State, rows: RowIndex) -> AndersonMemory:
        """The residuals so far count as so large that they have no weight."""
        gram = state.gram
        huge = 1e-8 * torch.finfo(gram.dtype).max
        diagonal = huge * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        return state._replace(gram=put(gram, rows, diagonal.expand(len(rows), -1, -1)))

    def _weights(self, gram: Tensor, dtype: torch.dtype) -> Float[Tensor, "batch kept"]:
        """Solve the constrained least squares of each row; a singular one takes the newest value
        alone.
        """
        if gram.dtype != torch.float64:
            gram = gram.cpu().double()
        ridge = 10 * torch.finfo(dtype).eps if self.ridge is None else self.ridge
        eye = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        if torch.is_grad_enabled():
            # a residual of zero has no direction: its gradient would not be a number
            usable = (gram.diagonal(dim1=1, dim2=2) > torch.finfo(gram.dtype).tiny).all(dim=1)
            gram = torch.where(
                usable[:, None, None], gram, eye[-1:] * eye + 1e300 * (eye - eye[-1:] * eye)
            )
        # solve_ex, because solve checks for errors on the host, which waits for the device at every
        # step
        solved, _ = torch.linalg.solve_ex(gram * (1 + ridge * eye), torch.ones_like(gram[:, :, :1]))
        weights = solved[:, :, 0] / solved.sum(dim=1)
        return torch.where(weights.isfinite().all(dim=1, keepdim=True), weights, eye[-1])

    def _combine(
        self, weights: Tensor, values: tuple[State, ...], residuals: tuple[State, ...]
    ) -> State:
        columns = weights.reshape(*weights.shape, *[1] * (values[0].ndim - 1)).unbind(dim=1)
        total = columns[0] * values[0]
        for weight, value in zip(columns[1:], values[1:], strict=True):
            total.addcmul_(weight, value)
        if self.mixing < 1:
            for weight, residual in zip(columns, residuals, strict=True):
                total.addcmul_(weight, residual, value=self.mixing - 1)
        return total


def _row_products(states: tuple[State, ...]) -> Float[Tensor, "batch kept"]:
    """Inner products of each row of the last state with that of each, in at least float32."""
    flat = [one.reshape(len(one), -1).to(float32_at_least(one)) for one in states]
    return torch.stack([torch.linalg.vecdot(flat[-1], one) for one in flat], dim=1)


def _bordered(
    gram: Tensor, products: Float[Tensor, "batch kept"]
) -> Float[Tensor, "batch kept kept"]:
    """The symmetric matrix with one more row and column, whose last entries are ``products``."""
    above = torch.cat([gram, products[:, :-1, None]], dim=2)
    return torch.cat([above, products[:, None, :]], dim=1)
