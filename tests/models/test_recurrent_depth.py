"""Prelude, core, coda: one after the other, with gradients, and what is refused.

Sweeps, padding, caches and generation of such models are tested with those of the others.
"""

from dataclasses import replace

import pytest
import torch
from small_models import (
    contractive_llama,
    contractive_mamba2,
    injected_llama,
    randn,
    recurrent_depth,
)
from torch.testing import assert_close

import deqseq as dq
from deqseq.diagnostics import check_duality, model_spectral_radius
from deqseq.training import bounded

# the docstrings' examples run with the checks of shapes
pytestmark = pytest.mark.usefixtures("unchecked")

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=500))


def llama_with_concat_injection():
    core = dq.Injected(contractive_llama(n_layers=1, injection=False), dq.ConcatInjection(8))
    core.injection.weight.data[:, :8].normal_(std=0.05)  # the state counts little
    return core.double()


def mamba2_with_decay_injection():
    layers = contractive_mamba2(n_layers=1, injection=False)
    return dq.Injected(layers, dq.DecayInjection(8, decay=0.3)).double()


CORES = pytest.mark.parametrize(
    "make",
    [llama_with_concat_injection, mamba2_with_decay_injection, contractive_llama],
)


def recurrent(make=llama_with_concat_injection, norm=None):
    return recurrent_depth(dq.ImplicitModel(make(), TIGHT), norm)


@torch.no_grad()
def test_it_is_its_parts_one_after_the_other():
    norm = dq.layers.RMSNorm(8).double()
    norm.weight.data.uniform_(0.5, 2)
    model = recurrent(norm=norm)
    x = randn(2, 6, 8)
    output = model(x, throw=True)
    z = torch.zeros_like(x)
    backbone = model.core.backbone
    inputs = backbone.prepare(model.prelude(x).value)
    for _ in range(300):
        z, _ = backbone(z, inputs)
    assert_close(output.value, model.coda(norm(z)).value, rtol=0, atol=1e-8)
    assert output.stats.iterations.shape == (2, 6)


def gradients(make, estimator):
    model = recurrent(make)
    model.core.solve = replace(TIGHT, gradient=estimator, solver=dq.Naive())
    value = model(randn(2, 5, 8)).value
    (value * randn(2, 5, 8, seed=1)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@CORES
def test_the_implicit_gradient_is_that_of_the_unrolled_solve(make):
    unrolled = gradients(make, dq.Unrolled())
    exact = gradients(make, dq.Implicit(stop=dq.Stop(rtol=1e-12, max_steps=500)))
    assert_close(exact, unrolled, rtol=0, atol=1e-7)
    assert {name.partition(".")[0] for name in unrolled} == {"prelude", "core", "coda"}
    with pytest.raises(AssertionError, match="not close"):
        assert_close(gradients(make, dq.OneStep()), unrolled, rtol=0, atol=1e-7)


@CORES
def test_diagnostics_take_the_core(make):
    lm = dq.CausalLM(13, recurrent(make), embedding_std=1.0).double().eval()
    ids = torch.randint(0, 13, (2, 6))
    assert check_duality(lm, ids).worst < 1e-7
    assert (model_spectral_radius(lm, ids).radius < 1).all()
    assert lm(ids).explain().causes == ("converged", "converged")


@torch.no_grad()
def test_phases_and_compile_reach_the_core():
    model = recurrent()
    x = randn(1, 4, 8)
    bounded(3, 1, until=None).apply(model)
    assert model.core.solve.stop.max_steps == 3
    before = model.eval()(x).value
    model.compile(backend="eager")
    assert_close(model(x).value, before, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "value"), [("throw", True), ("stop", dq.Stop())])
def test_a_core_of_fixed_depth_takes_nothing_for_a_solve(name, value):
    model = recurrent_depth(dq.ExplicitModel(dq.Looped(injected_llama(), 3, start="zero")))
    with pytest.raises(TypeError, match=f"nothing to solve: it takes no {name}"):
        model(randn(1, 2, 8), **{name: value})


def test_parts_that_do_not_fit_are_refused():
    core = dq.ImplicitModel(dq.Affine(8))
    part = dq.ExplicitModel(dq.Affine(8))
    x = torch.ones(1, 2, 8)
    with pytest.raises(TypeError, match=r"prelude must be an ExplicitModel, got"):
        dq.RecurrentDepth(dq.Affine(8), core, part)
    with pytest.raises(ValueError, match=r"same d_model.*\[8, 8, 4\]"):
        dq.RecurrentDepth(part, core, dq.ExplicitModel(dq.Affine(4)))
    with pytest.raises(ValueError, match=r"RecurrentDepth\.norm cannot take"):
        dq.RecurrentDepth(part, core, part, torch.nn.LayerNorm(4))(x)
    model = dq.RecurrentDepth(part, core, part)
    with pytest.raises(TypeError, match="cache must be a JointCache"):
        model(x, cache=core(x, return_cache=True).cache)
    with pytest.raises(dq.ConvergenceError):
        model(x, stop=dq.Stop.exactly(1), throw=True)
