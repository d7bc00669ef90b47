"""explain() names the cause of a failed solve, and remedies that were tried and hold."""

import copy
import math
import pickle
import re
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from small_models import contractive_mamba2, language_model

import deqseq as dq

ONE = torch.ones(3, 2, dtype=torch.float64)
BFLOAT = torch.bfloat16
WEIGHT = torch.tensor([[0.5, 0.2], [0.1, 0.4]], dtype=torch.float64)


def solve(f, z0=ONE, solver=dq.Naive(), stop=None, **options):
    stop = stop or dq.Stop(**{"rtol": 1e-6, "max_steps": 20} | options)
    return dq.solve(f, z0, solver=solver, stop=stop)


def turning(z):
    """Half a turn of an ellipse in 16 iterations: residuals swing with that period, and the last
    ones fall.
    """
    cos = math.cos(math.pi / 16)
    sin = math.sin(math.pi / 16)
    return torch.stack(
        [cos * z[:, 0] - sin / 5 * z[:, 1], 5 * sin * z[:, 0] + cos * z[:, 1]], dim=1
    )


def settling(z):
    """The residual falls until about the 50th iteration, to that of a cycle."""
    return torch.stack([0.85 * z[:, 0] + 0.15, 1e-3 - z[:, 1]], dim=1)


def basin(size):
    """Zero is found from within."""
    return lambda z: torch.where(z.abs() > size, 1 + 0 * z, 0.1 * z)


def two_values(gap):
    return lambda z: torch.where(z < 1 - gap / 2, 1 - gap + 0 * z, 1 + 0 * z)


def bits(dtype, size):
    """The value jumps by this much at one."""
    one = torch.ones(1, 2, dtype=dtype)
    return lambda z: torch.where(z == 1, 1 + size * one, one), one


class Halved(dq.Rule):
    def residual(self, z, fz):
        return (fz - z).abs().sum(dim=-1, keepdim=True) / 2


def affine(slope, offset=1.0):
    return lambda z: slope * z + offset


def spiral(z):
    """It turns on a long ellipse, so that its residual swings while it falls."""
    cosine, sine = 0.99 * math.cos(0.3), 0.99 * math.sin(0.3)
    return z @ z.new_tensor([[cosine, 20 * sine], [-sine / 20, cosine]]) + 1


def jumps(z):
    return torch.where(z > 2, z * 0 + 1, z * 0 + 3)


def case(cause, f, z0=ONE, finding="", remedy="", **options):
    """A solve, its cause, and words of what is found and of the remedy."""
    return pytest.param(cause, f, z0, options, finding, remedy, id=cause)


