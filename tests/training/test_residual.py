"""The terminal residual against its formula, finite differences and the solver's own numbers."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded, randn

import deqseq as dq
from deqseq.training import terminal_residual

MASK = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "padded"])
def test_is_the_mean_over_real_tokens(mask):
    W, z = randn(4, 4, seed=1), randn(2, 7, 4, seed=2)
    terms = []
    for row in range(2):
        for token in range(7):
            if mask is None or mask[row, token]:
                fz = torch.tanh(z[row, token] @ W)
                terms.append((fz - z[row, token]).square().sum().sqrt() / fz.square().sum().sqrt())
    ours = terminal_residual(lambda z: torch.tanh(z @ W), z, mask=mask)
    assert ours.item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-12)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "padded"])
def test_gradients_by_finite_differences(mask):
    W, z = randn(3, 3, seed=1).requires_grad_(), randn(2, 7, 3, seed=2).requires_grad_()

    def loss(W, z):
        return terminal_residual(lambda z: torch.tanh(z @ W), z, mask=mask)

    assert torch.autograd.gradcheck(loss, (W, z))
    assert torch.autograd.gradgradcheck(loss, (W, z))
    loss(W, z.detach()).backward()
    assert (W.grad.abs().max() > 0, z.grad) == (True, None)
    with torch.no_grad():
        assert not loss(W, z).requires_grad


def test_a_fixed_point_and_padding_give_no_gradient():
    a, z = torch.tensor(0.5, requires_grad=True), torch.tensor([[[2.0], [torch.finfo().max]]], requires_grad=True)
    value = terminal_residual(lambda z: a * z + 1, z, mask=torch.tensor([[True, False]]))
    value.backward()
    assert (value.item(), a.grad.item(), z.grad.abs().max().item()) == (0, 0, 0)


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"])
def test_of_a_padded_model_is_the_residual_that_its_next_iteration_reports(make):
    model = dq.ImplicitModel(make(), dq.SolveConfig(dq.Naive(), dq.Stop.exactly(3), dq.Unrolled(last=2)))
    x = embedded() * MASK[..., None]
    z = model(x, mask=MASK).value
    inputs = model.backbone.prepare(x, None, MASK)
    ours = terminal_residual(lambda z: model.backbone(z, inputs)[0], z, mask=MASK)
    with torch.no_grad():
        more = model(x, mask=MASK, stop=dq.Stop(rtol=0.0, max_steps=4)).stats.residual
    assert ours.item() == pytest.approx(more[MASK].mean().item(), rel=1e-9)
    ours.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert any(parameter.grad.abs().max() > 0 for parameter in model.parameters())
