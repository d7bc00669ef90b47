"""Our implicit models compute what the paper's public reference code computes, from the same weights."""

import pytest
import reference_model
import torch

import deqseq as dq

TENSORS = {name: reference_model.load(name) for name in reference_model.NAMES}


@pytest.fixture(scope="module", params=reference_model.NAMES)
def reference(request) -> tuple[dq.CausalLM, dict[str, torch.Tensor]]:
    tensors = TENSORS[request.param]
    return reference_model.build(request.param, tensors), tensors


@pytest.mark.parametrize("solver", [dq.Relaxed(0.8), dq.Naive(), dq.Anderson()], ids=lambda s: type(s).__name__)
def test_logits_at_the_fixed_point(reference, solver):
    lm, tensors = reference
    with torch.no_grad():
        output = lm(tensors["input_ids"], solver=solver, stop=dq.Stop(rtol=1e-13, max_steps=600))
    assert (output.status == dq.Status.CONVERGED).all()
    assert (output.logits - tensors["eval_logits"]).abs().max() < 1e-9


@pytest.mark.parametrize("sweep", [dq.Sliding(1), dq.Sliding(100)], ids=str)  # the others: below
def test_every_sweep_finds_the_same_fixed_point(reference, sweep):
    lm, tensors = reference
    with torch.no_grad():
        output = lm(tensors["input_ids"], sweep=sweep, stop=dq.Stop(rtol=1e-12, max_steps=600))
    assert (output.status == dq.Status.CONVERGED).all()
    assert not output.stats.forced.any()
    assert (output.logits - tensors["eval_logits"]).abs().max() < 1e-9


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Chunked(7), dq.Sequential(), dq.Sliding(8)], ids=str)
def test_phantom_gradient_of_every_parameter(reference, sweep):
    lm, tensors = reference
    assert lm.model.solve.gradient == dq.Phantom(steps=4, damping=0.8)
    lm.zero_grad()
    stop = dq.Stop(rtol=1e-13, max_steps=600)
    output = lm(tensors["input_ids"], labels=tensors["input_ids"], sweep=sweep, stop=stop)
    assert output.converged.all()
    assert output.loss.item() == pytest.approx(tensors["train_loss"].item(), rel=1e-6)
    assert (output.logits - tensors["train_logits"]).abs().max() < 1e-9
    output.loss.backward()
    name = "mamba2" if isinstance(lm.model.backbone, dq.Mamba2) else "llama"
    expected = reference_model.gradients(name, tensors)
    gradients = {name: p.grad for name, p in lm.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, f"{name}: {error:.1e}"
