"""Exit rules: what they say of a sequence of logits, in a solve of rows that end apart, and what is refused."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import deqseq as dq
from deqseq.exits import ExitRule

GATE = torch.nn.Linear(4, 1).double()
torch.nn.init.ones_(GATE.weight)
torch.nn.init.constant_(GATE.bias, -1.0)
RULES = [
    dq.LogitKL(1e-3),
    dq.StableArgmax(3),
    dq.Margin(0.05),
    dq.ExitGate(GATE, 0.7),
]


def says(rule: ExitRule, states: list[torch.Tensor], logits: list[torch.Tensor]) -> bool:
    """Whether a rule lets a token go, from the states (d_model,) and the logits (classes,) of all checks so far."""
    if isinstance(rule, dq.ExitGate):
        stays = math.prod(1 - 1 / (1 + math.exp(-rule.gate(state).item())) for state in states)
        return 1 - stays >= rule.threshold
    p = [[x / sum(row) for x in row] for row in (one.exp().tolist() for one in logits)]
    if isinstance(rule, dq.Margin):
        *_, second, first = sorted(p[-1])
        return first - second >= rule.threshold
    if isinstance(rule, dq.StableArgmax):
        last = [row.index(max(row)) for row in p[-rule.times :]]
        return len(last) == rule.times and len(set(last)) == 1
    assert isinstance(rule, dq.LogitKL)
    return len(p) > 1 and sum(a * math.log(a / b) for a, b in zip(p[-2], p[-1], strict=True)) < rule.threshold


def by_hand(f, head, rule, z, *, damping, stop):
    """One row of a damped solve in a plain loop: its value, the evaluations, and how it ended."""
    tokens = z.shape[0]
    states, logits = ([[] for _ in range(tokens)] for _ in range(2))
    done = [False] * tokens
    for step in range(1, stop.max_steps + 1):
        fz = f(z)
        if step % stop.check_every == 0 or step == stop.max_steps:
            for t, one in enumerate(head(fz)):
                states[t].append(fz[t])
                logits[t].append(one)
            passed = [bool((fz[t] - z[t]).norm() <= stop.rtol * fz[t].norm()) for t in range(tokens)]
            done = [passed[t] or says(rule, states[t], logits[t]) for t in range(tokens)]
            if all(done):
                return fz, step, dq.Status.CONVERGED if all(passed) else dq.Status.EXITED
        moved = z + damping * (fz - z)
        frozen = torch.tensor(done)[:, None] if stop.per == "token" else torch.tensor(False)
        z = torch.where(frozen, z, moved)
    return None, stop.max_steps, dq.Status.MAX_STEPS_REACHED


W = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
H = torch.randn(4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
X = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
RATES = torch.tensor([0.1, 0.95, 0.5, 0.9, 0.3, 0.8], dtype=torch.float64)[:, None, None].expand(6, 3, 1)


def mapped(z, args):
    x, rate = args
    return torch.tanh(rate * (z + 0.3 * z.flip(-2)) @ W + x)


@pytest.mark.parametrize("per", ["row", "token"])
@pytest.mark.parametrize("check_every", [1, 2])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_rows_that_end_apart_are_those_of_a_plain_loop(rule, check_every, per):
    """The fast rows are removed on the way, which changes nothing of the others."""
    stop = dq.Stop(rtol=1e-8, max_steps=60, per=per, check_every=check_every, exit=rule)
    rows = []  # of each evaluation

    def f(z, args):
        rows.append(len(z))
        return mapped(z, args)

    call = {"args": (X, RATES), "readout": lambda z, args: z @ H}
    solution = dq.solve(f, torch.zeros_like(X), solver=dq.Relaxed(0.7), stop=stop, **call)
    ends = set()
    for row in range(6):
        own = (X[row], RATES[row])
        value, steps, status = by_hand(
            lambda z, own=own: mapped(z, own), lambda z: z @ H, rule, X[row] * 0, damping=0.7, stop=stop
        )
        assert solution.status[row] == status
        assert solution.stats.iterations[row].max() == steps
        if value is not None:
            assert torch.allclose(solution.value[row], value, rtol=0, atol=1e-12)
        ends.add((steps, status))
    assert len(ends) > 1
    assert dq.Status.EXITED in solution.status.tolist()
    assert rows[-1] < 6 or isinstance(rule, dq.StableArgmax)


def test_a_residual_that_passes_first_has_converged():
    stop = dq.Stop(rtol=1e-3, exit=dq.StableArgmax(40))
    solution = dq.solve(mapped, X * 0, args=(X, RATES / 2), readout=lambda z, _: z @ H, solver=dq.Naive(), stop=stop)
    plain = dq.solve(mapped, X * 0, args=(X, RATES / 2), solver=dq.Naive(), stop=dq.Stop(rtol=1e-3))
    assert solution.converged.all()
    assert torch.equal(solution.value, plain.value)
    assert torch.equal(solution.stats.iterations, plain.stats.iterations)


def test_a_batch_ends_together():
    stop = dq.Stop(rtol=1e-8, per="batch", exit=dq.StableArgmax(2))
    call = {"args": (X, RATES), "readout": lambda z, _: z @ H, "solver": dq.Relaxed(0.7)}
    together = dq.solve(mapped, X * 0, stop=stop, **call)
    apart = dq.solve(mapped, X * 0, stop=dq.Stop(rtol=1e-8, exit=dq.StableArgmax(2)), **call)
    assert together.status.tolist() == [dq.Status.EXITED] * 6
    assert set(together.stats.iterations.tolist()) == {int(together.stats.iterations[0])}
    assert together.stats.iterations[0] >= apart.stats.iterations.max()


def test_a_row_that_diverges_does_not_exit():
    rate = torch.tensor([[[0.5]], [[30.0]]], dtype=torch.float64).expand(2, 3, 1)
    solution = dq.solve(
        lambda z, args: z * args[1] + args[0],
        X[:2] * 0,
        args=(X[:2], rate),
        readout=lambda z, _: z @ H,
        solver=dq.Naive(),
        stop=dq.Stop(rtol=1e-9, max_steps=30, exit=dq.StableArgmax(20)),
    )
    assert solution.status.tolist() == [dq.Status.EXITED, dq.Status.DIVERGED]
    assert solution.failed.tolist() == [False, True]


def test_solvers_of_other_libraries():
    class Picard(dq.ExternalSolver):
        def run(self, f, z0, max_steps):
            z = z0
            for _ in range(max_steps):
                z = f(z)

    stop = dq.Stop(rtol=1e-9, exit=dq.LogitKL(1e-3))
    call = {"args": (X, RATES), "readout": lambda z, _: z @ H, "stop": stop}
    ours, theirs = (dq.solve(mapped, X * 0, solver=solver, **call) for solver in (dq.Naive(), Picard()))
    assert torch.equal(ours.stats.iterations, theirs.stats.iterations)
    assert torch.equal(ours.status, theirs.status)
    assert torch.allclose(ours.value, theirs.value, rtol=0, atol=1e-12)


def test_states_without_a_token_dimension():
    x = X[:, 0]
    rule = dq.StableArgmax(2)
    solution = dq.solve(
        lambda z: torch.tanh(z @ W / 2 + x),
        x * 0,
        readout=lambda z: z @ H,
        solver=dq.Naive(),
        stop=dq.Stop(rtol=1e-9, exit=rule),
    )
    for row in range(6):
        f = lambda z, row=row: torch.tanh(z @ W / 2 + x[row])  # noqa: E731
        wanted = by_hand(f, lambda z: z @ H, rule, x[row : row + 1] * 0, damping=1.0, stop=dq.Stop(rtol=1e-9))
        assert (int(solution.stats.iterations[row]), int(solution.status[row])) == wanted[1:]


def test_an_exit_is_no_failure_and_not_converged():
    stop = dq.Stop(rtol=1e-9, exit=dq.StableArgmax(2))
    call = {"args": (X, RATES), "readout": lambda z, _: z @ H, "solver": dq.Relaxed(0.7)}
    solution = dq.solve(mapped, X * 0, stop=stop, **call)
    assert (solution.status == dq.Status.EXITED).all()
    assert not solution.converged.any()
    assert not solution.failed.any()
    assert solution.raise_if_failed() is solution
    assert "6 ended by the exit rule" in repr(solution)
    explanation = solution.explain()
    assert explanation.causes == ("exit rule",) * 6
    assert "StableArgmax(times=2) ended it after" in str(explanation)


def test_rows_that_fail_beside_rows_that_exit_are_explained_and_named():
    stop = dq.Stop(rtol=1e-9, max_steps=4, exit=dq.LogitKL(1e-3))
    call = {"args": (X, RATES), "readout": lambda z, _: z @ H, "solver": dq.Relaxed(0.7)}
    solution = dq.solve(mapped, X * 0, stop=stop, **call)
    failed = solution.failed.nonzero()[:, 0].tolist()
    assert 0 < len(failed) < 6
    causes = solution.explain().causes
    assert [row for row in range(6) if causes[row] != "exit rule"] == failed
    with pytest.raises(dq.ConvergenceError, match=f"{len(failed)} of 6 rows") as caught:
        solution.raise_if_failed()
    assert caught.value.rows == failed


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dq.LogitKL(0.0), "LogitKL.threshold"),
        (lambda: dq.StableArgmax(1), "StableArgmax.times must be an integer >= 2, got 1"),
        (lambda: dq.Margin(1.5), "Margin.threshold"),
        (lambda: dq.ExitGate(GATE, 0.0), "ExitGate.threshold"),
        (lambda: dq.Stop(exit=dq.Margin(), norm="frobenius"), 'Stop.exit measures each token.*"max_token"'),
    ],
)
def test_numbers_out_of_range(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.usefixtures("unchecked")
def test_objects_of_another_type():
    with pytest.raises(TypeError, match=r"Stop\.exit must be an ExitRule or None.*write StableArgmax\(\.\.\.\)"):
        dq.Stop(exit="stable_argmax")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"ExitGate\.gate must be a function, got None"):
        dq.ExitGate(None)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Wrong(ExitRule):
    """Returns something else than a bool per token."""

    done: object

    def step(self, states, logits, memory):
        return self.done, memory


@pytest.mark.usefixtures("unchecked")
def test_what_a_solve_refuses():
    def solved(rule, readout):
        return dq.solve(torch.cos, X, solver=dq.Naive(), stop=dq.Stop(exit=rule), readout=readout)

    def never(z):
        raise AssertionError("the map must not be evaluated")

    with pytest.raises(ValueError, match=r"Stop\.exit=StableArgmax\(times=2\) judges logits.*CausalLM"):
        dq.solve(never, X, solver=dq.Naive(), stop=dq.Stop(exit=dq.StableArgmax()))
    with pytest.raises(ValueError, match=r"readout must give logits.*\(6, 3, 'classes'\), got \(6, 4\)"):
        solved(dq.Margin(), lambda z: z[:, 0])
    with pytest.raises(ValueError, match=r"Wrong.step must return bool \(6, 3\), got torch.bool \(6,\)"):
        solved(Wrong(torch.ones(6, dtype=torch.bool)), lambda z: z @ H)
    with pytest.raises(ValueError, match="got NoneType"):
        solved(Wrong(None), lambda z: z @ H)
    with pytest.raises(TypeError, match="readout must be a function, got 3"):
        solved(dq.Margin(), 3)


def test_an_adjoint_solve_has_no_exit_rule():
    with pytest.raises(ValueError, match=r"Implicit\.stop.*StableArgmax"):
        dq.Implicit(stop=dq.Stop(exit=dq.StableArgmax()))


def test_a_vocabulary_of_one_token_is_certain():
    done, _ = dq.Margin(1.0).step(torch.zeros(2, 3, 4), torch.zeros(2, 3, 1), None)
    assert done.shape == (2, 3)
    assert done.all()


def test_a_gate_with_threshold_1_lets_nothing_go_even_if_a_probability_underflows():
    done, _ = dq.ExitGate(lambda states: states[..., :1] + 200, 1.0).step(torch.zeros(2, 3, 4), None, None)
    assert not done.any()


def test_a_threshold_may_be_a_number_of_numpy():
    done, _ = dq.ExitGate(GATE, np.float64(0.5)).step(torch.zeros(2, 3, 4).double(), None, None)
    assert done.dtype == torch.bool


def test_a_class_that_the_head_rules_out_does_not_keep_a_token_from_exiting():
    logits = torch.tensor([[[1.0, 2.0, -torch.inf]]])
    rule = dq.LogitKL()
    _, memory = rule.step(torch.zeros(1, 1, 4), logits, None)
    done, _ = rule.step(torch.zeros(1, 1, 4), logits + 1e-3, memory)
    assert done.all()
    done, _ = rule.step(torch.zeros(1, 1, 4), logits * torch.tensor([1.0, 5.0, 1.0]), memory)
    assert not done.any()


def test_nan_is_no_stable_prediction():
    rule, memory, logits = dq.StableArgmax(2), None, torch.full((1, 1, 3), torch.nan)
    for _ in range(3):
        done, memory = rule.step(torch.zeros(1, 1, 4), logits, memory)
        assert not done.any()
    for expected in (False, True):
        done, memory = rule.step(torch.zeros(1, 1, 4), torch.ones(1, 1, 3), memory)
        assert done.all() == expected


@pytest.mark.parametrize(
    ("readout", "words"),
    [
        (lambda z: (z,), "readout must give logits, a floating-point tensor, got tuple"),
        (lambda z: z.long(), "got torch.int64"),
        (lambda z: z[..., :0], r"got \(6, 3, 0\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_readout_that_gives_no_logits(readout, words):
    with pytest.raises((TypeError, ValueError), match=words):
        dq.solve(torch.cos, X, solver=dq.Naive(), stop=dq.Stop(exit=dq.Margin()), readout=readout)


@pytest.mark.usefixtures("unchecked")
def test_a_rule_that_returns_no_pair():
    class Alone(ExitRule):
        def step(self, states, logits, memory):
            return torch.zeros(6, 3, dtype=torch.bool)

    with pytest.raises(TypeError, match=r"Alone.step must return a pair \(done, memory\), got Tensor"):
        dq.solve(torch.cos, X, solver=dq.Naive(), stop=dq.Stop(exit=Alone()), readout=lambda z: z @ H)
