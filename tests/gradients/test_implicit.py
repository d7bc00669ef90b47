"""Implicit: its adjoint solve, what it keeps and evaluates, and parameters that are hard to see."""

import warnings

import pytest
import torch
from gradient_problems import make
from graph_contract import problems
from problems import SOLVERS
from test_gradients import TIGHT, Counted
from torch import Tensor

import deqseq as dq


def saved_by(case, estimator, steps):
    """How many numbers autograd saves in a solve; its graph takes one more evaluation."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    f = Counted(case.f(case.injection()))
    options = {"solver": dq.Naive(), "stop": dq.Stop.exactly(steps), "gradient": estimator}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = dq.fixed_point(f, case.z0, **options).value
    case.loss(value).backward()
    assert f.calls == steps + 1
    return sum(sizes)


@problems
def test_implicit_evaluates_once_and_saves_one_evaluation(problem):
    """The map needs z and its own weights too."""
    case = make(problem)
    implicit = dq.Implicit(stop=TIGHT)
    one_step = saved_by(case, dq.OneStep(), 4)
    assert saved_by(case, dq.OneStep(), 40) == one_step
    assert saved_by(case, implicit, 4) == saved_by(case, implicit, 40)
    assert saved_by(case, implicit, 4) <= one_step + 4 * case.z0.numel()


def test_implicit_reports_its_adjoint():
    case = make("tanh-tokens")
    reports = []
    gradient = dq.Implicit(dq.Naive(), dq.Stop(rtol=1e-6), report=reports.append)
    loss = case.loss(dq.fixed_point(case.f(case.injection()), case.z0, gradient=gradient).value)
    assert reports == []
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(reports) == 2
    assert reports[0].converged.all()
    assert reports[0].stats.residual.max() <= 1e-6
    assert 5 < reports[0].stats.evaluations < 40


@pytest.fixture
def failing_adjoint():
    """Anderson finds the fixed point of an expansive row; the plain adjoint iteration does not."""
    rates = torch.tensor([[0.5], [3.0], [-0.3]])
    x = torch.ones(3, 1, requires_grad=True)

    def loss(throw):
        gradient = dq.Implicit(dq.Naive(), dq.Stop(rtol=1e-6, max_steps=40), throw=throw)
        return dq.fixed_point(lambda z: rates * z + x, 0 * rates, gradient=gradient).value.sum()

    return x, loss


def test_an_adjoint_that_fails_raises_with_throw(failing_adjoint):
    x, loss = failing_adjoint
    words = r"adjoint solve of Implicit failed for 1 of 3 rows after \d+ .*\(diverged: rows 1 "
    with pytest.raises(dq.ConvergenceError, match=words) as error:
        loss(throw=True).backward()
    assert error.value.rows == [1]
    assert x.grad is None


def test_an_adjoint_that_fails_warns_without_throw(failing_adjoint):
    x, loss = failing_adjoint
    words = "the adjoint solve of Implicit failed for some rows"
    with pytest.warns(dq.ConvergenceWarning, match=words):
        loss(throw=False).backward()
    assert x.grad[::2, 0].tolist() == pytest.approx([2.0, 1 / 1.3], rel=1e-5)
    assert x.grad.isfinite().all()


def test_the_default_adjoint_converges_under_autocast():
    generator = torch.Generator().manual_seed(0)
    reports = []
    W = torch.randn(32, 32, generator=generator)
    x = torch.randn(8, 32, generator=generator)
    W = (0.7 * W / torch.linalg.matrix_norm(W, 2)).requires_grad_()
    gradient = dq.Implicit(report=reports.append)
    stop = dq.Stop(rtol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        solution = dq.fixed_point(
            lambda z: torch.tanh(z @ W + x), torch.zeros_like(x), stop=stop, gradient=gradient
        )
    solution.value.square().sum().backward()
    assert reports[0].converged.all()
    assert reports[0].stats.evaluations < 30


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_autocast_does_not_reach_the_adjoint_solver(solver):
    rates = torch.linspace(-0.5, 0.5, 16)
    found = []
    x = torch.linspace(1, 2, 32).reshape(2, 16).requires_grad_()
    value = dq.fixed_point(
        lambda z: rates * z + x, torch.zeros(2, 16), gradient=dq.Implicit(solver)
    ).value
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(value.sum(), x, retain_graph=True)[0])
    assert torch.equal(*found)


def test_parameters_that_a_graph_hides_are_not_taken_for_none():
    weight = torch.nn.Parameter(torch.eye(3) / 2)

    def f(z):
        hidden = torch.utils.checkpoint.checkpoint(
            lambda z: torch.tanh(z @ weight + 1), z, use_reentrant=True
        )
        assert isinstance(hidden, Tensor)
        return hidden

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = dq.fixed_point(f, torch.zeros(2, 3)).value
    with pytest.raises(RuntimeError, match="use_reentrant"):
        value.sum().backward()


def test_many_gradients_at_once_are_refused_by_name():
    x = torch.ones(2, 3, requires_grad=True)
    value = dq.fixed_point(lambda z: z / 2 + x, torch.zeros(2, 3), gradient=dq.Implicit()).value
    with pytest.raises(RuntimeError, match="Implicit cannot solve for many gradients at once"):
        torch.autograd.grad(value, x, torch.eye(6).reshape(6, 2, 3), is_grads_batched=True)
