"""The size of a Jacobian against the dense one and finite differences."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded

from deqseq.testing.problems import seeded
from deqseq.training import jacobian_regularisation


def test_is_the_dense_formula_for_the_same_draws():
    W = torch.randn(6, 6, generator=seeded(1), dtype=torch.float64)
    z = torch.randn(3, 6, generator=seeded(2), dtype=torch.float64)
    ours = jacobian_regularisation(lambda z: torch.tanh(z @ W.T), z, samples=5, generator=seeded(3))
    draws, jacobians = seeded(3), (1 - torch.tanh(z @ W.T) ** 2)[:, :, None] * W
    sizes = [torch.einsum("bij,bi->bj", jacobians, torch.randn(3, 6, generator=draws).double()) for _ in range(5)]
    assert ours.item() == pytest.approx(torch.stack(sizes).square().sum(dim=2).mean().item() / 6, rel=1e-12)


def test_has_a_gradient_by_finite_differences():
    z = torch.randn(2, 3, generator=seeded(2), dtype=torch.float64)
    W = torch.randn(3, 3, generator=seeded(1), dtype=torch.float64, requires_grad=True)

    def penalty(W):
        return jacobian_regularisation(lambda z: torch.tanh(z @ W), z, samples=2, generator=seeded(0))

    assert torch.autograd.gradcheck(penalty, W)
    with torch.no_grad():
        assert not penalty(W).requires_grad


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"])
def test_reaches_the_parameters_of_a_backbone(make):
    """By finite differences; several chunks of a scan included."""
    backbone, x = make(), embedded()
    z = torch.randn(2, 7, 8, generator=seeded(5), dtype=torch.float64)

    def penalty(*_):
        inputs = backbone.prepare(x)
        return jacobian_regularisation(lambda z: backbone(z, inputs)[0], z, generator=seeded(0))

    parameters = [p for name, p in backbone.named_parameters() if "injection" not in name]
    assert torch.autograd.gradcheck(penalty, parameters, fast_mode=True, rtol=1e-4)
    assert penalty().item() > 1e-6


def test_a_map_that_ignores_its_state():
    assert jacobian_regularisation(lambda z: torch.ones_like(z), torch.ones(2, 3)).item() == 0
    weight = torch.ones(3, requires_grad=True)
    assert jacobian_regularisation(lambda z: weight.expand_as(z), torch.ones(2, 3)).item() == 0
