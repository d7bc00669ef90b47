"""What a monitor decides: forced commits and diverged rows of a window, and rows that are removed."""

import pytest
import torch
from torch import Tensor

from deqseq import Status, Stop
from deqseq.monitor import RowMonitor
from deqseq.sweeps.window import WindowMonitor

STOP = Stop(rtol=0.1, max_steps=3)


def tokens(*rows: list[float]) -> Tensor:
    """One number per token, ``(batch, length, 1)``."""
    return torch.tensor(rows, dtype=torch.float64)[..., None]


class TestWindowMonitor:
    def test_the_prefix_that_has_converged_in_every_row_is_committed(self):
        monitor = WindowMonitor(2, STOP)
        monitor.check(tokens([1, 1, 1, 1], [1, 1, 1, 1]), fz := tokens([1, 1, 2, 1], [1, 1, 1, 2]), 1)
        assert monitor.active_rows == 0
        torch.testing.assert_close(monitor.residuals(), tokens([0, 0, 0.5, 0], [0, 0, 0, 0.5])[..., 0])
        assert monitor.commit(fz, 1) == 2
        assert monitor.active_rows == 2
        monitor.check(tokens([2, 1], [1, 2]), fz := tokens([2, 1], [1, 2]), 1)
        assert monitor.commit(fz, 1) == 2
        solution = monitor.solution()
        assert solution.status.tolist() == [Status.CONVERGED] * 2
        assert solution.stats.iterations.tolist() == solution.stats.updates.tolist() == [[1, 1, 2, 2]] * 2
        assert solution.value[..., 0].tolist() == [[1, 1, 2, 1], [1, 1, 1, 2]]
        assert (solution.stats.evaluations, bool(solution.stats.forced.any())) == (2, False)

    def test_a_token_that_waits_behind_another_is_not_committed(self):
        monitor = WindowMonitor(1, STOP)
        monitor.check(tokens([1, 1]), tokens([2, 1]), 1)
        assert monitor.active_rows == 1

    def test_a_spent_budget_forces_the_first_token_alone(self):
        monitor = WindowMonitor(2, STOP)
        monitor.check(tokens([1, 1, 1], [1, 1, 1]), fz := tokens([1, 2, 1], [2, 1, 1]), 3)
        assert monitor.commit(fz, 3) == 1
        monitor.check(tokens([2, 1], [1, 1]), fz := tokens([2, 1], [1, 1]), 1)
        assert monitor.commit(fz, 1) == 2
        solution = monitor.solution()
        assert solution.status.tolist() == [Status.CONVERGED, Status.MAX_STEPS_REACHED]
        assert solution.stats.forced.tolist() == [[False] * 3, [True, False, False]]
        assert solution.stats.iterations.tolist() == [[3, 4, 4]] * 2
        assert solution.stats.residual.tolist() == [[0, 0, 0], [0.5, 0, 0]]
        assert solution.stats.evaluations == 4

    def test_tokens_that_enter_later_are_counted_from_there(self):
        monitor = WindowMonitor(1, STOP)
        monitor.check(tokens([1, 1]), fz := tokens([1, 2]), 2)
        assert monitor.commit(fz, 2) == 1
        monitor.check(tokens([2, 5]), fz := tokens([2, 5]), 3)  # the second of these has just entered
        assert monitor.commit(fz, 3) == 2
        assert monitor.solution().stats.iterations.tolist() == [[2, 5, 3]]

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e9])
    def test_a_diverged_row_is_zero_from_there_on_and_is_not_waited_for(self, bad):
        monitor = WindowMonitor(2, STOP)
        monitor.check(tokens([1, 1], [1, 1]), fz := tokens([1, 2], [1, 2]), 1)
        assert monitor.commit(fz, 1) == 1
        monitor.check(tokens([2, 1], [2, 1]), fz := tokens([2, 1], [bad, 1]), 1)
        if bad == 1e9:  # the limit follows tokens that have just entered
            assert monitor.active_rows == 2
            monitor.check(tokens([2, 1], [2, 1]), fz := tokens([2, 1], [bad**2, 1]), 2)
        assert monitor.active_rows == 0
        frozen = monitor.freeze(fz, fz)
        assert frozen[..., 0].tolist() == [[2, 1], [0, 0]]
        assert monitor.commit(fz, 1) == 2
        solution = monitor.solution()
        assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED]
        assert solution.value[..., 0].tolist() == [[1, 2, 1], [1, 0, 0]]
        assert solution.stats.forced[:, 1].tolist() == [False, True]
        assert not solution.stats.residual.isnan().any()

    def test_every_token_is_tested_on_its_own_whatever_the_rule_says(self):
        monitor = WindowMonitor(1, Stop(rtol=0.1, per="batch"))
        assert (monitor.stop.per, monitor.stop.rtol) == ("token", 0.1)

    def test_no_row_is_removed(self):
        monitor = WindowMonitor(4, STOP)
        monitor.check(fz := torch.ones(4, 1, 1), fz, 1)
        assert monitor.compact(None) is None


class TestRowMonitor:
    def test_rows_leave_once_a_quarter_has_ended(self):
        z, monitor = torch.ones(8, 1), RowMonitor(torch.ones(8, 1), STOP, keep_trace=False)
        targets = torch.tensor([[1.0]] + [[2.0]] * 7)
        monitor.check(z, targets, 1)
        assert (monitor.active_rows, monitor.compact(None)) == (7, None)
        targets[1] = 1
        monitor.check(z, targets, 2)
        rows = monitor.compact(None)
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
