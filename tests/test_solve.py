"""The iteration loop: freezing and removing rows, divergence, checks."""

import pytest
import torch
from problems import row_affine, staircase
from torch import Tensor

import deqseq as dq
from deqseq import Naive, Progress, Relaxed, Status, Stop, solve, take
from deqseq.testing.problems import Recorded, mapped
from deqseq.tokens import TokenArgs, token_map


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


class TestFreezingAndRemoving:
    @pytest.mark.parametrize(
        ("targets", "check_every", "rows"),
        [
            ([1, 2, 3, 4, 5, 6, 7, 8], 1, [8, 8, 8, 6, 6, 4, 3, 2, 1]),
            ([1, 2, 3, 4, 5, 6, 7, 8], 2, [8, 8, 8, 8, 5, 5, 3, 3, 1, 1]),
            ([5, 1, 5, 5], 1, [4, 4, 3, 3, 3, 3]),
            ([5, 1, 5, 5, 5], 1, [5] * 6),
            ([3, 3, 3], 1, [3] * 4),
            ([1, 9], 4, [2, 2, 2, 2] + [1] * 8),
        ],
    )
    def test_rows_are_removed_when_a_quarter_has_ended(self, targets, check_every, rows):
        f, stop = Recorded(mapped), Stop(rtol=0.0, max_steps=50, check_every=check_every)
        solution = solve(
            f, zeros(len(targets), 1), solver=Naive(), stop=stop, args=staircase(targets)
        )
        assert f.rows == rows
        checked = [-(-(target + 1) // check_every) * check_every for target in targets]
        assert solution.stats.iterations.tolist() == checked
        assert solution.stats.evaluations == len(rows)
        assert solution.stats.updates.sum() == sum(rows)
        assert solution.value[:, 0].tolist() == targets
        assert solution.converged.all()
        assert solution.stats.residual.tolist() == [0.0] * len(targets)


class TestDivergence:
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("norm", ["token", "row"])
    def test_a_first_value_that_is_not_finite_has_diverged(self, bad, norm):
        """Against an infinite scale every residual is small."""
        z0 = torch.ones(1, 2, 3)
        solution = solve(lambda z: z + bad, z0, solver=Naive(), stop=Stop(norm=norm))
        assert solution.status.tolist() == [Status.DIVERGED]
        assert solution.stats.residual.isinf().all()
        assert torch.equal(solution.value, z0)

    @pytest.mark.parametrize(("start", "divergence"), [(1e35, 1e4), (1.0, torch.inf)])
    def test_overflow_is_no_convergence(self, start, divergence):
        """The limit overflows too, or is infinite: infinity compared with infinity must
        not pass.
        """
        z0 = torch.full((2, 1), start)
        stop = Stop(max_steps=200, divergence=divergence)
        solution = solve(lambda z: 3 * z, z0, solver=Naive(), stop=stop)
        assert solution.status.tolist() == [Status.DIVERGED] * 2
        assert solution.value.isfinite().all()

    def test_the_norm_of_a_value_that_overflows_is_no_convergence(self):
        start = torch.full((2, 3), 1.9e20)
        solution = solve(lambda z: 0.5 * z + 1e20, start, solver=Naive(), stop=Stop())
        assert solution.status.tolist() == [Status.DIVERGED] * 2
        assert torch.equal(solution.value, start)


class OnDevice(torch.Tensor):
    """A tensor that counts what would make an accelerator wait: reading it on the host."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        reads = {"__bool__", "__float__", "__int__", "item", "tolist", "cpu", "nonzero"}
        result = super().__torch_function__(function, types, args, kwargs or {})
        if getattr(function, "__name__", "") not in reads:
            return result
        OnDevice.waits += 1
        return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result


class TestChecks:
    @pytest.mark.parametrize("remove", [False, True])
    def test_the_callback_is_told_the_residual_of_every_token_at_each_check(self, remove):
        """Row 0 ends early, row 1 diverges late, row 2 swings, row 3 takes long."""
        problem, told = row_affine([0.1, 1.3, -1.1, 0.8], event=(2, 3)), list[Progress]()
        f, args = (mapped, problem) if remove else (problem, None)
        stop = Stop(rtol=1e-6, max_steps=30, check_every=3, divergence=300.0)
        solve(f, zeros(4, 2, 3), solver=Relaxed(0.9), stop=stop, args=args, callback=told.append)
        assert [one.iteration for one in told] == list(range(3, 31, 3))
        for row in range(4):
            alone = Recorded(take(problem, torch.tensor([row])))
            solve(alone, zeros(1, 2, 3), solver=Relaxed(0.9), stop=stop)
            for check in range(10):
                z, fz = alone.calls[min(3 * check + 2, len(alone.calls) - 1)]
                expected = ((fz - z).norm(dim=-1) / fz.norm(dim=-1))[0]
                torch.testing.assert_close(told[check].residual[row], expected, rtol=1e-12, atol=0)

    def test_the_callback_is_told_how_far_the_solve_is(self):
        told: list[Progress] = []
        stop = Stop(rtol=0.0, max_steps=7, check_every=2)
        solve(
            mapped,
            zeros(3, 1),
            solver=Naive(),
            stop=stop,
            args=staircase([1, 2, 9]),
            callback=told.append,
        )
        seen = [(p.iteration, p.max_steps, p.active_rows) for p in told]
        assert seen == [(2, 7, 2), (4, 7, 1), (6, 7, 1), (7, 7, 0)]

    @pytest.mark.parametrize(("check_every", "checks"), [(1, 20), (8, 3), (20, 1)])
    def test_the_host_is_waited_for_at_the_start_and_once_a_check(self, check_every, checks):
        OnDevice.waits, told = 0, []
        f = row_affine([0.0, 0.5, 0.95, 0.97])
        stop = Stop(rtol=1e-10, max_steps=20, check_every=check_every)
        z0 = zeros(4, 3).as_subclass(OnDevice)
        solution = solve(mapped, z0, solver=Relaxed(0.9), stop=stop, args=f, callback=told.append)
        assert (len(told), told[-1].iteration, solution.stats.evaluations) == (checks, 20, 20)
        assert OnDevice.waits == 1 + checks + (
            check_every > 1
        )  # the first evaluation is measured, too

    @pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Chunked(3), dq.Sliding(3)], ids=str)
    def test_the_host_is_waited_for_once_a_check_where_windows_move(self, sweep):
        """At the start it asks whether the states are finite, and where the rows end."""
        OnDevice.waits, told, x = 0, [], torch.randn(8, 12, 4).as_subclass(OnDevice)
        mask = (torch.arange(12) < torch.arange(5, 13)[:, None]).as_subclass(OnDevice)
        backbone = dq.Affine(4)
        args = TokenArgs.prepared(backbone, x, None, mask, False)
        call = {"args": args, "has_aux": True, "sweep": sweep, "callback": told.append}
        with torch.no_grad():
            solution = solve(
                token_map, torch.zeros_like(x), solver=Relaxed(0.9), stop=Stop(), **call
            )
        assert solution.converged.all()
        assert len(told) < OnDevice.waits <= len(told) + 2


def test_a_state_of_several_tensors_is_told_how_to_become_one():
    with pytest.raises(TypeError, match=r"z0 must be a Tensor, got .*: join them as one tensor"):
        dq.fixed_point(lambda z: z, (torch.zeros(2, 3), torch.zeros(2, 4)))
