"""TorchDEQ's solvers as solvers of ours, and its configurations as our objects."""

import argparse
import json
import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from problems import tanh_contraction
from torch import Tensor

import deqseq as dq
from deqseq.integrations.torchdeq import CONFIG_DEFAULTS, TorchDEQ, from_torchdeq_config
from deqseq.testing.problems import Recorded, affine

with warnings.catch_warnings():  # of invalid escapes in its docstrings, where it is first compiled
    warnings.simplefilter("ignore")
    from torchdeq import get_deq
    from torchdeq.solver import get_solver
    from torchdeq.utils.arg_utils import add_deq_args

NAMES = ["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"]
DAMPED = [TorchDEQ("fixed_point_iter", tau=0.8), TorchDEQ("simple_fixed_point_iter", tau=0.8)]
SOLVERS = [*map(TorchDEQ, NAMES), *DAMPED, TorchDEQ("anderson", m=3, lam=1e-10)]
every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=repr)
PROBLEMS = {"affine": affine(), "tokens": affine(event=(4, 2)), "tanh": tanh_contraction()}
REFERENCE = json.loads((Path(__file__).parent / "data" / "mamba2.json").read_text())["deq_params"]


def stopping(absolute: float, budget: int = 40, relative: float = 0.0) -> dq.Stop:
    return dq.Stop(rtol=relative, atol=absolute, max_steps=budget, norm="row")


def both(stop: dq.Stop, evaluation: dq.Stop | None = None) -> dict[str, dq.Stop]:
    return {"stop": stop, "eval_stop": evaluation or stop}


def solves(**changes) -> tuple[dq.SolveConfig, dq.SolveConfig]:
    """What the empty configuration means, with some parts changed."""
    parts = {"solver": dq.Naive(), "gradient": dq.Phantom(steps=1, damping=1.0), **both(stopping(1e-3)), **changes}
    eval_stop = parts.pop("eval_stop")
    return dq.SolveConfig(**parts), dq.SolveConfig(**{**parts, "stop": eval_stop})


ZEROS = torch.zeros(3, 4, dtype=torch.float64)


