"""Test problems of other libraries: what is called converged is near a fixed point.

Values and sources: jaxopt (tests/fixed_point_iteration_test.py, anderson_test.py, broyden_test.py),
optimistix (tests/helpers.py), scipy (optimize/tests/test_minpack.py, test_nonlin.py), and the
collection of Moré, Garbow and Hillstrom, Testing Unconstrained Optimization Software, ACM TOMS
1981 (MGH). A root of g is a fixed point of z - g(z).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import deqseq as dq

SOLVERS = [dq.Naive(), dq.Relaxed(0.5), dq.Adaptive(), dq.Anderson(), dq.Broyden()]


class Known(NamedTuple):
    f: Callable[[Tensor], Tensor]
    start: list[float]
    rtol: float = 0.0
    atol: float = 0.0


def rows(*components: Tensor) -> Tensor:
    return torch.stack(components, dim=1)


def root(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: z - g(z)


def seeded(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1


RATES = torch.tensor([0.9, 0.99, 0.999], dtype=torch.float64)
SQUARE = seeded(200, 200)
SYMMETRIC = (SQUARE + SQUARE.T) / (2 * torch.linalg.eigvalsh(SQUARE + SQUARE.T)[-1] + 1e-4)
ANGLES = math.pi / torch.tensor([2, 3, 4, 5, 6, 1.27, 1.73], dtype=torch.float64)
TURN = torch.block_diag(
    *(torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]], dtype=torch.float64) for a in ANGLES)
)
CENTRE = torch.arange(1, 15, dtype=torch.float64)
COUPLED = torch.tensor([[-2.0, 1.0, 0.9], [0.3, -0.5, 0.2], [-0.1, 0.1, -0.3]]).double()
MATRIX = torch.tensor([[-2.0, 1.0, 0.9], [1.0, -1.0, 0.0], [0.1, 0.0, -3.0]]).double()


def heat(z: Tensor) -> Tensor:
    """One implicit Euler step of u_t = u_xx + u (1 - u) on 100 points of [-1, 1]."""
    x = torch.linspace(-1, 1, 100, dtype=torch.float64)
    begin = torch.exp(-(x**2))
    second = z[:, :-2] - 2 * z[:, 1:-1] + z[:, 2:]
    inside = begin[1:-1] + 1e-4 * (second / (x[1] - x[0]) ** 2 + z[:, 1:-1] * (1 - z[:, 1:-1]))
    edges = begin[[0, -1]].expand(len(z), 2)
    return torch.cat([edges[:, :1], inside, edges[:, 1:]], dim=1)


def robertson(z: Tensor) -> Tensor:
    a, b, c = z.unbind(dim=1)
    first = -0.04 * a + 1e4 * b * c
    last = 3e7 * b**2
    return rows(first, -first - last, last)


def midpoint(field: Callable[[Tensor], Tensor], start: Tensor, step: float, unknown: str):
    """The implicit midpoint rule, for the next state, its slope, or the state half way."""
    if unknown == "state":
        return lambda z: start + step * field((start + z) / 2)
    if unknown == "slope":
        return lambda z: field(start + step * z / 2)
    return lambda z: start + step / 2 * field(z)


def spread(z: Tensor) -> Tensor:
    """Epidemic of scipy's test without acceleration: the steady state is 1.3."""
    m, ratio = 1.3, 3.0
    begun = (m - 1) / m * (ratio / m) ** (1 / (m - 1))
    return (ratio / z).log() / (begun * z / (z - 1)).log() + 1


def powell(z: Tensor) -> Tensor:
    a, b = z.unbind(dim=1)
    return rows(1e4 * a * b - 1, torch.exp(-a) + torch.exp(-b) - 1.0001)


def trigonometric(z: Tensor) -> Tensor:
    n = z.shape[1]
    count = torch.arange(1, n + 1, dtype=z.dtype)
    return n - z.cos().sum(dim=1, keepdim=True) + count * (1 - z.cos()) - z.sin()


def tridiagonal(z: Tensor) -> Tensor:
    left = torch.nn.functional.pad(z[:, :-1], (1, 0))
    right = torch.nn.functional.pad(z[:, 1:], (0, 1))
    return (3 - 2 * z) * z - left - 2 * right + 1


def boundary(z: Tensor) -> Tensor:
    n = z.shape[1]
    h = 1 / (n + 1)
    t = h * torch.arange(1, n + 1, dtype=z.dtype)
    left = torch.nn.functional.pad(z[:, :-1], (1, 0))
    right = torch.nn.functional.pad(z[:, 1:], (0, 1))
    return 2 * z - left - right + h**2 * (z + t + 1) ** 3 / 2


