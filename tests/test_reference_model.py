"""Our implicit Mamba2 computes what the paper's public reference code computes, from the same weights."""

import pytest
import reference_model
import torch

import deqseq as dq

TENSORS = reference_model.load()


@pytest.fixture(scope="module")
def lm() -> dq.CausalLM:
    return reference_model.build(TENSORS)


@pytest.mark.parametrize("solver", [dq.Relaxed(0.8), dq.Naive(), dq.Anderson()], ids=lambda s: type(s).__name__)
def test_logits_at_the_fixed_point(lm, solver):
    with torch.no_grad():
        output = lm(TENSORS["input_ids"], solver=solver, stop=dq.Stop(rtol=1e-13, max_steps=600))
    assert (output.status == dq.Status.CONVERGED).all()
    assert (output.logits - TENSORS["eval_logits"]).abs().max() < 1e-9


@pytest.mark.parametrize("sweep", [dq.Chunked(7), dq.Sequential()], ids=str)
def test_every_sweep_finds_the_same_fixed_point(lm, sweep):
    with torch.no_grad():
        output = lm(TENSORS["input_ids"], sweep=sweep, stop=dq.Stop(rtol=1e-12, max_steps=600))
    assert (output.status == dq.Status.CONVERGED).all()
    assert (output.logits - TENSORS["eval_logits"]).abs().max() < 1e-9


def test_phantom_gradient_of_every_parameter(lm):
    lm.zero_grad()
    output = lm(TENSORS["input_ids"], labels=TENSORS["input_ids"])
    assert output.loss.item() == pytest.approx(TENSORS["train_loss"].item(), rel=1e-6)
    assert (output.logits - TENSORS["train_logits"]).abs().max() < 1e-9
    output.loss.backward()
    expected = reference_model.named(TENSORS, "grad/")
    gradients = {name: p.grad for name, p in lm.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, f"{name}: {error:.1e}"
