"""What "converged" promises: maps that drift never do, and what is returned passes."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import deqseq as dq

SOLVERS = [dq.Naive(), dq.Relaxed(0.5), dq.Adaptive(), dq.Anderson(), dq.Broyden()]
SEEDS, SIZE = 20, 6
RTOL = 1e-3


class Maps(NamedTuple):
    """A map per row: z A^T + c, through tanh where ``squashed``; a ``drift`` replaces its first
    component by z_0 + drift + y_1 / 10.
    """

    matrix: Tensor
    offset: Tensor
    squashed: Tensor
    drift: Tensor


def f(z: Tensor, maps: Maps) -> Tensor:
    y = torch.einsum("nij,nj->ni", maps.matrix, z) + maps.offset
    y = torch.where(maps.squashed, y.tanh(), y)
    first = torch.where(maps.drift == 0, y[:, 0], z[:, 0] + maps.drift + y[:, 1] / 10)
    return torch.cat([first[:, None], y[:, 1:]], dim=1)


def random_matrix(radius: float, generator: torch.Generator) -> Tensor:
    matrix = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    return matrix * radius / torch.linalg.eigvals(matrix).abs().max()


def maps_of(rows: list[tuple[Tensor, Tensor, bool, float]], dtype: torch.dtype) -> Maps:
    matrices, offsets, squashed, drifts = zip(*rows, strict=True)
    return Maps(
        torch.stack(matrices).to(dtype),
        torch.stack(offsets).to(dtype),
        torch.tensor(squashed)[:, None],
        torch.tensor(drifts, dtype=dtype),
    )


def without_fixed_point(dtype: torch.dtype) -> tuple[Maps, Tensor, list[str]]:
    """An eigenvalue of 1, the same from far away, a drift beside a tanh, and a translation."""
    rows, starts, kinds = [], [], []
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        offset = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        offset[0] = 0.5 + offset[0].abs()  # a smaller drift is within the tolerance at first
        matrix = random_matrix(0.45, generator)
        matrix[0] = 0
        matrix[0, 0] = 1
        far = 1e4 * torch.randn(SIZE, generator=generator, dtype=torch.float64)
        far[0] = 0
        near = torch.zeros(SIZE)
        identity = torch.eye(SIZE, dtype=torch.float64)
        rows += [
            (matrix, offset, False, 0.0),
            (matrix, offset, False, 0.0),
            (matrix / 2, offset, True, 0.5),
            (identity, offset, False, 0.0),
        ]
        starts += [near, far, near, near]
        kinds += ["eigenvalue", "far", "tanh", "translation"]
    return maps_of(rows, dtype), torch.stack([x.to(dtype) for x in starts]), kinds


def with_fixed_point(dtype: torch.dtype) -> tuple[Maps, Tensor]:
    """Rates from .3 to .99 at three scales, and maps that expand to an eigenvalue of -3."""
    rows = []
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(100 + seed)
        offset = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        for rate in (0.3, 0.5, 0.9, 0.99):
            matrix = random_matrix(rate, generator)
            rows += [(matrix, scale * offset, False, 0.0) for scale in (1e-6, 1.0, 1e6)]
        square = random_matrix(1.0, generator)
        square = square @ square.T
        expanding = -3 * square / torch.linalg.eigvalsh(square).max()
        rows.append((expanding, offset, True, 0.0))
    maps = maps_of(rows, dtype)
    return maps, torch.zeros_like(maps.offset)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", [64, 1024])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_map_without_a_fixed_point_does_not_converge(solver, budget, dtype):
    maps, z0, kinds = without_fixed_point(dtype)
    stop = dq.Stop(RTOL, max_steps=budget)
    with pytest.warns(dq.ConvergenceWarning):
        solution = dq.solve(f, z0, args=maps, solver=solver, stop=stop)
    wrong = [kinds[row] for row in solution.converged.nonzero()[:, 0].tolist()]
    if dtype == torch.float32 and solver.combines:
        # a jump from 1e4 hides a drift of 1, below its rounding; so do, on some processors and
        # with some versions of torch, one or two of 80 that rounding throws far away
        wrong = [kind for kind in wrong if kind != "far"][2:]
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("solver", SOLVERS)
def test_the_value_that_is_returned_passes(solver, dtype):
    maps, z0 = with_fixed_point(dtype)
    maps = maps._replace(offset=maps.offset.requires_grad_())
    stop = dq.Stop(RTOL, max_steps=1024)
    residuals = []
    with torch.no_grad():
        solved = dq.solve(
            f, z0, args=maps, solver=solver, stop=stop, callback=lambda p: residuals.append(p)
        )
    differentiated = dq.fixed_point(f, z0, args=maps, solver=solver, stop=stop)
    for solution in (solved, differentiated):
        assert solution.converged.float().mean() > 0.9
        value, fz = solution.value, f(solution.value, maps)
        residual = (fz - value).norm(dim=1) / fz.norm(dim=1)
        reported = solution.stats.residual
        rounding = 100 * torch.finfo(dtype).eps
        passed = residual <= reported * (1 + 1e-6) + rounding
        assert passed[solution.converged].all()
        assert (reported[solution.converged] <= RTOL).all()
    # what the first passes of the residual would have taken
    history = torch.cat([progress.residual for progress in residuals], dim=1)
    first = (history <= RTOL).float().argmax(dim=1) + 1
    rows = solved.converged
    extra = rows.sum() if solver.combines else 0
    assert solved.stats.iterations[rows].sum() <= 1.02 * first[rows].sum() + extra


def mixing(z, x):
    return torch.tanh(0.3 * z.roll(1, -1) + x + 0.3 * z.mean(0))


def test_rows_that_depend_on_one_another_are_found_before_one_is_removed():
    """Frozen or removed rows would change the map of the others, silently."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    call = {"solver": dq.Naive(), "stop": dq.Stop(rtol=1e-4)}
    with pytest.raises(ValueError, match=r"depend on one another.*lambda z: f"):
        dq.fixed_point(mixing, 0 * x, args=x, **call)
    solution = dq.fixed_point(lambda z: mixing(z, x), 0 * x, **call)
    value = solution.value
    residual = (mixing(value, x) - value).norm(dim=1) / value.norm(dim=1)
    assert residual.max() < 1e-3


