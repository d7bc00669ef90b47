"""What a monitor decides: forced commits and diverged rows of a window, and rows that are removed."""

import numpy as np
import pytest
import torch
from torch import Tensor

from deqseq import Status, Stop
from deqseq.monitor import RowMonitor
from deqseq.sweeps import window
from deqseq.sweeps.window import WindowMonitor

STOP = Stop(rtol=0.1, max_steps=3)


def tokens(*rows: list[float]) -> Tensor:
    """One number per token, ``(batch, length, 1)``."""
    return torch.tensor(rows, dtype=torch.float64)[..., None]


def window_monitor(z0: Tensor, window: int, stop: Stop = STOP, ends: list[int] | None = None) -> WindowMonitor:
    known = np.array([z0.shape[1]] * len(z0) if ends is None else ends)
    return WindowMonitor(z0, stop, window, known, together=False)


def seen(monitor: WindowMonitor, fz: Tensor, step: int = 1, first: int | None = None) -> bool:
    """Check evaluations ``first`` (default: ``step``) to ``step``, and move the windows if the last one ends."""
    for number in range(step if first is None else first, step + 1):
        monitor.check(monitor.states(), fz, number)
    if monitor.done:
        monitor.commit(fz, fz, step)
        monitor.stand(remove=True)
    return monitor.done


@pytest.fixture
def _every_evaluation(monkeypatch):
    """Windows may move after any evaluation."""
    monkeypatch.setattr(window, "EVERY", 1)


@pytest.mark.usefixtures("_every_evaluation")
class TestWindowMonitor:
    def test_each_window_moves_past_the_prefix_that_has_converged(self):
        monitor = window_monitor(tokens([1, 1, 1, 1, 1], [1, 1, 1, 1, 1]), 3)
        assert seen(monitor, tokens([1, 1, 2], [1, 2, 1]))
        assert monitor.states()[..., 0].tolist() == [[2, 1, 1], [2, 1, 1]]
        assert monitor.gather(torch.arange(5)[None]).tolist() == [[2, 3, 4], [1, 2, 3]]
        known = monitor.residuals()
        assert known.isinf().tolist() == [[False, False, False, True, True], [False, False, False, True, True]]
        assert seen(monitor, tokens([2, 1, 1], [2, 1, 3]))  # the first row has ended
        assert monitor.states().shape == (1, 2, 1)
        assert seen(monitor, tokens([3, 1]))
        solution = monitor.solution()
        assert solution.status.tolist() == [Status.CONVERGED] * 2
        assert solution.stats.iterations.tolist() == [[1, 1, 2, 1, 1], [1, 2, 2, 2, 1]]
        assert solution.stats.updates.tolist() == [[1, 1, 2, 1, 1], [1, 2, 2, 2, 1]]
        assert solution.value[..., 0].tolist() == [[1, 1, 2, 1, 1], [1, 2, 1, 3, 1]]
        assert (solution.stats.evaluations, bool(solution.stats.forced.any())) == (3, False)

    def test_a_token_that_waits_behind_another_is_not_committed(self):
        assert not seen(window_monitor(tokens([1, 1]), 2), tokens([2, 1]))

    def test_work_past_the_end_of_a_row_is_counted_at_its_last_token(self):
        monitor = window_monitor(tokens([1, 1, 1], [1, 0, 0]), 2, ends=[3, 1])
        assert monitor.mask().tolist() == [[True, True], [True, False]]
        assert seen(monitor, tokens([1, 2], [2, 0]))
        assert seen(monitor, tokens([2, 1], [2, 0]))
        stats = monitor.solution().stats
        assert stats.iterations.tolist() == [[1, 2, 1], [2, 0, 0]]
        assert stats.updates.tolist() == [[1, 2, 1], [4, 0, 0]]
        assert stats.residual[1].tolist() == stats.error[1].tolist() == [0, 0, 0]

    def test_a_spent_budget_forces_the_first_token_of_that_row_alone(self):
        monitor = window_monitor(tokens([1, 1, 1], [1, 1, 1]), 3)
        assert seen(monitor, fz := tokens([1, 2, 1], [2, 1, 1]), 3, first=1)
        assert monitor.moved is None
        assert seen(monitor, fz[:, 1:])
        solution = monitor.solution()
        assert solution.status.tolist() == [Status.CONVERGED, Status.MAX_STEPS_REACHED]
        assert solution.stats.forced.tolist() == [[False] * 3, [True, False, False]]
        assert solution.stats.iterations.tolist() == [[3, 4, 4]] * 2
        assert solution.stats.residual.tolist() == [[0, 0, 0], [0.5, 0, 0]]
        assert solution.stats.evaluations == 4

    def test_each_row_has_a_budget_of_its_own(self):
        monitor = window_monitor(tokens([1, 1], [1, 1]), 1)
        assert seen(monitor, tokens([1], [2]), 2, first=1)
        assert seen(monitor, tokens([5], [3]), 1)
        assert monitor.solution().stats.forced.tolist() == [[False, False], [True, False]]

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e9])
    def test_a_diverged_row_is_zero_from_there_on_and_is_not_waited_for(self, bad):
        monitor = window_monitor(tokens([1, 1, 1, 1], [1, 1, 1, 1]), 2)
        assert seen(monitor, tokens([1, 2], [1, 2]))
        step = 1
        if bad == 1e9:  # the limit follows tokens that have just entered
            assert not seen(monitor, tokens([5, 1], [bad, 1]))
            bad, step = bad**2, 2
        assert seen(monitor, tokens([2, 1], [bad, 1]), step)
        assert monitor.active_rows == 1
        assert seen(monitor, tokens([1]))
        solution = monitor.solution()
        assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED]
        assert solution.value[..., 0].tolist() == [[1, 2, 1, 1], [1, 0, 0, 0]]
        assert solution.stats.forced.tolist() == [[False] * 4, [False, True, True, True]]
        assert solution.stats.residual[1].tolist() == [0, torch.inf, torch.inf, torch.inf]

    def test_every_token_is_tested_on_its_own_whatever_the_rule_says(self):
        monitor = window_monitor(tokens([1, 1]), 2, Stop(rtol=0.1, per="batch"))
        assert (monitor.stop.per, monitor.stop.rtol) == ("token", 0.1)

    def test_no_row_leaves_whose_cache_is_needed(self):
        monitor = window_monitor(tokens([1, 1], [1, 1]), 2)
        monitor.check(monitor.states(), fz := tokens([1, 1], [2, 1]), 1)
        monitor.commit(fz, fz, 1)
        assert monitor.stand() is None
        assert monitor.states().shape == (2, 2, 1)
        assert monitor.mask().tolist() == [[False, False], [True, True]]


