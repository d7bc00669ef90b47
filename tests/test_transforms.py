"""Solves under autocast, torch.compile and torch.func."""

import warnings

import pytest
import torch

import deqseq as dq
from deqseq import Naive, Stop, solve


@pytest.mark.usefixtures("unchecked")
def test_a_compiled_solve_leaves_gradients_enabled():
    weight = torch.nn.Parameter(torch.eye(3) / 2)

    def layer(x):
        return solve(
            lambda z: torch.tanh(z @ weight + x), torch.zeros(2, 3), solver=Naive(), stop=Stop()
        ).value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(layer, backend="eager")(torch.ones(2, 3))
    assert torch.is_grad_enabled()
    torch.testing.assert_close(compiled, layer(torch.ones(2, 3)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
class TestTorchFunc:
    """Transforms that a solve cannot run under are refused by name."""

    def value(self, a, gradient=None):
        z0 = torch.zeros(2, 1, dtype=torch.float64)
        stop = dq.Stop(rtol=1e-10)
        return dq.fixed_point(
            lambda z: a * torch.tanh(z) + 1, z0, stop=stop, gradient=gradient
        ).value.sum()

    def test_vmap(self):
        with pytest.raises(TypeError, match=r"torch\.func's vmap.*rows of z0"):
            torch.func.vmap(self.value)(torch.tensor([0.1, 0.2], dtype=torch.float64))

    def test_gradients_of_samples(self):
        with pytest.raises(TypeError, match=r"torch\.func's vmap.*rows of z0"):
            a = torch.tensor([0.1, 0.2], dtype=torch.float64)
            torch.func.vmap(torch.func.grad(lambda a: self.value(a, dq.Unrolled())))(a)

    def test_forward_mode(self):
        a = torch.tensor(0.5, dtype=torch.float64)
        with pytest.raises(TypeError, match=r"torch\.func's jvp.*backward"):
            torch.func.jvp(self.value, (a,), (torch.ones_like(a),))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(TypeError, match="jvp"):
            self.value(torch.autograd.forward_ad.make_dual(a, torch.ones_like(a)))

    @pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
    def test_reverse_mode(self, transform):
        with pytest.raises(TypeError, match=r"torch\.func's grad; use backward"):
            transform(self.value)(torch.tensor(0.5, dtype=torch.float64))
        with pytest.raises(TypeError, match=r"torch\.func's grad; use backward"):
            transform(lambda x: dq.ImplicitModel(dq.Affine(4))(x).value.sum())(torch.ones(2, 3, 4))
