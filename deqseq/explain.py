"""Why a solve ended as it did, and what to do about it: found by solving the same problem in other ways."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from deqseq.norms import worst_token
from deqseq.solvers import Adaptive, Anderson, Broyden, ExternalSolver, Relaxed, Solver
from deqseq.stop import Stop
from deqseq.types import RowIndex, RowMask

if TYPE_CHECKING:
    from deqseq.solution import Outcome

Cause = Literal[
    "converged",
    "exit rule",
    "several fixed points",
    "budget",
    "no tolerance",
    "slow convergence",
    "limit cycle",
    "divergence",
    "precision",
    "no fixed point found",
]
"""Why the solve of a row ended as it did."""
DAMPED = (Adaptive(), Relaxed(0.2))
SEVERAL = (Anderson(), Broyden())  # of several past iterates; their residuals fall irregularly
ADVICE: dict[Cause, str] = {
    "budget": "give more iterations",
    "no tolerance": "without a tolerance no row can converge: give stop=Stop(rtol=1e-3), and no Lockstep sweep",
    "slow convergence": "give more iterations, or take a solver that uses several past iterates; an untrained "
    "model may have to be trained first",
    "limit cycle": "damp the iteration",
    "divergence": "the map expands: damp the iteration, or make the map contractive",
    "precision": "loosen the tolerance, or compute in a wider dtype",
    "no fixed point found": "make the map contract, for example by scaling its weights to a spectral norm below 1, or "
    "train the model at its fixed point (deqseq.training.free); an untrained map, one trained through unrolled "
    "iterations alone, or inputs unlike those of training need not have a fixed point that a solver reaches",
    "several fixed points": "the start decides which one is found: solve from the start that training used, and "
    "train with every sweep that will be used",
}


@dataclass(frozen=True)
class Problem:
    """The solve behind an outcome.

    ``run(solver, stop, start, trace)`` repeats it in another way, without gradients; ``whole`` says whether the outcome
    still has the rows that ``run`` solves.
    """

    solver: Solver[Any] | ExternalSolver
    stop: Stop
    run: "Callable[[Solver[Any] | ExternalSolver, Stop, Tensor | None, bool], Outcome]"
    whole: bool = True

    @property
    def fixed(self) -> bool:
        """Whether the number of iterations was fixed: no row could converge to a tolerance."""
        return self.stop.rtol == self.stop.atol == 0

    def take_rows(self, rows: RowIndex) -> "Problem":
        """What is left of it for some rows, ``(rows,)``, of the outcome."""
        return replace(self, whole=False)


@dataclass(frozen=True)
class Explanation:
    """Why rows converged or not, and what to do; prints as text.

    Attributes:
        causes: one per row.
        findings: what was observed of the rows of each cause.
        remedies: what to do about each cause; a setting that was tried and converged is named.
    """

    causes: tuple[Cause, ...]
    findings: dict[Cause, str]
    remedies: dict[Cause, str]

    def __str__(self) -> str:
        lines = []
        for cause, finding in self.findings.items():
            rows = [row for row, each in enumerate(self.causes) if each == cause]
            lines.append(f"{_named(rows, len(self.causes))}: {cause}. {finding}")
            if cause in self.remedies:
                lines.append(f"  Remedy: {self.remedies[cause]}.")
        return "\n".join(lines)


def explain(outcome: "Outcome", problem: Problem) -> Explanation:
    """Solve again with a larger budget, with other solvers until one converges, and from another start."""
    from deqseq.solution import Status

    assert outcome.status is not None
    given = replace(problem.stop, rtol=1e-4, check_every=1) if problem.fixed else problem.stop
    stop = replace(given, exit=None, check_every=1, max_steps=_larger(given.max_steps))
    converged, failed = outcome.converged.cpu(), outcome.failed.cpu()
    exited, judged = ~converged & ~failed, (outcome.status.cpu() == Status.DIVERGED) | (not problem.fixed)
    causes: list[Cause] = ["exit rule" if row else "converged" for row in exited.tolist()]
    for row in (failed & ~judged).nonzero()[:, 0].tolist():
        causes[row] = "no tolerance"
    failed = failed & judged
    findings: dict[Cause, list[str]] = {}
    tried, again, solved, solver = "", outcome, outcome, problem.solver
    if bool(failed.any()):
        again = solved = problem.run(solver, stop, None, True)
        for row in failed.nonzero()[:, 0].tolist():
            causes[row], finding = _cause(again, row, given, stop)
            findings.setdefault(causes[row], []).append(finding)
        hard = _mask([cause in ("slow convergence", "limit cycle", "divergence") for cause in causes])
        if bool(hard.any()):
            trials = _trials(problem.solver, stop, causes)
            better = _first_that_converges(problem, stop, hard, trials)
            if better is not None:
                solver, solved = better
                rule, numbers = _written(given, _enough(solved, hard)), _iterations(solved, hard)
                tried = f"solver={solver}, stop={rule} converges in {numbers} iterations"
            else:
                moved = "limit cycle", "divergence"
                causes = ["no fixed point found" if cause in moved else cause for cause in causes]
                lost = [text for cause in moved for text in findings.pop(cause, [])]
                if lost:
                    names = ", ".join(map(str, trials))
                    findings["no fixed point found"] = [f"{lost[0]} {names} did not converge either."]
    settled = solved.converged.cpu() & ~exited
    several, alone = _elsewhere(problem, replace(stop, rtol=min(stop.rtol, 1e-4)), solver, settled)
    for row in (several & converged).nonzero()[:, 0].tolist():  # of the others, say why they failed
        causes[row] = "several fixed points"
    text = _texts(outcome, problem, causes, findings, alone)
    order: list[Cause] = list(dict.fromkeys(causes))
    remedies: dict[Cause, str] = {cause: ADVICE[cause] for cause in order if cause in ADVICE}
    if "budget" in remedies:
        short = _mask([cause == "budget" for cause in causes])
        remedies["budget"] += f": stop={_written(given, _enough(again, short))}"
    for cause in ("slow convergence", "limit cycle", "divergence"):
        if tried and cause in remedies:
            remedies[cause] = tried + "; to train, make the map contract" * (cause != "slow convergence")
    return Explanation(tuple(causes), {cause: text[cause] for cause in order}, remedies)


def _texts(
    outcome: "Outcome", problem: Problem, causes: Sequence[Cause], findings: dict[Cause, list[str]], alone: bool
) -> dict[Cause, str]:
    """What is said of each cause; ``alone``: a random start led to no other fixed point."""
    assert outcome.stats is not None
    text: dict[Cause, str] = {cause: _summary(findings[cause]) for cause in findings if cause in causes}
    rows = {cause: _mask([each == cause for each in causes]) for cause in causes}
    if "several fixed points" in causes:
        text["several fixed points"] = "A solve from a random start converges elsewhere."
    if "converged" in causes:
        same, mine = "; from a random start, to the same value" * alone, rows["converged"]
        text["converged"] = f"In {_iterations(outcome, mine)} iterations{same}.{_error(outcome, mine)}"
    if "exit rule" in causes:
        text["exit rule"] = f"{problem.stop.exit} ended it after {_iterations(outcome, rows['exit rule'])} iterations."
    if "no tolerance" in causes:
        worst = float(worst_token(outcome.stats.residual.detach()).cpu()[rows["no tolerance"]].max())
        text["no tolerance"] = f"{problem.stop.max_steps} iterations, whatever the residual: it is {worst:.1e} or less."
    return text


def _written(stop: Stop, budget: int) -> str:
    """A stopping rule with this budget, as a user writes it; trials have no exit rule."""
    given = {field.name: getattr(stop, field.name) for field in fields(stop)}
    changed = {field.name: given[field.name] for field in fields(stop) if given[field.name] != field.default}
    changed = {name: value for name, value in changed.items() if name != "exit"} | {"max_steps": budget}
    return f"Stop({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def _mask(rows: list[bool]) -> RowMask:
    return torch.tensor(rows, device="cpu")


def _larger(budget: int) -> int:
    return max(budget, min(max(4 * budget, 64), 1000))


def _cause(solved: "Outcome", row: int, given: Stop, stop: Stop) -> tuple[Cause, str]:
    """Why a row failed, from the residuals of a solve with a larger budget."""
    from deqseq.solution import Status

    assert solved.stats is not None and solved.status is not None and solved.stats.trace is not None
    trace = solved.stats.trace[:, row].detach().cpu().double()
    trace = worst_token(trace)
    iterations = int(worst_token(solved.stats.iterations)[row])
    if int(solved.status[row]) == Status.DIVERGED:
        return "divergence", f"The residual grows without bound in {iterations} iterations."
    if int(solved.status[row]) == Status.CONVERGED:
        return "budget", f"It converges in {iterations} iterations; the budget was {given.max_steps}."
    quarter = max(1, len(trace) // 4)  # smallest residuals of the last two quarters: an oscillation falls by nothing
    last = float(trace[-quarter:].min())
    before = float(trace[-2 * quarter : -quarter].min()) if len(trace) > 1 else last
    rate = (last / before) ** (1 / quarter) if before > 0 else 1.0
    level = f"{last:.1e} after {len(trace)} iterations"
    dtype = solved.value.dtype  # pyright: ignore[reportAttributeAccessIssue]
    if last < (32 if dtype.itemsize > 2 else 4) * torch.finfo(dtype).eps:
        return (
            "precision",
            f"The residual is {level}, which is the precision of {dtype}; the tolerance is {stop.rtol:.1e}.",
        )
    if rate < 0.999:
        needed = "more"
        if stop.rtol and not stop.atol and stop.of == "residual":
            needed = f"at least {len(trace) + int(math.log(stop.rtol / last) / math.log(rate))}"
        return "slow convergence", (
            f"The residual is {level} and falls by a factor of {rate:.3f} per iteration: {needed} iterations are "
            "needed."
        )
    return "limit cycle", f"The residual does not fall: {level}, the tolerance is {stop.rtol:.1e}."


def _trials(failed: Solver[Any] | ExternalSolver, stop: Stop, causes: Sequence[Cause]) -> list[Solver[Any]]:
    """What to try instead of the solver that failed; damping does not help a solve that is only slow."""
    damped = "limit cycle" in causes or "divergence" in causes
    trials = DAMPED * damped + SEVERAL * (stop.of == "residual")  # else they bound nothing
    return [solver for solver in trials if solver != failed]


def _first_that_converges(
    problem: Problem, stop: Stop, rows: RowMask, trials: Sequence[Solver[Any]]
) -> "tuple[Solver[Any] | ExternalSolver, Outcome] | None":
    for solver in trials:
        solved = problem.run(solver, stop, None, False)
        if bool(solved.converged.cpu()[rows].all()):
            return solver, solved
    return None


def _elsewhere(
    problem: Problem, stop: Stop, solver: Solver[Any] | ExternalSolver, rows: RowMask
) -> tuple[RowMask, bool]:
    """Which rows converge to another point from a random start of the scale of their value; whether none does."""
    if not bool(rows.any()):
        return rows, False
    usual = problem.run(solver, stop, None, False)
    value: Tensor = usual.value  # pyright: ignore[reportAttributeAccessIssue]
    noise = torch.randn(value.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=torch.float64)
    scale = value.double().square().mean().sqrt().clamp_min(1e-3)
    start = (noise.to(value.device) * scale).to(value.dtype)
    if not bool(start.isfinite().all()):
        return torch.zeros_like(rows), False
    other = problem.run(solver, stop, start, False)
    difference = other.value - value  # pyright: ignore[reportAttributeAccessIssue]
    apart = _norms(difference) > 0.05 * _norms(value)
    settled = (usual.converged & other.converged).cpu()
    return rows & settled & apart.cpu(), bool((settled & ~apart.cpu())[rows].all())


def _norms(x: Tensor) -> Tensor:
    """The norm of each row, in float64."""
    return x.double().reshape(len(x), -1).norm(dim=1)


def _enough(solved: "Outcome", rows: RowMask) -> int:
    """A budget for the solves of some rows, a power of two."""
    assert solved.stats is not None
    return 2 ** int(worst_token(solved.stats.iterations).cpu()[rows].max()).bit_length()


def _iterations(solved: "Outcome", rows: RowMask) -> str:
    assert solved.stats is not None
    numbers = worst_token(solved.stats.iterations).cpu()[rows]
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _error(solved: "Outcome", rows: RowMask) -> str:
    assert solved.stats is not None
    worst = float(worst_token(solved.stats.error.detach()).cpu()[rows].max())
    return f"\n  Estimated relative error: {worst:.0e}." if math.isfinite(worst) else ""


def _summary(findings: list[str]) -> str:
    more = len(set(findings)) - 1
    return findings[0] + (" Other rows are alike." if more else "")


def _named(rows: list[int], batch: int) -> str:
    if len(rows) == batch:
        return f"all {batch} rows" if batch > 1 else "row 0"
    shown = ", ".join(map(str, rows[:8]))
    return f"row{'s' * (len(rows) > 1)} {shown}{' …' * (len(rows) > 8)} of {batch}"
