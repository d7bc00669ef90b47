"""Prelude, core, coda: its parts one after the other, however the tokens are cut, padded, cached or
generated.
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

import deqseq as dq
from deqseq.diagnostics import check_duality, model_spectral_radius
from deqseq.training import bounded

pytestmark = pytest.mark.usefixtures(
    "unchecked"
)  # the docstrings' examples run with the checks of shapes

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=500))


def recurrent(kind="llama", injection="concat", norm=None) -> dq.RecurrentDepth:
    """A core that contracts: its layers see the input much more than the state."""
    make = {"llama": contractive_llama, "mamba2": contractive_mamba2}[kind]
    torch.manual_seed(3)
    parts = {
        "concat": dq.ConcatInjection(8),
        "add": dq.AddInjection(),
        "decay": dq.DecayInjection(8, decay=0.3),
    }
    layers = make(
        n_layers=1, injection=injection == "projected", weight_norm=injection == "projected"
    )
    core = layers if injection == "projected" else dq.Injected(layers, parts[injection])
    if injection == "concat":
        core.injection.weight.data[:, :8].normal_(std=0.05)
    first, last = (dq.ExplicitModel(make(injection=False, n_layers=n)) for n in (1, 2))
    return dq.RecurrentDepth(first, dq.ImplicitModel(core, TIGHT), last, norm).double()


MODELS = [("llama", "concat"), ("llama", "projected"), ("mamba2", "decay")]


@pytest.fixture(params=MODELS, ids="-".join, scope="module")
def model(request):
    return recurrent(*request.param).eval()


@pytest.fixture(scope="module")
def lm(model):
    torch.manual_seed(1)
    return dq.CausalLM(13, model, embedding_std=1.0).double().eval()


def near(found, wanted, atol=1e-8):
    return torch.allclose(found, wanted, rtol=0, atol=atol)


@torch.no_grad()
def test_it_is_its_parts_one_after_the_other():
    norm = dq.layers.RMSNorm(8).double()
    norm.weight.data.uniform_(0.5, 2)
    model, x = recurrent(norm=norm), randn(2, 6, 8)
    output = model(x, throw=True)
    first = model.prelude(x).value
    z = torch.zeros_like(x)
    backbone = model.core.backbone
    for _ in range(300):
        z, _ = backbone(z, backbone.prepare(first))
    assert near(output.value, model.coda(norm(z)).value)
    assert output.stats.iterations.shape == (2, 6)


@pytest.mark.parametrize(
    ("gradient", "exact"),
    [(dq.Implicit(stop=dq.Stop(rtol=1e-12, max_steps=500)), True), (dq.OneStep(), False)],
)
def test_the_implicit_gradient_is_that_of_the_unrolled_solve(gradient, exact):
    found = []
    for one in (dq.Unrolled(), gradient):
        model = recurrent()
        model.core.solve = replace(TIGHT, gradient=one, solver=dq.Naive())
        (model(randn(2, 5, 8)).value * randn(2, 5, 8, seed=1)).sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    same = [near(found[1][name], grad, 1e-7) for name, grad in found[0].items()]
    assert all(same) == exact
    assert {name.partition(".")[0] for name in found[0]} == {"prelude", "core", "coda"}


def test_diagnostics_take_the_core(lm):
    ids = torch.randint(0, 13, (2, 6), generator=torch.Generator().manual_seed(0))
    assert check_duality(lm, ids).worst < 1e-7
    assert bool((model_spectral_radius(lm, ids).radius < 1).all())
    assert lm(ids).explain().causes == ("converged", "converged")


def test_phases_and_compile_reach_the_core():
    model = recurrent()
    bounded(3, 1, until=None).apply(model)
    assert model.core.solve.stop.max_steps == 3
    x = randn(1, 4, 8)
    with torch.no_grad():
        before = model.eval()(x).value
        model.compile(backend="eager")
        assert near(model(x).value, before, 1e-12)


def test_a_core_of_fixed_depth_takes_nothing_for_a_solve():
    model = recurrent_depth(dq.ExplicitModel(dq.Looped(injected_llama(), 3, start="zero")))
    for option in ({"throw": True}, {"stop": dq.Stop()}):
        with pytest.raises(TypeError, match=f"nothing to solve: it takes no {next(iter(option))}"):
            model(randn(1, 2, 8), **option)


def test_parts_that_do_not_fit_are_refused():
    core, part = dq.ImplicitModel(dq.Affine(8)), dq.ExplicitModel(dq.Affine(8))
    with pytest.raises(TypeError, match=r"prelude must be an ExplicitModel.*dq\.ExplicitModel"):
        dq.RecurrentDepth(dq.Affine(8), core, part)
    with pytest.raises(ValueError, match=r"same d_model.*\[8, 8, 4\]"):
        dq.RecurrentDepth(part, core, dq.ExplicitModel(dq.Affine(4)))
    model = dq.RecurrentDepth(part, core, part, torch.nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"RecurrentDepth\.norm cannot take"):
        model(torch.ones(1, 2, 8))
    model = dq.RecurrentDepth(part, core, part)
    with pytest.raises(TypeError, match="cache must be a JointCache"):
        model(torch.ones(1, 2, 8), cache=core(torch.ones(1, 2, 8), return_cache=True).cache)
    with pytest.raises(dq.ConvergenceError):
        model(torch.ones(1, 2, 8), stop=dq.Stop.exactly(1), throw=True)