HALVES = torch.zeros(2, 3, dtype=torch.float16)
SAME = "from a random start, to the same value"
SEVERAL = "random start converges elsewhere"
SWITCH = "solver=Adaptive(), stop=Stop(rtol=1e-06, max_steps=4) converges in 3 iterations"
TRIED = "does not fall; the tolerance is 1.0e-06. Adaptive(), Relaxed(damping=0.2), Anderson("
CASES = [
    case("converged", affine(0.1), finding=SAME),
    # to 1e-4 both starts converge within 80 iterations, to 1e-5 they do not, and to 1e-2 they are
    # 20 % apart
    case("converged", affine(0.9), finding=SAME, rtol=0.1),
    case("converged", torch.cos, torch.zeros(3), SAME, rtol=1e-3),
    case("converged", affine(0.5, 200), HALVES, SAME, rtol=1e-3),  # squares that overflow
    case("converged", lambda z: torch.tanh(z @ WEIGHT), rtol=1e-3, atol=1e-6, max_steps=1000),
    # a random start near zero is of the size of a thousandth, and values less than a twentieth
    # apart are one
    case("converged", basin(0.03), 0 * ONE),
    case("several fixed points", basin(1e-5), 0 * ONE, SEVERAL, "start"),
    case("converged", two_values(0.02)),
    case("several fixed points", two_values(0.1), ONE, SEVERAL, "start"),
    case("several fixed points", lambda z: torch.tanh(3 * z), ONE, SEVERAL, "start"),
    case("budget", affine(0.6), ONE, "in 26 iterations; the budget was 20", "1e-06, max_steps=32)"),
    case("budget", affine(0.6), ONE, "It converges in 26 iterations", check_every=7),
    case("budget", affine(0.93), remedy=f"stop=Stop(max_steps={dq.Stop().max_steps})", rtol=1e-3),
    case("budget", affine(0.6), remedy="Halved", norm=Halved()),
    case("slow convergence", affine(0.995), ONE, "falls by a factor of 0.9", "solver=Anderson"),
    case("slow convergence", spiral, torch.ones(1, 2).double(), rtol=1e-8, max_steps=64),
    # four times the budget is tried, within limits
    *(
        case("slow convergence", affine(0.998), finding=tried, rtol=1e-9, max_steps=budget)
        for budget, tried in (
            (10, "after 64 iterations"),
            (20, "after 80 iterations"),
            (300, "after 1000 iterations"),
            (1500, "after 1500 iterations"),
        )
    ),
    case("limit cycle", affine(-1, 3), ONE, "does not fall", SWITCH),
    # chaos: the smallest residual of a quarter happens to fall
    case("limit cycle", lambda z: 3.9 * z * (1 - z), 0.3 * ONE, "does not fall", "Adaptive()"),
    # less than a thousandth is not a fall
    case("limit cycle", affine(0.9995), 2010 * ONE, "does not fall", rtol=1e-9),
    # the last two quarters decide: of halves the first, and of eighths the second, would fall
    case("no fixed point found", turning, torch.tensor([[1.0, 0.0]]).double(), "does not fall"),
    case("limit cycle", settling, torch.tensor([[9.0, 0.0]]).double(), "does not fall"),
    case("limit cycle", affine(-1, 10), torch.tensor([[4.5]], dtype=BFLOAT), rtol=1e-2),
    case("divergence", affine(-1.5, 3), ONE, "grows without bound", "solver=Adaptive()"),
    case("drift", affine(1), ONE, "the state grows", "normalise its", rtol=0.03, max_steps=100),
    case("fixed point zero", affine(0.5, 0), ONE, "The state tends to zero", "atol=1e-6"),
    case(
        "random map",
        lambda z: 0.5 * z + torch.rand_like(z),
        finding="at the same point differ",
        remedy="before the solve",
    ),
    case("map not finite", affine(math.nan), ONE, "value of the map is not finite", "the weights"),
    case("no fixed point found", jumps, ONE, TRIED, "make the map contract"),
    # 32 times the machine epsilon, or 4 times that of bfloat16, and a little more or less
    case("precision", *bits(torch.float32, 2e-6), "of torch.float32", "wider dtype", rtol=1e-9),
    case("precision", *bits(BFLOAT, 2**-6), "of torch.bfloat16", "wider dtype", rtol=1e-9),
    case("no fixed point found", *bits(torch.float32, 1e-5), rtol=1e-9),
    case("no fixed point found", *bits(BFLOAT, 2**-4), rtol=1e-9),
]