class TestSolver:
    @every_solver
    @pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
    def test_finds_the_known_fixed_point(self, solver, problem):
        exact, stop = problem.fixed_point(), dq.Stop(rtol=1e-5, max_steps=200, norm="row")
        f = Recorded(problem)
        solution = dq.solve(f, torch.zeros_like(exact), solver=solver, stop=stop)
        assert solution.converged.all()
        torch.testing.assert_close(solution.value, exact, rtol=0, atol=1e-3)
        assert len(f.calls) == solution.stats.evaluations <= (200 if solver.name == NAMES[1] else 150)

    @every_solver
    @pytest.mark.parametrize("budget", [1, 3, 4, 10])
    def test_a_budget_is_never_exceeded_and_spent_where_it_suffices_for_a_step(self, solver, budget):
        f = Recorded(affine(radius=0.9))
        solution = dq.solve(f, ZEROS, solver=solver, stop=dq.Stop(rtol=0.0, max_steps=budget))
        least = {"anderson": 4, "broyden": 3}.get(solver.name, 1)
        assert len(f.calls) == solution.stats.evaluations == (budget if budget >= least else 1)
        assert solution.status.tolist() == [dq.Status.MAX_STEPS_REACHED] * 3

    @pytest.mark.parametrize("name", ["fixed_point_iter", "anderson", "broyden"])
    @pytest.mark.parametrize(("mode", "stop"), [("abs", stopping(1e-3, 52)), ("rel", stopping(0.0, 52, 1e-3))])
    def test_returns_what_torchdeq_returns(self, name, mode, stop):
        f = tanh_contraction()
        theirs, _, _ = get_solver(name)(f, ZEROS, max_iter=50, tol=1e-3, stop_mode=mode)
        solution = dq.solve(f, ZEROS, solver=TorchDEQ(name), stop=stop)
        assert solution.converged.all()
        assert torch.equal(solution.value, theirs)

    def test_solves_one_chunk_of_a_sequence_after_another(self):
        model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(stop=dq.Stop(rtol=1e-6), solver=TorchDEQ("broyden")))
        x = torch.randn(2, 6, 4)
        for sweep in (dq.Simultaneous(), dq.Chunked(4), dq.Sequential()):
            torch.testing.assert_close(model(x, sweep=sweep).value, model.backbone.solution(x), rtol=0, atol=1e-4)
        with pytest.raises(ValueError, match="Chunked"):
            model(x, sweep=dq.Sliding(2))

    @pytest.mark.parametrize("name", NAMES)
    def test_a_row_that_becomes_nan_is_reported_and_the_others_converge(self, name):
        def f(z: Tensor) -> Tensor:
            return torch.where(torch.arange(3)[:, None] == 1, torch.nan, 0.5 * z + 1)

        solution = dq.solve(f, torch.zeros(3, 2), solver=TorchDEQ(name), stop=dq.Stop(rtol=1e-5, max_steps=50))
        assert solution.status.tolist() == [dq.Status.CONVERGED, dq.Status.DIVERGED, dq.Status.CONVERGED]
        torch.testing.assert_close(solution.value[[0, 2]], torch.full((2, 2), 2.0), rtol=1e-4, atol=0)

    def test_a_singular_system_is_a_warning_and_a_status(self):
        with pytest.warns(dq.ConvergenceWarning, match="anderson .* singular .*: raise lam"):
            solution = dq.solve(lambda z: z + 1e6, torch.zeros(2, 3), solver=TorchDEQ("anderson"), stop=dq.Stop())
        assert solution.status.tolist() == [dq.Status.MAX_STEPS_REACHED] * 2
        assert solution.stats.evaluations == 3  # two of TorchDEQ's

    @every_solver
    def test_as_the_adjoint_solver_the_gradient_is_the_closed_form(self, solver):
        problem = affine()
        bias = problem.bias.clone().requires_grad_()
        adjoint = dq.Implicit(solver=solver, stop=dq.Stop(rtol=1e-10, max_steps=400), throw=True)
        f, stop = (lambda z: z @ problem.weight.T + bias), dq.Stop(rtol=1e-12, max_steps=200)
        solution = dq.fixed_point(f, torch.zeros_like(bias), solver=dq.Naive(), stop=stop, gradient=adjoint)
        solution.value.square().sum().backward()
        inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) - problem.weight)
        torch.testing.assert_close(bias.grad, 2 * problem.fixed_point() @ inverse, rtol=0, atol=1e-8)

    @pytest.mark.parametrize("name", NAMES)
    def test_only_a_solver_that_keeps_the_graph_is_unrolled(self, name):
        a, stop = torch.tensor(0.5, requires_grad=True), dq.Stop.exactly(30)
        text = rf"{name} .* cannot be differentiated.* use Phantom\(\) or Implicit\(\)"
        with nullcontext() if name == NAMES[1] else pytest.raises(ValueError, match=text):
            solution = dq.solve(lambda z: a * z + 1, torch.zeros(1, 1), solver=TorchDEQ(name), stop=stop)
            (grad,) = torch.autograd.grad(solution.value.sum(), a)
            assert grad.item() == pytest.approx(4.0, abs=1e-4)


def with_options(name: str, **options) -> tuple[dq.SolveConfig, dq.SolveConfig]:
    return from_torchdeq_config({"f_solver": name}, solver_kwargs=options)


@pytest.mark.parametrize(
    ("make", "name", "options", "text"),
    [
        (TorchDEQ, "andersen", {}, "TorchDEQ.name must be"),
        (TorchDEQ, "broyden", {"tau": 0.5}, "TorchDEQ('broyden'): option 'tau' is unknown (known: LBFGS_thres)"),
        (TorchDEQ, "anderson", {"m": 1}, "TorchDEQ.m must be an integer >= 2, got 1"),
        (TorchDEQ, "anderson", {"tau": 0.0}, "TorchDEQ.tau must be a number in (0, inf), got 0.0"),
        (TorchDEQ, "anderson", {"lam": -1.0}, "TorchDEQ.lam must be a number in [0, inf), got -1.0"),
        (TorchDEQ, "broyden", {"LBFGS_thres": 0}, "TorchDEQ.LBFGS_thres must be an integer >= 1, got 0"),
        (with_options, "anderson", {"lan": 1.0}, "solver_kwargs of 'anderson': option 'lan' is unknown; did"),
        (with_options, "anderson", {"lam": 1e-4}, "solver_kwargs 'lam': the ridge of"),
        (with_options, "broyden", {"ls": True}, "solver_kwargs 'ls': a line search"),
    ],
)
def test_a_wrong_option_is_an_error(make, name, options, text):
    with pytest.raises(ValueError, match="^" + re.escape(text)):
        make(name, **options)