@pytest.mark.parametrize("solver", [dq.Naive(), dq.Relaxed(0.8), dq.Adaptive()], ids=repr)
def test_rows_that_others_move_converge_with_them(solver):
    """Some rows pass long before the mean over the batch has settled; then they go on."""
    torch.manual_seed(0)
    weight, x = 0.1 * torch.randn(8, 8), torch.logspace(-2, 0.5, 16)[:, None] * torch.randn(16, 8)

    def f(z):
        return torch.tanh(z @ weight + 0.9 * z.mean(0) + x)

    stop = dq.Stop(rtol=1e-3, max_steps=200)
    solution = dq.fixed_point(f, torch.zeros(16, 8), solver=solver, stop=stop, throw=True)
    z = solution.value
    assert ((f(z) - z).norm(dim=1) <= 1e-3 * f(z).norm(dim=1)).all()
    assert (solution.stats.residual <= 1e-3).all()


def test_a_row_that_others_move_at_the_end_of_the_budget_has_not_converged():
    def drifting(z):  # row 0 stands until row 1 has left 1
        return torch.stack([torch.where(z[1] > 3, z[0] + 1, 1), z[1] + 1])

    with pytest.warns(dq.ConvergenceWarning):
        solution = dq.solve(
            drifting, torch.ones(2, 1), solver=dq.Naive(), stop=dq.Stop(max_steps=6)
        )
    assert solution.status.tolist() == [dq.Status.MAX_STEPS_REACHED] * 2
    assert solution.stats.iterations.tolist() == [6, 6]


def test_what_a_map_uses_of_each_row_belongs_in_args():
    mask = torch.ones(4, 1)
    x = torch.tensor([0, 0.1, 1, 30])[:, None].expand(4, 8)
    with pytest.raises(ValueError, match=r"got 3 of 4 and failed .*a mask, belongs in args"):
        dq.fixed_point(lambda z, x: mask * torch.tanh(0.9 * z + x), torch.zeros(4, 8), args=x)


