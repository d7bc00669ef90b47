"""Every sweep finds the fixed point, goes on from its cache, and gives the gradients of the whole
sequence.

Values, statistics and statuses of windows are held by a loop over one row, in ``test_windows.py``.
"""

import weakref
from dataclasses import replace

import pytest
import torch
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
CONFIG = dq.SolveConfig(stop=TIGHT)
SWEEPS = [
    dq.Simultaneous(),
    dq.Chunked(3),
    dq.Sequential(),
    dq.Sliding(3),
    dq.Sliding(30),
    Blocks(2, 3),
]
each_sweep = pytest.mark.parametrize("sweep", SWEEPS, ids=str)


def solve(model, x, sweep, **options) -> dq.ModelOutput:
    with torch.no_grad():
        return model(x, sweep=sweep, **options)


def model_of(**fields) -> dq.ImplicitModel:
    """Affine, whose fixed point is known."""
    return dq.ImplicitModel(affine(), dq.SolveConfig(**{"stop": TIGHT} | fields))


@each_sweep
@pytest.mark.parametrize(
    "solver", [dq.Naive(), dq.Relaxed(0.5), dq.Anderson(), dq.Broyden()], ids=str
)
@pytest.mark.parametrize("rule", [{"norm": "row"}, {"check_every": 3}, {"atol": 1e-9}], ids=str)
def test_any_solver_and_stopping_rule(sweep, solver, rule):
    model, x = model_of(solver=solver, stop=replace(TIGHT, **rule)), embedded(2, 8)
    output = solve(model, x, sweep)
    assert bool(output.converged.all())
    torch.testing.assert_close(output.value, model.backbone.solution(x), rtol=0, atol=1e-6)


