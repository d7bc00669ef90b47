"""Every sweep finds the fixed point, goes on from its cache, and gives the gradients of the whole
sequence.

Values, statistics and statuses of windows are compared with a loop over one row in
``test_windows.py``.
"""

import weakref
from dataclasses import replace

import pytest
import torch
from problems import SOLVERS
from small_models import (
    affine,
    contractive_llama,
    contractive_mamba2,
    embedded,
    injected_llama,
    recurrent_depth,
)
from test_windows import Blocks

import deqseq as dq

TIGHT = dq.Stop(rtol=1e-10, max_steps=500)
SWEEPS = [
    dq.Simultaneous(),
    dq.Chunked(3),
    dq.Sequential(),
    dq.Sliding(3),
    dq.Sliding(30),
    Blocks(2, 3),
]
each_sweep = pytest.mark.parametrize("sweep", SWEEPS, ids=str)


def model_of(make=affine, **fields):
    """By default Affine, whose fixed point is known."""
    return dq.ImplicitModel(make(), dq.SolveConfig(**{"stop": TIGHT} | fields))


def solve(model, x, sweep, **options):
    with torch.no_grad():
        return model(x, sweep=sweep, **options)


@each_sweep
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("rule", [{"norm": "row"}, {"check_every": 3}], ids=str)
def test_any_solver_finds_the_fixed_point(sweep, solver, rule):
    model = model_of(solver=solver, stop=replace(TIGHT, **rule))
    x = embedded(2, 8)
    output = solve(model, x, sweep)
    assert output.converged.all()
    torch.testing.assert_close(output.value, model.backbone.solution(x), rtol=0, atol=1e-6)


@each_sweep
@pytest.mark.parametrize(
    "gradient", [dq.Phantom(4), dq.OneStep(), dq.Implicit(stop=TIGHT)], ids=str
)
@pytest.mark.parametrize("make", [affine, contractive_mamba2])
def test_gradients_of_a_padded_batch_are_those_of_its_rows(make, sweep, gradient):
    model = model_of(make, gradient=gradient)
    x = embedded(3, 6).requires_grad_()
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    weights = embedded(3, 6).flip(0)
    leaves = [x, *model.parameters()]
    loss = (model(x, mask=mask, sweep=sweep).value * weights).sum()
    rows = sum(
        (model(x[None, row, real]).value * weights[None, row, real]).sum()
        for row, real in enumerate(mask)
    )
    both = torch.autograd.grad(loss, leaves), torch.autograd.grad(rows, leaves)
    for ours, expected in zip(*both, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


PADDED = {
    "Affine": model_of,
    "Mamba2": lambda: model_of(contractive_mamba2),
    "Llama": lambda: model_of(contractive_llama),
    "RecurrentDepth": lambda: recurrent_depth(model_of(injected_llama)),
}


@pytest.mark.usefixtures("unchecked")
@each_sweep
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", PADDED)
def test_a_padded_row_is_the_row_alone_whatever_padding_holds(name, side, sweep):
    model = PADDED[name]().eval()
    x = embedded(3, 9)
    more = embedded(3, 2).flip(1)
    mask = torch.arange(9) >= torch.tensor([0, 8, 4])[:, None]
    mask = mask if side == "left" else mask.flip(1)
    padded = x.masked_fill(~mask[..., None], torch.nan)
    together = solve(model, padded, sweep, mask=mask, return_cache=True)
    later = solve(model, more, sweep, cache=together.cache)
    assert together.value[~mask].abs().max() == 0
    assert together.stats.residual[~mask].abs().max() == 0
    assert torch.equal(together.stats.iterations > 0, mask)
    for row, real in enumerate(mask):
        alone = solve(model, x[None, row, real], sweep, return_cache=True)
        torch.testing.assert_close(together.value[row, real], alone.value[0], rtol=0, atol=1e-7)
        after = solve(model, more[[row]], sweep, cache=alone.cache)
        torch.testing.assert_close(later.value[[row]], after.value, rtol=0, atol=1e-7)


# rows


SOLVED = {
    "Adaptive": (affine, dq.Adaptive()),
    "Anderson": (affine, dq.Anderson()),
    "Broyden": (affine, dq.Broyden()),
    "Mamba2": (contractive_mamba2, dq.Broyden(2)),
    "Llama": (contractive_llama, dq.Broyden(2)),
}
STOPS = {
    "enough": dq.Stop(1e-8, max_steps=200),
    "budget": dq.Stop(1e-8, max_steps=3),
    "check_every": dq.Stop(1e-6, max_steps=10, check_every=4),
}


@pytest.mark.parametrize("sweep", [dq.Sliding(3), dq.Chunked(3)], ids=str)
@pytest.mark.parametrize("solved", SOLVED)
@pytest.mark.parametrize("stop", STOPS)
def test_a_row_is_the_row_alone_with_any_memory_and_backbone(solved, stop, sweep):
    """Iterations and statuses are equal; values up to rounding."""
    make, solver = SOLVED[solved]
    model = model_of(make, solver=solver, stop=STOPS[stop])
    x = embedded(5, 11) * torch.tensor([1, 0.1, 3, 1e-3, 10.0])[:, None, None]
    mask = torch.arange(11) < torch.tensor([11, 1, 5, 11, 8])[:, None]
    together = solve(model, x, sweep, mask=mask)
    for row, real in enumerate(mask):
        alone = solve(model, x[None, row, real], sweep)
        tolerance = 1e-9 * (1 + x[row].abs().max().item())
        value = together.value[row, real]
        torch.testing.assert_close(value, alone.value[0], rtol=0, atol=tolerance)
        assert together.status[row] == alone.status[0]
        for name in ("iterations", "forced"):
            ours = getattr(together.stats, name)[row, real]
            assert torch.equal(ours, getattr(alone.stats, name)[0]), name


# what is told


@each_sweep
@pytest.mark.parametrize("check_every", [1, 3])
def test_a_callback_is_told_the_residual_of_every_token_at_every_check(sweep, check_every):
    told = []
    stop = dq.Stop(1e-6, max_steps=200, check_every=check_every)
    output = solve(model_of(stop=stop), embedded(3, 8), sweep, callback=told.append)
    width = sweep.width(8)
    assert {progress.residual.shape for progress in told} == {(3, 8)}
    assert told[0].residual[:, :width].isfinite().all()
    assert told[0].residual[:, width:].isinf().all()
    assert torch.equal(told[-1].residual, output.stats.residual)
    assert told[-1].active_rows == 0
    checks = [progress.iteration for progress in told]
    assert checks[-1] == output.stats.evaluations
    if check_every == 1:
        assert checks == list(range(1, output.stats.evaluations + 1))


# budgets and failures


@each_sweep
def test_a_token_of_another_scale_has_not_diverged(sweep):
    model = model_of()
    x = embedded(2, 9)
    x[1, 4] *= 1e9
    output = solve(model, x, sweep)
    assert output.converged.all()
    error = (output.value - model.backbone.solution(x)).norm(dim=-1)
    assert (error / output.value.norm(dim=-1)).max() < 1e-6


@each_sweep
@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama])
@pytest.mark.parametrize("bad", [0, 4])
def test_a_row_that_diverges_delays_no_other_and_what_follows_it_has_diverged_too(make, sweep, bad):
    model = model_of(make, stop=dq.Stop(rtol=1e-4, max_steps=500))
    x = embedded(2, 6)
    x[0, bad] = torch.inf
    alone = solve(model, x[1:], sweep)
    for rows in (slice(0, 1), slice(0, 2)):
        output = solve(model, x[rows], sweep, return_cache=True)
        assert output.stats.evaluations <= alone.stats.evaluations
        after = solve(model, embedded(2, 3)[rows], sweep, cache=output.cache)
        assert after.status.tolist() == [dq.Status.DIVERGED, dq.Status.CONVERGED][rows]


