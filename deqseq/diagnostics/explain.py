"""Why a solve ended as it did, and what to do about it: the problem is solved in other ways."""

import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deqseq.arguments import checked
from deqseq.rows import per_row
from deqseq.solution import Call, Outcome, SolveStats, Status, worst_token
from deqseq.solvers import Adaptive, Anderson, Broyden, Relaxed, Solver
from deqseq.step import Progress
from deqseq.stop import Stop, token_norms
from deqseq.sweeps import Simultaneous, Sliding
from deqseq.types import State

DAMPED = (Adaptive(), Relaxed(0.2))
SEVERAL = (Anderson(), Broyden())  # they combine several past iterates
WINDOW = Sliding(8)

ADVICE = {
    "budget": "give more iterations",
    "no tolerance": "without a tolerance no row can converge: give stop=Stop(rtol=1e-3)",
    "slow convergence": (
        "give more iterations, or take a solver that uses several past iterates, or train first"
    ),
    "limit cycle": "damp the iteration",
    "divergence": "the map expands: damp the iteration, or make the map contractive",
    "loose tolerance": "tighten it",
    "estimator": "in eval mode the value is that of the solve; to train, take fewer or "
    "shorter steps, or make the map "
    "contract",
    "changed since": (
        "explain a solve before weights, mode or inputs change: it is made again with those of now"
    ),
    "drift": "the map has no fixed point near: normalise its output, or make it contract",
    "fixed point zero": "give an absolute tolerance, such as stop=Stop(atol=1e-6)",
    "random map": "draw noise and dropout once, before the solve, or call eval()",
    "map not finite": "look for NaN in the inputs and the weights",
    "precision": "loosen the tolerance, or compute in a wider dtype",
    "no fixed point found": "make the map contract, for example by scaling its weights "
    "to a spectral norm below 1, or "
    "train the model at its fixed point (deqseq.training.free); an untrained map, one trained "
    "through unrolled "
    "iterations alone, or inputs unlike those of training need not have a fixed point that a "
    "solver reaches",
    "several fixed points": "the start decides which one is found: solve from the "
    "start that training used, and "
    "train with every sweep that will be used",
}
"""What to do about each cause; a row that converged has the cause "converged"."""


@dataclass(frozen=True)
class Explanation:
    """Why rows converged or not, and what to do; prints as text.

    Attributes:
        causes: one per row, such as "converged" or "budget".
        findings: what was observed of the rows of each cause.
        remedies: what to do about each; a setting that was tried and converged is named.
    """

    causes: tuple[str, ...]
    findings: dict[str, str]
    remedies: dict[str, str]

    def __str__(self) -> str:
        lines, batch = [], len(self.causes)
        for cause, finding in self.findings.items():
            rows = [row for row, name in enumerate(self.causes) if name == cause]
            numbers = ", ".join(map(str, rows[:8]))
            if len(rows) == batch:
                shown = f"all {batch} rows" if batch > 1 else "row 0"
            elif len(rows) == 1:
                shown = f"row {numbers} of {batch}"
            else:
                more = " …" if len(rows) > 8 else ""
                shown = f"rows {numbers}{more} of {batch}"
            lines.append(f"{shown}: {cause}. {finding}")
            if cause in self.remedies:
                lines.append(f"  Remedy: {self.remedies[cause]}.")
        return "\n".join(lines)


class Cause(NamedTuple):
    """Why a row ended as it did."""

    name: str
    text: str
    iterations: int = 0
    """How many are enough; 0 if unknown."""


Causes = dict[int, Cause]
"""Of some rows."""


class _Stay(Solver[None]):
    """Evaluates the map at one point, again and again."""

    def init(self, z0: Tensor) -> None:
        return None

    def step(self, z: Tensor, fz: Tensor, state: None) -> tuple[Tensor, None]:
        return z, None


class _Trials:
    """The solves that are made to explain one: ``longer`` has a tolerance and a larger budget."""

    def __init__(self, call: Call) -> None:
        self.call, self.stop = call, call.stop
        if not call.stop.has_tolerance:
            self.stop = replace(call.stop, rtol=1e-4, check_every=1)
        budget = min(max(4 * call.stop.max_steps, 64), 1000)
        budget = max(call.stop.max_steps, budget)
        self.longer = replace(self.stop, check_every=1, max_steps=budget)

    def together(self, **changes: Any) -> Any:
        """Solve with changes, all tokens together."""
        if self.call.sweep is not None:
            changes["sweep"] = Simultaneous()
        return self.call.repeat(**changes)

    def evaluate(self, point: State, times: int = 1) -> State:
        """The value of the map at a point, when it is evaluated there the last of so many times."""
        stop = Stop.exactly(times)
        return self.together(solver=_Stay(), stop=stop, start=point).value.double()