@each_sweep
@pytest.mark.parametrize(
    "gradient", [dq.Phantom(4), dq.OneStep(), dq.Implicit(stop=TIGHT)], ids=str
)
@pytest.mark.parametrize("make", [affine, contractive_mamba2])
def test_gradients_of_a_padded_batch_are_those_of_its_rows(make, sweep, gradient):
    model, x = (
        dq.ImplicitModel(make(), dq.SolveConfig(stop=TIGHT, gradient=gradient)),
        embedded(3, 6).requires_grad_(),
    )
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    towards, leaves = embedded(3, 6).flip(0), [x, *model.parameters()]
    found = torch.autograd.grad((model(x, mask=mask, sweep=sweep).value * towards).sum(), leaves)
    rows = [
        (model(x[None, row, real]).value * towards[None, row, real]).sum()
        for row, real in enumerate(mask)
    ]
    for ours, expected in zip(found, torch.autograd.grad(sum(rows), leaves), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


PADDED = {
    "Affine": lambda: dq.ImplicitModel(affine(), CONFIG),
    "Mamba2": lambda: dq.ImplicitModel(contractive_mamba2(), CONFIG),
    "Llama": lambda: dq.ImplicitModel(contractive_llama(), CONFIG),
    "RecurrentDepth": lambda: recurrent_depth(dq.ImplicitModel(injected_llama(), CONFIG)),
}


@pytest.mark.usefixtures("unchecked")
@each_sweep
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", PADDED)
def test_a_padded_row_is_the_row_alone_whatever_padding_holds(name, side, sweep):
    model, x, more = PADDED[name]().eval(), embedded(3, 9), embedded(3, 2).flip(1)
    mask = torch.arange(9) >= torch.tensor([0, 8, 4])[:, None]
    mask = mask if side == "left" else mask.flip(1)
    together = solve(
        model, x.masked_fill(~mask[..., None], torch.nan), sweep, mask=mask, return_cache=True
    )
    later = solve(model, more, sweep, cache=together.cache).value
    assert together.value[~mask].abs().max() == 0
    assert torch.equal(together.stats.iterations > 0, mask)
    for row, real in enumerate(mask):
        alone = solve(model, x[None, row, real], sweep, return_cache=True)
        torch.testing.assert_close(together.value[row, real], alone.value[0], rtol=0, atol=1e-7)
        after = solve(model, more[row : row + 1], sweep, cache=alone.cache)
        torch.testing.assert_close(later[row], after.value[0], rtol=0, atol=1e-7)


# rows


@pytest.mark.parametrize("sweep", [dq.Sliding(3), dq.Chunked(3)], ids=str)
@pytest.mark.parametrize(
    ("make", "solver"),
    [
        *((affine, each) for each in (dq.Adaptive(), dq.Anderson(), dq.Broyden())),
        *((make, dq.Broyden(2)) for make in (contractive_mamba2, contractive_llama)),
    ],
    ids=lambda x: getattr(x, "__name__", None) or str(x),
)
@pytest.mark.parametrize(
    "stop",
    [
        dq.Stop(1e-8, max_steps=200),
        dq.Stop(1e-8, max_steps=3),
        dq.Stop(1e-6, max_steps=10, check_every=4),
    ],
    ids=["enough", "budget", "check_every"],
)
def test_a_row_is_the_row_alone_with_any_memory_and_backbone(make, solver, stop, sweep):
    """Iterations and statuses are equal; residuals, values and caches up to rounding."""
    model = dq.ImplicitModel(make(), dq.SolveConfig(solver=solver, stop=stop, sweep=sweep))
    x, lengths = (
        embedded(5, 11) * torch.tensor([1, 0.1, 3, 1e-3, 10.0])[:, None, None],
        torch.tensor([11, 1, 5, 11, 8]),
    )
    with torch.no_grad():
        together = model(x, mask=torch.arange(11) < lengths[:, None], return_cache=True)
        for row, length in enumerate(lengths.tolist()):
            alone, scale = (
                model(x[row : row + 1, :length], return_cache=True),
                1 + x[row].abs().max(),
            )
            assert together.status[row] == alone.status[0]
            for name in ("iterations", "forced"):
                assert torch.equal(
                    getattr(together.stats, name)[row, :length], getattr(alone.stats, name)[0]
                ), name
            residuals = together.stats.residual[row, :length], alone.stats.residual[0]
            torch.testing.assert_close(*residuals, rtol=1e-3, atol=1e-12)
            assert (together.value[row, :length] - alone.value[0]).abs().max() < 1e-9 * scale
            for ours, theirs in zip(together.cache.tensors(), alone.cache.tensors(), strict=True):
                same = (
                    ours[row, :, : theirs.shape[2]]
                    if ours.ndim == 4 and ours.shape[2] == 11
                    else ours[row]
                )
                assert (same - theirs[0]).abs().max() < 1e-9 * scale


# what is told


@each_sweep
@pytest.mark.parametrize("norm", ["token", "row"])
@pytest.mark.parametrize("check_every", [1, 3])
def test_a_callback_is_told_the_residual_of_every_token_at_every_check(sweep, norm, check_every):
    told, stop = [], dq.Stop(1e-6, max_steps=200, norm=norm, check_every=check_every)
    output = solve(
        dq.ImplicitModel(affine()), embedded(3, 8), sweep, stop=stop, callback=told.append
    )
    width = sweep.width(8)
    assert {one.residual.shape for one in told} == {(3, 8)}
    assert told[0].residual.isfinite().tolist() == [[True] * width + [False] * (8 - width)] * 3
    assert torch.equal(told[-1].residual, output.stats.residual)
    assert (told[-1].iteration, told[-1].active_rows) == (output.stats.evaluations, 0)
    if check_every == 1:
        assert [one.iteration for one in told] == list(range(1, output.stats.evaluations + 1))


def test_rows_of_an_output_keep_all_their_numbers():
    model = dq.ImplicitModel(
        affine(), dq.SolveConfig(stop=dq.Stop(rtol=1e-12, max_steps=9), sweep=dq.Chunked(2))
    )
    output, rows = (
        model(embedded(3, 4) * torch.tensor([1, 1e-9, 0])[:, None, None]),
        torch.tensor([2, 0]),
    )
    assert 0 < output.stats.forced.sum() < 12
    taken = dq.take(output, rows).stats
    for name in ("iterations", "residual", "updates", "forced"):
        assert torch.equal(getattr(taken, name), getattr(output.stats, name)[rows]), name


# budgets and failures


@each_sweep
def test_a_token_of_another_scale_has_not_diverged(sweep):
    backbone, x = affine(), embedded(2, 9)
    x[1, 4] *= 1e9
    output = solve(dq.ImplicitModel(backbone, dq.SolveConfig(stop=TIGHT)), x, sweep)
    assert output.converged.all()
    assert (
        (output.value - backbone.solution(x)).norm(dim=-1) / output.value.norm(dim=-1)
    ).max() < 1e-6


@each_sweep
@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama])
@pytest.mark.parametrize("bad", [0, 4])
def test_a_row_that_diverges_delays_no_other_and_what_follows_it_has_diverged_too(make, sweep, bad):
    model, x = (
        dq.ImplicitModel(make(), dq.SolveConfig(stop=dq.Stop(rtol=1e-4, max_steps=500))),
        embedded(2, 6),
    )
    x[0, bad] = torch.inf
    alone = solve(model, x[1:], sweep)
    for rows in (slice(0, 1), slice(0, 2)):
        output = solve(model, x[rows], sweep, return_cache=True)
        assert output.stats.evaluations <= alone.stats.evaluations
        after = solve(model, embedded(2, 3)[rows], sweep, cache=output.cache)
        assert after.status.tolist() == [dq.Status.DIVERGED, dq.Status.CONVERGED][rows]


