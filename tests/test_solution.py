"""What a solve returns, and what it says when it failed: solutions and model outputs alike."""

import pickle
import re

import numpy as np
import pytest
import torch

import deqseq as dq
from deqseq import ConvergenceError, Solution, SolveStats, Stop

WINDOW = r"first try sweep=dq\.Sliding\(8\); "
BUDGET = r"raise Stop\.max_steps, loosen Stop\.rtol"


def solution(status, residual):
    residuals = torch.tensor(residual)
    steps = torch.full(residuals.shape, 12)
    stats = SolveStats(steps, residuals, 12, steps)
    return Solution(torch.zeros(len(status), 2), torch.tensor(status), stats, np.array(status))


CASES = {
    "budget": (
        solution([0, 1, 1], [0.0, 0.5, 0.012345]),
        {1: 0.5, 2: 0.012345},
        rf"2 of 3 rows after 12 .* 2 \(residual 1\.23e-02\).*Remedy: {BUDGET}",
    ),
    "diverged": (
        solution([1, 2], [0.25, torch.inf]),
        {0: 0.25, 1: torch.inf},
        r"max steps reached: rows 0 .*diverged: rows 1 \(residual inf.*Remedy: the map expands",
    ),
    "many": (
        solution([1] * 11, [0.5] * 11),
        dict.fromkeys(range(11), 0.5),
        rf"11 of 11 rows.*, 7 \(residual 5\.00e-01\) and 3 more\)\. Remedy: {BUDGET}",
    ),
    "worst token": (
        solution([1, 0], [[0.1, 0.5], [0.0, 0.0]]),
        {0: 0.5},
        r"rows 0 \(residual 5\.00e-01\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_names_rows_residuals_and_a_remedy(case):
    failed, rows, says = CASES[case]
    failed.stats.residual.requires_grad_()  # a graph does not stand in the way
    with pytest.raises(ConvergenceError, match=rf"the adjoint failed for .*{says}") as caught:
        failed.raise_if_failed("the adjoint")
    assert caught.value.rows == list(rows)
    assert caught.value.residuals == pytest.approx(list(rows.values()))


@pytest.mark.parametrize("solver", ["Adaptive", "Anderson", "Broyden"])
def test_the_remedy_is_not_the_solver_that_failed(solver):
    z0 = torch.zeros(1, 1)
    stop = Stop(max_steps=2)
    failed = dq.solve(lambda z: 3 * z + 1, z0, solver=getattr(dq, solver)(), stop=stop)
    with pytest.raises(ConvergenceError) as caught:
        failed.raise_if_failed()
    for name in ("Adaptive", "Anderson", "Broyden"):
        assert (f"{name}()" in str(caught.value)) == (name != solver)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_at_once_are_not_called_an_expansion(bad):
    words = "f returned NaN, infinity or numbers too large at its first"
    with pytest.raises(ConvergenceError, match=words):
        dq.fixed_point(lambda z: z + bad, torch.zeros(2, 3), throw=True)


def test_rows_are_taken_of_every_field():
    taken = dq.take(solution([0, 1, 2], [0.0, 0.5, 0.25]), torch.tensor([2, 0]))
    assert taken.status.tolist() == taken.ends.tolist() == [2, 0]
    assert taken.stats.residual.tolist() == [0.25, 0.0]
    lm, ids = dq.CausalLM(7, dq.ImplicitModel(dq.Affine(4))), torch.ones(2, 3, dtype=torch.int64)
    output = lm(ids, labels=ids, return_cache=True)
    taken = dq.take(output, torch.tensor([1]))
    assert torch.equal(taken.logits, output.logits[1:])
    assert taken.loss is None, "the loss is of all rows"


def test_an_error_survives_pickling():
    with pytest.raises(ConvergenceError) as caught:
        solution([1, 0], [0.5, 0.0]).raise_if_failed()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is ConvergenceError
    assert str(copy) == str(caught.value)
    assert copy.rows == [0]
    assert copy.residuals == [0.5]


@pytest.mark.parametrize("language", [False, True])
@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sequential(), dq.Sliding(2)])
def test_model_outputs_fail_as_solutions_do(sweep, language):
    config = dq.SolveConfig(sweep=sweep, stop=Stop(rtol=1e-7, max_steps=2))
    lm = dq.CausalLM(5, dq.ImplicitModel(dq.Affine(4), config))
    x = torch.tensor([[1, 2], [4, 0]])
    model, x = (lm, x) if language else (lm.model, lm.embedding(x))
    with torch.no_grad():
        failed = model(x)
        fine = model(x, stop=Stop(rtol=1e-4, max_steps=200), throw=True)
        with pytest.raises(ConvergenceError):
            model(x, throw=True)
    assert fine.converged.all()
    assert fine.raise_if_failed() is fine
    assert not failed.converged.any()
    first = WINDOW if sweep == dq.Simultaneous() else ""
    with pytest.raises(ConvergenceError, match=f"2 of 2 rows.*Remedy: {first}{BUDGET}") as caught:
        failed.raise_if_failed()
    assert caught.value.rows == [0, 1]
    assert len(caught.value.residuals) == 2


def test_a_solution_is_no_tensor_and_no_pair():
    solved = dq.fixed_point(torch.cos, torch.zeros(1, 1))
    with pytest.raises(AttributeError, match=r"'Solution' .* no attribute 'sum'; it has value, "):
        solved.sum()
    with pytest.raises(TypeError, match=r"cannot be unpacked: the fixed point is solution\.value"):
        _z, _info = solved
    output = dq.CausalLM(5, dq.ImplicitModel(dq.Affine(4)))(torch.tensor([[1]]))
    with pytest.raises(AttributeError, match="no attribute 'argmax'; it has logits, loss, "):
        output.argmax(-1)


def test_the_advice_of_a_warning_can_be_followed():
    """It names no variable of the caller's."""
    model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(stop=Stop(rtol=1e-9, max_steps=2))).eval()
    x = torch.ones(1, 3, 4)
    with pytest.warns(dq.ConvergenceWarning, match=r"print\((.*)\), says why") as caught:
        model(x)
    advice = re.search(r"print\((.*)\), says", str(caught[0].message)).group(1)
    assert eval(advice, {"model": model, "x": x}).causes == ("budget",)


def test_one_row_that_fails_is_told():
    """Its map has no fixed point; all others do."""
    x = torch.tensor([[0.5], [0.5], [0.5], [1.0]])
    with pytest.warns(dq.ConvergenceWarning, match="1 of 4 rows did not converge"):
        dq.fixed_point(lambda z, x: x * z + 1, 0 * x, args=x, solver=dq.Naive())


def test_without_a_tolerance_nothing_is_said_to_have_failed():
    solution = dq.fixed_point(torch.cos, torch.zeros(2, 1), stop=dq.Stop.exactly(3))
    assert repr(solution) == "Solution(2 rows, without a tolerance, iterations 3 to 3)"
