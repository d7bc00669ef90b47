"""Auxiliary output: it belongs to the value of its row, whether the row converged, failed or was removed."""

import weakref

import pytest
import torch
from torch import Tensor

import deqseq as dq
from deqseq.testing.problems import Recorded, row_affine

SOLVERS = [dq.Naive(), dq.Relaxed(0.9), dq.Adaptive(), dq.Anderson(), dq.Broyden()]
SWINGING = dq.Stop(rtol=1e-9, max_steps=24)


def with_aux(z: Tensor, args: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, None]]]:
    """Rows contract, swing, grow or become NaN, each by its gain; the aux is the point, and numbers made of it."""
    gain, ceiling = (x[:, None, None] for x in args)
    fz = gain * z + 1
    return torch.where(z.abs() > ceiling, torch.nan, fz), {"kept": (3 * z + fz, None)}


def expected(z: Tensor, gain: Tensor) -> Tensor:
    return 3 * z + gain[:, None, None] * z + 1


GAINS = torch.tensor([0.0, 0.5, -1.0, 2.0, 0.9, -0.3, 3.0], dtype=torch.float64)
CEILINGS = torch.tensor([torch.inf] * 6 + [5.0], dtype=torch.float64)
START = torch.linspace(0.1, 0.4, 7 * 6, dtype=torch.float64).reshape(7, 2, 3)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("per", ["row", "token", "batch"])
@pytest.mark.parametrize("check_every", [1, 5])
@pytest.mark.parametrize("remove", [True, False])
def test_the_aux_of_every_row_is_that_of_its_value(solver, per, check_every, remove):
    """The point of an aux is known from the aux; the map at that point is the value, or that point is the value."""
    stop = dq.Stop(rtol=1e-6, max_steps=40, per=per, check_every=check_every, divergence=300.0)
    f, args = (with_aux, (GAINS, CEILINGS)) if remove else (lambda z: with_aux(z, (GAINS, CEILINGS)), None)
    solution = dq.solve(f, START, solver=solver, stop=stop, args=args, has_aux=True)
    plain = dq.solve(lambda z, args: with_aux(z, args)[0], START, solver=solver, stop=stop, args=(GAINS, CEILINGS))
    assert torch.equal(solution.value, plain.value)
    assert solution.status.tolist() == plain.status.tolist()
    point = (solution.aux["kept"][0] - 1) / (3 + GAINS[:, None, None])
    from_point = GAINS[:, None, None] * point + 1
    at_value, before = (
        torch.isclose(x, solution.value, rtol=1e-9, atol=1e-12).flatten(1).all(dim=1) for x in (point, from_point)
    )
    failed = solution.status != dq.Status.CONVERGED
    assert bool((before | at_value).all())
    assert bool(before[~failed].all())  # no row that converged is evaluated again
    assert solution.aux["kept"][1] is None
    assert solution.stats.evaluations == plain.stats.evaluations + int(bool((at_value & ~before).any()))


@pytest.mark.parametrize("remove", [True, False])
def test_rows_that_are_evaluated_again_are_counted_and_no_others(remove):
    """Row 0 converges at 2, row 1 swings and is best at an odd evaluation, the last value of row 2 is its best."""
    gain = torch.tensor([0.0, -1.0, 0.99], dtype=torch.float64)
    args, ceilings = (gain, torch.full((3,), torch.inf, dtype=torch.float64)), torch.full((3,), torch.inf).double()
    f = Recorded(with_aux if remove else lambda z: with_aux(z, (gain, ceilings)))
    start = torch.full((3, 1, 1), 0.25, dtype=torch.float64)
    solution = dq.solve(f, start, solver=dq.Naive(), stop=SWINGING, args=args if remove else None, has_aux=True)
    assert solution.status.tolist() == [0, 2, 2]
    assert f.evaluations == solution.stats.evaluations == 25
    assert solution.stats.updates.tolist() == ([2, 25, 24] if remove else [24, 25, 24])
    assert f.rows == ([3, 3] + [2] * 22 + [1] if remove else [3] * 25)
    assert solution.value[1].item() == 0.75
    torch.testing.assert_close(
        solution.aux["kept"][0],
        torch.stack(
            [
                expected(f.calls[1].z_copy[:1], gain[:1])[0],
                expected(solution.value[1:2], gain[1:2])[0],
                expected(f.calls[23].z_copy[-1:], gain[2:])[0],
            ]
        ),
        rtol=1e-13,
        atol=0,
    )


def test_without_a_budget_spent_nothing_is_evaluated_again():
    f = Recorded(lambda z: (z / 2 + 1, z))
    solution = dq.solve(f, torch.zeros(2, 3), solver=dq.Relaxed(), stop=dq.Stop(), has_aux=True)
    assert f.evaluations == solution.stats.evaluations
    assert torch.equal(solution.aux, f.calls[-1].z_copy)


def test_an_aux_of_none_is_nothing_to_evaluate_again():
    f = Recorded(lambda z: (1 - z, None))
    solution = dq.solve(f, torch.full((1, 1), 0.25), solver=dq.Naive(), stop=dq.Stop(max_steps=6), has_aux=True)
    assert (solution.aux, f.evaluations) == (None, 6)


def test_aux_is_evaluated_again_without_a_graph():
    gain = torch.tensor(-1.0, requires_grad=True)
    modes = []

    def f(z: Tensor) -> tuple[Tensor, Tensor]:
        modes.append(torch.is_grad_enabled())
        return gain * z + 1, z

    stop = dq.Stop(max_steps=4)
    solution = dq.solve(f, torch.full((1, 1), 0.25), solver=dq.Naive(), stop=stop, has_aux=True)
    assert modes == [True] * 4 + [False]
    assert solution.value.requires_grad
    assert solution.aux.tolist() == solution.value.tolist()


@pytest.mark.parametrize("gradient", [dq.Phantom(3), dq.OneStep(), dq.Implicit(), dq.Unrolled()], ids=str)
def test_estimators_hand_aux_on(gradient):
    """A gradient does not change what was found beside the value."""
    problem = row_affine([0.5, 2.0, -0.4])
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def f(z: Tensor, problem) -> tuple[Tensor, Tensor]:
        return weight * problem(z), 10 * z

    call = {"args": problem, "has_aux": True, "solver": dq.Naive(), "stop": dq.Stop(rtol=1e-9, max_steps=60)}
    start = torch.zeros(3, 3, dtype=torch.float64)
    solution = gradient.apply(f, start, **call)
    with torch.no_grad():
        plain = dq.solve(f, start, **call)
    assert torch.equal(solution.aux.detach(), plain.aux)
    assert solution.status.tolist() == plain.status.tolist() == [0, 3, 0]
    assert torch.autograd.grad(solution.value[[0, 2]].sum(), weight)[0].abs() > 0


def test_one_auxiliary_output_is_held_at_a_time():
    """That of a prompt is as large as several states."""
    made = []

    def f(z):
        assert all(each() is None for each in made)
        aux = torch.ones(2, 3)
        made.append(weakref.ref(aux))
        return 0.5 * z + 1, aux

    solution = dq.solve(f, torch.zeros(2, 3), solver=dq.Naive(), stop=dq.Stop(rtol=1e-3), has_aux=True)
    assert len(made) == solution.stats.evaluations > 2
    assert made[-1]() is solution.aux
