"""What sweeps promise beyond finding the fixed point: commits, counts, windows, failures."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded

import deqseq as dq
from deqseq.integrations.torchdeq import TorchDEQ

TIGHT = dq.Stop(rtol=1e-10, max_steps=500)
MAKE = pytest.mark.parametrize(
    "make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"]
)
SWEEPS = (dq.Simultaneous(), dq.Chunked(3), dq.Sequential(), dq.Sliding(3), dq.Sliding(30))


def solve(model, x, sweep, **options) -> dq.ModelOutput:
    with torch.no_grad():
        return model(x, sweep=sweep, **options)


class Evaluations:
    """How many tokens of how many rows each call of a backbone got."""

    def __init__(self, backbone) -> None:
        self.shapes: list[tuple[int, int]] = []
        backbone.register_forward_hook(lambda module, inputs, _: self.shapes.append(tuple(inputs[0].shape[:2])))


@MAKE
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
@pytest.mark.parametrize("return_cache", [False, True])
def test_token_updates_are_what_was_computed(make, sweep, return_cache):
    backbone = make()
    seen = Evaluations(backbone)
    output = solve(dq.ImplicitModel(backbone, stop=TIGHT), embedded(5, 11), sweep, return_cache=return_cache)
    assert output.stats.evaluations == len(seen.shapes)
    assert output.stats.updates.shape == (5, 11)
    assert output.stats.updates.sum() == sum(rows * tokens for rows, tokens in seen.shapes)
    assert (output.stats.updates >= output.stats.steps.reshape(5, -1)).all()


@MAKE
@pytest.mark.parametrize("sweep", SWEEPS[1:], ids=str)
def test_committing_takes_no_evaluation(make, sweep):
    backbone, evaluations = make(), []
    for keep in (False, True):
        output = solve(dq.ImplicitModel(backbone, stop=TIGHT), embedded(4, 9), sweep, return_cache=keep)
        assert (output.status == dq.Status.CONVERGED).all()
        evaluations.append(output.stats.evaluations)
    assert evaluations[0] == evaluations[1]


@MAKE
@pytest.mark.parametrize("window", [1, 4, 7])
def test_a_window_holds_so_many_tokens_and_moves_on(make, window):
    backbone = make()
    seen = Evaluations(backbone)
    solve(dq.ImplicitModel(backbone, stop=TIGHT), embedded(2, 20), dq.Sliding(window))
    sizes = [tokens for _, tokens in seen.shapes]
    assert max(sizes) == sizes[0] == window
    assert sizes == sorted(sizes, reverse=True)  # it shrinks at the end alone
    assert sizes.count(window) > len(sizes) / 2
    assert {rows for rows, _ in seen.shapes} == {2}


def test_a_window_of_one_takes_the_rounds_of_the_slowest_row():
    model, x = dq.ImplicitModel(contractive_mamba2(), stop=TIGHT), embedded(4, 9)
    one, sequential = solve(model, x, dq.Sliding(1)), solve(model, x, dq.Sequential())
    slowest = sequential.stats.steps.amax(dim=0)
    assert (one.stats.steps[0] - slowest).abs().max() <= 1
    assert one.stats.evaluations == one.stats.steps[0].sum()


def test_a_window_as_long_as_the_sequence_is_the_simultaneous_iteration():
    model, x = dq.ImplicitModel(affine(), stop=TIGHT), embedded(1, 9)
    sliding, together = solve(model, x, dq.Sliding(9)), solve(model, x, dq.Simultaneous())
    assert sliding.stats.evaluations <= together.stats.evaluations
    assert (sliding.value - together.value).abs().max() < 1e-9


def test_every_token_passes_the_tolerance():
    model, x = dq.ImplicitModel(contractive_llama(), stop=dq.Stop(rtol=1e-3)), embedded(3, 12)
    for sweep in SWEEPS[1:]:
        output = solve(model, x, sweep)
        assert output.stats.residual.max() <= 1e-3
        assert not output.stats.forced.any()
        again = solve(model, x, dq.Simultaneous(), stop=TIGHT).value
        assert (output.value - again).norm(dim=-1).max() < 0.05 * again.norm(dim=-1).max()


@pytest.mark.parametrize("sweep", [dq.Sliding(4), dq.Chunked(4), dq.Sequential()], ids=str)
def test_commits_that_were_forced_are_reported(sweep):
    stop = dq.Stop(rtol=1e-10, max_steps=3)
    output = solve(dq.ImplicitModel(affine(), stop=stop), embedded(2, 9), sweep)
    assert (output.status == dq.Status.BUDGET_SPENT).all()
    assert output.stats.forced.all()
    assert output.stats.residual.min() > 1e-10
    assert torch.isfinite(output.value).all()
    if isinstance(sweep, dq.Sliding):
        assert output.stats.evaluations <= 3 * 9


def test_forced_tokens_are_those_that_the_budget_was_too_small_for():
    model, x = dq.ImplicitModel(affine()), embedded(1, 9)
    needed = solve(model, x, dq.Sliding(1), stop=dq.Stop(rtol=1e-6, max_steps=100)).stats.steps[0]
    budget = int(needed.max()) - 1
    assert 0 < (needed > budget).sum() < 9
    output = solve(model, x, dq.Sliding(1), stop=dq.Stop(rtol=1e-6, max_steps=budget))
    assert torch.equal(output.stats.forced[0], needed > budget)
    assert output.stats.steps.max() == budget
    assert output.status.tolist() == [dq.Status.BUDGET_SPENT]


def test_a_token_of_another_scale_has_not_diverged():
    backbone, x = affine(), embedded(2, 9)
    x[1, 4] *= 1e9
    output = solve(dq.ImplicitModel(backbone, stop=TIGHT), x, dq.Sliding(2))
    assert (output.status == dq.Status.CONVERGED).all()
    assert ((output.value - backbone.solution(x)).norm(dim=-1) / output.value.norm(dim=-1)).max() < 1e-6


@pytest.mark.parametrize("make", [contractive_mamba2, affine])
def test_a_row_that_diverges_does_not_disturb_or_delay_the_others(make):
    x = embedded(3, 12)
    x[1, 5] = torch.inf
    model = dq.ImplicitModel(make(), stop=TIGHT)
    output, alone = solve(model, x, dq.Sliding(4), return_cache=True), solve(model, x[:1], dq.Sliding(4))
    assert output.status.tolist() == [dq.Status.CONVERGED, dq.Status.DIVERGED, dq.Status.CONVERGED]
    assert torch.isfinite(output.value).all()
    assert (output.value[:1] - alone.value).abs().max() < 1e-8
    assert output.stats.forced[1, 5:].any()
    assert not output.stats.forced[[0, 2]].any()
    assert torch.isinf(output.stats.residual[1]).any()
    assert output.stats.evaluations < 2 * solve(model, x[[0, 2]], dq.Sliding(4)).stats.evaluations


@pytest.mark.parametrize(
    "solver",
    [dq.Naive(), dq.Relaxed(0.5), dq.Anderson(), dq.Broyden(), TorchDEQ("fixed_point_iter"), TorchDEQ("anderson")],
    ids=str,
)
@pytest.mark.parametrize("sweep", [dq.Chunked(3), dq.Sequential(), dq.Sliding(3)], ids=str)
def test_any_solver(solver, sweep):
    backbone, x = affine(), embedded(2, 8)
    output = solve(dq.ImplicitModel(backbone, solver=solver, stop=dq.Stop(rtol=1e-9, max_steps=200)), x, sweep)
    assert (output.status == dq.Status.CONVERGED).all()
    assert (output.value - backbone.solution(x)).abs().max() < 1e-6


@pytest.mark.parametrize(
    "stop",
    [
        dq.Stop(rtol=1e-9, max_steps=200, per="batch"),
        dq.Stop(rtol=1e-9, max_steps=200, per="token"),
        dq.Stop(rtol=1e-9, max_steps=200, check_every=3),
        dq.Stop(rtol=0.0, atol=1e-9, max_steps=200),
    ],
    ids=str,
)
@pytest.mark.parametrize("sweep", [dq.Chunked(3), dq.Sequential(), dq.Sliding(3)], ids=str)
def test_any_stopping_rule(stop, sweep):
    backbone, x = affine(), embedded(2, 8)
    output = solve(dq.ImplicitModel(backbone, stop=stop), x, sweep)
    assert (output.status == dq.Status.CONVERGED).all()
    assert (output.value - backbone.solution(x)).abs().max() < 1e-6


def test_the_budget_of_a_fixed_number_of_steps_is_kept():
    for sweep, expected in ((dq.Chunked(4), 6), (dq.Sequential(), 24), (dq.Sliding(4), 24)):
        output = solve(dq.ImplicitModel(affine(), stop=dq.Stop.exactly(3)), embedded(2, 8), sweep, return_cache=True)
        assert output.stats.evaluations == expected


def test_a_callback_sees_every_look():
    looks = []
    solve(dq.ImplicitModel(affine(), stop=TIGHT), embedded(2, 8), dq.Sliding(3), callback=looks.append)
    assert len(looks) > 8
    assert looks[0].residual.shape == (2, 3)
    assert looks[0].step == 1


@pytest.mark.parametrize("window", [0, -1])
def test_a_bad_window_is_named(window):
    with pytest.raises(ValueError, match=rf"Sliding.window must be an integer >= 1, got {window}"):
        dq.Sliding(window)


def test_a_whole_sequence_norm_is_refused():
    with pytest.raises(ValueError, match=r'Sliding tests each token: Stop.norm must be "max_token", got "frobenius"'):
        solve(dq.ImplicitModel(affine(), stop=dq.Stop(norm="frobenius")), embedded(), dq.Sliding())


def test_a_trace_is_refused():
    with pytest.raises(ValueError, match=r"trace=True needs the Simultaneous sweep, got Sliding\(window=8\)"):
        solve(dq.ImplicitModel(affine()), embedded(), dq.Sliding(), trace=True)


@MAKE
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_a_padded_row_is_the_row_alone(make, sweep):
    model, x, counts = dq.ImplicitModel(make(), stop=dq.Stop(rtol=1e-5)), embedded(3, 9), (9, 1, 5)
    for flip in (False, True):
        mask = torch.arange(9) < torch.tensor(counts)[:, None]
        mask = mask.flip(1) if flip else mask
        together = solve(model, x, sweep, mask=mask)
        assert together.value[~mask].abs().max() == 0
        for row, real in enumerate(mask):
            alone = solve(model, x[row : row + 1, real], sweep)
            shared = isinstance(sweep, dq.Sliding)  # a window waits for all rows: equal within the tolerance
            difference = (together.value[row, real] - alone.value[0]).abs().max()
            assert difference < (1e-3 if shared else 1e-9)
            if sweep == dq.Simultaneous():
                assert together.stats.steps[row] == alone.stats.steps[0]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3), r"mask must be bool of shape \(2, 7\), True at real tokens, got torch.float32 \(2, 3\)"),
        (torch.tensor([[1, 1, 0, 1, 1, 1, 1]] * 2).bool(), "got 2 runs in row 0"),
        (torch.tensor([[1] * 7, [0] * 7]).bool(), "got 0 runs in row 1"),
    ],
)
def test_a_bad_mask_is_named(mask, message):
    from deqseq.models.padding import check_mask

    with pytest.raises(ValueError, match=message):
        check_mask(mask, embedded())


def test_gradients_of_a_padded_batch_are_those_of_the_rows():
    model, x = dq.ImplicitModel(contractive_mamba2(), stop=TIGHT), embedded(2, 6)
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
        model = dq.ImplicitModel(contractive_mamba2(weight_norm=False).float(), stop=dq.Stop.exactly(4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = model(embedded().float(), sweep=sweep).value
        (value * torch.linspace(-1, 1, 8)).sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters()), sweep
