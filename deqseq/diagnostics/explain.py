"""Why a solve ended as it did, and what to do about it: found by solving the same problem in other ways."""

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from deqseq.annotations import checked
from deqseq.loop import Progress
from deqseq.solution import Outcome, SolveStats, Status, worst_token
from deqseq.solvers import Adaptive, Anderson, Broyden, Naive, Relaxed
from deqseq.stop import Stop

Cause = Literal[
    "converged",
    "several fixed points",
    "budget",
    "no tolerance",
    "slow convergence",
    "limit cycle",
    "divergence",
    "drift",
    "fixed point zero",
    "random map",
    "map not finite",
    "precision",
    "no fixed point found",
]
"""Why the solve of a row ended as it did."""
Found = dict[int, tuple[Cause, str]]  # of each row the cause, and what was observed
DAMPED, SEVERAL = (Adaptive(), Relaxed(0.2)), (Anderson(), Broyden())  # the latter combine several past iterates
ADVICE: dict[Cause, str] = {
    "budget": "give more iterations",
    "no tolerance": "without a tolerance no row can converge: give stop=Stop(rtol=1e-3)",
    "slow convergence": "give more iterations, or take a solver that uses several past iterates, or train first",
    "limit cycle": "damp the iteration",
    "divergence": "the map expands: damp the iteration, or make the map contractive",
    "drift": "the map has no fixed point near: normalise its output, or make it contract",
    "fixed point zero": "give an absolute tolerance, such as stop=Stop(atol=1e-6)",
    "random map": "draw noise and dropout once, before the solve, or call eval()",
    "map not finite": "look for NaN in the inputs and the weights",
    "precision": "loosen the tolerance, or compute in a wider dtype",
    "no fixed point found": "make the map contract, for example by scaling its weights to a spectral norm below 1, or "
    "train the model at its fixed point (deqseq.training.free); an untrained map, one trained through unrolled "
    "iterations alone, or inputs unlike those of training need not have a fixed point that a solver reaches",
    "several fixed points": "the start decides which one is found: solve from the start that training used, and "
    "train with every sweep that will be used",
}


