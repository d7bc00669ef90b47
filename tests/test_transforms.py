"""Solves under torch.compile and torch.func."""

import warnings

import pytest
import torch

import deqseq as dq


@pytest.mark.usefixtures("unchecked")
def test_a_compiled_solve_leaves_gradients_enabled():
    weight = torch.nn.Parameter(torch.eye(3) / 2)
    z0 = torch.zeros(2, 3)
    stop = dq.Stop()

    def layer(x):
        f = lambda z: torch.tanh(z @ weight + x)  # noqa: E731
        return dq.solve(f, z0, solver=dq.Naive(), stop=stop).value

    x = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(layer, backend="eager")(x)
    assert torch.is_grad_enabled()
    torch.testing.assert_close(compiled, layer(x))


def value(a, gradient=None):
    z0 = torch.zeros(2, 1, dtype=torch.float64)
    return dq.fixed_point(lambda z: a * torch.tanh(z) + 1, z0, gradient=gradient).value.sum()


def unrolled(a):
    return value(a, dq.Unrolled())


MODEL = dq.ImplicitModel(dq.Affine(4).double())


def forward_mode(a):
    with torch.autograd.forward_ad.dual_level():
        value(torch.autograd.forward_ad.make_dual(a, torch.ones_like(a)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: torch.func.vmap(value)(a.expand(2)), "vmap.*rows of z0"),
        (lambda a: torch.func.vmap(torch.func.grad(unrolled))(a.expand(2)), "vmap.*rows of z0"),
        (lambda a: torch.func.jvp(value, (a,), (a,)), "jvp.*backward"),
        (forward_mode, "jvp.*backward"),
        (torch.func.grad(value), "grad; use backward"),
        (torch.func.jacrev(value), "grad; use backward"),
        (torch.func.grad(lambda a: MODEL(a.expand(2, 3, 4)).value.sum()), "grad; use backward"),
    ],
)
def test_transforms_that_a_solve_cannot_run_under_are_refused_by_name(call, words):
    with pytest.raises(TypeError, match=rf"torch\.func's {words}"):
        call(torch.tensor(0.5, dtype=torch.float64))
