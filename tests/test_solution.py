"""What a solve returns, and what it says when it failed: solutions and model outputs alike."""

import pickle

import pytest
import torch

import deqseq as dq
from deqseq import ConvergenceError, Solution, SolveStats, Status, Stop, solve

WINDOW = r"first try sweep=dq\.Sliding\(8\); "
BUDGET = r"Remedy: raise Stop\.max_steps, loosen Stop\.rtol"
EXPANDS = r"Remedy: the map expands here: try "


def solution(
    status: list[Status], residual: list[float] | list[list[float]], evaluations: int = 12
) -> Solution:
    residuals = torch.tensor(residual)
    stats = SolveStats(
        steps := torch.full(residuals.shape, evaluations), residuals, evaluations, steps
    )
    return Solution(torch.zeros(len(status), 2), torch.tensor(status), stats)


@pytest.mark.parametrize(
    ("status", "residual", "rows", "says"),
    [
        (
            [0, 1, 1],
            [0.0, 0.5, 0.012345],
            [1, 2],
            rf"2 of 3 rows after 12 .* 2 \(residual 1\.23e-02\).*{BUDGET}",
        ),
        (
            [1, 2],
            [0.25, torch.inf],
            [0, 1],
            rf"max steps reached: rows 0 .*diverged: rows 1 \(residual inf.*{EXPANDS}",
        ),
        (
            [1] * 11,
            [0.5] * 11,
            list(range(11)),
            rf"11 of 11 rows.*, 7 \(residual 5\.00e-01\) and 3 more\)\. {BUDGET}",
        ),
        (
            [1, 0],
            [[0.1, 0.5], [0.0, 0.0]],
            [0],
            r"rows 0 \(residual 5\.00e-01\)",
        ),  # the worst token
    ],
    ids=["budget", "diverged", "many", "tokens"],
)
def test_an_error_names_rows_residuals_and_a_remedy(status, residual, rows, says):
    failed = solution([Status(number) for number in status], residual)
    failed.stats.residual.requires_grad_()  # a graph does not stand in the way
    with pytest.raises(ConvergenceError, match=rf"the adjoint failed for .*{says}") as caught:
        failed.raise_if_failed("the adjoint")
    assert caught.value.rows == rows
    worst = torch.tensor(residual).reshape(len(status), -1).amax(dim=1)
    assert caught.value.residuals == worst[rows].tolist()


@pytest.mark.parametrize("solver", [dq.Adaptive(), dq.Anderson(), dq.Broyden()], ids=str)
def test_the_remedy_is_not_the_solver_that_failed(solver):
    with pytest.raises(ConvergenceError) as caught:
        solve(
            lambda z: 3 * z + 1, torch.zeros(1, 1), solver=solver, stop=Stop(max_steps=2)
        ).raise_if_failed()
    named = [
        name for name in ("Adaptive()", "Anderson()", "Broyden()") if name in str(caught.value)
    ]
    assert len(named) == 2
    assert f"{type(solver).__name__}()" not in named


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_at_once_are_no_expansion(bad):
    with pytest.raises(
        ConvergenceError, match="f returned NaN, infinity or numbers too large at its first"
    ):
        dq.fixed_point(lambda z: z + bad, torch.zeros(2, 3), throw=True)


def test_an_error_survives_pickling():
    with pytest.raises(ConvergenceError) as caught:
        solution([Status.MAX_STEPS_REACHED, Status.CONVERGED], [0.5, 0.0]).raise_if_failed()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is ConvergenceError
    assert (str(copy), copy.rows, copy.residuals) == (str(caught.value), [0], [0.5])


def language_model(**fields) -> dq.CausalLM:
    torch.manual_seed(0)
    return dq.CausalLM(5, dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(**fields)))


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sequential(), dq.Sliding(2)], ids=str)
def test_model_outputs_fail_as_solutions_do(sweep):
    short, long = dq.Stop(rtol=1e-7, max_steps=2), dq.Stop(rtol=1e-4, max_steps=200)
    model, ids = language_model(sweep=sweep, stop=short), torch.tensor([[1, 2, 3], [4, 0, 1]])
    remedy = BUDGET.replace("raise", WINDOW + "raise" if sweep == dq.Simultaneous() else "raise")
    states = model.model, model.embedding(ids).detach()
    for one, x in ((model, ids), states):
        with torch.no_grad():
            failed, fine = one(x), one(x, stop=long, throw=True)
        assert (failed.converged.tolist(), fine.converged.tolist()) == ([False] * 2, [True] * 2)
        assert fine.raise_if_failed() is fine
        for fail in (failed.raise_if_failed, lambda one=one, x=x: one(x, throw=True)):
            with pytest.raises(ConvergenceError, match=rf"2 of 2 rows.*{remedy}") as caught:
                fail()
            assert (caught.value.rows, len(caught.value.residuals)) == ([0, 1], 2)