def test_a_state_that_wanders_without_growing_does_not_drift():
    """Anderson's residual falls at times, below the tolerance too, and rises again."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 16, generator=generator) for n in (16, 64))
    wanders = dq.solve(
        lambda z, x: torch.tanh(z @ weight + 0.3 * x),
        0 * x,
        args=x,
        solver=dq.Anderson(),
        stop=dq.Stop(),
    )
    causes = wanders.explain().causes
    assert "drift" not in causes and "no fixed point found" in causes


@pytest.mark.parametrize(("cause", "f", "z0", "options", "finding", "remedy"), CASES)
def test_the_cause_and_the_remedy_are_named(cause, f, z0, options, finding, remedy):
    solution = solve(f, z0, **options)
    with torch.device("meta"):  # the default device is not an argument of an explanation
        explanation = solution.explain()
    rows = len(z0)
    assert explanation.causes == (cause,) * rows
    assert finding in explanation.findings[cause]
    if cause == "converged":
        assert not explanation.remedies
    else:
        assert remedy in explanation.remedies[cause]
    subject = f"all {rows} rows" if rows > 1 else "row 0"
    assert str(explanation).startswith(f"{subject}: {cause}. ")


def test_the_predicted_number_of_iterations_of_a_slow_contraction_is_right():
    slope, offset = torch.tensor([[0.97, 0.0], [0.3, 100.0]], dtype=torch.float64)
    f = affine(slope, offset)
    explanation = solve(f, rtol=1e-7).explain()
    predicted = re.search(r"at least (\d+)", explanation.findings["slow convergence"])
    budget = re.search(r"give more iterations: .*max_steps=(\d+)", str(explanation))
    longer = solve(f, rtol=1e-7, max_steps=int(budget[1]))
    assert longer.converged.all()
    assert int(predicted[1]) == pytest.approx(longer.stats.iterations[0].item(), rel=0.02)


def test_without_a_tolerance_nothing_converges():
    f = torch.tensor([[0.5], [0.6], [-9.0]]).double()
    few = solve(lambda z: 1 + f * z.cos(), stop=dq.Stop.exactly(4))
    explanation = few.explain()
    assert explanation.causes == ("no tolerance",) * 3
    assert "stop=Stop(rtol=1e-3)" in explanation.remedies["no tolerance"]
    residual = few.stats.residual.max()
    assert f"4 iterations, whatever the residual: it is {residual:.1e} or less" in str(explanation)


def test_without_a_tolerance_a_residual_of_zero_and_a_divergence_are_still_named():
    f = torch.tensor([[0.5], [0.6], [-9.0]]).double()
    explanation = solve(affine(f), stop=dq.Stop.exactly(400)).explain()
    assert explanation.causes == ("converged", "converged", "divergence")
    remedy = r"stop=Stop\(rtol=0\.0001, max_steps=\d+\)"
    assert re.search(remedy, explanation.remedies["divergence"])


def test_rows_of_several_causes_are_named_apart_and_eight_of_each():
    slopes = torch.tensor([0.1] * 10 + [-1.0] * 9 + [0.6], dtype=torch.float64)[:, None]
    z0 = torch.ones_like(slopes)
    explanation = solve(affine(slopes), z0).explain()
    assert explanation.causes == ("converged",) * 10 + ("limit cycle",) * 9 + ("budget",)
    assert str(explanation).count("Remedy: ") == 2
    assert "rows 10, 11, 12, 13, 14, 15, 16, 17 … of 20: limit cycle" in str(explanation)
    explanation = solve(affine(slopes[1:18]), z0[1:18]).explain()
    assert "rows 9, 10, 11, 12, 13, 14, 15, 16 of 17: limit cycle" in str(explanation)


@pytest.fixture
def lm():
    return language_model(contractive_mamba2(dropout=0.5), 7).eval()


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(4), dq.Sequential()])
def test_outputs_of_models_explain_themselves_under_a_cache_and_padding(lm, sweep):
    ids = torch.randint(0, 7, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :3] = False
    start = lm(ids[:, :4], return_cache=True)
    stop = dq.Stop(rtol=1e-9, max_steps=3)
    with pytest.warns(dq.ConvergenceWarning, match="2 of 2 rows did not converge"):
        output = lm(ids, mask=mask, cache=start.cache, stop=stop, sweep=sweep)
    assert set(output.explain().causes) in ({"budget"}, {"slow convergence"})
    fine = lm(ids, mask=mask, stop=dq.Stop(rtol=1e-6, max_steps=500), sweep=sweep)
    assert fine.explain().causes == ("converged",) * 2


def test_dropout_does_not_make_a_model_look_as_if_it_had_several_fixed_points(lm):
    model = lm.model.train()
    x = torch.randn(3, 5, model.backbone.d_model, dtype=torch.float64)
    assert model(x, stop=dq.Stop(rtol=1e-3, max_steps=200)).explain().causes == ("converged",) * 3
    assert model.training


@contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("function", [dq.solve, dq.fixed_point])
def test_functions_warn_where_rows_could_converge(function):
    def call(slope, stop):
        function(affine(slope), torch.zeros(2, 1), solver=dq.Naive(), stop=stop)

    with pytest.warns(dq.ConvergenceWarning, match=r"2 of 2 rows did not converge .*explain\(\)"):
        call(1.0, dq.Stop(max_steps=3))
    with no_warnings():
        call(0.5, dq.Stop())
        call(1.0, dq.Stop.exactly(3))
        call(1.0, dq.Stop(rtol=0.0, atol=1.0))


def test_a_model_warns_once_where_rows_could_converge_and_explaining_does_not(lm):
    ids = torch.randint(0, 7, (2, 9))
    short = dq.Stop(rtol=1e-9, max_steps=2)
    with no_warnings():
        lm(ids).explain()
        lm(ids, stop=dq.Stop.exactly(2))
        lm(ids, stop=replace(short, rtol=0.0))
        lm.train()(ids, stop=replace(short, check_every=2))
    for mode in (False, True):
        with pytest.warns(dq.ConvergenceWarning, match=r"explain\(\)"):
            lm.train(mode)(ids, stop=short)
        with no_warnings():
            lm(ids, stop=short)


def test_copies_some_rows_and_explicit_outputs_cannot_be_explained():
    solution = solve(torch.cos)
    for other in (
        pickle.loads(pickle.dumps(solution)),
        copy.deepcopy(solution),
        dq.take(solution, torch.arange(3)),
    ):
        assert torch.equal(other.value, solution.value)
        with pytest.raises(ValueError, match=r"whole solve.*rows of one, or a copy"):
            other.explain()
    with pytest.raises(ValueError, match=r"explain\(\) needs a solve: an explicit model"):
        dq.ExplicitModel(contractive_mamba2())(torch.ones(1, 3, 8, dtype=torch.float64)).explain()


@pytest.mark.parametrize("solver", [dq.Adaptive(), dq.Anderson()])
def test_the_solver_that_failed_is_not_tried_again(solver):
    finding = solve(jumps, solver=solver).explain().findings["no fixed point found"]
    assert str(solver) not in finding
    assert "Broyden" in finding


class TheirLoop(dq.ExternalSolver):
    def run(self, f, z0, stop):
        return [z0 := f(z0) for _ in range(stop.max_steps - 1)][-1]


def test_of_a_solver_of_another_library_no_rate_is_claimed():
    """It is checked once."""
    explanation = solve(affine(-1, 3), solver=TheirLoop()).explain()
    assert explanation.causes == ("slow convergence",) * 3
    assert "factor" not in str(explanation)
    assert "solver=Anderson" in str(explanation)
    assert solve(affine(0.6), solver=TheirLoop()).explain().causes == ("budget",) * 3


def test_rows_that_failed_are_told_why_and_not_that_there_are_other_fixed_points():
    solution = dq.fixed_point(lambda z: torch.tanh(3 * z), torch.full((6, 1), 0.01))
    assert not solution.converged.any()
    explanation = solution.explain()
    assert "several fixed points" not in explanation.causes
    assert set(explanation.remedies) == set(explanation.causes)


@pytest.mark.parametrize("budget", [1, 100])
def test_no_random_numbers_of_the_caller_are_changed(monkeypatch, budget):
    model = dq.ImplicitModel(dq.Affine(4))
    output = model(torch.ones(1, 2, 4), stop=dq.Stop(max_steps=budget))
    monkeypatch.setattr(torch, "manual_seed", lambda _: pytest.fail("seeds every device"))
    before = torch.get_rng_state()
    output.explain()
    assert torch.equal(torch.get_rng_state(), before)


class Scalar(dq.Backbone):
    d_model = 1

    def __init__(self, rate, dropout=0.0):
        super().__init__()
        self.rate = rate
        self.dropout = torch.nn.Dropout(dropout)

    def prepare(self, x, cache=None, mask=None):
        return x

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        return self.dropout(self.rate * z) + 4 * inputs + z.sin() / 50, None


def test_a_model_is_explained_in_the_mode_of_its_solve():
    """Dropout within the map: a random map in training mode, and the caller's mode and random
    numbers are kept.
    """
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
    with pytest.raises(ValueError, match=r"now: torch\.float64; the solve was in torch\.float32"):
        outputs[1].explain()


@pytest.mark.parametrize("entry", ["function", "model"])
def test_phantom_steps_that_leave_the_tolerance_are_told(entry):
    """f(z) = 4 - 3 z expands: damping finds 1, and each damped step of the estimator triples the
    error and more.
    """
    rate = torch.nn.Parameter(torch.tensor(-3.0))
    call = {"solver": dq.Relaxed(0.2), "gradient": dq.Phantom(steps=12, damping=1.0)}
    if entry == "function":
        solved = dq.fixed_point(lambda z: rate * z + 4 + z.sin() / 50, torch.zeros(1, 1), **call)
    else:
        solved = dq.ImplicitModel(Scalar(rate))(torch.ones(1, 1, 1), **call)
    assert solved.converged.all()
    explanation = solved.explain()
    assert explanation.causes == ("estimator",)
    assert "The estimator's steps led the value to a residual of" in str(explanation)


def solved_function():
    x = torch.linspace(-1, 1, 40).view(2, 5, 4)
    weight = 0.9 * torch.linalg.qr(torch.randn(4, 4)).Q
    return solve(lambda z: torch.tanh(z @ weight + x), x, stop=dq.Stop(rtol=1e-4, max_steps=40))


def solved_model():
    ids = torch.randint(64, (3, 18))
    return dq.load_example("text")(ids, stop=dq.Stop(rtol=1e-3, max_steps=40))


@pytest.mark.parametrize("solved", [solved_function, solved_model])
def test_half_precision_is_the_cause_wherever_the_question_is_asked(solved):
    """The map is evaluated again in the precision of its solve, not in that of the moment."""
    with torch.autocast("cpu", dtype=BFLOAT):
        outcome = solved()
        inside = str(outcome.explain())
    assert not outcome.converged.any()
    assert "precision of torch.bfloat16" in inside
    assert "precision of torch.bfloat16" in str(outcome.explain())


def test_a_callback_is_told_of_the_solve_and_not_of_its_explanation():
    told = []
    call = {"solver": dq.Naive(), "stop": dq.Stop(), "callback": told.append}
    outcome = dq.solve(affine(0.998), torch.zeros(1, 1), **call)
    assert len(told) == outcome.stats.evaluations
    assert outcome.explain().causes == ("slow convergence",)
    assert len(told) == outcome.stats.evaluations


def test_a_solve_in_full_precision_is_explained_in_it_under_autocast():
    x = torch.linspace(-1, 1, 8).view(2, 4)
    outcome = solve(lambda z: torch.tanh(z @ (0.9 * torch.eye(4)) + x), x, max_steps=8)
    with torch.autocast("cpu", dtype=BFLOAT):
        inside = str(outcome.explain())
    assert inside == str(outcome.explain())
    assert "budget" in inside


@pytest.mark.parametrize("solver", [dq.Naive(), dq.Adaptive(), dq.Anderson(), dq.Broyden()])
def test_a_residual_that_falls_because_the_state_grows_is_drift(solver):
    """Of z + 1 the difference is 1 for ever; that of a slow contraction falls with the residual."""
    drift = solve(affine(1.0), torch.zeros(1, 1), solver, stop=dq.Stop())
    assert drift.explain().causes == ("drift",)
    slow = solve(affine(0.998), torch.zeros(1, 1), stop=dq.Stop())
    assert slow.explain().causes == ("slow convergence",)
