"""explain() names the cause of a failed solve, and remedies that were tried and hold."""

import copy
import math
import pickle
import re
import warnings

import pytest
import torch
from small_models import contractive_mamba2

import deqseq as dq

ONE = torch.ones(3, 2, dtype=torch.float64)


def solve(f, z0=ONE, **options):
    stop = dq.Stop(**{"rtol": 1e-6, "max_steps": 20} | options)
    return dq.solve(f, z0, solver=dq.Naive(), stop=stop)


@pytest.mark.parametrize(
    ("cause", "f", "finding", "remedy"),
    [
        ("converged", lambda z: 0.1 * z + 1, "from a random start, to the same value", None),
        (
            "budget",
            lambda z: 0.6 * z + 1,
            "It converges in 26 iterations; the budget was 20",
            "Stop(rtol=1e-06, max_steps=32)",
        ),
        ("slow convergence", lambda z: 0.995 * z + 1, "falls by a factor of 0.9", "solver=Anderson"),
        (
            "limit cycle",
            lambda z: 3 - z,
            "does not fall",
            "solver=Adaptive(), stop=Stop(rtol=1e-06, max_steps=4) converges in 3 iterations",
        ),
        ("divergence", lambda z: 3 - 1.5 * z, "grows without bound", "solver=Adaptive()"),
        (
            "no fixed point found",
            lambda z: torch.where(z > 2, z * 0 + 1, z * 0 + 3),
            "does not fall; the tolerance is 1.0e-06. Adaptive(), Relaxed(damping=0.2), Anderson(",
            "make the map contract",
        ),
        ("fixed point zero", lambda z: z / 2, "The state tends to zero", "atol=1e-6"),
        ("random map", lambda z: 0.5 * z + torch.rand_like(z), "at the same point differ", "before the solve"),
        ("map not finite", lambda z: z * math.nan, "first value of the map is not finite", "the weights"),
        ("several fixed points", lambda z: torch.tanh(3 * z), "random start converges elsewhere", "start"),
    ],
)
def test_the_cause_and_the_remedy_are_named(cause, f, finding, remedy):
    explanation = solve(f).explain()
    assert explanation.causes == (cause,) * 3
    assert finding in explanation.findings[cause]
    assert explanation.remedies.get(cause) is None if remedy is None else remedy in explanation.remedies[cause]
    assert str(explanation).startswith(f"all 3 rows: {cause}. ")


def test_the_predicted_number_of_iterations_of_a_slow_contraction_is_right():
    slope, offset = torch.tensor([[0.97, 0.0], [0.3, 100.0]], dtype=torch.float64)
    finding = solve(lambda z: slope * z + offset, rtol=1e-7).explain().findings["slow convergence"]
    predicted = int(finding.split("at least ")[1].split()[0])
    needed = solve(lambda z: slope * z + offset, rtol=1e-7, max_steps=1000).stats.iterations[0].item()
    assert math.isclose(predicted, needed, rel_tol=0.02)


@pytest.mark.parametrize("steps", [4, 400])
def test_without_a_tolerance_nothing_converges(steps):
    f, stop = torch.tensor([[0.5], [0.6], [-9.0]]).double(), dq.Stop.exactly(steps)
    solution = dq.solve(lambda z: 1 + f * (z.cos() if steps < 9 else z), ONE, solver=dq.Naive(), stop=stop)
    explanation = solution.explain()
    if steps < 9:
        assert explanation.causes == ("no tolerance",) * 3
        assert "stop=Stop(rtol=1e-3)" in explanation.remedies["no tolerance"]
        assert f"4 iterations, whatever the residual: it is {solution.stats.residual.max():.1e} or less" in str(
            explanation
        )
    else:  # a residual of zero is within any tolerance, and what diverges does so anyway
        assert explanation.causes == ("converged", "converged", "divergence")
        assert re.search(r"stop=Stop\(rtol=0\.0001, max_steps=\d+\)", explanation.remedies["divergence"])


