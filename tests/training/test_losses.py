"""The size of a Jacobian and the terminal residual: their formulas, finite differences, the solver's own numbers."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded, randn

from deqseq.testing.problems import seeded
from deqseq.training import jacobian_regularisation, terminal_residual

MASK = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
every_mask = pytest.mark.parametrize("mask", [None, MASK], ids=["all", "padded"])
every_backbone = pytest.mark.parametrize(
    "make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"]
)


def test_the_size_of_a_jacobian_is_the_dense_formula_for_the_same_draws():
    W, z, draws = randn(6, 6, seed=1), randn(3, 6, seed=2), seeded(3)
    ours = jacobian_regularisation(lambda z: torch.tanh(z @ W.T), z, samples=5, generator=seeded(3))
    jacobians = (1 - torch.tanh(z @ W.T) ** 2)[:, :, None] * W
    sizes = [torch.einsum("bij,bi->bj", jacobians, torch.randn(3, 6, generator=draws).double()) for _ in range(5)]
    assert ours.item() == pytest.approx(torch.stack(sizes).square().sum(dim=2).mean().item() / 6, rel=1e-12)


@every_mask
def test_the_terminal_residual_is_the_mean_over_real_tokens(mask):
    W, z = randn(4, 4, seed=1), randn(2, 7, 4, seed=2)
    terms = []
    for row in range(2):
        for token in range(7):
            if mask is None or mask[row, token]:
                fz = torch.tanh(z[row, token] @ W)
                terms.append((fz - z[row, token]).square().sum().sqrt() / fz.square().sum().sqrt())
    ours = terminal_residual(lambda z: torch.tanh(z @ W), z, mask=mask)
    assert ours.item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-12)


LOSSES = {
    "jacobian": lambda f, z: jacobian_regularisation(f, z, samples=2, generator=seeded(0)),
    "residual": terminal_residual,
    "padded residual": lambda f, z: terminal_residual(f, z, mask=MASK),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients_by_finite_differences(loss):
    W, z = randn(3, 3, seed=1).requires_grad_(), randn(2, 7, 3, seed=2)
    assert torch.autograd.gradcheck(lambda W: loss(lambda z: torch.tanh(z @ W), z), W)
    if loss is not LOSSES["jacobian"]:  # of which z is cut off
        both = (W, z.clone().requires_grad_())
        assert torch.autograd.gradcheck(lambda W, z: loss(lambda z: torch.tanh(z @ W), z), both)
        assert torch.autograd.gradgradcheck(lambda W, z: loss(lambda z: torch.tanh(z @ W), z), both)
    with torch.no_grad():
        assert not loss(lambda z: torch.tanh(z @ W), z).requires_grad


def test_a_fixed_point_and_padding_give_no_gradient():
    a, z = torch.tensor(0.5, requires_grad=True), torch.tensor([[[2.0], [torch.finfo().max]]], requires_grad=True)
    value = terminal_residual(lambda z: a * z + 1, z, mask=torch.tensor([[True, False]]))
    value.backward()
    assert (value.item(), a.grad.item(), z.grad.abs().max().item()) == (0, 0, 0)


@pytest.mark.parametrize("weight", [None, torch.ones(3, requires_grad=True)], ids=["constant", "parameter"])
def test_a_map_that_ignores_its_state(weight):
    f = torch.ones_like if weight is None else lambda z: weight.expand_as(z)
    assert jacobian_regularisation(f, torch.ones(2, 3)).item() == 0


@every_backbone
def test_the_size_of_a_jacobian_reaches_the_parameters_of_a_backbone(make):
    """By finite differences; several chunks of a scan included."""
    backbone, x, z = make(), embedded(), randn(2, 7, 8, seed=5)

    def penalty(*_):
        inputs = backbone.prepare(x)
        return jacobian_regularisation(lambda z: backbone(z, inputs)[0], z, generator=seeded(0))

    parameters = [p for name, p in backbone.named_parameters() if "injection" not in name]
    assert torch.autograd.gradcheck(penalty, parameters, fast_mode=True, rtol=1e-4)
    assert penalty().item() > 1e-6
