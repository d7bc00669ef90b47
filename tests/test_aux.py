"""Auxiliary output is that of the evaluation which gave a row its value: of rows that converge,
fail or are removed.
"""

import weakref

import pytest
import torch
from problems import SOLVERS, row_affine
from torch import Tensor

import deqseq as dq
from deqseq.testing.problems import Recorded

GAINS = torch.tensor([0.0, 0.5, -1.0, 2.0, 0.9, -0.3, 3.0], dtype=torch.float64)
CEILINGS = torch.tensor([torch.inf] * 6 + [5.0], dtype=torch.float64)
START = torch.linspace(0.1, 0.4, 7 * 6, dtype=torch.float64).reshape(7, 2, 3)


def with_aux(
    z: Tensor, args: tuple[Tensor, Tensor]
) -> tuple[Tensor, dict[str, tuple[Tensor, None]]]:
    """Rows contract, swing, grow or become NaN, each by its gain; the aux is the point."""
    gain, ceiling = (x[:, None, None] for x in args)
    return torch.where(z.abs() > ceiling, torch.nan, gain * z + 1), {"kept": (1 * z, None)}


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("check_every", [1, 5])
@pytest.mark.parametrize("remove", [True, False])
def test_the_aux_of_every_row_is_that_of_its_last_evaluation(solver, check_every, remove):
    stop = dq.Stop(rtol=1e-6, max_steps=40, check_every=check_every, divergence=300.0)
    f, args = (
        (with_aux, (GAINS, CEILINGS))
        if remove
        else (lambda z: with_aux(z, (GAINS, CEILINGS)), None)
    )
    solution = dq.solve(f, START, solver=solver, stop=stop, args=args, has_aux=True)
    f = Recorded(
        lambda z: with_aux(z, (GAINS, CEILINGS))[0]
    )  # rows stay, so that each is found at its place
    plain = dq.solve(f, START, solver=solver, stop=stop)
    torch.testing.assert_close(solution.value, plain.value, rtol=1e-12, atol=1e-12)
    assert solution.status.tolist() == plain.status.tolist()
    assert solution.stats.evaluations == plain.stats.evaluations == f.evaluations
    assert solution.aux["kept"][1] is None
    for row, last in enumerate(plain.stats.iterations.tolist()):
        expected = f.calls[last - 1][0][row]
        torch.testing.assert_close(
            solution.aux["kept"][0][row], expected, rtol=1e-12, atol=1e-12, equal_nan=True
        )


@pytest.mark.parametrize(
    "gradient", [dq.Phantom(3), dq.OneStep(), dq.Implicit(), dq.Unrolled()], ids=str
)
def test_estimators_hand_aux_on(gradient):
    """A gradient does not change what was found beside the value."""
    problem = row_affine([0.5, 2.0, -0.4])
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def f(z: Tensor, problem) -> tuple[Tensor, Tensor]:
        return weight * problem(z), 10 * weight * z

    told, stop = [], dq.Stop(rtol=1e-9, max_steps=60)
    call = {
        "args": problem,
        "has_aux": True,
        "solver": dq.Naive(),
        "stop": stop,
        "callback": told.append,
    }
    start = torch.zeros(3, 3, dtype=torch.float64)
    solution = gradient.apply(dq.Problem(f=f, z0=start, **call))
    assert len(told) == solution.stats.evaluations
    with torch.no_grad():
        plain = dq.solve(f, start, **call)
    assert torch.equal(solution.aux.detach(), plain.aux)
    assert solution.aux.requires_grad == isinstance(
        gradient, dq.Unrolled
    )  # where the iteration has a graph
    assert solution.status.tolist() == plain.status.tolist() == [0, 2, 0]
    assert torch.autograd.grad(solution.value[[0, 2]].sum(), weight)[0].abs() > 0


def test_one_auxiliary_output_is_held_at_a_time():
    """That of a prompt is as large as several states."""
    made = []

    def f(z):
        assert all(each() is None for each in made)
        aux = torch.ones(2, 3)
        made.append(weakref.ref(aux))
        return 0.5 * z + 1, aux

    solution = dq.solve(
        f, torch.zeros(2, 3), solver=dq.Naive(), stop=dq.Stop(rtol=1e-3), has_aux=True
    )
    assert len(made) == solution.stats.evaluations > 2
    assert made[-1]() is solution.aux