@pytest.mark.parametrize(("budget", "tried"), [(10, 64), (20, 80), (300, 1000), (1500, 1500)])
def test_it_is_tried_with_four_times_the_budget_within_limits(budget, tried):
    explanation = solve(lambda z: 0.998 * z + 1, rtol=1e-9, max_steps=budget).explain()
    assert f"after {tried} iterations" in explanation.findings["slow convergence"]


def test_iterations_are_counted_at_every_evaluation():
    explanation = solve(lambda z: 0.6 * z + 1, check_every=7).explain()
    assert "It converges in 26 iterations" in explanation.findings["budget"]


def test_a_loose_tolerance_does_not_make_several_fixed_points_of_one():
    """To 1e-4 both starts converge within 80 iterations, to 1e-5 they do not, and to 1e-2 they are 20 % apart."""
    explanation = solve(lambda z: 0.9 * z + 1, rtol=0.1).explain()
    assert set(explanation.causes) == {"converged"}
    assert "from a random start, to the same value" in str(explanation)


@pytest.mark.parametrize(
    ("dtype", "size", "cause"),
    [
        *((torch.float32, size, cause) for size, cause in ((2e-6, "precision"), (1e-5, "no fixed point found"))),
        *((torch.bfloat16, size, cause) for size, cause in ((2**-6, "precision"), (2**-4, "no fixed point found"))),
    ],
)
def test_a_residual_near_the_last_bits_is_that_of_the_dtype(dtype, size, cause):
    """The value jumps by 32 times the machine epsilon, or 4 times that of bfloat16, and by a little more or less."""
    one = torch.ones(1, 2, dtype=dtype)
    f = lambda z: torch.where(z == 1, 1 + size * one, one)  # noqa: E731
    explanation = dq.solve(f, one, solver=dq.Naive(), stop=dq.Stop(rtol=1e-9)).explain()
    assert explanation.causes == (cause,)
    assert cause != "precision" or f"the precision of {dtype}" in explanation.findings[cause]


def test_a_residual_that_falls_by_less_than_a_thousandth_does_not_fall():
    assert set(solve(lambda z: 0.9995 * z + 1, 2010 * ONE, rtol=1e-9).explain().causes) == {"limit cycle"}


def turning(z):
    """Half a turn of an ellipse in 16 iterations: residuals swing with that period, and the last ones fall."""
    cos, sin = math.cos(math.pi / 16), math.sin(math.pi / 16)
    return torch.stack([cos * z[:, 0] - sin / 5 * z[:, 1], 5 * sin * z[:, 0] + cos * z[:, 1]], dim=1)


def settling(z):
    """The residual falls until about the 50th iteration, to that of a cycle."""
    return torch.stack([0.85 * z[:, 0] + 0.15, 1e-3 - z[:, 1]], dim=1)


@pytest.mark.parametrize(("f", "start"), [(turning, 1.0), (settling, 9.0)])
def test_the_last_two_quarters_decide_whether_the_residual_falls(f, start):
    """Of 80 iterations: of halves the one, and of eighths the other, would fall."""
    explanation = solve(f, torch.tensor([[start, 0.0]], dtype=torch.float64)).explain()
    assert "does not fall" in str(explanation)


@pytest.mark.parametrize(
    ("basin", "causes"), [(0.03, {"converged"}), (1e-5, {"several fixed points"})], ids=["wide", "narrow"]
)
def test_a_random_start_near_zero_is_of_the_size_of_a_thousandth(basin, causes):
    explanation = solve(lambda z: torch.where(z.abs() > basin, 1 + 0 * z, 0.1 * z), 0 * ONE).explain()
    assert set(explanation.causes) == causes


@pytest.mark.parametrize(("gap", "causes"), [(0.02, {"converged"}), (0.1, {"several fixed points"})])
def test_values_less_than_a_twentieth_apart_are_one(gap, causes):
    explanation = solve(lambda z: torch.where(z < 1 - gap / 2, 1 - gap + 0 * z, 1 + 0 * z)).explain()
    assert set(explanation.causes) == causes


