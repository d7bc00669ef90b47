"""What a solve returns, and what it says when it failed."""

import re

import pytest
import torch
from contracts import exactly
from problems import row_affine

from deqseq import ConvergenceError, Naive, Solution, SolveStats, Status, Stop, fixed_point

BUDGET = "raise Stop.max_steps, loosen Stop.rtol, or damp a limit cycle with Relaxed(damping=0.5)"
EXPANDS = "the map expands here: damp it with Relaxed(damping=0.5), try Anderson() or Broyden(), or make it contractive"


def solution(status: list[Status], residual: list[float] | list[list[float]], evaluations: int = 12) -> Solution:
    residuals = torch.tensor(residual)
    stats = SolveStats(steps := torch.full(residuals.shape, evaluations), residuals, evaluations, steps)
    return Solution(torch.zeros(len(status), 2), torch.tensor(status), stats)


def test_converged_rows():
    mixed = solution([Status.CONVERGED, Status.BUDGET_SPENT, Status.DIVERGED], [0.0, 0.5, torch.inf])
    assert mixed.converged.tolist() == [True, False, False]


def test_returns_itself_where_all_converged():
    fine = solution([Status.CONVERGED] * 2, [0.0, 1e-4])
    assert fine.raise_if_failed() is fine


def test_spent_budgets():
    failed = solution([Status.CONVERGED, Status.BUDGET_SPENT, Status.BUDGET_SPENT], [0.0, 0.5, 0.012345])
    text = (
        "the fixed-point solve failed for 2 of 3 rows after 12 evaluations "
        f"(budget spent: rows 1 (residual 5.00e-01), 2 (residual 1.23e-02)). Remedy: {BUDGET}."
    )
    with pytest.raises(ConvergenceError, match=exactly(text)) as caught:
        failed.raise_if_failed()
    assert caught.value.rows == [1, 2]
    assert caught.value.residuals == pytest.approx([0.5, 0.012345])


def test_diverged_rows_name_their_own_remedy():
    failed = solution([Status.BUDGET_SPENT, Status.DIVERGED], [0.25, torch.inf])
    text = (
        "the adjoint failed for 2 of 2 rows after 12 evaluations (budget spent: rows 0 (residual 2.50e-01); "
        f"diverged: rows 1 (residual inf)). Remedy: {EXPANDS}."
    )
    with pytest.raises(ConvergenceError, match=exactly(text)) as caught:
        failed.raise_if_failed("the adjoint")
    assert caught.value.rows == [0, 1]
    assert caught.value.residuals == [0.25, torch.inf]


def test_many_rows_are_cut_short_in_the_text_but_not_in_the_lists():
    failed = solution([Status.BUDGET_SPENT] * 11, [0.5] * 11)
    shown = ", ".join(f"{row} (residual 5.00e-01)" for row in range(8))
    text = (
        "the fixed-point solve failed for 11 of 11 rows after 12 evaluations "
        f"(budget spent: rows {shown} and 3 more). Remedy: {BUDGET}."
    )
    with pytest.raises(ConvergenceError, match=exactly(text)) as caught:
        failed.raise_if_failed()
    assert caught.value.rows == list(range(11))
    assert caught.value.residuals == [0.5] * 11


def test_per_token_names_the_worst_token():
    failed = solution([Status.BUDGET_SPENT, Status.CONVERGED], [[0.1, 0.5], [0.0, 0.0]])
    with pytest.raises(ConvergenceError, match=r"rows 0 \(residual 5\.00e-01\)\)\. Remedy") as caught:
        failed.raise_if_failed()
    assert (caught.value.rows, caught.value.residuals) == ([0], [0.5])


def test_a_residual_with_a_graph_can_be_described():
    failed = solution([Status.BUDGET_SPENT], [0.5])
    failed.stats.residual.requires_grad_()
    with pytest.raises(ConvergenceError, match=r"rows 0 \(residual 5\.00e-01\)") as caught:
        failed.raise_if_failed()
    assert caught.value.residuals == [0.5]


def test_statuses_are_numbers_in_order_of_trouble():
    assert [status.name for status in sorted(Status)] == ["CONVERGED", "BUDGET_SPENT", "DIVERGED"]


def test_a_solve_that_throws_says_which_rows_how_and_what_to_do():
    f = row_affine([0.0, 2.0, 0.99], event=(1,))
    start, stop = torch.zeros(3, 1, dtype=torch.float64), Stop(rtol=1e-9, max_steps=30)
    text = (
        r"^the fixed-point solve failed for 2 of 3 rows after 30 evaluations \(budget spent: rows 2 "
        r"\(residual \d\.\d\de-0\d\); diverged: rows 1 \(residual 5\.00e-01\)\)\. Remedy: "
    )
    with pytest.raises(ConvergenceError, match=text + re.escape(EXPANDS)) as caught:
        fixed_point(f, start, solver=Naive(), stop=stop, throw=True)
    assert caught.value.rows == [1, 2]
    assert caught.value.residuals[0] == pytest.approx(0.5, rel=1e-3)
    failed = fixed_point(f, start, solver=Naive(), stop=stop)
    assert failed.stats.residual[1:].tolist() == caught.value.residuals
