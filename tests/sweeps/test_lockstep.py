"""Lockstep: a fixed number of iterations, each with the cache of the same iteration."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded

import deqseq as dq
from deqseq.sweeps.lockstep import LockstepCache

pytestmark = pytest.mark.usefixtures("unchecked")  # the docstrings' examples run with the checks of shapes

MAKE = [contractive_mamba2, contractive_llama, affine]


@pytest.fixture(params=MAKE, ids=lambda make: make.__name__)
def model(request):
    return dq.ImplicitModel(request.param()).eval()


@pytest.mark.parametrize("solver", [dq.Naive(), dq.Relaxed(0.6), dq.Anderson()], ids=str)
@torch.no_grad()
def test_it_is_the_given_number_of_iterations(model, solver):
    x = embedded()
    wanted = model(x, solver=solver, stop=dq.Stop.exactly(4))
    found = model(x, solver=solver, sweep=dq.Lockstep(4))
    assert torch.allclose(found.value, wanted.value, rtol=0, atol=1e-12)
    assert torch.allclose(found.stats.residual, wanted.stats.residual)
    assert (found.stats.evaluations, found.stats.iterations.tolist()) == (4, [4, 4])
    assert found.stats.updates.tolist() == [[4] * 7] * 2
    assert not found.converged.any()


@pytest.mark.parametrize("steps", [1, 2, 5])
@torch.no_grad()
def test_decoding_is_the_whole_sequence_however_it_is_cut(model, steps):
    x, call = embedded(), {"sweep": dq.Lockstep(steps), "solver": dq.Naive(), "return_cache": True}
    whole, values, cache = model(x, **call), [], None
    for part in x.split([3, 1, 2, 1], dim=1):
        output = model(part, cache=cache, **call)
        values, cache = [*values, output.value], output.cache
    assert torch.allclose(torch.cat(values, dim=1), whole.value, rtol=0, atol=1e-12)
    assert isinstance(cache, LockstepCache)
    assert len(cache.steps) == steps
    for ours, theirs in zip(cache.tensors(), whole.cache.tensors(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


@torch.no_grad()
def test_other_sweeps_need_a_fixed_point_for_that(model):
    """What Lockstep is for: with one cache for all iterations, few of them depend on how the tokens are cut."""
    x, call = embedded(), {"solver": dq.Naive(), "stop": dq.Stop.exactly(2)}
    whole = model(x, **call).value
    first = model(x[:, :4], return_cache=True, **call)
    assert not torch.allclose(model(x[:, 4:], cache=first.cache, **call).value, whole[:, 4:], atol=1e-6)


@torch.no_grad()
def test_rows_and_padding(model):
    x, mask = embedded(), torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = False
    call = {"sweep": dq.Lockstep(3), "return_cache": True}
    padded, alone = model(x, mask=mask, **call), model(x[1:, 3:], **call)
    assert torch.allclose(padded.value[1:, 3:], alone.value, rtol=0, atol=1e-12)
    more = embedded(length=2)
    after = model(more[1:], cache=dq.take(padded.cache, torch.tensor([1])), **call)
    assert torch.allclose(after.value, model(more[1:], cache=alone.cache, **call).value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("gradient", [dq.Unrolled(), dq.Unrolled(checkpoint=True), dq.Unrolled(last=2), dq.Phantom(2)])
def test_gradients_are_those_of_as_many_simultaneous_iterations(gradient):
    found, towards = [], torch.randn(2, 7, 8, dtype=torch.float64)
    for how in ({"sweep": dq.Lockstep(4)}, {"stop": dq.Stop.exactly(4)}):
        model = dq.ImplicitModel(contractive_llama(), dq.SolveConfig(gradient=gradient, solver=dq.Naive()))
        (model(embedded(), **how).value * towards).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(one, two, rtol=1e-9, atol=1e-12) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("sweep", [dq.Lockstep(2), dq.Simultaneous()], ids=str)
@pytest.mark.parametrize("solver", [dq.Naive(), dq.Relaxed(0.6), dq.Adaptive(), dq.Coupled(0.8)], ids=str)
def test_the_start_gets_no_gradient_once_iterations_are_cut_off(sweep, solver):
    start = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    how = {"stop": dq.Stop.exactly(2), "gradient": dq.Unrolled(last=1), "solver": solver}
    model = dq.ImplicitModel(contractive_llama())
    model(embedded(), start=start, sweep=sweep, **how).value.sum().backward()
    assert start.grad is None


@torch.no_grad()
def test_callbacks_count_the_iterations(model):
    seen = []
    model(embedded(), sweep=dq.Lockstep(3), callback=seen.append)
    assert [(one.iteration, one.max_steps, one.active_rows) for one in seen] == [(1, 3, 2), (2, 3, 2), (3, 3, 2)]
    assert seen[0].residual.shape == (2,)


@torch.no_grad()
def test_a_row_that_diverges_is_told():
    model = dq.ImplicitModel(affine()).eval()
    model.backbone.A.data *= 1e300
    assert (model(embedded(), sweep=dq.Lockstep(5)).status == dq.Status.DIVERGED).all()


def test_it_does_not_warn():
    model = dq.ImplicitModel(contractive_llama()).eval()
    with torch.no_grad():
        model(embedded(), sweep=dq.Lockstep(1))  # warnings are errors in tests


@torch.no_grad()
def test_a_call_that_goes_on_is_explained():
    model, x = dq.ImplicitModel(contractive_llama()).eval(), embedded()
    call = {"sweep": dq.Lockstep(3), "solver": dq.Naive(), "return_cache": True}
    output = model(x[:, 4:], cache=model(x[:, :4], **call).cache, **call)
    explanation = output.explain()
    assert explanation.causes == ("no tolerance", "no tolerance")
    assert explanation.findings["no tolerance"].startswith("3 iterations, whatever the residual: it is ")
    with pytest.raises(dq.ConvergenceError, match="without a tolerance no row can converge: give stop="):
        output.raise_if_failed()


def test_rows_fail_only_by_diverging(model):
    """It has no tolerance, so no row converges, and ``throw`` is for those that diverge."""
    x = embedded()
    assert not bool(model(x, sweep=dq.Lockstep(2), throw=True).converged.any())
    x[1, 0, 0] = torch.nan
    with pytest.raises(dq.ConvergenceError, match="diverged: rows 1 "):
        model(x, sweep=dq.Lockstep(2), throw=True)


def test_what_does_not_fit_is_refused(model):
    x = embedded()
    with torch.no_grad():
        stepped = model(x, sweep=dq.Lockstep(3), return_cache=True).cache
        single = model(x, return_cache=True).cache
        for sweep, cache in ((dq.Lockstep(2), stepped), (dq.Simultaneous(), stepped), (dq.Lockstep(2), single)):
            with pytest.raises(ValueError, match=r"cache was made by .*, but this call solves by"):
                model(x, sweep=sweep, cache=cache)
        with pytest.raises(ValueError, match="trace=True needs the Simultaneous sweep"):
            model(x, sweep=dq.Lockstep(2), trace=True)
    for bad in (0, -1, 1.5, "3", True):
        with pytest.raises((TypeError, ValueError), match=r"Lockstep\.steps"):
            dq.Lockstep(bad)
