"""Why a solve ended as it did, and what to do about it: the problem is solved in other ways."""

import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deqseq.arguments import checked
from deqseq.rows import per_row
from deqseq.solution import Call, Outcome, Status, worst_token
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
    "loose tolerance": "tighten it, unless the predictions agree",
    "estimator": (
        "in eval mode the value is that of the solve; to train, take fewer or shorter steps, or "
        "make the map contract"
    ),
    "changed since": (
        "explain a solve before weights, mode or inputs change: it is made again with those of now"
    ),
    "drift": "the map has no fixed point near: normalise its output, or make it contract",
    "fixed point zero": "give an absolute tolerance, such as stop=Stop(atol=1e-6)",
    "random map": "draw noise and dropout once, before the solve, or call eval()",
    "map not finite": "look for NaN in the inputs and the weights",
    "precision": "loosen the tolerance, or compute in a wider dtype",
    "no fixed point found": (
        "make the map contract, for example by scaling its weights to a spectral norm below 1, or "
        "train the model at its fixed point (deqseq.training.free); an untrained map, one that was "
        "only trained through unrolled iterations, or inputs unlike those of training need not "
        "have a fixed point that a solver reaches"
    ),
    "several fixed points": (
        "the start decides which one is found: solve from the start that training used, and train "
        "with every sweep that will be used"
    ),
}
"""What to do about each cause; a row that converged has the cause "converged"."""


@dataclass(frozen=True)
class Explanation:
    """Why rows converged or not, and what to do; prints as text.

    Attributes:
        causes: one per row: "converged", "budget", "no tolerance", "slow convergence", "limit
            cycle", "divergence", "drift", "map not finite", "precision", "fixed point zero", "no
            fixed point found", "loose tolerance", "several fixed points", "random map", "changed
            since" or "estimator".
        findings: what was observed in the rows with each cause.
        remedies: what to do about each cause, with a setting that converged if one was found.
    """

    causes: tuple[str, ...]
    findings: dict[str, str]
    remedies: dict[str, str]

    def __str__(self) -> str:
        lines = []
        batch = len(self.causes)
        for cause, finding in self.findings.items():
            rows = [str(row) for row, name in enumerate(self.causes) if name == cause]
            subject = "row" if len(rows) == 1 else "rows"
            shown = f"{subject} {', '.join(rows[:8])}"
            if len(rows) > 8:
                shown += " …"
            if len(rows) < batch:
                shown += f" of {batch}"
            elif batch > 1:
                shown = f"all {batch} rows"
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


class _Stay(Solver[None]):
    """Evaluates the map at one point, again and again."""

    def init(self, z0: Tensor) -> None:
        return None

    def step(self, z: Tensor, fz: Tensor, state: None) -> tuple[Tensor, None]:
        return z, None