@dataclass(frozen=True)
class Explanation:
    """Why rows converged or not, and what to do; prints as text.

    Attributes:
        causes: one per row.
        findings: what was observed of the rows of each cause.
        remedies: what to do about each; a setting that was tried and converged is named.
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


@checked
def explain(outcome: Outcome) -> Explanation:
    """Why each row of a solve converged or not, and what to do about it.

    If rows failed, the map is evaluated twice at the start: a map that draws random numbers has no fixed point. Then
    the same problem is solved again, all tokens together, with four times the budget (at least 64 and at most 1,000
    iterations). If rows still fail, Adaptive, Relaxed(0.2), Anderson and Broyden are tried until one converges; only
    the last two if the solve is merely slow. Rows that converged are solved from a random start too.

    Args:
        outcome: what a solve or a model returned. A model is examined with the weights that it has now.

    Raises:
        ValueError: an explicit model's output, a copy of an outcome, or some rows of one.

    Example:
        >>> import torch, deqseq as dq
        >>> solution = dq.solve(lambda z: 3 - z, torch.ones(2, 1), solver=dq.Naive(), stop=dq.Stop(rtol=1e-6))
        >>> explain(solution).causes
        ('limit cycle', 'limit cycle')
    """
    if outcome.status is None or outcome.stats is None:
        raise ValueError("explain() needs a solve: an explicit model runs its layers once")
    if outcome.again is None:
        raise ValueError("explain() needs the outcome of a whole solve as it was returned, got rows of one, or a copy")
    again, stop, statuses = outcome.again, outcome.again.keywords["stop"], outcome.status.tolist()
    given = stop if stop.has_tolerance else replace(stop, rtol=1e-4, check_every=1)
    longer = replace(given, check_every=1, max_steps=max(stop.max_steps, min(max(4 * stop.max_steps, 64), 1000)))
    converged, spent, diverged = ([row for row, one in enumerate(statuses) if one == kind] for kind in Status)
    failed, found, advice = diverged + spent * stop.has_tolerance, {}, dict(ADVICE)
    if failed:
        found, advice = _failed(again, given, longer, failed)
    if converged:
        found.update(_converged(outcome.stats, again, replace(longer, rtol=min(longer.rtol, 1e-4)), converged))
    if spent and not stop.has_tolerance:
        worst = float(worst_token(outcome.stats.residual.detach())[spent].max())
        text = f"{stop.max_steps} iterations, whatever the residual: it is {worst:.1e} or less."
        found.update(dict.fromkeys(spent, ("no tolerance", text)))
    rows = [found[row] for row in range(len(statuses))]
    causes: tuple[Cause, ...] = tuple(cause for cause, _ in rows)
    findings: dict[Cause, str] = {}
    for cause in causes:
        first, *others = dict.fromkeys(text for one, text in rows if one == cause)
        findings[cause] = first + " Other rows are alike." * bool(others)
    remedies: dict[Cause, str] = {cause: advice[cause] for cause in findings if cause in advice}
    return Explanation(causes, findings, remedies)


def _failed(again: partial[Any], given: Stop, longer: Stop, rows: list[int]) -> tuple[Found, dict[Cause, str]]:
    """Why these rows failed, and advice that names settings with which they converge."""
    records: list[Progress] = []
    first, second = (again(solver=Naive(), stop=Stop.exactly(1)).value.double() for _ in range(2))
    solved = again(stop=longer, callback=records.append)
    trace = torch.stack([worst_token(one.residual) for one in records]).cpu().double()
    found = {row: _cause(solved, row, trace[:, row], given.max_steps, longer) for row in rows}
    noisy = (first - second).abs().flatten(1).amax(dim=1) > 1e-4 * first.abs().flatten(1).amax(dim=1)
    if bool(noisy.any()):
        random = "random map", "Two evaluations at the same point differ."
        return found | {row: random for row in rows if noisy[row]}, dict(ADVICE)
    for row in rows:
        if found[row][0] in ("limit cycle", "budget") and solved.value[row].double().norm() < 1e-3 * first[row].norm():
            found[row] = "fixed point zero", f"The state tends to zero; {found[row][1]}"
    of: dict[Cause, list[int]] = {cause: [row for row in rows if found[row][0] == cause] for cause in ADVICE}
    moving, advice = of["limit cycle"] + of["divergence"], dict(ADVICE)
    hard = moving + of["slow convergence"]
    if of["budget"]:
        advice["budget"] += f": stop={_written(given, solved.stats, of['budget'])}"
    # damping does not help a solve that is only slow
    trials = [one for one in DAMPED * bool(moving) + SEVERAL if hard and one != again.keywords["solver"]]
    for solver in trials:
        solved = again(solver=solver, stop=longer)
        if bool(solved.converged[hard].all()):
            stop, numbers = _written(given, solved.stats, hard), _range(solved.stats, hard)
            tried = f"solver={solver}, stop={stop} converges in {numbers} iterations"
            advice["slow convergence"] = tried
            advice["limit cycle"] = advice["divergence"] = f"{tried}; to train, make the map contract"
            return found, advice
    for row in moving:
        found[row] = "no fixed point found", f"{found[row][1]} {', '.join(map(str, trials))} did not converge either."
    return found, advice


def _cause(solved: Any, row: int, trace: Tensor, budget: int, stop: Stop) -> tuple[Cause, str]:
    """Why a row failed, from the residuals of a solve with a larger budget."""
    iterations, status = int(worst_token(solved.stats.iterations)[row]), int(solved.status[row])
    if status == Status.DIVERGED and iterations <= 1:
        return "map not finite", "The first value of the map is not finite."
    if status == Status.DIVERGED:
        return "divergence", f"The residual grows without bound in {iterations} iterations."
    if status == Status.CONVERGED:
        return "budget", f"It converges in {iterations} iterations; the budget was {budget}."
    # smallest residuals of the last two quarters: an oscillation falls by nothing
    dtype, quarter = solved.value.dtype, max(1, len(trace) // 4)
    last = float(trace[-quarter:].min())
    level, tolerance = f"The residual is {last:.1e} after {iterations} iterations", f"the tolerance is {stop.rtol:.1e}."
    if 0 < last <= stop.rtol:
        return "drift", f"{level}, because the state grows: the difference does not fall."
    if last < (32 if dtype.itemsize > 2 else 4) * torch.finfo(dtype).eps:
        return "precision", f"{level}, which is the precision of {dtype}; {tolerance}"
    if len(trace) == 1:  # of a solver of another library
        return "slow convergence", f"{level}; {tolerance}"
    before = float(trace[-2 * quarter : -quarter].min())
    rate = (last / before) ** (1 / quarter) if before > 0 else 1.0
    if rate >= 0.999:
        return "limit cycle", f"{level} and does not fall; {tolerance}"
    falls, needed = f"falls by a factor of {rate:.3f} per iteration", "more"
    if stop.rtol and not stop.atol:
        needed = f"at least {iterations + int(math.log(stop.rtol / last) / math.log(rate))}"
    return "slow convergence", f"{level} and {falls}: {needed} iterations are needed."


def _converged(stats: SolveStats, again: partial[Any], stop: Stop, rows: list[int]) -> Found:
    """Whether these rows converge to another value from a random start of the scale of theirs."""
    usual = again(stop=stop)
    value, dtype = usual.value.double().reshape(len(usual.value), -1), usual.value.dtype
    noise = torch.randn(value.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu", dtype=value.dtype)
    scale, limit = value.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-3), torch.finfo(dtype).max
    start = (noise.to(value.device) * scale).clamp(-limit, limit).to(dtype).reshape(usual.value.shape)
    other = again(stop=stop, start=start)
    settled = usual.converged & other.converged
    apart = (other.value.double().reshape(value.shape) - value).norm(dim=1) > 0.05 * value.norm(dim=1) + 100 * stop.atol
    several = (settled & apart).tolist()
    single = [row for row in rows if not several[row]]
    same = "; from a random start, to the same value" * bool(settled[single].all())
    elsewhere = "several fixed points", "A solve from a random start converges elsewhere."
    here = "converged", f"In {_range(stats, single or rows)} iterations{same}."
    return {row: elsewhere if several[row] else here for row in rows}


def _written(stop: Stop, stats: SolveStats, rows: list[int]) -> str:
    """The stopping rule as a user writes it, with a budget that is enough for these rows: a power of two."""
    budget = 2 ** int(worst_token(stats.iterations)[rows].max()).bit_length()
    given = {one.name: getattr(stop, one.name) for one in fields(stop) if getattr(stop, one.name) != one.default}
    return f"Stop({', '.join(f'{name}={value!r}' for name, value in (given | {'max_steps': budget}).items())})"


def _range(stats: SolveStats, rows: list[int]) -> str:
    low, high = (int(one) for one in torch.aminmax(worst_token(stats.iterations)[rows]))
    return f"{low}" if low == high else f"{low} to {high}"


def _named(rows: list[int], batch: int) -> str:
    if len(rows) == batch:
        return f"all {batch} rows" if batch > 1 else "row 0"
    shown = ", ".join(map(str, rows[:8]))
    return f"row{'s' * (len(rows) > 1)} {shown}{' …' * (len(rows) > 8)} of {batch}"