@checked
def explain(outcome: Outcome) -> Explanation:
    """Why each row of a solve converged or not, and what to do about it.

    The map is solved again in the mode in which it was. It is evaluated twice at one point: one
    that draws random numbers has no fixed point. If rows failed, they are solved with four times
    the budget (at least 64 and at most 1,000 iterations), then with Adaptive, Relaxed(0.2),
    Anderson and Broyden until one converges; only the last two if the solve is merely slow. Rows
    that converged are solved again as they were, with another sweep and from a random start, and in
    training mode the residual of the estimator's value is measured.

    Args:
        outcome: what a solve or a model returned. A model is examined with the weights that it has
            now, in the dtype of then.

    Raises:
        ValueError: an explicit model's output, a copy of an outcome, or some rows of one.

    Example:
        >>> import torch, deqseq as dq
        >>> solution = dq.solve(
        ...     lambda z: 3 - z, torch.ones(2, 1), solver=dq.Naive(), stop=dq.Stop(rtol=1e-6)
        ... )
        >>> explain(solution).causes
        ('limit cycle', 'limit cycle')
    """
    if outcome.status is None or outcome.stats is None:
        raise ValueError("explain() needs a solve: an explicit model runs its layers once")
    if outcome.call is None:
        raise ValueError(
            "explain() needs the outcome of a whole solve as it was returned, got rows of one, or "
            "a copy"
        )
    call, trials = outcome.call, _Trials(outcome.call)
    statuses = outcome.status.tolist()
    rows: dict[Status, list[int]] = {kind: [] for kind in Status}
    for row, status in enumerate(statuses):
        rows[Status(status)].append(row)
    spent = rows[Status.MAX_STEPS_REACHED]
    failed = rows[Status.DIVERGED] + (spent if call.stop.has_tolerance else [])
    causes, advice = Causes(), dict(ADVICE)
    point = trials.together(solver=_Stay(), stop=Stop.exactly(1)).value.nan_to_num(0, 0, 0)
    first, second = trials.evaluate(point), trials.evaluate(point, times=2)
    if failed:
        causes, advice = _failed(trials, failed, point)
    if rows[Status.CONVERGED]:
        causes |= _converged(trials, outcome, rows[Status.CONVERGED])
    size = first.abs().reshape(len(first), -1).amax(dim=1)
    noisy = (first - second).abs().reshape(len(first), -1).amax(dim=1) > 1e-4 * size
    for row in causes:
        if noisy[row]:
            causes[row] = Cause("random map", "Two evaluations at the same point differ.")
    if spent and not call.stop.has_tolerance:
        worst = float(worst_token(outcome.stats.residual.detach())[spent].max())
        ran = f"{call.stop.max_steps} iterations, whatever the residual"
        causes |= dict.fromkeys(spent, Cause("no tolerance", f"{ran}: it is {worst:.1e} or less."))
    return _summary([causes[row] for row in range(len(statuses))], advice)


def _summary(causes: list[Cause], advice: dict[str, str]) -> Explanation:
    """One finding and one remedy for each cause."""
    findings: dict[str, str] = {}
    for name in (cause.name for cause in causes):
        text, *others = dict.fromkeys(cause.text for cause in causes if cause.name == name)
        findings[name] = f"{text} Other rows are alike." if others else text
    remedies = {name: advice[name] for name in findings if name in advice}
    return Explanation(tuple(cause.name for cause in causes), findings, remedies)


def _failed(trials: _Trials, rows: list[int], begun: State) -> tuple[Causes, dict[str, str]]:
    """Why these rows failed, and advice that names settings with which they converge."""
    records: list[Progress] = []
    longer = trials.longer
    solved = trials.together(stop=longer, callback=records.append)
    residuals = [worst_token(record.residual) for record in records]
    trace = torch.stack(residuals).cpu().double()
    norms = [x.double().reshape(len(x), -1).norm(dim=1) for x in (solved.value, begun)]
    growth = (norms[0] / norms[1]).tolist()
    causes = Causes()
    for row in rows:
        cause = _cause(trials, solved, row, trace[:, row], growth[row])
        if cause.name in ("limit cycle", "budget") and growth[row] < 1e-3:
            text = f"The state tends to zero; {cause.text}"
            cause = Cause("fixed point zero", text, cause.iterations)
        causes[row] = cause
    stuck = [
        row for row in rows if causes[row].name in ("limit cycle", "slow convergence", "drift")
    ]
    in_window = _converged_in_window(trials) if stuck else []
    late = [row for row in stuck if in_window and in_window[row]]
    if late:  # from left to right their tokens converge one after another
        passed = (solved.stats.residual <= longer.rtol).cumprod(dim=1).sum(dim=1).tolist()
        length, steps = solved.stats.residual.shape[1], solved.stats.evaluations
        for row in late:
            count = f"{passed[row]} of {length} tokens have converged after {steps} iterations"
            causes[row] = Cause("budget", f"From left to right, {count}.")
    advice = _budgets(trials, causes, late, in_window)
    return _other_solvers(trials, causes, advice)