def test_a_map_that_draws_random_numbers_is_not_said_to_mix_rows():
    x = torch.linspace(0, 1, 8)[:, None]

    def noisy(z, x):
        return x * z + 1 + 0.01 * torch.rand_like(z)

    call = {"solver": dq.Naive(), "stop": dq.Stop(rtol=0.05, max_steps=200)}
    assert dq.fixed_point(noisy, 0 * x, args=x / 2, **call).converged.all()


def test_rounding_to_half_precision_is_not_said_to_mix_rows():
    """Under autocast a smaller batch may be computed by another kernel, which rounds otherwise."""
    x = torch.linspace(0, 1, 8)[:, None]

    def rounds(z, x):
        fz = x * z + 1
        return fz if len(z) == 8 else fz.bfloat16()

    call = {"solver": dq.Naive(), "stop": dq.Stop(rtol=0.05)}
    with torch.autocast("cpu", torch.bfloat16):
        assert dq.fixed_point(rounds, 0 * x, args=x / 2, **call).converged.all()


def test_the_evaluation_of_rows_without_the_others_is_counted():
    rates = torch.tensor([[0.0], [0.0], [0.5], [0.5]])
    calls = []

    def counted(z, rate):
        calls.append(len(z))
        return rate * z + 1

    solution = dq.solve(counted, 0 * rates, args=rates, solver=dq.Naive(), stop=dq.Stop(rtol=1e-5))
    assert solution.stats.evaluations == len(calls)
    assert calls[:4] == [4, 4, 2, 2]


def test_drift_beside_a_component_that_converges_is_explained():
    def drifting(z):
        return torch.stack([z[:, 0] + 1, z[:, 1] / 2], dim=1)

    start = torch.tensor([[0.0, 5.0]])
    stop = dq.Stop(max_steps=1500)
    with pytest.warns(dq.ConvergenceWarning):
        solution = dq.solve(drifting, start, solver=dq.Naive(), stop=stop)
    assert solution.explain().causes == ("drift",)


def test_a_state_that_grows_on_its_way_is_told_to_raise_the_limit_of_divergence():
    def grows(z):
        return torch.where(z.abs() < 1e5, 10 * z + 1, 1e6)

    with pytest.warns(dq.ConvergenceWarning, match="diverged"):
        solution = dq.solve(grows, torch.zeros(1, 1), solver=dq.Naive(), stop=dq.Stop())
    with pytest.raises(dq.ConvergenceError, match=r"raise Stop\.divergence"):
        solution.raise_if_failed()
    explanation = solution.explain()
    assert explanation.causes == ("divergence",)
    stop = dq.Stop(divergence=float("inf"))
    assert dq.solve(grows, torch.zeros(1, 1), solver=dq.Naive(), stop=stop).converged.all()
    assert "Stop(divergence=inf) converges" in explanation.remedies["divergence"]


class InPlace(dq.Rule):
    def residual(self, z, fz):
        return (fz.mul_(0.5) - z).norm(dim=-1)


class Logarithm(dq.Rule):
    def residual(self, z, fz):
        return (fz - z).norm(dim=-1, keepdim=True).log() - 9


@pytest.mark.parametrize(
    ("rule", "words"),
    [(InPlace(), "must not change z or fz"), (Logarithm(), "must not be negative")],
)
def test_what_a_rule_does_is_looked_at(rule, words):
    with pytest.raises(ValueError, match=f"{type(rule).__name__}.residual {words}"):
        dq.solve(torch.cos, torch.zeros(1, 2), solver=dq.Naive(), stop=dq.Stop(norm=rule))


def test_weights_that_are_gone_are_named_when_a_solve_is_explained():
    lm = dq.load_example("parity")
    output = lm(torch.ones(1, 3).long(), stop=dq.Stop(max_steps=1))
    lm.to("meta")
    with pytest.raises(ValueError, match="its weights are on meta"):
        output.explain()
