"""TorchDEQ's solvers as solvers of ours, and the same models in both libraries."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from problems import tanh_contraction

import deqseq as dq
from deqseq.integrations.torchdeq import TorchDEQ
from deqseq.testing.problems import Recorded, affine

with warnings.catch_warnings():  # of invalid escapes in its docstrings, where it is first compiled
    warnings.simplefilter("ignore")
    from torchdeq import get_deq
    from torchdeq.solver import get_solver

NAMES = ["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"]
DAMPED = [TorchDEQ("fixed_point_iter", tau=0.8), TorchDEQ("simple_fixed_point_iter", tau=0.8)]
SOLVERS = [*map(TorchDEQ, NAMES), *DAMPED, TorchDEQ("anderson", m=3, lam=1e-10)]
every_solver = pytest.mark.parametrize("solver", SOLVERS)
PROBLEMS = {"affine": affine(), "tokens": affine(event=(4, 2)), "tanh": tanh_contraction()}


def stopping(absolute, budget=40, relative=0.0):
    return dq.Stop(rtol=relative, atol=absolute, max_steps=budget, norm="row")


ZEROS = torch.zeros(3, 4, dtype=torch.float64)


class TestSolver:
    @every_solver
    @pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
    def test_finds_the_known_fixed_point(self, solver, problem):
        exact = problem.fixed_point()
        stop = dq.Stop(rtol=1e-5, max_steps=200, norm="row")
        f = Recorded(problem)
        solution = dq.solve(f, torch.zeros_like(exact), solver=solver, stop=stop)
        assert solution.converged.all()
        torch.testing.assert_close(solution.value, exact, rtol=0, atol=1e-3)
        most = 200 if solver.name == "simple_fixed_point_iter" else 150
        assert len(f.calls) == solution.stats.evaluations <= most

    @every_solver
    @pytest.mark.parametrize("budget", [1, 3, 4, 10])
    def test_a_budget_is_never_exceeded_and_spent_where_it_suffices_for_a_step(
        self, solver, budget
    ):
        f = Recorded(affine(radius=0.9))
        solution = dq.solve(f, ZEROS, solver=solver, stop=dq.Stop(rtol=0.0, max_steps=budget))
        least = {"anderson": 4, "broyden": 3}.get(solver.name, 1)
        assert len(f.calls) == solution.stats.evaluations == (budget if budget >= least else 1)
        assert solution.status.tolist() == [dq.Status.MAX_STEPS_REACHED] * 3

    @pytest.mark.parametrize("name", ["fixed_point_iter", "anderson", "broyden"])
    @pytest.mark.parametrize(
        ("mode", "stop"), [("abs", stopping(1e-3, 52)), ("rel", stopping(0.0, 52, 1e-3))]
    )
    def test_returns_what_torchdeq_returns(self, name, mode, stop):
        f = tanh_contraction()
        theirs, _, _ = get_solver(name)(f, ZEROS, max_iter=50, tol=1e-3, stop_mode=mode)
        solution = dq.solve(f, ZEROS, solver=TorchDEQ(name), stop=stop)
        assert solution.converged.all()
        assert torch.equal(solution.value, theirs)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_row_that_becomes_nan_is_reported_and_the_others_converge(self, name):
        def f(z):
            return torch.where(torch.arange(3)[:, None] == 1, torch.nan, 0.5 * z + 1)

        stop = dq.Stop(rtol=1e-5, max_steps=50)
        solution = dq.solve(f, torch.zeros(3, 2), solver=TorchDEQ(name), stop=stop)
        assert solution.converged.tolist() == [True, False, True]
        assert solution.status[1] == dq.Status.DIVERGED
        assert (solution.value[[0, 2]] - 2).abs().max() < 2e-4

    def test_a_singular_system_is_a_warning_and_a_status(self):
        solver = TorchDEQ("anderson")
        stop = dq.Stop()
        with pytest.warns(dq.ConvergenceWarning, match="anderson .* singular .*: raise lam"):
            solution = dq.solve(lambda z: z + 1e6, torch.zeros(2, 3), solver=solver, stop=stop)
        assert solution.status.tolist() == [dq.Status.MAX_STEPS_REACHED] * 2
        assert solution.stats.evaluations == 3  # two of TorchDEQ's

    @every_solver
    def test_as_the_adjoint_solver_the_gradient_is_the_closed_form(self, solver):
        problem = affine()
        bias = problem.bias.clone().requires_grad_()
        adjoint = dq.Implicit(solver=solver, stop=dq.Stop(rtol=1e-10, max_steps=400), throw=True)
        f, stop = (lambda z: z @ problem.weight.T + bias), dq.Stop(rtol=1e-12, max_steps=200)
        options = {"solver": dq.Naive(), "stop": stop, "gradient": adjoint}
        solution = dq.fixed_point(f, torch.zeros_like(bias), **options)
        solution.value.square().sum().backward()
        inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) - problem.weight)
        assert (bias.grad - 2 * problem.fixed_point() @ inverse).abs().max() < 1e-8

    @pytest.mark.parametrize("name", NAMES)
    def test_only_a_solver_that_keeps_the_graph_is_unrolled(self, name):
        a = torch.tensor(0.5, requires_grad=True)
        stop = dq.Stop.exactly(30)
        text = rf"{name} .* cannot be differentiated.* use Phantom\(\) or Implicit\(\)"
        with nullcontext() if name == NAMES[1] else pytest.raises(ValueError, match=text):
            z0 = torch.zeros(1, 1)
            solver = TorchDEQ(name)
            solution = dq.solve(lambda z: a * z + 1, z0, solver=solver, stop=stop)
            (grad,) = torch.autograd.grad(solution.value.sum(), a)
            assert grad.item() == pytest.approx(4.0, abs=1e-4)


def test_an_option_of_another_solver_is_an_error():
    with pytest.raises(ValueError, match=r"^TorchDEQ\('broyden'\): option 'tau' .*LBFGS_thres"):
        TorchDEQ("broyden", tau=0.5)


BOUNDS = {"f_tol": 1e-9, "f_max_iter": 300}
BROYDEN = BOUNDS | {"f_solver": "broyden"}
ADJOINT = dq.Implicit(dq.Naive(), stopping(1e-10, 300))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (BOUNDS | {"grad": 3, "tau": 0.7}, {"gradient": dq.Phantom(3, 0.7)}),
        (BOUNDS | {"ift": True, "b_tol": 1e-10, "b_max_iter": 300}, {"gradient": ADJOINT}),
        (BROYDEN, {"solver": dq.Broyden(), "gradient": dq.OneStep()}),
        (BROYDEN, {"solver": TorchDEQ("broyden"), "gradient": dq.OneStep()}),
    ],
)
def test_value_and_gradient_are_those_of_torchdeq(config, options):
    weight = affine(radius=0.7).weight.clone().requires_grad_()
    z0 = torch.zeros(2, 4, dtype=torch.float64)

    def f(z):
        return torch.tanh(z @ weight + 1)

    (theirs,), _ = get_deq(config)(f, z0)
    (their_grad,) = torch.autograd.grad(theirs.square().sum(), weight)
    how = {"solver": dq.Naive(), "stop": stopping(1e-9, 300), "throw": True, **options}
    solution = dq.fixed_point(f, z0, **how)
    (grad,) = torch.autograd.grad(solution.value.square().sum(), weight)
    assert (solution.value - theirs).abs().max() < 1e-7
    assert (grad - their_grad).abs().max() < 1e-6
