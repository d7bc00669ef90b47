"""Every sweep passes the contract; plans of one's own; windows, commits and failures."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded

import deqseq as dq
from deqseq.integrations.torchdeq import TorchDEQ
from deqseq.testing import SweepContract

TIGHT = dq.Stop(rtol=1e-10, max_steps=500)
MAKE = pytest.mark.parametrize(
    "make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"]
)
SWEEPS = (dq.Simultaneous(), dq.Chunked(3), dq.Sequential(), dq.Sliding(3), dq.Sliding(30))


@dataclass(frozen=True)
class Plan(dq.Sweep):
    """Chunks of given sizes, whatever the length; without any, the whole sequence."""

    given: tuple[int, ...] = ()

    def sizes(self, length: int) -> Iterable[int]:
        return self.given or (length,)


@dataclass(frozen=True)
class Doubling(dq.Sweep):
    """1, 1, 2, 4, 8 ... tokens."""

    def sizes(self, length: int) -> Iterator[int]:
        done, size = 0, 1
        while done < length:
            yield min(size, length - done)
            done, size = done + size, max(done + size, 1)


class TestSimultaneous(SweepContract):
    sweep = dq.Simultaneous()


class TestChunked(SweepContract):
    sweep = dq.Chunked(3)


class TestSequential(SweepContract):
    sweep = dq.Sequential()


class TestDoubling(SweepContract):
    sweep = Doubling()


class TestSliding(SweepContract):
    sweep = dq.Sliding(3)

    test_chunks_are_solved_as_planned = None  # what a window commits is decided while solving: tested below


class TestWideWindow(TestSliding):
    sweep = dq.Sliding(30)


def solve(model, x, sweep, **options) -> dq.ModelOutput:
    with torch.no_grad():
        return model(x, sweep=sweep, **options)


class Evaluations:
    """How many tokens of how many rows each call of a backbone got."""

    def __init__(self, backbone) -> None:
        self.shapes: list[tuple[int, int]] = []
        backbone.register_forward_hook(lambda module, inputs, _: self.shapes.append(tuple(inputs[0].shape[:2])))


# plans

STOPS = [dq.Stop(rtol=1e-6, max_steps=200), dq.Stop(rtol=1e-6, max_steps=7), dq.Stop(rtol=1e-6, per="token")]


@pytest.mark.parametrize("stop", STOPS, ids=["enough", "budget", "token"])
@pytest.mark.parametrize(
    ("plan", "known"),
    [(Plan(), dq.Simultaneous()), (Plan((3, 3, 3, 2)), dq.Chunked(3)), (dq.Chunked(1), dq.Sequential())],
    ids=["whole", "chunks", "tokens"],
)
def test_equal_plans_come_to_the_same_bits(stop, plan, known):
    model = dq.ImplicitModel(affine(), dq.SolveConfig(solver=dq.Anderson(), stop=stop))
    ours, theirs = (solve(model, embedded(4, 11), sweep, return_cache=True) for sweep in (plan, known))
    assert torch.equal(ours.value, theirs.value)
    assert torch.equal(ours.status, theirs.status)
    assert ours.stats.evaluations == theirs.stats.evaluations
    assert torch.equal(ours.stats.updates, theirs.stats.updates)
    for name in ("iterations", "residual"):
        numbers = getattr(theirs.stats, name)
        expected = numbers[:, None].expand(-1, 11) if numbers.ndim == 1 else numbers
        assert torch.equal(getattr(ours.stats, name), expected)
    assert all(torch.equal(*pair) for pair in zip(ours.cache.tensors(), theirs.cache.tensors(), strict=True))


@pytest.mark.parametrize("sizes", [(3, 3), (3, 3, 3), (0, 7), (8, -1)], ids=str)
def test_a_plan_that_does_not_fit_is_named(sizes):
    with pytest.raises(ValueError, match=r"Plan\(.*\.sizes\(7\) must be numbers >= 1 that add up to 7"):
        solve(dq.ImplicitModel(affine()), embedded(2, 7), Plan(sizes))


def test_a_plan_is_read_once_per_solve():
    lengths = []

    class Watched(dq.Sweep):
        def sizes(self, length):
            lengths.append(length)
            return iter([2, length - 2])

    solve(dq.ImplicitModel(affine()), embedded(2, 7), Watched())
    assert lengths == [7]


@pytest.mark.parametrize("solver", [TorchDEQ("fixed_point_iter"), TorchDEQ("anderson")], ids=str)
@pytest.mark.parametrize("sweep", [dq.Chunked(3), dq.Sequential(), dq.Sliding(3)], ids=str)
def test_a_solver_of_another_library(solver, sweep):
    backbone, x = affine(), embedded(2, 8)
    config = dq.SolveConfig(solver=solver, stop=dq.Stop(rtol=1e-9, max_steps=200))
    output = solve(dq.ImplicitModel(backbone, config), x, sweep)
    assert output.converged.all()
    assert (output.value - backbone.solution(x)).abs().max() < 1e-6


# windows


@pytest.mark.parametrize("window", [1, 4, 7])
def test_a_window_holds_so_many_tokens_and_moves_on(window):
    backbone = affine()
    seen = Evaluations(backbone)
    solve(dq.ImplicitModel(backbone, dq.SolveConfig(stop=TIGHT)), embedded(2, 20), dq.Sliding(window))
    sizes = [tokens for _, tokens in seen.shapes]
    assert max(sizes) == sizes[0] == window
    assert sizes == sorted(sizes, reverse=True)  # it shrinks at the end alone
    assert sizes.count(window) > len(sizes) / 2


@pytest.mark.parametrize("keep", [False, True])
def test_rows_that_have_ended_leave_unless_their_cache_is_needed(keep):
    backbone, x = affine(), embedded(8, 20)
    seen = Evaluations(backbone)
    mask = torch.arange(20) < torch.tensor([20, 18, 15, 12, 9, 6, 4, 1])[:, None]
    model = dq.ImplicitModel(backbone, dq.SolveConfig(stop=TIGHT))
    output = solve(model, x, dq.Sliding(4), mask=mask, return_cache=keep)
    rows = [rows for rows, _ in seen.shapes]
    assert rows == sorted(rows, reverse=True)
    assert (rows[0], rows[-1]) == ((8, 8) if keep else (8, 1))
    assert output.converged.all()


@pytest.mark.parametrize(
    ("make", "solver"),
    [
        *((affine, each) for each in (dq.Relaxed(0.8), dq.Adaptive(), dq.Anderson(), dq.Broyden(), dq.Coupled(0.7))),
        *((make, each) for make in (contractive_mamba2, contractive_llama) for each in (dq.Broyden(2),)),
    ],
    ids=lambda x: getattr(x, "__name__", None) or str(x),
)
@pytest.mark.parametrize(
    "stop",
    [
        dq.Stop(rtol=1e-8, max_steps=200),
        dq.Stop(rtol=1e-8, max_steps=3),
        dq.Stop(rtol=1e-6, max_steps=10, check_every=4),
        dq.Stop(rtol=1e-6, of="error"),
    ],
    ids=["enough", "budget", "check_every", "error"],
)
def test_a_row_of_a_window_is_the_row_alone(make, solver, stop):
    """Iterations, verdicts and residuals are equal, and values and caches up to rounding."""
    model = dq.ImplicitModel(make(), dq.SolveConfig(solver=solver, stop=stop, sweep=dq.Sliding(3)))
    x, tokens = embedded(5, 11) * torch.tensor([1, 0.1, 3, 1e-3, 10.0])[:, None, None], torch.arange(11)
    lengths = torch.tensor([11, 1, 5, 11, 8])
    with torch.no_grad():
        together = model(x, mask=tokens < lengths[:, None], return_cache=True)
        for row, length in enumerate(lengths.tolist()):
            alone, scale = model(x[row : row + 1, :length], return_cache=True), 1 + x[row].abs().max()
            assert together.status[row] == alone.status[0]
            for name in ("iterations", "forced"):
                assert torch.equal(getattr(together.stats, name)[row, :length], getattr(alone.stats, name)[0]), name
            for name in ("residual", "error"):
                numbers = getattr(together.stats, name)[row, :length], getattr(alone.stats, name)[0]
                torch.testing.assert_close(*numbers, rtol=1e-3, atol=1e-12)
            assert (together.value[row, :length] - alone.value[0]).abs().max() < 1e-9 * scale
            for ours, theirs in zip(together.cache.tensors(), alone.cache.tensors(), strict=True):
                same = ours[row, :, : theirs.shape[2]] if ours.ndim == 4 and ours.shape[2] == 11 else ours[row]
                assert (same - theirs[0]).abs().max() < 1e-9 * scale


def test_a_window_of_one_takes_the_iterations_of_each_token_alone():
    model, x = dq.ImplicitModel(contractive_mamba2(), dq.SolveConfig(stop=TIGHT)), embedded(4, 9)
    one, sequential = solve(model, x, dq.Sliding(1)), solve(model, x, dq.Sequential())
    later = one.stats.iterations - sequential.stats.iterations
    assert later.min() >= 0
    assert later.max() <= 1  # windows move after every second evaluation
    assert one.stats.evaluations == one.stats.iterations.sum(dim=1).max()


def test_a_window_as_long_as_the_sequence_is_the_simultaneous_iteration():
    model, x = dq.ImplicitModel(affine(), dq.SolveConfig(stop=TIGHT)), embedded(1, 9)
    sliding, together = solve(model, x, dq.Sliding(9)), solve(model, x, dq.Simultaneous())
    assert sliding.stats.evaluations <= together.stats.evaluations
    assert (sliding.value - together.value).abs().max() < 1e-9


def test_forced_tokens_are_those_that_the_budget_was_too_small_for():
    model, x = dq.ImplicitModel(affine()), embedded(1, 9)
    needed = solve(model, x, dq.Sequential(), stop=dq.Stop(rtol=1e-6, max_steps=100)).stats.iterations[0]
    budget = int(needed.max()) - 1
    assert 0 < (needed > budget).sum() < 9
    output = solve(model, x, dq.Sliding(1), stop=dq.Stop(rtol=1e-6, max_steps=budget))
    assert torch.equal(output.stats.forced[0], needed > budget), (output.stats.forced, needed)
    assert output.stats.iterations.max() == budget
    assert output.status.tolist() == [dq.Status.MAX_STEPS_REACHED]


def test_a_token_of_another_scale_has_not_diverged():
    backbone, x = affine(), embedded(2, 9)
    x[1, 4] *= 1e9
    output = solve(dq.ImplicitModel(backbone, dq.SolveConfig(stop=TIGHT)), x, dq.Sliding(2))
    assert (output.status == dq.Status.CONVERGED).all()
    assert ((output.value - backbone.solution(x)).norm(dim=-1) / output.value.norm(dim=-1)).max() < 1e-6


@pytest.mark.parametrize("make", [contractive_mamba2, affine])
def test_a_row_that_diverges_does_not_delay_the_others(make):
    x = embedded(3, 12)
    x[1, 5] = torch.inf
    model = dq.ImplicitModel(make(), dq.SolveConfig(stop=TIGHT))
    output, others = (solve(model, rows, dq.Sliding(4), return_cache=True) for rows in (x, x[[0, 2]]))
    assert output.status.tolist() == [dq.Status.CONVERGED, dq.Status.DIVERGED, dq.Status.CONVERGED]
    assert (output.value[[0, 2]] - others.value).abs().max() < 1e-8
    assert output.stats.forced[1, 5:].any()
    assert torch.isinf(output.stats.residual[1]).any()
    assert output.stats.evaluations < 2 * others.stats.evaluations


class Growing(dq.Solver[tuple[torch.Tensor, ...]]):
    """Keeps every value, for nothing."""

    def init(self, z0):
        return ()

    def step(self, z, fz, state):
        return fz, (*state, fz)


def test_a_solver_that_cannot_begin_afresh_in_some_rows_is_told_what_to_write():
    model, x = dq.ImplicitModel(affine(), dq.SolveConfig(solver=Growing(), stop=TIGHT)), embedded(2, 9)
    assert solve(model, x[:1], dq.Sliding(3)).converged.all()
    x[1] *= 1e-3 * torch.arange(9)[:, None]
    with pytest.raises(NotImplementedError, match=r"Growing.* write restart\(state, z, rows\)"):
        solve(model, x, dq.Sliding(3))


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama], ids=["Mamba2", "Llama"])
@pytest.mark.parametrize("bad", [0, 4])
def test_what_follows_a_row_that_has_diverged_has_diverged_too(make, sweep, bad):
    model, x = dq.ImplicitModel(make(), dq.SolveConfig(stop=dq.Stop(rtol=1e-4, max_steps=500))), embedded(2, 6)
    x[0, bad] = torch.inf
    for rows in (slice(0, 1), slice(0, 2)):
        cache = solve(model, x[rows], sweep, return_cache=True).cache
        after = solve(model, embedded(2, 3)[rows], sweep, cache=cache)
        assert after.status.tolist() == [dq.Status.DIVERGED, dq.Status.CONVERGED][rows]


def test_the_budget_of_a_fixed_number_of_steps_is_kept():
    for sweep, expected in ((dq.Chunked(4), 6), (dq.Sequential(), 24), (dq.Sliding(4), 24)):
        output = solve(
            dq.ImplicitModel(affine(), dq.SolveConfig(stop=dq.Stop.exactly(3))),
            embedded(2, 8),
            sweep,
            return_cache=True,
        )
        assert output.stats.evaluations == expected


def test_a_callback_is_told_at_every_check():
    told = []
    solve(dq.ImplicitModel(affine(), dq.SolveConfig(stop=TIGHT)), embedded(2, 8), dq.Sliding(3), callback=told.append)
    assert len(told) > 8
    assert told[0].residual.shape == (2, 8)
    assert told[0].residual.isfinite().tolist() == [[True] * 3 + [False] * 5] * 2
    assert [one.iteration for one in told] == list(range(1, len(told) + 1))
    assert told[0].iteration == 1


@pytest.mark.parametrize("window", [0, -1])
def test_a_bad_window_or_chunk_is_named(window):
    with pytest.raises(ValueError, match=r"Chunked\.size must be"):
        dq.Chunked(window)
    with pytest.raises(ValueError, match=r"Sliding\.window must be"):
        dq.Sliding(window)


def test_a_whole_sequence_norm_is_refused():
    with pytest.raises(ValueError, match=r'Stop\.norm must be "max_token"'):
        solve(dq.ImplicitModel(affine(), dq.SolveConfig(stop=dq.Stop(norm="frobenius"))), embedded(), dq.Sliding())


def test_a_solver_of_another_library_that_ends_early_commits_no_tokens():
    class OneStep(dq.ExternalSolver):
        def run(self, f, z0, max_steps):
            f(z0)

    class Counted(dq.Affine):
        def advance(self, cache, aux, tokens, counts=None):
            taken.append(tokens)
            return super().advance(cache, aux, tokens, counts)

    taken, x = [], embedded()
    model = dq.ImplicitModel(Counted(x.shape[2]).double())
    output = solve(model, x, dq.Sliding(3), solver=OneStep(), stop=dq.Stop(rtol=1e-6))
    assert output.converged.all() and min(taken) > 0
    assert torch.allclose(output.value, model.backbone.solution(x), atol=1e-4)


def test_a_trace_is_refused():
    with pytest.raises(ValueError, match=r"trace=True needs the Simultaneous sweep"):
        solve(dq.ImplicitModel(affine()), embedded(), dq.Sliding(), trace=True)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3), r"mask must be bool of shape \(2, 7\)"),
        (torch.tensor([[1, 1, 0, 1, 1, 1, 1]] * 2).bool(), "got 2 runs in row 0"),
        (torch.tensor([[1] * 7, [0] * 7]).bool(), "got 0 runs in row 1"),
    ],
)
def test_a_bad_mask_is_named(mask, message):
    from deqseq.models.padding import check_mask

    with pytest.raises(ValueError, match=message):
        check_mask(mask, embedded())


def test_gradients_of_a_padded_batch_are_those_of_the_rows():
    model, x = dq.ImplicitModel(contractive_mamba2(), dq.SolveConfig(stop=TIGHT)), embedded(2, 6)
    towards = embedded(2, 6).flip(0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    together = []
    for sweep in (dq.Simultaneous(), dq.Sliding(2)):
        model.zero_grad()
        (model(x, mask=mask, sweep=sweep).value * towards).sum().backward()
        together.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    for row, real in enumerate(mask):
        (model(x[row : row + 1, real]).value * towards[row : row + 1, real]).sum().backward()
    for one, two, p in zip(*together, model.parameters(), strict=True):
        assert p.grad.abs().max() > 0
        assert torch.allclose(one, p.grad, atol=1e-7)
        assert torch.allclose(two, p.grad, atol=1e-7)


def test_gradients_under_autocast_reach_every_parameter_after_any_sweep():
    for sweep in SWEEPS:
        model = dq.ImplicitModel(contractive_mamba2(weight_norm=False).float(), dq.SolveConfig(stop=dq.Stop.exactly(4)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = model(embedded().float(), sweep=sweep).value
        (value * torch.linspace(-1, 1, 8)).sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters()), sweep


def test_tokens_solved_one_by_one_keep_no_cache_but_the_last(monkeypatch):
    """What explain() would need of each token's solve holds the cache that it began from."""
    model, advance = dq.ImplicitModel(contractive_mamba2()).eval(), dq.Mamba2.advance
    made, alive = [], []

    def advanced(*arguments):
        cache = advance(*arguments)
        made.append(weakref.ref(cache))
        return cache

    def count(_):
        alive.append(sum(cache() is not None for cache in made))

    monkeypatch.setattr(dq.Mamba2, "advance", advanced)

    with torch.no_grad():
        model(embedded(length=24), sweep=dq.Sequential(), callback=count)
    assert len(made) == 23  # the last token's is not asked for
    assert 0 < max(alive) <= 2  # before a token, and after it