def test_windows_move_after_every_second_evaluation_or_when_all_of_one_has_converged():
    monitor = window_monitor(tokens([1, 1, 1]), 2)
    assert not seen(monitor, tokens([1, 2]), 1)
    assert seen(monitor, tokens([1, 2]), 2)
    assert not seen(monitor, tokens([2, 2]), 1)
    assert seen(window_monitor(fz := tokens([1, 1]), 2), fz, 1)


class TestRowMonitor:
    def test_rows_leave_once_a_quarter_has_ended(self):
        z, monitor = torch.ones(8, 1), RowMonitor(torch.ones(8, 1), STOP, keep_trace=False)
        targets = torch.tensor([[1.0]] + [[2.0]] * 7)
        monitor.check(z, targets, 1)
        assert (monitor.active_rows, monitor.compact(None, 1)) == (7, None)
        targets = targets.clone()
        targets[1] = 1
        monitor.check(z, targets, 2)
        rows = monitor.compact(None, 2)
        assert rows is not None and rows.tolist() == list(range(2, 8))
        monitor.check(z[2:], targets[2:], 3)
        assert monitor.residuals().tolist() == [0.0, 0.0] + [0.5] * 6
        solution, stale = monitor.solution(3, None)
        assert solution.status.tolist() == [0, 0] + [2] * 6
        assert solution.stats.updates.tolist() == [2, 2] + [3] * 6
        assert solution.stats.iterations.tolist() == [1, 2] + [3] * 6
        assert stale is None

    def test_rows_whose_best_value_is_not_the_last_are_named(self):
        monitor = RowMonitor(torch.ones(2, 1), STOP, keep_trace=True)
        for step, values in enumerate(([2.0, 4.0], [4.0, 2.0]), start=1):
            monitor.check(torch.ones(2, 1), torch.tensor(values)[:, None], step)
        solution, stale = monitor.solution(2, None)
        assert stale is not None and stale.tolist() == [0]
        assert solution.value[:, 0].tolist() == [2.0, 2.0]
        assert solution.stats.trace is not None and solution.stats.trace.tolist() == [[0.5, 0.75], [0.75, 0.5]]

    def test_frozen_rows_stand_still(self):
        monitor = RowMonitor(z := torch.ones(2, 1), STOP, keep_trace=False)
        assert monitor.freeze(z, 5 * z) is not z
        monitor.check(z, torch.tensor([[1.0], [2.0]]), 1)
        assert monitor.freeze(z, 5 * z).tolist() == [[1.0], [5.0]]