def test_eight_rows_are_named():
    slopes = torch.tensor([0.1] * 10 + [-1.0] * 9, dtype=torch.float64)[:, None]
    explanation = solve(lambda z: slopes * z + 1, torch.ones(19, 2, dtype=torch.float64))
    assert "rows 10, 11, 12, 13, 14, 15, 16, 17 … of 19: limit cycle" in str(explanation.explain())
    explanation = solve(lambda z: slopes[1:18] * z + 1, torch.ones(17, 2, dtype=torch.float64))
    assert "rows 9, 10, 11, 12, 13, 14, 15, 16 of 17: limit cycle" in str(explanation.explain())


def test_rows_of_several_causes_are_named_apart():
    slopes = torch.tensor([0.1, -1.0, 0.6], dtype=torch.float64)[:, None]
    explanation = solve(lambda z: slopes * z + 1).explain()
    assert explanation.causes == ("converged", "limit cycle", "budget")
    assert str(explanation).count("Remedy: ") == 2
    assert "row 1 of 3: limit cycle" in str(explanation)


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(4), dq.Sequential()], ids=str)
def test_outputs_of_models_explain_themselves_under_a_cache_and_padding(sweep):
    torch.manual_seed(0)
    lm = dq.CausalLM(7, dq.ImplicitModel(contractive_mamba2())).double().eval()
    ids, mask = torch.randint(0, 7, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    mask[1, :3] = False
    start = lm(ids[:, :4], return_cache=True)
    stop = dq.Stop(rtol=1e-9, max_steps=3)
    with pytest.warns(dq.ConvergenceWarning, match="2 of 2 rows did not converge"):
        output = lm(ids, mask=mask, cache=start.cache, stop=stop, sweep=sweep)
    assert output.explain().causes in (("budget", "budget"), ("slow convergence", "slow convergence"))
    assert (
        lm(ids, mask=mask, stop=dq.Stop(rtol=1e-6, max_steps=500), sweep=sweep).explain().causes == ("converged",) * 2
    )


def test_a_model_warns_once_and_only_where_rows_could_converge():
    lm = dq.CausalLM(7, dq.ImplicitModel(contractive_mamba2())).double().eval()
    ids = torch.randint(0, 7, (2, 9))
    short = dq.Stop(rtol=1e-9, max_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm(ids, stop=dq.Stop.exactly(2))
        lm(ids, stop=dq.Stop(rtol=0.0, max_steps=2))
        lm.train()(ids, stop=dq.Stop(rtol=1e-9, max_steps=2, check_every=2))
    for mode in (False, True):
        with pytest.warns(dq.ConvergenceWarning, match=r"explain\(\)"):
            lm.train(mode)(ids, stop=short)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lm(ids, stop=short)


def test_explaining_a_solve_does_not_warn_and_leaves_the_warning_for_a_failure():
    lm = dq.CausalLM(7, dq.ImplicitModel(contractive_mamba2())).double().eval()
    ids = torch.randint(0, 7, (2, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm(ids).explain()
    with pytest.warns(dq.ConvergenceWarning):
        lm(ids, stop=dq.Stop(rtol=1e-9, max_steps=2))


def test_dropout_does_not_make_a_model_look_as_if_it_had_several_fixed_points():
    torch.manual_seed(0)
    model = dq.ImplicitModel(contractive_mamba2(dropout=0.5)).double().train()
    x = torch.randn(3, 5, model.backbone.d_model, dtype=torch.float64)
    explanation = model(x, stop=dq.Stop(rtol=1e-3, max_steps=200)).explain()
    assert explanation.causes == ("converged",) * 3
    assert model.training


def test_copies_some_rows_and_explicit_outputs_cannot_be_explained():
    solution = solve(torch.cos)
    for other in (pickle.loads(pickle.dumps(solution)), copy.deepcopy(solution), dq.take(solution, torch.arange(3))):
        assert torch.equal(other.value, solution.value)
        with pytest.raises(ValueError, match=r"whole solve.*rows of one, or a copy"):
            other.explain()
    with pytest.raises(ValueError, match=r"explain\(\) needs a solve: an explicit model"):
        dq.ExplicitModel(contractive_mamba2())(torch.ones(1, 3, 8, dtype=torch.float64)).explain()


def test_the_solver_that_failed_is_not_tried_again():
    f = lambda z: torch.where(z > 2, z * 0 + 1, z * 0 + 3)  # noqa: E731
    for solver in (dq.Adaptive(), dq.Anderson()):
        solution = dq.solve(f, ONE, solver=solver, stop=dq.Stop(rtol=1e-6, max_steps=20))
        finding = solution.explain().findings["no fixed point found"]
        assert str(solver) not in finding
        assert "Broyden" in finding


def test_a_remedy_says_the_budget_even_if_it_is_the_default():
    remedy = solve(lambda z: 0.93 * z + 1, rtol=1e-3, max_steps=30).explain().remedies["budget"]
    assert remedy.endswith(f"stop=Stop(max_steps={dq.Stop().max_steps})"), remedy


def test_of_a_solver_of_another_library_no_rate_is_claimed():
    """It is checked once."""

    class TheirLoop(dq.ExternalSolver):
        def run(self, f, z0, stop):
            return [z0 := f(z0) for _ in range(stop.max_steps - 1)][-1]

    cycle = dq.solve(lambda z: 3 - z, ONE, solver=TheirLoop(), stop=dq.Stop(rtol=1e-6, max_steps=20)).explain()
    assert set(cycle.causes) == {"slow convergence"}
    assert "factor" not in str(cycle) and "solver=Anderson" in str(cycle)
    short = dq.solve(lambda z: 0.6 * z + 1, ONE, solver=TheirLoop(), stop=dq.Stop(rtol=1e-6, max_steps=20)).explain()
    assert set(short.causes) == {"budget"}


def test_a_rule_of_ones_own_is_kept():
    class Halved(dq.Rule):
        def residual(self, z, fz):
            return (fz - z).abs().sum(dim=-1, keepdim=True) / 2

    explanation = solve(lambda z: 0.6 * z + 1, norm=Halved()).explain()
    assert set(explanation.causes) == {"budget"} and "Halved" in explanation.remedies["budget"]


def test_rows_that_failed_are_told_why_and_not_that_there_are_other_fixed_points():
    solution = dq.fixed_point(lambda z: torch.tanh(3 * z), torch.full((6, 1), 0.01))
    assert not solution.converged.any()
    explanation = solution.explain()
    assert "several fixed points" not in explanation.causes
    assert set(explanation.remedies) == set(explanation.causes)


def test_a_cycle_in_half_precision_is_no_lack_of_precision():
    start = torch.tensor([[4.5]], dtype=torch.bfloat16)
    explanation = dq.solve(lambda z: 10 - z, start, solver=dq.Naive(), stop=dq.Stop(rtol=1e-2)).explain()
    assert explanation.causes == ("limit cycle",)
    assert "Adaptive()" in explanation.remedies["limit cycle"]


@pytest.mark.parametrize(
    ("f", "start"),
    [(torch.cos, torch.zeros(3)), (lambda z: z / 2 + 200, torch.zeros(2, 3, dtype=torch.float16))],
    ids=["no event dimension", "squares that overflow"],
)
def test_states_that_need_care_are_explained(f, start):
    with torch.device("meta"):  # the default device is no argument of an explanation
        explanation = dq.solve(f, start, solver=dq.Naive(), stop=dq.Stop(rtol=1e-3)).explain()
    assert set(explanation.causes) == {"converged"}
    assert "to the same value" in str(explanation)


def test_a_state_that_grows_for_ever_drifts():
    explanation = solve(lambda z: z + 1, rtol=0.03, max_steps=100).explain()
    assert explanation.causes == ("drift",) * 3
    assert "the state grows: the difference does not fall" in str(explanation)
    assert "normalise its output" in str(explanation)


def test_starts_near_a_fixed_point_of_zero_do_not_make_several():
    stop = dq.Stop(atol=1e-6)
    weight = torch.tensor([[0.5, 0.2], [0.1, 0.4]])
    solution = dq.solve(lambda z: torch.tanh(z @ weight), torch.ones(1, 2), solver=dq.Naive(), stop=stop)
    assert solution.explain().causes == ("converged",)


def test_values_that_are_not_finite_at_once_are_no_expansion():
    for bad in (torch.nan, torch.inf):
        with pytest.raises(dq.ConvergenceError, match="f returned NaN, infinity or numbers too large at its first"):
            dq.fixed_point(lambda z, bad=bad: z + bad, torch.zeros(2, 3), throw=True)
    with pytest.raises(dq.ConvergenceError, match="the map expands here"):
        dq.fixed_point(lambda z: 3 * z - 2, torch.zeros(2, 3), solver=dq.Naive(), throw=True)


def test_no_random_numbers_of_the_caller_are_changed(monkeypatch):
    output = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(stop=dq.Stop(max_steps=1)))(torch.ones(1, 2, 4))
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("seeds every device"))
    before = torch.get_rng_state()
    output.explain()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_is_explained_in_the_mode_of_its_solve():
    """Dropout within the map: a random map in training mode, and the caller's mode and random numbers are kept."""
    torch.manual_seed(0)
    model = dq.ImplicitModel(Scalar(torch.tensor(-0.3), dropout=0.3)).train()
    x = torch.ones(2, 4, 1)
    solved = model(x)
    assert model.eval()(x).explain().causes == ("converged",) * 2
    assert solved.explain().causes == ("random map",) * 2
    assert not any(part.training for part in model.modules())


def test_weights_that_changed_since_are_told():
    model = dq.ImplicitModel(dq.Affine(4)).eval()
    outputs = [model(torch.ones(2, 3, 4)) for _ in range(2)]
    with torch.no_grad():
        model.backbone.U.mul_(2)
    explanation = outputs[0].explain()
    assert explanation.causes == ("changed since",) * 2
    assert "The same solve now gives another value" in str(explanation)
    model.double()
    with pytest.raises(ValueError, match=r"as it is now: torch\.float64; the solve was in torch\.float32"):
        outputs[1].explain()


@pytest.mark.parametrize("entry", ["function", "model"])
def test_phantom_steps_that_leave_the_tolerance_are_told(entry):
    """f(z) = 4 - 3 z expands: Anderson finds 1, and each damped step of the estimator triples the error and more."""
    rate = torch.nn.Parameter(torch.tensor(-3.0))
    phantom, stop = dq.Phantom(steps=12, damping=1.0), dq.Stop(rtol=1e-3)
    if entry == "function":
        solved = dq.fixed_point(lambda z: rate * z + 4 + z.sin() / 50, torch.zeros(1, 1), stop=stop, gradient=phantom)
    else:
        config = dq.SolveConfig(solver=dq.Anderson(), stop=stop, gradient=phantom)
        solved = dq.ImplicitModel(Scalar(rate), config).train()(torch.ones(1, 1, 1))
    assert solved.status.tolist() == [dq.Status.CONVERGED]
    explanation = solved.explain()
    assert explanation.causes == ("estimator",)
    assert "The estimator's steps led the value to a residual of" in str(explanation)


class Scalar(dq.Backbone):
    d_model = 1

    def __init__(self, rate, dropout=0.0):
        super().__init__()
        self.rate, self.dropout = rate, torch.nn.Dropout(dropout)

    def prepare(self, x, cache=None, mask=None):
        return x

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        return self.dropout(self.rate * z) + 4 * inputs + z.sin() / 50, None


@pytest.mark.parametrize("function", [dq.solve, dq.fixed_point])
def test_functions_warn_like_models(function):
    z0, solver = torch.zeros(2, 1), dq.Naive()
    with pytest.warns(dq.ConvergenceWarning, match=r"2 of 2 rows did not converge .*explain\(\)"):
        function(lambda z: z + 1, z0, solver=solver, stop=dq.Stop(max_steps=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(lambda z: z / 2 + 1, z0, solver=solver, stop=dq.Stop())
        function(lambda z: z + 1, z0, solver=solver, stop=dq.Stop.exactly(3))
        function(lambda z: z + 1, z0, solver=solver, stop=dq.Stop(rtol=0.0, atol=1.0))