def _budgets(
    trials: _Trials, causes: Causes, late: list[int], in_window: list[bool]
) -> dict[str, str]:
    """The advice, in which the budget is named that is enough."""
    advice = dict(ADVICE)
    for name in ("budget", "slow convergence"):
        rows = [row for row, cause in causes.items() if cause.name == name]
        counts = [causes[row].iterations for row in rows if row not in late]
        if late and name == "budget":  # what is enough for other rows is not enough for these
            if all(in_window[row] for row in rows):
                reason = "all tokens together need a max_steps that grows with the length"
                advice[name] = f"sweep={WINDOW} converges; {reason}"
        elif counts and min(counts) > 0:
            advice[name] = f"give more iterations: stop={_written(trials.stop, max(counts))}"
    return advice


def _other_solvers(
    trials: _Trials, causes: Causes, advice: dict[str, str]
) -> tuple[Causes, dict[str, str]]:
    """Name a solver with which all rows converge that are not merely short of a budget."""
    moving = [row for row in causes if causes[row].name in ("limit cycle", "divergence")]
    slow = [row for row in causes if causes[row].name == "slow convergence"]
    hard = moving + slow
    if not hard:
        return causes, advice
    # damping does not help a solve that is only slow
    solvers = DAMPED + SEVERAL if moving else SEVERAL
    solvers = [solver for solver in solvers if solver != trials.call.solver]
    for solver in solvers:
        solved = trials.together(solver=solver, stop=trials.longer)
        if bool(solved.converged[hard].all()):
            iterations = int(worst_token(solved.stats.iterations)[hard].max())
            setting = f"solver={solver}, stop={_written(trials.stop, iterations)}"
            tried = f"{setting} converges in {_range(solved.stats, hard)} iterations"
            advice["slow convergence"] = f"{tried}, or {advice['slow convergence']}"
            advice["limit cycle"] = f"{tried}; to train, make the map contract"
            advice["divergence"] = advice["limit cycle"]
            return causes, advice
    names = ", ".join(map(str, solvers))
    for row in moving:
        text = f"{causes[row].text} {names} did not converge either."
        causes[row] = Cause("no fixed point found", text)
    return causes, advice


def _converged_in_window(trials: _Trials) -> list[bool]:
    """Which rows converge in a window; nothing if there is none."""
    call = trials.call
    if call.sweep is not None and call.sweep.block is None and not call.solver.owns_loop:
        with suppress(NotImplementedError):  # a backbone without advance() has one sweep
            return call.repeat(sweep=WINDOW, stop=trials.stop).converged.tolist()
    return []