ONES = torch.ones(3, dtype=torch.float64)
PROBLEMS = {
    # jaxopt
    "geometric decay": Known(lambda z: RATES * z, [1.0, 0.4, -0.2], atol=1e-5),
    "scalar": Known(lambda z: 0.5 * z + 0.5, [0.0], rtol=1e-4),
    "sine": Known(lambda z: z.sin() * z**2, [0.6, 0.0, -0.1], atol=1e-6),
    "cube": Known(lambda z: z**3, [0.7, 0.5], atol=1e-6),
    "mixed cube": Known(lambda z: -(z**3), [-1 / 3, 0.0, 2 / 3, -0.4 / 3], atol=1e-6),
    "cosine": Known(torch.cos, [0.3], rtol=1e-6),
    "cosine, loose": Known(torch.cos, [0.3], rtol=1e-2),
    "cosine, moved": Known(lambda z: z.cos() + math.pi / 2, [math.pi / 4], rtol=1e-6),
    "flat": Known(lambda z: torch.tensor([0.05, 0.2]).double() * z, [1.0, -0.5], atol=1e-6),
    "affine": Known(lambda z: z @ SYMMETRIC + seeded(200), [0.0] * 200, rtol=1e-6),
    "rotation": Known(lambda z: (z - CENTRE) @ TURN.T + CENTRE, [0.5] * 14, rtol=1e-4),
    # optimistix
    "sine of ones": Known(lambda z: (0.5 * z + 1).sin(), [1.0, 1.0, 1.0], rtol=1e-6),
    "exponential": Known(lambda z: torch.exp(-z), [1.0, 1.0], rtol=1e-6),
    "network": Known(lambda z: torch.tanh(z @ COUPLED + 0.1), [1.0, 1.0, 1.0], rtol=1e-6),
    "heat": Known(heat, [1.0] * 100, rtol=1e-6),
    **{
        f"linear midpoint, {unknown}": Known(
            midpoint(lambda z: z @ MATRIX.T, ONES, 0.1, unknown), [1.0, 1.0, 1.0], rtol=1e-6
        )
        for unknown in ("state", "slope", "half way")
    },
    **{
        f"Robertson's midpoint, {unknown}": Known(
            midpoint(robertson, torch.tensor([1.0, 0.0, 0.0]).double(), 1e-4, unknown),
            [1.0, 1e-5, 1e-5],
            rtol=1e-6,
        )
        for unknown in ("state", "slope", "half way")
    },
    # scipy
    "double": Known(lambda z: 2 * z, [1.0], atol=1e-8),
    "square": Known(lambda z: z**2, [1.05], rtol=1e-8),
    "root": Known(torch.sqrt, [1.05], rtol=1e-8),
    "squares": Known(
        lambda z: torch.tensor([0.75, 1.0, 1.25]).double() * z**2, [1.1, 1.15, 0.9], rtol=1e-8
    ),
    "roots": Known(
        lambda z: torch.tensor([0.75, 1.0, 1.25]).double() * z.sqrt(), [0.8, 1.1, 1.1], rtol=1e-8
    ),
    "Lambert": Known(lambda z: torch.exp(-z) / 2, [0.0], rtol=1e-8),
    "epidemic": Known(spread, [1.001], rtol=1e-8),
    "steep diagonal": Known(
        root(lambda z: torch.tensor([3.0, 2.0, 1.5, 1.0, 0.5]).double() * z), [1.0] * 5, atol=1e-6
    ),
    "cubic diagonal": Known(
        root(lambda z: z + 0.01 * z.sum(1, keepdim=True) ** 3), [1.0] * 5, atol=1e-6
    ),
    "Powell": Known(root(powell), [-1.0, -2.0], atol=1e-2),
    # MGH
    "Rosenbrock": Known(
        root(lambda z: rows(10 * (z[:, 1] - z[:, 0] ** 2), 1 - z[:, 0])), [-1.2, 1.0], rtol=1e-6
    ),
    "trigonometric": Known(root(trigonometric), [0.1] * 10, rtol=1e-4),
    "tridiagonal": Known(root(tridiagonal), [-1.0] * 10, rtol=1e-4),
    "boundary values": Known(root(boundary), [-0.1] * 10, rtol=1e-4),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_what_is_called_converged_is_near_a_fixed_point(solver, name):
    """Newton's method from the value ends where the tolerance and the Jacobian say."""
    f, start, rtol, atol = PROBLEMS[name]
    stop = dq.Stop(rtol, atol=atol, max_steps=1000, divergence=math.inf)
    z0 = torch.tensor([start], dtype=torch.float64)
    with torch.no_grad():
        solution = dq.Problem(f=f, z0=z0, solver=solver, stop=stop).solve()
    if not solution.converged.all():
        pytest.skip("not called converged")
    value = solution.value[0]

    def residual(z):
        return f(z[None])[0] - z

    allowed = atol + rtol * f(solution.value)[0].norm()
    assert residual(value).norm() <= allowed * (1 + 1e-9)
    jacobian = torch.func.jacrev(residual)
    reach = torch.linalg.matrix_norm(torch.linalg.pinv(jacobian(value)), ord=2)
    point = value
    for _ in range(50):
        point = point - torch.linalg.pinv(jacobian(point)) @ residual(point)
    assert residual(point).norm() <= 1e-3 * allowed + 1e-12
    assert (point - value).norm() <= 10 * reach * allowed