class _Examination:
    """Solves a problem in other ways, and records why each row ended as it did, and what to do.

    ``stop`` has a tolerance; ``longer`` has a larger budget, too.
    """

    def __init__(self, call: Call) -> None:
        self.call: Any = call
        self.causes: dict[int, Cause] = {}
        self.advice = dict(ADVICE)
        self.has_sweeps = call.sweep is not None and not call.solver.owns_loop
        self.stop = call.stop
        if not call.stop.has_tolerance:
            self.stop = replace(call.stop, rtol=1e-4, check_every=1)
        budget = min(max(4 * call.stop.max_steps, 64), 1000)
        budget = max(call.stop.max_steps, budget)
        self.longer = replace(self.stop, check_every=1, max_steps=budget)

    def solve(self, **changes: Any) -> Any:
        """Solve with changes, all tokens together."""
        if self.call.sweep is not None:
            changes["sweep"] = Simultaneous()
        return self.call.repeat(**changes)

    def evaluate(self, point: State | None, times: int) -> State:
        """The value of the map at a point, or at the start, the last of so many times."""
        return self.solve(solver=_Stay(), stop=Stop.exactly(times), start=point).value

    def rows_with(self, *names: str) -> list[int]:
        """The rows with one of these causes."""
        return [row for row, cause in self.causes.items() if cause.name in names]

    def examine_failed(self, rows: list[int], first_value: State) -> None:
        """Find out why these rows failed, and settings with which they converge."""
        records: list[Progress] = []
        solved = self.solve(stop=self.longer, callback=records.append)
        residuals = [worst_token(record.residual) for record in records]
        trace = torch.stack(residuals).cpu().double()
        sizes = [token_norms(x.double()).norm(dim=1) for x in (solved.value, first_value)]
        growth = (sizes[0] / sizes[1]).tolist()
        drifting = self._drifting(solved.value)
        for row in rows:
            growing = growth[row] if drifting[row] else 0.0
            cause = self._cause(solved, row, trace[:, row], growing)
            if cause.name in ("limit cycle", "budget") and growth[row] < 1e-3:
                text = f"The state tends to zero; {cause.text}"
                cause = Cause("fixed point zero", text, cause.iterations)
            self.causes[row] = cause
        unfinished = self.rows_with("budget")
        for row in unfinished:
            text = f"It converges in {_range(solved.stats, unfinished)} iterations; the budget was "
            cause = self.causes[row]
            self.causes[row] = cause._replace(text=f"{text}{self.stop.max_steps}.")
        self._try_window(solved)
        for name in ("budget", "slow convergence"):
            counts = [self.causes[row].iterations for row in self.rows_with(name)]
            if min(counts, default=0) > 0:
                budget = _written(self.stop, max(counts))
                self.advice[name] = f"give more iterations: stop={budget}"
        self._try_solvers()

    def _try_window(self, solved: Any) -> None:
        """Rows whose tokens converge from left to right only need a window, or a budget."""
        stuck = self.rows_with("limit cycle", "slow convergence", "drift")
        if not (stuck and self.has_sweeps and self.call.sweep.block is None):
            return
        try:
            in_window = _rows(self.call.repeat(sweep=WINDOW, stop=self.stop).converged)
        except NotImplementedError:  # not causal, or without advance()
            return
        passed = (solved.stats.residual <= self.longer.rtol).cumprod(dim=1)
        length = passed.shape[1]
        steps = solved.stats.evaluations
        sequential = [row for row in stuck if row in in_window]
        for row in sequential:
            count = f"{int(passed[row].sum())} of {length} tokens have converged"
            text = f"From left to right, {count} after {steps} iterations."
            self.causes[row] = Cause("budget", text)
        if sequential and set(self.rows_with("budget")) <= set(in_window):
            reason = "all tokens together need a max_steps that grows with the length"
            self.advice["budget"] = f"sweep={WINDOW} converges; {reason}"

    def _try_solvers(self) -> None:
        """Name a solver with which all rows converge that are not merely short of a budget."""
        moving = self.rows_with("limit cycle", "divergence")
        diverged = self.rows_with("divergence")
        unlimited = replace(self.longer, divergence=math.inf)
        if diverged and bool(self.solve(stop=unlimited).converged[diverged].all()):
            text = "the state grows on its way: stop=Stop(divergence=inf) converges"
            self.advice["divergence"] = text
            moving = self.rows_with("limit cycle")
        rows = moving + self.rows_with("slow convergence")
        if not rows:
            return
        # damping does not help a solve that is only slow
        solvers = DAMPED + SEVERAL if moving else SEVERAL
        solvers = [solver for solver in solvers if solver != self.call.solver]
        for solver in solvers:
            solved = self.solve(solver=solver, stop=self.longer)
            if bool(solved.converged[rows].all()):
                iterations = int(worst_token(solved.stats.iterations)[rows].max())
                setting = f"solver={solver}, stop={_written(self.stop, iterations)}"
                tried = f"{setting} converges in {_range(solved.stats, rows)} iterations"
                several = f"{tried}, or {self.advice['slow convergence']}"
                self.advice["slow convergence"] = several
                damped = f"{tried}; to train, make the map contract"
                names = {self.causes[row].name for row in moving}
                self.advice |= dict.fromkeys(names, damped)
                return
        names = ", ".join(map(str, solvers))
        for row in moving:
            text = f"{self.causes[row].text} {names} did not converge either."
            self.causes[row] = Cause("no fixed point found", text)

    def _drifting(self, point: State) -> list[bool]:
        """Rows that the next two evaluations of the map move on by nearly the same step."""
        first = self.evaluate(point, 1)
        step = first - point
        changes = self.evaluate(first, 1) - first - step, step
        turned, taken = (token_norms(x.double()).norm(dim=1) for x in changes)
        return (turned < 0.5 * taken).tolist()

    def _cause(self, solved: Any, row: int, trace: Tensor, growth: float) -> Cause:
        """Why a row failed, from the residuals of a longer solve.

        Of a state that drifts the difference has fallen as the residual has, times its ``growth``;
        of others that is 0.
        """
        rtol = self.longer.rtol
        dtype = self.call.dtype
        iterations = int(worst_token(solved.stats.iterations)[row])
        status = int(solved.status[row])
        if status == Status.DIVERGED and iterations <= 1:
            return Cause("map not finite", "The first value of the map is not finite.")
        if status == Status.DIVERGED:
            text = f"The residual grows without bound in {iterations} iterations."
            return Cause("divergence", text)
        if status == Status.CONVERGED:
            budget = self.stop.max_steps
            text = f"It converges in {iterations} iterations; the budget was {budget}."
            return Cause("budget", text, iterations)
        # smallest residuals of the last two quarters: an oscillation falls by nothing; a state that
        # wanders rises far above what it had reached, and its largest ones do not fall all the time
        quarter = max(1, len(trace) // 4)
        last, largest = (float(x) for x in torch.aminmax(trace[-quarter:]))
        level = f"The residual is {last:.1e} after {iterations} iterations"
        tolerance = f"the tolerance is {rtol:.1e}."
        drift = Cause("drift", f"{level}, because the state grows: the difference does not fall.")
        if 0 < last <= rtol:
            text = f"The residual falls to {last:.1e} and rises again; {tolerance}"
            return drift if growth else Cause("limit cycle", text)
        units = 32 if dtype.itemsize > 2 else 4
        if last < units * torch.finfo(dtype).eps:
            return Cause("precision", f"{level}, which is the precision of {dtype}; {tolerance}")
        if len(trace) == 1:  # a solver of another library is checked once
            return Cause("slow convergence", f"{level}; {tolerance}")
        earlier = float(trace[-2 * quarter : -quarter].min())
        rate = (last / earlier) ** (1 / quarter) if earlier > 0 else 1.0
        peaks = trace[-4 * quarter :].reshape(-1, quarter).amax(dim=1)
        wanders = largest > 10 * earlier and not bool((peaks.diff() < 0).all())
        if rate >= 0.999 or wanders:
            return Cause("limit cycle", f"{level} and does not fall; {tolerance}")
        if growth * last > 0.9 * float(trace[0]):
            return drift
        text = f"{level} and falls by a factor of {rate:.3f} per iteration"
        enough = 0
        if rtol and not self.longer.atol:
            enough = iterations + int(math.log(rtol / last) / math.log(rate))
        needed = f"at least {enough}" if enough else "more"
        return Cause("slow convergence", f"{text}: {needed} iterations are needed.", enough)

    def examine_converged(self, outcome: Outcome, rows: list[int]) -> None:
        """Find out whether these rows converge to the same in other ways."""
        call = self.call
        causes = dict[int, Cause]()
        tight = replace(self.longer, rtol=min(self.longer.rtol, 1e-4))
        usual = self.solve(stop=tight)
        other = self.solve(stop=tight, start=_random_states(usual.value))
        elsewhere = "A solve from a random start converges elsewhere."
        different_rows = _apart(usual, other, tight.atol)
        causes |= dict.fromkeys(different_rows, Cause("several fixed points", elsewhere))
        with suppress(NotImplementedError):  # not causal, or without advance()
            causes |= self._other_sweeps()
        solved, estimated = call.values(outcome)
        if estimated is None:
            same = call.repeat()
            returned = replace(same, value=solved)
            changed = Cause("changed since", "The same solve now gives another value.")
            causes |= dict.fromkeys(_apart(same, returned, tight.atol), changed)
        else:  # the estimator may have left the tolerance where the map expands
            once = replace(call.stop, max_steps=1, check_every=1)
            evaluated = self.solve(solver=_Stay(), stop=once, start=estimated)
            residual = worst_token(evaluated.stats.residual)
            for row in _rows(~evaluated.converged):
                text = "The estimator's steps led the value to a residual of"
                causes[row] = Cause("estimator", f"{text} {float(residual[row]):.1e}.")
        unsuspected = [row for row in rows if row not in causes]
        text = f"In {_range(outcome.stats, unsuspected or rows)} iterations"
        if bool((usual.converged & other.converged)[unsuspected].all()):
            text += "; from a random start, to the same value"
        converged = Cause("converged", f"{text}.")
        self.causes |= {row: causes.get(row, converged) for row in rows}

    def _other_sweeps(self) -> dict[int, Cause]:
        """Rows in which the sweep that was used and another one converge to different values."""
        causes: dict[int, Cause] = {}
        if not self.has_sweeps:
            return causes
        used = self.call.sweep
        other = WINDOW if used.block is None else Simultaneous()
        loose = self.longer.rtol
        tight = max(loose / 100, 8 * torch.finfo(self.call.dtype).eps)
        for rtol, name in ((loose, "loose tolerance"), (tight, "several fixed points")):
            stop = replace(self.longer, rtol=rtol)
            first, second = (self.call.repeat(sweep=sweep, stop=stop) for sweep in (used, other))
            text = f"At a tolerance of {rtol:.0e}, {used} and {other} converge to different values."
            rows = _apart(first, second, stop.atol)
            causes |= dict.fromkeys(rows, Cause(name, text))
            if not rows:
                break
        return causes


@checked
def explain(outcome: Outcome) -> Explanation:
    """Why each row of a solve converged or not, and what to do about it.

    The map is evaluated twice at one point, because a map that draws random numbers has no fixed
    point. Then it is solved again, in the same mode. Rows that failed get four times the budget (at
    least 64 and at most 1,000 iterations, or the budget if it is larger); sequences are also solved
    in a window, diverged rows with ``divergence=inf``. Adaptive, Relaxed(0.2), Anderson and Broyden
    are tried until one converges; only the last two if the solve is merely slow. Rows that
    converged are solved in the same way, with another sweep, and from a random start. In training
    mode the residual of the estimator's value is measured, too.

    Args:
        outcome: what a solve or a model returned. A model is solved with its current weights, in
            the dtype of the original call.

    Raises:
        ValueError: an explicit model's output, a copy of an outcome, or some rows of one.

    Example:
        >>> from deqseq.diagnostics import explain
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
    examination = _Examination(outcome.call)
    stop = outcome.call.stop
    converged = _rows(outcome.converged)
    spent = _rows(outcome.status == Status.MAX_STEPS_REACHED)
    failed = _rows(outcome.status == Status.DIVERGED)
    if stop.has_tolerance:
        failed += spent
    point = examination.evaluate(None, 1).nan_to_num(0, 0, 0)
    first, second = (examination.evaluate(point, times).double() for times in (1, 2))
    if failed:
        examination.examine_failed(failed, point)
    if converged:
        examination.examine_converged(outcome, converged)
    causes = examination.causes
    differ = token_norms(first - second).amax(dim=1) > 1e-4 * token_norms(first).amax(dim=1)
    random = Cause("random map", "Two evaluations at the same point differ.")
    causes |= {row: random for row in _rows(differ) if row in causes}
    if spent and not stop.has_tolerance:
        worst = float(worst_token(outcome.stats.residual.detach())[spent].max())
        text = f"{stop.max_steps} iterations, whatever the residual: it is {worst:.1e} or less."
        causes |= dict.fromkeys(spent, Cause("no tolerance", text))
    return _summary([causes[row] for row in sorted(causes)], examination.advice)


def _summary(causes: list[Cause], advice: dict[str, str]) -> Explanation:
    """One finding and one remedy for each cause."""
    findings: dict[str, str] = {}
    for name in (cause.name for cause in causes):
        text, *others = dict.fromkeys(cause.text for cause in causes if cause.name == name)
        findings[name] = f"{text} Other rows are alike." if others else text
    remedies = {name: advice[name] for name in findings if name in advice}
    return Explanation(tuple(cause.name for cause in causes), findings, remedies)


def _rows(flags: Tensor) -> list[int]:
    """The numbers of the rows whose flag is True."""
    return flags.nonzero()[:, 0].tolist()


def _random_states(like: State) -> State:
    """Random states, in each row of the size of ``like``."""
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(like.shape, generator=generator, device="cpu")
    size = like.double().reshape(len(like), -1).square().mean(dim=1).sqrt().clamp_min(1e-3)
    limit = torch.finfo(like.dtype).max
    return (noise.to(size) * per_row(size, like)).clamp(-limit, limit).to(like.dtype)


def _apart(a: Any, b: Any, atol: float) -> list[int]:
    """Rows that converged in both, and differ in a token by a twentieth of a token's mean size."""
    difference = token_norms(a.value - b.value).amax(dim=1)
    apart = difference > 0.05 * token_norms(a.value).mean(dim=1) + 100 * atol
    return _rows(apart & a.converged & b.converged)


def _written(stop: Stop, iterations: int) -> str:
    """The stopping rule as a user writes it, with a budget that is enough: a power of two."""
    stop = replace(stop, max_steps=2 ** iterations.bit_length())
    changed = []
    for field in fields(stop):
        value = getattr(stop, field.name)
        if value != field.default or field.name == "max_steps":
            changed.append(f"{field.name}={value!r}")
    return f"Stop({', '.join(changed)})"


def _range(stats: Any, rows: list[int]) -> str:
    """The smallest and the largest number of iterations of some rows."""
    low, high = torch.aminmax(worst_token(stats.iterations)[rows])
    return f"{int(low)}" if low == high else f"{int(low)} to {int(high)}"
