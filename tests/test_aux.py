"""Auxiliary output is that of the evaluation which gave a row its value: of rows that converge,
fail or are removed.
"""

import weakref

import pytest
import torch
from problems import SOLVERS, row_affine

import deqseq as dq
from deqseq.testing.problems import Recorded

GAINS = torch.tensor([0.0, 0.5, -1.0, 2.0, 0.9, -0.3, 3.0], dtype=torch.float64)
CEILINGS = torch.tensor([torch.inf] * 6 + [5.0], dtype=torch.float64)


def with_aux(z, args):
    """Rows contract, swing, grow or become NaN, each by its gain; the aux is the point."""
    gain, ceiling = (x[:, None, None] for x in args)
    return torch.where(z.abs() > ceiling, torch.nan, gain * z + 1), {"point": (1 * z, None)}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("check_every", [1, 5])
@pytest.mark.parametrize("remove", [True, False])
def test_the_aux_of_every_row_is_that_of_its_last_evaluation(solver, check_every, remove):
    """In the plain solve rows stay, so that each is found at its place."""
    z0 = torch.linspace(0.1, 0.4, 7 * 6, dtype=torch.float64).reshape(7, 2, 3)
    stop = dq.Stop(rtol=1e-6, max_steps=40, check_every=check_every, divergence=300.0)
    call = {"solver": solver, "stop": stop}
    args = (GAINS, CEILINGS)
    if remove:
        solution = dq.solve(with_aux, z0, args=args, has_aux=True, **call)
    else:
        solution = dq.solve(lambda z: with_aux(z, args), z0, has_aux=True, **call)
    f = Recorded(lambda z: with_aux(z, args)[0])
    plain = dq.solve(f, z0, **call)
    torch.testing.assert_close(solution.value, plain.value, rtol=1e-12, atol=1e-12)
    assert torch.equal(solution.status, plain.status)
    alone = solution.stats.evaluations - plain.stats.evaluations  # before rows are removed
    assert alone in (0, int(remove))
    assert plain.stats.evaluations == f.evaluations
    points, nothing = solution.aux["point"]
    assert nothing is None
    for row, last in enumerate(plain.stats.iterations):
        expected = f.calls[last - 1][0][row]
        torch.testing.assert_close(points[row], expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("gradient", [dq.Phantom(3), dq.OneStep(), dq.Implicit(), dq.Unrolled()])
def test_estimators_hand_aux_on(gradient):
    """A gradient does not change what was found beside the value."""
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def f(z, problem):
        return weight * problem(z), 10 * weight * z

    start = torch.zeros(3, 3, dtype=torch.float64)
    told = []
    call = {
        "args": row_affine([0.5, 2.0, -0.4]),
        "has_aux": True,
        "solver": dq.Naive(),
        "stop": dq.Stop(rtol=1e-9, max_steps=60),
    }
    problem = dq.Problem(f=f, z0=start, callback=told.append, **call)
    solution = gradient.apply(problem)
    with torch.no_grad():
        plain = dq.solve(f, start, **call)
    assert len(told) == solution.stats.evaluations - 1  # one shows that rows are independent
    assert torch.equal(solution.aux.detach(), plain.aux)
    with_graph = isinstance(gradient, dq.Unrolled)  # the others solve without one
    assert solution.aux.requires_grad == with_graph
    assert solution.status.tolist() == plain.status.tolist() == [0, 2, 0]
    assert torch.autograd.grad(solution.value[[0, 2]].sum(), weight)[0].abs() > 0


def test_one_auxiliary_output_is_held_at_a_time():
    """That of a prompt is as large as several states."""
    made = []

    def f(z):
        assert all(aux() is None for aux in made)
        aux = torch.ones(2, 3)
        made.append(weakref.ref(aux))
        return 0.5 * z + 1, aux

    call = {"solver": dq.Naive(), "stop": dq.Stop(rtol=1e-3), "has_aux": True}
    solution = dq.solve(f, torch.zeros(2, 3), **call)
    assert len(made) == solution.stats.evaluations > 2
    assert made[-1]() is solution.aux


class OwnRows:
    """A record that takes its rows by itself."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take_rows(self, rows):
        return OwnRows(self.tensor[rows])


def test_aux_whose_rows_cannot_be_put_back_is_refused_when_rows_are_removed():
    x = torch.tensor([[0.0], [1.0], [1e3]])
    stop = dq.Stop(rtol=1e-4)
    with pytest.raises(TypeError, match=r"aux must be tensors, .* got a OwnRows with take_rows"):
        dq.solve(
            lambda z, x: (0.1 * x * z.cos() + x, {"nested": OwnRows(z.clone())}),
            torch.zeros_like(x),
            args=x,
            has_aux=True,
            solver=dq.Naive(),
            stop=stop,
        )


def test_a_number_in_aux_is_that_of_the_last_evaluation():
    x, calls = torch.tensor([[0.0], [1.0], [2.0]]), []

    def f(z, x):
        calls.append(len(z))
        return (z + x) / 2, {"calls": len(calls)}

    stop = dq.Stop(rtol=1e-4)
    solution = dq.solve(f, torch.zeros_like(x), args=x, has_aux=True, solver=dq.Naive(), stop=stop)
    assert calls[-1] < 3
    assert solution.aux["calls"] == solution.stats.evaluations
