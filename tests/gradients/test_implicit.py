"""Implicit: its adjoint solve, what it keeps and evaluates, and parameters that are hard to see."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gradient_problems import make
from problems import SOLVERS
from test_gradients import TIGHT, Counted, problems, solve_of
from torch import Tensor

import deqseq as dq


@contextmanager
def packed_tensors() -> Iterator[list[int]]:
    """Collects the number of elements of everything that autograd saves."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


@problems
def test_implicit_evaluates_once_and_saves_one_evaluation(problem: str) -> None:
    case = make(problem)
    sizes = {}
    for estimator in (dq.OneStep(), dq.Implicit(stop=TIGHT)):
        for max_steps in (4, 40):
            f = Counted(case.f(case.injection()))
            with packed_tensors() as packed:
                stop = dq.Stop.exactly(max_steps)
                value = dq.fixed_point(
                    f, case.z0, solver=dq.Naive(), stop=stop, gradient=estimator
                ).value
            assert f.calls == max_steps + 1
            case.loss(value).backward()
            assert f.calls == max_steps + 1
            sizes[estimator, max_steps] = sum(packed)
    one_step, *rest = sizes.values()
    assert one_step == rest[0]
    assert (
        rest[1] == rest[2] <= one_step + 4 * case.z0.numel()
    )  # the map needs z and its own weights too


def test_implicit_reports_its_adjoint() -> None:
    case = make("tanh-tokens")
    reports = []
    estimator = dq.Implicit(dq.Naive(), dq.Stop(rtol=1e-6), report=reports.append)
    loss = case.loss(solve_of(case, estimator).value)
    assert reports == []
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(reports) == 2
    assert reports[0].converged.tolist() == [True, True, True]
    assert float(reports[0].stats.residual.max()) <= 1e-6
    assert 5 < reports[0].stats.evaluations < 40


@pytest.mark.parametrize("throw", [True, False])
def test_an_adjoint_that_fails_is_told(throw: bool) -> None:
    """Anderson finds the fixed point of an expansive row; the plain adjoint iteration does not."""
    rates = torch.tensor([[0.5], [3.0], [-0.3]])
    x = torch.ones(3, 1, requires_grad=True)
    estimator = dq.Implicit(dq.Naive(), dq.Stop(rtol=1e-6, max_steps=40), throw=throw)
    value = dq.fixed_point(
        lambda z: rates * z + x, torch.zeros(3, 1), gradient=estimator, throw=True
    ).value
    text = (
        r"the adjoint solve of Implicit failed for 1 of 3 rows after \d+ evaluations "
        r"\(diverged: rows 1 "
    )
    if throw:
        with pytest.raises(dq.ConvergenceError, match=text) as error:
            value.sum().backward()
        assert error.value.rows == [1]
        assert x.grad is None
    else:
        with pytest.warns(
            dq.ConvergenceWarning, match="the adjoint solve of Implicit failed for some rows"
        ):
            value.sum().backward()
        assert x.grad[[0, 2], 0].tolist() == pytest.approx([2.0, 1 / 1.3], rel=1e-5)
        assert bool(torch.isfinite(x.grad).all())


def test_the_default_adjoint_converges_under_autocast() -> None:
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
def test_autocast_does_not_reach_the_adjoint_solver(solver: dq.Solver) -> None:
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