def test_tokens_solved_one_by_one_keep_no_cache_but_the_last(monkeypatch):
    model, advance = dq.ImplicitModel(contractive_mamba2()).eval(), dq.Mamba2.advance
    made, alive = [], []

    def advanced(*arguments):
        cache = advance(*arguments)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(dq.Mamba2, "advance", advanced)
    count = lambda _: alive.append(sum(cache() is not None for cache in made))  # noqa: E731
    solve(model, embedded(1, 24), dq.Sequential(), callback=count)
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
        (None, NotImplementedError, r"Growing.* write restart\(state, z, rows\)"),
        (lambda state, z, rows: None, TypeError, r"Growing\.restart must return a state like"),
        (
            lambda state, z, rows: [x[rows] for x in state],
            (TypeError, ValueError),
            r"Growing\.restart (must|returns must)",
        ),
    ],
)
def test_a_solver_that_cannot_begin_afresh_in_some_rows_is_told_what_to_write(
    restart, error, words, monkeypatch
):
    if restart is not None:
        monkeypatch.setattr(Growing, "restart", lambda self, *arguments: restart(*arguments))
    model, x = (
        dq.ImplicitModel(affine(), dq.SolveConfig(solver=Growing(), stop=TIGHT)),
        embedded(2, 9),
    )
    assert solve(model, x[:1], dq.Sliding(3)).converged.all()
    x[1] *= 1e-3 * torch.arange(9)[:, None]
    with pytest.raises(error, match=words):
        solve(model, x, dq.Sliding(3))


# gradients


@each_sweep
def test_gradients_under_autocast_reach_every_parameter(sweep):
    model = dq.ImplicitModel(
        contractive_mamba2(weight_norm=False).float(), dq.SolveConfig(stop=dq.Stop.exactly(4))
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = model(embedded().float(), sweep=sweep).value
    (value * torch.linspace(-1, 1, 8)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("sweep", "steps"),
    [
        (dq.Simultaneous(), [7, 7, 7, 7, 7, 7]),
        (dq.Sequential(), [2, 2, 2, 2, 2, 2]),
        (dq.Chunked(3), [4, 4, 4, 4, 4, 4]),
        (dq.Sliding(3), [2, 4, 4, 4, 2, 3]),  # it moves after evaluations 2, 4 and 6, and ends at 7
    ],
    ids=str,
)
def test_a_token_is_done_one_iteration_after_the_one_before(sweep, steps):
    """z_t = z_{t-1} + x_t: a token is exact once the one before is, and passes at the evaluation
    after that.
    """
    model = model_of(solver=dq.Naive())
    with torch.no_grad():
        model.backbone.A.zero_()
        model.backbone.R.copy_(torch.eye(len(model.backbone.R)))
    output = solve(model, embedded(2, 6), sweep)
    assert output.stats.iterations.tolist() == [steps, steps] and bool(output.converged.all())