@pytest.mark.parametrize("sweep", [dq.Chunked(4), dq.Sequential(), dq.Sliding(4)])
def test_padding_is_never_forced(sweep):
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    model = dq.ImplicitModel(affine(), dq.SolveConfig(stop=dq.Stop(rtol=1e-12, max_steps=2)))
    assert torch.equal(model(embedded(2, 4), mask=mask, sweep=sweep).stats.forced, mask)


@pytest.mark.parametrize("sweep", [dq.Chunked(4), dq.Sequential(), dq.Sliding(4), dq.Simultaneous()])
@pytest.mark.parametrize("real", [[True, True, False, False], [False, False, True, True]], ids=["right", "left"])
def test_padding_takes_no_iterations(sweep, real):
    mask = torch.tensor([real, [True, True, True, True]])
    stop = dq.Stop(per="token")
    output = dq.ImplicitModel(affine())(embedded(2, 4), mask=mask, sweep=sweep, stop=stop)
    assert torch.equal(output.stats.iterations > 0, mask)


def test_rows_of_a_swept_output_keep_all_their_numbers():
    model = dq.ImplicitModel(affine(), dq.SolveConfig(stop=dq.Stop(rtol=1e-12, max_steps=9), sweep=dq.Chunked(2)))
    output, rows = model(embedded(3, 4) * torch.tensor([1, 1e-9, 0])[:, None, None]), torch.tensor([2, 0])
    assert 0 < output.stats.forced.sum() < 12
    taken = dq.take(output, rows).stats
    for name in ("iterations", "residual", "error", "updates", "forced"):
        assert torch.equal(getattr(taken, name), getattr(output.stats, name)[rows]), name