ANDERSON, BROYDEN, SIMPLE = {"f_solver": NAMES[2]}, {"f_solver": NAMES[3]}, {"f_solver": NAMES[1]}
ADJOINT = {"b_solver": "broyden", "b_max_iter": 9, "b_tol": 0.01, "b_stop_mode": "rel"}
IDLE = {"core": "indexing", "no_stat": True, "gamma": 0.3, "sup_loc": None, "jac_loss_freq": 0.5}
PHANTOM = {"gradient": dq.Phantom(steps=4, damping=0.8)}
OFF = {"norm_type": "none", "norm_clip": True, "norm_no_scale": True}


@pytest.mark.parametrize(
    ("config", "solver_kwargs", "changes"),
    [
        ({}, {}, {}),
        (IDLE, {}, {}),
        ({"f_tol": 0.05, "f_stop_mode": "rel"}, {}, both(stopping(0.0, relative=0.05))),
        ({"grad": 4, "tau": 0.8}, {}, PHANTOM),
        ({"grad": [6], "tau": 0.5}, {}, {"gradient": dq.Phantom(steps=6, damping=0.5)}),
        ({"eval_factor": 2.5}, {}, {"eval_stop": stopping(1e-3, 100)}),
        ({"eval_f_max_iter": 7, "eval_factor": 2.5}, {}, {"eval_stop": stopping(1e-3, 7)}),
        # TorchDEQ measures the damped step, which is shorter
        ({}, {"tau": 0.8}, {"solver": dq.Relaxed(0.8), **both(stopping(1e-3 / 0.8))}),
        (SIMPLE, {"tau": 0.5}, {"solver": dq.Relaxed(0.5), **both(dq.Stop.exactly(40))}),
        (ANDERSON, {}, {"solver": dq.Anderson(memory=6)}),
        (ANDERSON, {"m": 3, "tau": 0.9}, {"solver": dq.Anderson(memory=3, mixing=0.9)}),
        (BROYDEN | {"eval_factor": 0.5}, {"ls": False}, {"solver": dq.Broyden(40), "eval_stop": stopping(1e-3, 20)}),
        (BROYDEN, {"LBFGS_thres": 12}, {"solver": dq.Broyden(memory=12)}),
        ({"ift": True, "tau": 5.0}, {}, {"gradient": dq.Implicit(dq.Naive(), stopping(1e-6))}),
        ({"hook_ift": True, **ADJOINT}, {}, {"gradient": dq.Implicit(dq.Broyden(9), stopping(0.0, 9, 0.01))}),
        (OFF, {}, {}),
        ({"norm": {"norm_type": "weight_norm"}}, {}, {}),
        (REFERENCE, {}, PHANTOM | both(stopping(0.0, 600, 1e-14), stopping(0.0, 1200, 1e-14))),
    ],
)
def test_a_configuration_becomes_these_objects(config, solver_kwargs, changes):
    assert from_torchdeq_config(config, solver_kwargs=solver_kwargs) == solves(**changes)


def test_the_keys_and_defaults_are_those_of_torchdeq():
    parser = argparse.ArgumentParser()
    add_deq_args(parser)
    theirs = vars(parser.parse_args([]))
    # an argument of its modules; the reference code's spelling; get_deq applies no norm, its command line asks for one
    ours = CONFIG_DEFAULTS | {"norm_type": "weight_norm", "grad": [1], "indexing": [], "sup_loc": []}
    assert {key: ours[key] for key in ours if key not in ("no_stat", "norm_clip_val")} == theirs
    assert from_torchdeq_config(theirs) == solves()