def test_tokens_solved_one_by_one_keep_no_cache_but_the_last(monkeypatch):
    advance = dq.Mamba2.advance
    made = []
    alive = []

    def advanced(*arguments):
        cache = advance(*arguments)
        made.append(weakref.ref(cache))
        return cache

    def count(progress):
        alive.append(sum(cache() is not None for cache in made))

    monkeypatch.setattr(dq.Mamba2, "advance", advanced)
    solve(model_of(contractive_mamba2), embedded(1, 24), dq.Sequential(), callback=count)
    assert len(made) == 23  # that of the last token is not asked for
    assert 0 < max(alive) <= 2  # before a token, and after it


class Growing(dq.Solver[tuple[torch.Tensor, ...]]):
    """Keeps every value, for nothing."""

    def init(self, z0):
        return ()

    def step(self, z, fz, state):
        return fz, (*state, fz)


@pytest.mark.parametrize(
    ("restart", "error", "words"),
    [
        (dq.Solver.restart, NotImplementedError, r"Growing.* write restart\(state, z, rows\)"),
        (lambda *_: None, TypeError, r"Growing\.restart must return a state like"),
        (
            lambda solver, state, z, rows: tuple(x[rows] for x in state),
            ValueError,
            r"Growing\.restart returns must",
        ),
    ],
)
def test_a_solver_that_cannot_begin_afresh_in_some_rows_is_told_what_to_write(
    restart, error, words, monkeypatch
):
    monkeypatch.setattr(Growing, "restart", restart)
    model = model_of(solver=Growing())
    x = embedded(2, 9)
    assert solve(model, x[:1], dq.Sliding(3)).converged.all()
    x[1] *= 1e-3 * torch.arange(9)[:, None]
    with pytest.raises(error, match=words):
        solve(model, x, dq.Sliding(3))


class Averaging(dq.Solver[torch.Tensor]):
    """Keeps a mean over tokens once it has stepped, and each token before."""

    def init(self, z0):
        return z0

    def step(self, z, fz, state):
        return fz, fz.mean(dim=1, keepdim=True)


def test_a_memory_that_takes_another_shape_cannot_begin_afresh_in_some_rows():
    x = embedded(2, 9)
    x[1] *= 1e-3 * torch.arange(9)[:, None]
    with pytest.raises(NotImplementedError, match=r"Averaging.* write restart\(state, z, rows\)"):
        solve(model_of(solver=Averaging()), x, dq.Sliding(3))


@each_sweep
def test_gradients_under_autocast_reach_every_parameter(sweep):
    backbone = contractive_mamba2(weight_norm=False).float()
    model = dq.ImplicitModel(backbone, dq.SolveConfig(stop=dq.Stop.exactly(4)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = model(embedded().float(), sweep=sweep).value
    (value * torch.linspace(-1, 1, 8)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
