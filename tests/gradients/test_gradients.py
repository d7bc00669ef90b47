"""Every estimator passes the contract; then what each promises of its own."""

import warnings
from dataclasses import replace

import pytest
import torch
from gradient_contract import GradientContract
from gradient_problems import PROBLEMS, Case, Map, assert_close, gradients, make, neumann
from torch import Tensor

import deqseq as dq

TIGHT = dq.Stop(rtol=1e-12, max_steps=200)
COARSE = dq.Stop(rtol=1e-2, norm="row")
EXACT = [dq.Unrolled(), dq.Unrolled(checkpoint=True), dq.Implicit(stop=TIGHT)]
ATTACHED = [dq.OneStep(), dq.Phantom(), dq.Phantom(checkpoint=True), dq.Implicit(stop=TIGHT)]

problems = pytest.mark.parametrize("problem", PROBLEMS)


class TestUnrolled(GradientContract):
    gradient = dq.Unrolled()


class TestUnrolledCheckpoint(GradientContract):
    gradient = dq.Unrolled(checkpoint=True)


class TestOneStep(GradientContract):
    gradient = dq.OneStep()

    def adjoint(self, jacobian: Tensor, grad: Tensor) -> Tensor:
        return grad


class TestPhantom(GradientContract):
    gradient = dq.Phantom(steps=3, damping=0.7)

    def adjoint(self, jacobian: Tensor, grad: Tensor) -> Tensor:
        return neumann(3, 0.7)(jacobian, grad)


class TestImplicitNaive(GradientContract):
    gradient, coarse = (dq.Implicit(dq.Naive(), stop, throw=True) for stop in (TIGHT, COARSE))


class TestImplicitAnderson(GradientContract):
    gradient, coarse = (dq.Implicit(dq.Anderson(), stop, throw=True) for stop in (TIGHT, COARSE))


class Counted:
    """A map that counts its calls, also those that a checkpoint ends early."""

    def __init__(self, f: Map) -> None:
        self.f = f
        self.calls = 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return self.f(z)


def solve_of(case: Case, gradient: dq.Gradient | None, **changes: object) -> dq.Solution:
    options = {"solver": dq.Naive(), "stop": TIGHT, "gradient": gradient, "throw": True}
    return dq.fixed_point(case.f(case.injection()), case.z0, **(options | changes))


@problems
@pytest.mark.parametrize("gradient", [dq.Unrolled(), dq.Phantom(steps=5)], ids=str)
def test_checkpointing_changes_nothing_but_the_evaluations(
    gradient: dq.Gradient, problem: str
) -> None:
    case = make(problem)
    found = []
    for checkpoint in (False, True):
        f = Counted(case.f(case.injection()))
        estimator = replace(gradient, checkpoint=checkpoint)
        assert estimator.checkpoint is checkpoint
        solution = dq.fixed_point(f, case.z0, solver=dq.Anderson(), stop=TIGHT, gradient=estimator)
        with_graph = 5 if isinstance(gradient, dq.Phantom) else 0
        assert f.calls == solution.stats.evaluations + with_graph
        found.append(gradients(case.loss(solution.value), case.leaves))
        recomputed = (with_graph or solution.stats.evaluations) if checkpoint else 0
        if problem.startswith(
            "tanh"
        ):  # an affine map saves too little for every call to be repeated
            assert f.calls == solution.stats.evaluations + with_graph + recomputed
    assert_close(found[1], found[0], rtol=0.0)


@pytest.mark.parametrize("gradient", [None, *ATTACHED], ids=str)
def test_a_start_that_requires_a_gradient_is_an_error(gradient: dq.Gradient | None) -> None:
    name = "Implicit" if gradient is None else type(gradient).__name__
    with pytest.raises(
        ValueError, match=rf"z0 requires a gradient, but {name} .*detach\(\).*Unrolled\(\)"
    ):
        dq.fixed_point(torch.cos, torch.zeros(2, 1, requires_grad=True), gradient=gradient)


@pytest.mark.parametrize("gradient", EXACT, ids=str)
def test_a_solve_inside_a_solve(gradient: dq.Gradient) -> None:
    inner = make("tanh-rows")
    outer = make("affine-rows")

    def loss(find) -> Tensor:
        f = lambda z: outer.f(0.3 * find(inner.f(inner.injection() + z), inner.z0))(z) / 2  # noqa: E731
        return outer.loss(find(f, outer.z0))

    def plain(f, z: Tensor) -> Tensor:
        for _ in range(30):
            z = f(z)
        return z

    def ours(f, z: Tensor) -> Tensor:
        return dq.fixed_point(
            f, z, solver=dq.Naive(), stop=dq.Stop(rtol=1e-9), gradient=gradient
        ).value

    assert_close(
        gradients(loss(ours), inner.leaves), gradients(loss(plain), inner.leaves), rtol=1e-7
    )


def test_a_solve_without_a_finite_value_is_not_called_undifferentiable() -> None:
    a = torch.tensor(0.5, requires_grad=True)
    solution = dq.fixed_point(lambda z: a * z / 0, torch.zeros(2, 1), gradient=dq.Unrolled())
    assert solution.status.tolist() == [dq.Status.DIVERGED] * 2


def test_unrolling_the_last_iterations_of_broyden():
    """The memory that was written in place before them is part of the graph."""
    a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    options = {"solver": dq.Broyden(), "stop": dq.Stop.exactly(12)}
    start = torch.zeros(2, 2, dtype=torch.float64)
    for last in (2, 5, 11):
        value = dq.fixed_point(
            lambda z: torch.tanh(a * z + 1), start, gradient=dq.Unrolled(last=last), **options
        ).value
        (grad,) = torch.autograd.grad(value.sum(), a)
        z = value[0, 0].item()
        slope = 1 - z * z
        assert abs(grad.item() - 4 * slope * z / (1 - slope * a.item())) < 1e-3


def direction(z, x, weight):
    return torch.nn.functional.normalize(z @ weight + x, eps=0.0)


@pytest.mark.parametrize("gradient", ATTACHED, ids=str)
def test_a_row_that_cannot_be_left_out_is_named(gradient):
    """The map of one row is not finite anywhere: with args it is left out, without them a warning
    says so.
    """
    weight = torch.nn.Parameter(0.3 * torch.eye(3, dtype=torch.float64))
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    solution = dq.fixed_point(
        lambda z, x: direction(z, x, weight), torch.zeros_like(x), args=x, gradient=gradient
    )
    assert solution.status.tolist() == [dq.Status.CONVERGED, dq.Status.DIVERGED]
    (grad,) = torch.autograd.grad(solution.value[0].sum(), weight)
    assert grad.isfinite().all()
    with pytest.warns(dq.ConvergenceWarning, match="pass what f needs of each row as args"):
        dq.fixed_point(lambda z: direction(z, x, weight), torch.zeros_like(x), gradient=gradient)


def test_rows_that_diverge_warn_only_where_a_gradient_is_lost():
    weight = torch.tensor(3.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*differentiated|.*gradient")
        dq.fixed_point(lambda z: weight * z + 1, torch.zeros(2, 1), solver=dq.Naive())
    weight.requires_grad_()
    with pytest.warns(dq.ConvergenceWarning, match="a solve to be differentiated failed"):
        dq.fixed_point(lambda z: weight * z + 1, torch.zeros(2, 1), solver=dq.Naive())