def _cause(trials: _Trials, solved: Outcome, row: int, trace: Tensor, growth: float) -> Cause:
    """Why a row failed, from the residuals of a longer solve.

    The difference has fallen as the residual has, times the ``growth`` of the state.
    """
    assert solved.stats is not None and solved.status is not None
    stop, dtype = trials.longer, trials.call.dtype
    iterations, status = int(worst_token(solved.stats.iterations)[row]), int(solved.status[row])
    if status == Status.DIVERGED and iterations <= 1:
        return Cause("map not finite", "The first value of the map is not finite.")
    if status == Status.DIVERGED:
        text = f"The residual grows without bound in {iterations} iterations."
        return Cause("divergence", text)
    if status == Status.CONVERGED:
        budget = trials.stop.max_steps
        text = f"It converges in {iterations} iterations; the budget was {budget}."
        return Cause("budget", text, iterations)
    # smallest residuals of the last two quarters: an oscillation falls by nothing
    quarter = max(1, len(trace) // 4)
    last = float(trace[-quarter:].min())
    level = f"The residual is {last:.1e} after {iterations} iterations"
    tolerance = f"the tolerance is {stop.rtol:.1e}."
    drift = Cause("drift", f"{level}, because the state grows: the difference does not fall.")
    if 0 < last <= stop.rtol:
        return drift
    units = 32 if dtype.itemsize > 2 else 4
    if last < units * torch.finfo(dtype).eps:
        return Cause("precision", f"{level}, which is the precision of {dtype}; {tolerance}")
    if len(trace) == 1:  # of a solver of another library
        return Cause("slow convergence", f"{level}; {tolerance}")
    before = float(trace[-2 * quarter : -quarter].min())
    rate = (last / before) ** (1 / quarter) if before > 0 else 1.0
    if rate >= 0.999:
        return Cause("limit cycle", f"{level} and does not fall; {tolerance}")
    if growth * last > 0.9 * float(trace[0]):
        return drift
    text, enough = f"{level} and falls by a factor of {rate:.3f} per iteration", 0
    if stop.rtol and not stop.atol:
        enough = iterations + int(math.log(stop.rtol / last) / math.log(rate))
    needed = f"at least {enough}" if enough else "more"
    return Cause("slow convergence", f"{text}: {needed} iterations are needed.", enough)


def _converged(trials: _Trials, outcome: Outcome, rows: list[int]) -> Causes:
    """Whether these rows converge to the same from another start and by another sweep."""
    assert outcome.stats is not None
    call, longer, causes = trials.call, trials.longer, Causes()
    tight = replace(longer, rtol=min(longer.rtol, 1e-4))
    usual, same = trials.together(stop=tight), call.repeat()
    other = trials.together(stop=tight, start=_random_states(usual.value))
    elsewhere = Cause("several fixed points", "A solve from a random start converges elsewhere.")
    causes |= dict.fromkeys(_apart(usual, other, tight.atol), elsewhere)
    if call.sweep is not None:
        with suppress(NotImplementedError):  # a backbone without advance() has one sweep
            causes |= _other_sweeps(trials)
    estimated = call.estimated_value(outcome)
    if estimated is None:
        changed = Cause("changed since", "The same solve now gives another value.")
        returned = replace(same, value=call.solved_value(outcome))
        causes |= dict.fromkeys(_apart(same, returned, longer.atol), changed)
    else:  # the estimator may have left the tolerance where the map expands
        once = replace(call.stop, max_steps=1, check_every=1)
        there = trials.together(solver=_Stay(), stop=once, start=estimated)
        residual = worst_token(there.stats.residual)
        for row in (~there.converged).nonzero()[:, 0].tolist():
            text = "The estimator's steps led the value to a residual of"
            causes[row] = Cause("estimator", f"{text} {float(residual[row]):.1e}.")
    single = [row for row in rows if row not in causes]
    text = f"In {_range(outcome.stats, single or rows)} iterations"
    if bool((usual.converged & other.converged)[single].all()):
        text += "; from a random start, to the same value"
    here = Cause("converged", f"{text}.")
    return {row: causes.get(row, here) for row in rows}


def _random_states(like: State) -> State:
    """Random states, in each row of the size of ``like``."""
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(like.shape, generator=generator, device="cpu")
    size = like.double().reshape(len(like), -1).square().mean(dim=1).sqrt().clamp_min(1e-3)
    limit = torch.finfo(like.dtype).max
    return (noise.to(size) * per_row(size, like)).clamp(-limit, limit).to(like.dtype)


def _other_sweeps(trials: _Trials) -> Causes:
    """Rows in which the sweep that was used and another one converge to different values."""
    call, longer, causes = trials.call, trials.longer, Causes()
    assert call.sweep is not None
    if call.solver.owns_loop:
        return causes
    used, other = call.sweep, Simultaneous()
    if used.block is None:
        other = WINDOW
    closer = max(longer.rtol / 100, 8 * torch.finfo(call.dtype).eps)
    for rtol, name in ((longer.rtol, "loose tolerance"), (closer, "several fixed points")):
        stop = replace(longer, rtol=rtol)
        first, second = (call.repeat(sweep=sweep, stop=stop) for sweep in (used, other))
        text = f"At a tolerance of {rtol:.0e}, {used} and {other} converge to different values."
        disagree = _apart(first, second, longer.atol)
        causes |= dict.fromkeys(disagree, Cause(name, text))
        if not disagree:
            break
    return causes


def _apart(a: Any, b: Any, atol: float) -> list[int]:
    """Rows that converged in both, and differ in a token by a twentieth of a token's mean size."""
    difference = token_norms(a.value - b.value).amax(dim=1)
    apart = difference > 0.05 * token_norms(a.value).mean(dim=1) + 100 * atol
    return (apart & a.converged & b.converged).nonzero()[:, 0].tolist()


def _written(stop: Stop, iterations: int) -> str:
    """The stopping rule as a user writes it, with a budget that is enough: a power of two."""
    stop = replace(stop, max_steps=2 ** iterations.bit_length())
    values = {field.name: getattr(stop, field.name) for field in fields(stop)}
    changed = [
        f"{field.name}={values[field.name]!r}"
        for field in fields(stop)
        if values[field.name] != field.default or field.name == "max_steps"
    ]
    return f"Stop({', '.join(changed)})"


def _range(stats: SolveStats, rows: list[int]) -> str:
    """The smallest and the largest number of iterations of some rows."""
    low, high = torch.aminmax(worst_token(stats.iterations)[rows])
    return f"{int(low)}" if low == high else f"{int(low)} to {int(high)}"