@pytest.mark.parametrize(
    "config",
    [
        {"f_tol": 1e-9, "f_max_iter": 300, "grad": 3, "tau": 0.7},
        {"f_tol": 1e-9, "f_max_iter": 300, "ift": True, "b_tol": 1e-10, "b_max_iter": 300},
        {"f_solver": "broyden", "f_tol": 1e-9, "f_stop_mode": "rel", "grad": [2], "core": "indexing"},
    ],
)
@pytest.mark.parametrize("native", [True, False])
def test_value_and_gradient_are_those_of_torchdeq(config, native):
    weight = affine(radius=0.7).weight.clone().requires_grad_()
    z0 = torch.zeros(2, 4, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ weight + 1)

    (theirs,), _ = get_deq(dict(config))(f, z0)
    (their_grad,) = torch.autograd.grad(theirs.square().sum(), weight)
    ours, _ = from_torchdeq_config(config, native=native)
    assert isinstance(ours.solver, TorchDEQ) is not native
    solution = dq.fixed_point(f, z0, solver=ours.solver, stop=ours.stop, gradient=ours.gradient, throw=True)
    (grad,) = torch.autograd.grad(solution.value.square().sum(), weight)
    torch.testing.assert_close(solution.value, theirs, rtol=0, atol=1e-7)
    torch.testing.assert_close(grad, their_grad, rtol=0, atol=1e-6)


NO_OTHER, PENALTY = "deqseq computes nothing else", "it is part of the loss: add deqseq.training.jacobian_reg"
WRONG_CONFIGS = [
    ({"n_states": 3}, f"key 'n_states' must be 1 or 0, got 3: {NO_OTHER}"),
    ({"indexing": [4, 8]}, f"key 'indexing' must be () or [] or None, got [4, 8]: {NO_OTHER}"),
    ({"sup_gap": 1}, f"key 'sup_gap' must be -1 or 0, got 1: {NO_OTHER}"),
    ({"sup_loc": [1]}, f"key 'sup_loc' must be () or [] or None, got [1]: {NO_OTHER}"),
    ({"jac_loss_weight": 0.5}, f"key 'jac_loss_weight' must be 0, got 0.5: {PENALTY}"),
    ({"jac_incremental": 100}, f"key 'jac_incremental' must be 0, got 100: {PENALTY}"),
    ({"norm_type": "spectral_norm"}, "key 'norm_type' must be None or 'none' or 'weight_norm', got 'spectral_norm'"),
    ({"norm_clip": True}, f"key 'norm_clip' must be False, got True: {NO_OTHER}"),
    ({"norm_no_scale": True}, f"key 'norm_no_scale' must be False, got True: {NO_OTHER}"),
    ({"core": "custom"}, "key 'core' must be one of ('sliced', 'indexing'), got 'custom'"),
    ({"f_max_iter": 0}, "key 'f_max_iter' must be an integer >= 1, got 0"),
    ({"b_max_iter": -1}, "key 'b_max_iter' must be an integer >= 1, got -1"),
    ({"grad": [1, 2]}, "key 'grad' must be an integer >= 1, got [1, 2]"),
    ({"f_tol": -1.0}, "key 'f_tol' must be a number in [0, inf), got -1.0"),
    ({"f_stop_mode": "both"}, "key 'f_stop_mode' must be one of ('abs', 'rel'), got 'both'"),
    ({"eval_factor": 0.0}, "key 'eval_factor' must be such that the budget in evaluation is from 1 to 10**9, got 0.0"),
    ({"eval_factor": float("nan")}, "key 'eval_factor' must be a number in (-inf, inf), got nan"),
    ({"tau": 1.2}, "key 'tau' must be a number in (0, 1], got 1.2"),
    ({"ift": 1}, "key 'ift' must be True or False, got 1"),
    ({"f_maxiter": 40}, "key 'f_maxiter' is unknown; did you mean 'f_max_iter'"),
    ({"training": {"f_tol": 0.1}}, "key 'f_tol' is unknown"),
    ({"solver": None}, "group 'solver' must be a Mapping"),
    ({"zzz": 0}, "key 'zzz' is unknown (known: f_solver, "),
    ({"f_solver": "naive"}, "solver 'naive' is unknown (known: fixed_point_iter, "),
    ({"ift": True, "b_solver": "broydn"}, "solver 'broydn' is unknown; did you mean 'broyden'"),
    ({"ift": True, "b_solver": NAMES[1]}, "key 'b_solver' must be 'fixed_point_iter', 'anderson' or 'broyden', got '"),
    ({"m": 5}, "ignores 'm' in a configuration: pass it in solver_kwargs"),
    ({"grad": 1, "training": {"grad": 1}}, "key 'grad' is given twice: in its group and outside of it"),
]


@pytest.mark.parametrize(("config", "text"), WRONG_CONFIGS)
def test_a_configuration_that_cannot_be_honoured_is_refused(config, text):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape("torchdeq " + text)):
        from_torchdeq_config(config)
