"""Everything that moves to a GPU computes there what it computes on a CPU; `.ci/gpu` runs this.

``DEVICE=pretend``, as in `.ci/run`, takes a device that computes on the CPU and rounds, refuses and
waits as a GPU does.

Models are float64 throughout, and Llama's rotary tables with them (``float32_rotary=False``):
cosines of two devices differ in the last bit, in float32 by a thousand times the tolerance.
"""

import copy
import os
from functools import partial

import pytest
import torch
from problems import SOLVERS
from small_models import contractive_llama, contractive_mamba2, embedded, language_model
from transformers import AutoModelForCausalLM

import deqseq as dq
import deqseq.solvers.anderson
from deqseq.diagnostics import check_duality, model_spectral_radius, spectral_radius
from deqseq.integrations.huggingface import from_causal_lm
from deqseq.layers import apply_weight_norm
from deqseq.training import Curriculum, bounded, free, parameter_groups

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]  # once a process
DEVICE = os.environ.get("DEVICE", "cuda")
TIGHT = dq.Stop(rtol=1e-10, max_steps=500)
SWEEPS = (dq.Simultaneous(), dq.Chunked(3), dq.Sequential(), dq.Sliding(3))
GRADIENTS = (dq.OneStep(), dq.Phantom(3), dq.Implicit(stop=TIGHT), dq.Unrolled())
MASK = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])
float64_llama = partial(contractive_llama, float32_rotary=False)
each_backbone = pytest.mark.parametrize(
    "backbone", [contractive_mamba2, float64_llama], ids=["mamba2", "llama"]
)


def moved(module):
    return copy.deepcopy(module).to(DEVICE)


def same(theirs, ours, rtol=1e-7, atol=1e-9):
    assert ours.device.type == DEVICE
    torch.testing.assert_close(ours.cpu(), theirs, rtol=rtol, atol=atol)


def test_tensors_of_two_places_are_refused():
    """Otherwise the tests below would show less than they seem to."""
    there = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(2)
    with pytest.raises(TypeError, match="can't convert"):
        there.numpy()


def test_weight_norm_in_float64_is_exact_where_the_kernel_of_torch_rounds_to_float32():
    """If the kernel is exact one day, ``WeightNorm`` does not need an expression of its own."""
    layer = torch.nn.Linear(64, 64).double()
    apply_weight_norm(layer)
    with torch.no_grad():
        layer.parametrizations["weight"].original1.mul_(1.7)
    theirs, ours = layer.parametrizations["weight"], moved(layer).parametrizations["weight"]
    same(theirs(), ours(), rtol=1e-15, atol=0)
    for expected, gradient in zip(
        torch.autograd.grad(theirs().sin().sum(), theirs.parameters()),
        torch.autograd.grad(ours().sin().sum(), ours.parameters()),
        strict=True,
    ):
        same(expected, gradient, rtol=1e-12, atol=1e-14)
    kernel = torch._weight_norm(ours.original1, ours.original0, 0)
    error = (kernel.cpu() / theirs() - 1).abs().max()
    assert 1e-9 < error < 1e-6


@each_backbone
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_a_solve_of_padded_rows(backbone, sweep, solver):
    model = dq.ImplicitModel(backbone(), dq.SolveConfig(solver, TIGHT, sweep=sweep)).eval()
    with torch.no_grad():
        theirs = model(embedded(), mask=MASK, return_cache=True)
        ours = moved(model)(embedded().to(DEVICE), mask=MASK.to(DEVICE), return_cache=True)
        further = embedded()[:, :2]
        going_on = (
            model(further, cache=theirs.cache),
            moved(model)(further.to(DEVICE), cache=ours.cache),
        )
    assert bool(theirs.converged.all())
    same(theirs.value, ours.value)
    same(going_on[0].value, going_on[1].value)
    same(theirs.status, ours.status)
    assert (
        ours.stats.updates.cpu() - theirs.stats.updates
    ).abs().max() <= 1  # the last digit may decide


@each_backbone
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_the_explanation_of_a_solve(backbone, sweep):
    model = moved(dq.ImplicitModel(backbone(), dq.SolveConfig(stop=TIGHT, sweep=sweep))).eval()
    with torch.no_grad():
        assert str(model(embedded().to(DEVICE), mask=MASK.to(DEVICE)).explain()).startswith(
            "all 2 rows: converged"
        )


@each_backbone
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS, ids=str)
def test_gradients(backbone, sweep, gradient):
    config = dq.SolveConfig(dq.Relaxed(0.8), dq.Stop(rtol=1e-10, max_steps=60), gradient, sweep)
    if isinstance(gradient, dq.Unrolled):
        config = dq.SolveConfig(dq.Relaxed(0.8), dq.Stop.exactly(6), gradient)
    results = []
    for model in (lambda one: (one, moved(one)))(dq.ImplicitModel(backbone(), config).train()):
        x = embedded().to(next(model.parameters()).device).requires_grad_()
        loss = model(x, mask=MASK.to(x.device)).value.square().sum()
        results.append(torch.autograd.grad(loss, [x, *model.parameters()]))
    for theirs, ours in zip(*results, strict=True):
        same(theirs, ours, atol=1e-8)


