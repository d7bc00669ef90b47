"""Every estimator passes the contract; then what each promises of its own."""

import warnings
from dataclasses import replace

import pytest
import torch
from gradient_contract import GradientContract
from gradient_problems import assert_close, gradients, make, neumann

import deqseq as dq

TIGHT = GradientContract.stop
COARSE = dq.Stop(rtol=1e-2, norm="row")
EXACT = [dq.Unrolled(), dq.Unrolled(checkpoint=True), dq.Implicit(stop=TIGHT)]
ATTACHED = [dq.OneStep(), dq.Phantom(), dq.Phantom(checkpoint=True), dq.Implicit(stop=TIGHT)]


class TestUnrolled(GradientContract):
    gradient = dq.Unrolled()


class TestUnrolledCheckpoint(GradientContract):
    gradient = dq.Unrolled(checkpoint=True)


class TestOneStep(GradientContract):
    gradient = dq.OneStep()

    def adjoint(self, jacobian, grad):
        return grad


class TestPhantom(GradientContract):
    gradient = dq.Phantom(steps=3, damping=0.7)

    def adjoint(self, jacobian, grad):
        return neumann(3, 0.7)(jacobian, grad)


class TestImplicitNaive(GradientContract):
    gradient, coarse = (dq.Implicit(dq.Naive(), stop, throw=True) for stop in (TIGHT, COARSE))


class TestImplicitAnderson(GradientContract):
    gradient, coarse = (dq.Implicit(dq.Anderson(), stop, throw=True) for stop in (TIGHT, COARSE))


class Counted:
    """A map that counts its calls, also those that a checkpoint ends early."""

    def __init__(self, f):
        self.f = f
        self.calls = 0

    def __call__(self, z):
        self.calls += 1
        return self.f(z)


@pytest.mark.parametrize("gradient", [dq.Unrolled(), dq.Phantom(steps=5)], ids=str)
def test_checkpointing_changes_nothing_but_the_evaluations(gradient):
    """Every evaluation with a graph is repeated in the backward pass."""
    case = make("tanh-tokens")

    def run(checkpoint):
        f = Counted(case.f(case.injection()))
        estimator = replace(gradient, checkpoint=checkpoint)
        solution = dq.fixed_point(f, case.z0, solver=dq.Anderson(), stop=TIGHT, gradient=estimator)
        forward = f.calls
        found = gradients(case.loss(solution.value), case.leaves)
        return found, solution.stats.evaluations, forward, f.calls

    plain, evaluations, *calls = run(False)
    with_graph = 5 if isinstance(gradient, dq.Phantom) else 0
    assert calls == [evaluations + with_graph] * 2
    found, _, *recomputed = run(True)
    assert recomputed == [calls[0], calls[0] + (with_graph or evaluations)]
    assert_close(found, plain, rtol=0.0)


@pytest.mark.parametrize("gradient", [None, *ATTACHED], ids=str)
def test_a_start_that_requires_a_gradient_is_an_error(gradient):
    name = "Implicit" if gradient is None else type(gradient).__name__
    with pytest.raises(
        ValueError, match=rf"z0 requires a gradient, but {name} .*detach\(\).*Unrolled\(\)"
    ):
        dq.fixed_point(torch.cos, torch.zeros(2, 1, requires_grad=True), gradient=gradient)


@pytest.mark.parametrize("gradient", EXACT, ids=str)
def test_a_solve_inside_a_solve(gradient):
    inner = make("tanh-rows")
    outer = make("affine-rows")

    def loss(find):
        def f(z):
            return outer.f(0.3 * find(inner.f(inner.injection() + z), inner.z0))(z) / 2

        return outer.loss(find(f, outer.z0))

    def plain(f, z):
        for _ in range(30):
            z = f(z)
        return z

    def ours(f, z):
        stop = dq.Stop(rtol=1e-9)
        return dq.fixed_point(f, z, solver=dq.Naive(), stop=stop, gradient=gradient).value

    expected = gradients(loss(plain), inner.leaves)
    assert_close(gradients(loss(ours), inner.leaves), expected, rtol=1e-7)


def test_a_solve_without_a_finite_value_is_not_called_undifferentiable():
    a = torch.tensor(0.5, requires_grad=True)
    solution = dq.fixed_point(lambda z: a * z / 0, torch.zeros(2, 1), gradient=dq.Unrolled())
    assert solution.status.tolist() == [dq.Status.DIVERGED] * 2


@pytest.mark.parametrize("last", [2, 5, 11])
def test_unrolling_the_last_iterations_of_broyden(last):
    """The memory that was written in place before them is part of the graph."""
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z0 = torch.zeros(2, 2, dtype=torch.float64)
    options = {"solver": dq.Broyden(), "stop": dq.Stop.exactly(12)}
    gradient = dq.Unrolled(last=last)
    value = dq.fixed_point(lambda z: torch.tanh(a * z + 1), z0, gradient=gradient, **options).value
    (grad,) = torch.autograd.grad(value.sum(), a)
    slope = 1 - value**2
    torch.testing.assert_close(grad, (slope * value / (1 - slope * a)).sum(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("gradient", ATTACHED, ids=str)
def test_a_row_that_cannot_be_left_out_is_named(gradient):
    """The map of one row is not finite anywhere: with args it is left out, without them a warning
    says so.
    """
    weight = torch.nn.Parameter(0.3 * torch.eye(3, dtype=torch.float64))
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)

    def f(z, x):
        return torch.nn.functional.normalize(z @ weight + x, eps=0.0)

    solution = dq.fixed_point(f, 0 * x, args=x, gradient=gradient)
    assert solution.status.tolist() == [dq.Status.CONVERGED, dq.Status.DIVERGED]
    (grad,) = torch.autograd.grad(solution.value[0].sum(), weight)
    assert grad.isfinite().all()
    with pytest.warns(dq.ConvergenceWarning, match="pass what f needs of each row as args"):
        dq.fixed_point(lambda z: f(z, x), 0 * x, gradient=gradient)


def test_rows_that_diverge_warn_only_where_a_gradient_is_lost():
    weight = torch.tensor(3.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*differentiated|.*gradient")
        dq.fixed_point(lambda z: weight * z + 1, torch.zeros(2, 1), solver=dq.Naive())
    weight.requires_grad_()
    with pytest.warns(dq.ConvergenceWarning, match="a solve to be differentiated failed"):
        dq.fixed_point(lambda z: weight * z + 1, torch.zeros(2, 1), solver=dq.Naive())


ATTACHED = {
    "dtype": (lambda f, z: f(z).double(), TypeError),
    "rows": (lambda f, z: f(z)[:1], ValueError),
    "None": (lambda f, z: None, TypeError),
    "tuple": (lambda f, z: (f(z), z), TypeError),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bad", ATTACHED)
def test_what_an_estimator_attaches_is_looked_at(bad):
    attach, error = ATTACHED[bad]

    class Bad(dq.AttachedGradient):
        def attach(self, f, z_star):
            return attach(f, z_star)

    rate = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(error, match=r"Bad\.attach"):
        dq.fixed_point(lambda z: rate * z + 1, torch.zeros(2, 1), gradient=Bad())
