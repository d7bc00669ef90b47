"""The loop over whole rows: freezing and removing rows, divergence, checks."""

import platform

import pytest
import torch
from problems import row_affine
from processes import output_of

import deqseq as dq
from deqseq import Naive, Progress, Relaxed, Status, Stop, solve, take
from deqseq.testing.problems import Recorded, mapped


def staircase(z, targets):
    """From zero a row passes, exactly, at evaluation number target + 1."""
    return torch.minimum(z + 1, targets)


def column(numbers):
    return torch.tensor(numbers, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    ("targets", "check_every", "rows"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 1, [8, 8, 8, 6, 6, 6, 4, 3, 2, 1]),
        ([1, 2, 3, 4, 5, 6, 7, 8], 2, [8, 8, 8, 8, 5, 5, 5, 3, 3, 1, 1]),
        ([5, 1, 5, 5], 1, [4, 4, 3, 3, 3, 3, 3]),
        ([5, 1, 5, 5, 5], 1, [5] * 6),
    ],
)
def test_rows_are_removed_when_a_quarter_has_ended(targets, check_every, rows):
    """Before the first ones are, those that stay are evaluated without them."""
    f = Recorded(staircase)
    stop = Stop(rtol=0.0, max_steps=50, check_every=check_every)
    targets = column(targets)
    solution = solve(f, 0 * targets, solver=Naive(), stop=stop, args=targets)
    checks = torch.ceil((targets[:, 0] + 1) / check_every)
    assert f.rows == rows
    assert torch.equal(solution.value, targets)
    assert solution.stats.iterations.tolist() == (check_every * checks).tolist()
    assert solution.stats.evaluations == len(rows)
    alone = next((count for count in rows if count < rows[0]), 0)
    assert solution.stats.updates.sum() == sum(rows) - alone
    assert solution.converged.all()
    assert not solution.stats.residual.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("norm", ["token", "row"])
def test_a_first_value_that_is_not_finite_has_diverged(bad, norm):
    """Against an infinite scale every residual is small."""
    z0 = torch.ones(1, 2, 3)
    solution = solve(lambda z: z + bad, z0, solver=Naive(), stop=Stop(norm=norm))
    assert solution.status.tolist() == [Status.DIVERGED]
    assert solution.stats.residual.isinf().all()
    assert torch.equal(solution.value, z0)


@pytest.mark.parametrize(
    ("f", "start", "divergence"),
    [
        (lambda z: 3 * z, 1e35, 1e4),  # the limit overflows too
        (lambda z: 3 * z, 1.0, torch.inf),
        (lambda z: 0.5 * z + 1e20, 1.9e20, 1e4),  # only the norm overflows
    ],
)
def test_overflow_has_diverged(f, start, divergence):
    stop = Stop(max_steps=200, divergence=divergence)
    solution = solve(f, torch.full((2, 3), start), solver=Naive(), stop=stop)
    assert solution.status.tolist() == [Status.DIVERGED] * 2
    assert solution.value.isfinite().all()


def test_without_a_limit_of_divergence_a_solve_goes_on():
    z0 = torch.zeros(2, 3)
    solution = solve(torch.cos, z0, solver=Naive(), stop=Stop(divergence=torch.inf))
    assert solution.converged.all() and solution.stats.iterations.min() > 5


def test_a_callback_is_told_the_residual_of_every_token_at_each_check():
    """Row 0 ends early, row 1 diverges late, row 2 swings, row 3 takes long."""
    problem = row_affine([0.1, 1.3, -1.1, 0.8], event=(2, 3))
    told = list[Progress]()
    z0 = torch.zeros(4, 2, 3, dtype=torch.float64)
    stop = Stop(rtol=1e-6, max_steps=30, check_every=3, divergence=300.0)
    call = {"solver": Relaxed(0.9), "stop": stop}
    solve(mapped, z0, args=problem, callback=told.append, **call)
    assert [progress.iteration for progress in told] == list(range(3, 31, 3))
    for row in range(4):
        f = Recorded(take(problem, torch.tensor([row])))
        solve(f, z0[:1], **call)
        for progress in told:
            last = min(progress.iteration, f.evaluations)
            z, fz = f.calls[last - 1]
            expected = (fz - z).norm(dim=-1) / fz.norm(dim=-1)
            torch.testing.assert_close(progress.residual[[row]], expected, rtol=1e-12, atol=0)


def test_a_callback_is_told_how_far_the_solve_is():
    told = list[Progress]()
    targets = column([1, 2, 9])
    call = {"stop": Stop(rtol=0.0, max_steps=7, check_every=2), "callback": told.append}
    solve(staircase, 0 * targets, solver=Naive(), args=targets, **call)
    seen = [(p.iteration, p.max_steps, p.active_rows) for p in told]
    assert seen == [(2, 7, 2), (4, 7, 1), (6, 7, 1), (7, 7, 0)]


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


@pytest.mark.parametrize(("check_every", "waits"), [(1, 22), (8, 6), (20, 3)])
def test_the_host_is_waited_for_at_the_start_and_once_a_check(check_every, waits):
    """The first evaluation is measured even if it is not checked."""
    OnDevice.waits = 0
    z0 = torch.zeros(4, 3, dtype=torch.float64).as_subclass(OnDevice)
    stop = Stop(rtol=1e-10, max_steps=20, check_every=check_every)
    problem = row_affine([0.0, 0.5, 0.95, 0.97])
    solution = solve(mapped, z0, solver=Relaxed(0.9), stop=stop, args=problem)
    assert solution.stats.evaluations in (20, 21)
    assert OnDevice.waits == waits


def test_without_a_tolerance_the_host_is_waited_for_at_the_start_and_the_end():
    OnDevice.waits = 0
    z0 = torch.zeros(4, 3).as_subclass(OnDevice)
    solve(torch.cos, z0, solver=Naive(), stop=Stop.exactly(20))
    assert OnDevice.waits == 2


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Chunked(3), dq.Sliding(3)], ids=str)
def test_the_host_is_waited_for_once_a_check_where_windows_move(sweep):
    """Before, the model asks about the mask and the states; a window asks where rows end."""
    told = []
    mask = torch.arange(12) < torch.arange(5, 13)[:, None]
    x, mask = (each.as_subclass(OnDevice) for each in (torch.randn(8, 12, 4), mask))
    model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(Relaxed(0.9)))
    OnDevice.waits = 0
    with torch.no_grad():
        output = model(x, mask=mask, sweep=sweep, callback=told.append)
    assert output.converged.all()
    assert len(told) < OnDevice.waits <= len(told) + 4


def test_a_state_of_several_tensors_is_told_how_to_become_one():
    with pytest.raises(TypeError, match=r"z0 must be a Tensor, got .*: join them as one tensor"):
        dq.fixed_point(lambda z: z, (torch.zeros(2, 3), torch.zeros(2, 4)))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the limit is glibc's")
def test_freed_memory_of_some_mebibytes_is_used_again():
    """Each round has 40 MiB: 10,240 pages, which the system would have to give again."""
    rounds = """
import resource, torch, deqseq

for round in range(24):
    if round == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(1 << 20) for _ in range(10)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    assert int(output_of("-c", rounds)) < 10_000