@each_backbone
@pytest.mark.parametrize("window", [1, 4])
def test_generation(backbone, window):
    lm = language_model(backbone(), stop=TIGHT).eval()
    prompt, how = torch.arange(14).view(2, 7) % 11, {"max_new_tokens": 9, "window": window}
    theirs = lm.generate(prompt, mask=MASK, **how)
    ours = moved(lm).generate(prompt.to(DEVICE), mask=MASK.to(DEVICE), **how)
    same(theirs.tokens, ours.tokens)
    assert bool(ours.converged.all())
    sampled = moved(lm).generate(prompt.to(DEVICE), temperature=1.0, seed=3, **how)
    same(
        moved(lm).generate(prompt.to(DEVICE), temperature=1.0, seed=3, **how).tokens.cpu(),
        sampled.tokens,
    )


@each_backbone
def test_training_by_a_curriculum(backbone):
    curriculum, losses = Curriculum((bounded(4, 1, until=0.5), free(16, 2))), []
    for lm in (lambda one: (one, moved(one)))(language_model(backbone()).train()):
        optimizer, ids = (
            torch.optim.AdamW(parameter_groups(lm, 0.1), lr=1e-3),
            torch.arange(14).view(2, 7) % 11,
        )
        ids, mine = ids.to(next(lm.parameters()).device), []
        for step in range(6):
            curriculum.at(step / 6).apply(lm)
            loss = lm(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mine.append(loss.item())
        losses.append(mine)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@each_backbone
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backbone, dtype):
    lm = language_model(backbone(), stop=dq.Stop(rtol=2e-2, max_steps=64)).float().eval()
    ids = torch.arange(14).view(2, 7) % 11
    with torch.no_grad():
        theirs, whole = lm(ids), moved(lm).to(dtype)(ids.to(DEVICE))
        with torch.autocast(DEVICE, dtype=dtype):
            mixed = moved(lm)(ids.to(DEVICE))
    for ours in (whole, mixed):
        assert bool(ours.converged.all()), str(ours.explain())
        assert (
            ours.logits.cpu().float() - theirs.logits
        ).abs().max() < 0.1 * theirs.logits.abs().max()


@each_backbone
def test_transformers_models(backbone, tmp_path):
    lm = language_model(backbone(), stop=TIGHT)
    from_causal_lm(lm, eos_token_id=0, bos_token_id=0).eval().save_pretrained(tmp_path)
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where)
        for where in ("cpu", DEVICE)
    )
    ids, how = (
        torch.arange(1, 13).view(2, 6) % 11,
        {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0},
    )
    same(theirs.generate(ids, **how), ours.generate(ids.to(DEVICE), **how))
    same(
        theirs.generate(ids, num_beams=2, **how), ours.generate(ids.to(DEVICE), num_beams=2, **how)
    )
    ours(ids.to(DEVICE), labels=ids.to(DEVICE)).loss.backward()


def test_two_parts_around_a_core():
    first, last = (dq.ExplicitModel(float64_llama(n_layers=1, injection=False)) for _ in range(2))
    core = dq.ImplicitModel(float64_llama(n_layers=1), dq.SolveConfig(stop=TIGHT))
    model = dq.RecurrentDepth(first, core, last).double().eval()
    with torch.no_grad():
        same(model(embedded()).value, moved(model)(embedded().to(DEVICE)).value)


def test_a_map_of_ones_own_and_its_stability():
    x = embedded()
    solution = dq.fixed_point(lambda z: torch.tanh(z / 2 + 1), x.to(DEVICE))
    assert solution.value.device.type == DEVICE and bool(solution.converged.all())
    radius = spectral_radius(lambda z: torch.tanh(z / 2 + 1), solution.value)
    assert bool((radius.per_row < 0.5).all())


@each_backbone
def test_diagnostics_of_a_model(backbone):
    lm, ids = language_model(backbone(), stop=TIGHT).eval(), torch.arange(14).view(2, 7) % 11
    theirs, ours = (
        model_spectral_radius(one, ids.to(where))
        for one, where in ((lm, "cpu"), (moved(lm), DEVICE))
    )
    torch.testing.assert_close(ours.radius, theirs.radius, rtol=1e-6, atol=1e-8)
    assert check_duality(moved(lm), ids.to(DEVICE)).worst < 1e-7


@pytest.mark.skipif(DEVICE != "pretend", reason="CUDA has float64")
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_anderson_on_a_device_without_float64(sweep, monkeypatch):
    """Apple's GPUs are such devices: the small systems are solved on the CPU."""
    import pretend

    monkeypatch.setattr(deqseq.solvers.anderson, "WITHOUT_FLOAT64", {DEVICE})
    config = dq.SolveConfig(dq.Anderson(), dq.Stop(rtol=1e-5, max_steps=200), sweep=sweep)
    model, x = dq.ImplicitModel(contractive_llama(), config).float().eval(), embedded().float()
    with torch.no_grad():
        theirs = model(x, mask=MASK)
        with pretend.without_float64():
            ours = moved(model)(x.to(DEVICE), mask=MASK.to(DEVICE))
    same(theirs.value, ours.value, rtol=1e-4, atol=1e-5)
    same(theirs.converged, ours.converged)
