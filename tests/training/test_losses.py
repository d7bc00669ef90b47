"""The size of a Jacobian: its formula, and finite differences."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded, randn

from deqseq.testing.problems import seeded
from deqseq.training import jacobian_regularisation


def test_the_size_of_a_jacobian_is_the_dense_formula_for_the_same_draws():
    W = randn(6, 6, seed=1)
    z = randn(3, 6, seed=2)
    draws = seeded(3)
    ours = jacobian_regularisation(lambda z: torch.tanh(z @ W.T), z, samples=5, generator=seeded(3))
    jacobians = (1 - torch.tanh(z @ W.T) ** 2)[:, :, None] * W
    v = torch.stack([torch.randn(3, 6, generator=draws) for _ in range(5)]).double()
    products = torch.einsum("bij,sbi->sbj", jacobians, v)
    assert ours.item() == pytest.approx(products.square().mean().item(), rel=1e-12)


@pytest.mark.parametrize("weight", [None, torch.ones(3, requires_grad=True)])
def test_a_map_that_ignores_its_state(weight):
    f = torch.ones_like if weight is None else lambda z: weight.expand_as(z)
    assert jacobian_regularisation(f, torch.ones(2, 3)).item() == 0


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama, affine])
def test_the_size_of_a_jacobian_reaches_the_parameters_of_a_backbone(make):
    """By finite differences; several chunks of a scan included."""
    backbone = make()
    x = embedded()
    z = randn(2, 7, 8, seed=5)

    def penalty(*_):
        inputs = backbone.prepare(x)
        return jacobian_regularisation(lambda z: backbone(z, inputs)[0], z, generator=seeded(0))

    parameters = [p for name, p in backbone.named_parameters() if "injection" not in name]
    assert torch.autograd.gradcheck(penalty, parameters, fast_mode=True, rtol=1e-4)
    assert penalty().item() > 1e-6
    with torch.no_grad():
        assert not penalty().requires_grad
