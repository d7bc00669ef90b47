"""Why a solve ended as it did, and what to do about it: found by solving the same problem in other
ways.
"""

import math
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deqseq.arguments import checked
from deqseq.diagnostics.explanation import ADVICE, Explanation
from deqseq.loop import Progress
from deqseq.solution import Outcome, SolveStats, Status, worst_token
from deqseq.solvers import Adaptive, Anderson, Broyden, Relaxed, Solver
from deqseq.stop import Stop, token_norms
from deqseq.sweeps import Simultaneous, Sliding

Found = dict[int, tuple[str, str]]  # of each row the cause, and what was observed
DAMPED, SEVERAL = (
    (Adaptive(), Relaxed(0.2)),
    (Anderson(), Broyden()),
)  # the latter combine several past iterates
WINDOW = Sliding(8)


class _Stay(Solver[None]):
    """Evaluates the map at one point, again and again."""

    def init(self, z0: Tensor) -> None:
        return None

    def step(self, z: Tensor, fz: Tensor, state: None) -> tuple[Tensor, None]:
        return z, None


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
    if outcome.again is None:
        raise ValueError(
            "explain() needs the outcome of a whole solve as it was returned, got rows of one, or "
            "a copy"
        )
    asked, stop, statuses = outcome.again, outcome.again.keywords["stop"], outcome.status.tolist()
    again = partial(asked, sweep=Simultaneous()) if "sweep" in asked.keywords else asked
    given = stop if stop.has_tolerance else replace(stop, rtol=1e-4, check_every=1)
    longer = replace(
        given, check_every=1, max_steps=max(stop.max_steps, min(max(4 * stop.max_steps, 64), 1000))
    )
    converged, spent, diverged = (
        [row for row, one in enumerate(statuses) if one == kind] for kind in Status
    )
    failed, found, advice = diverged + spent * stop.has_tolerance, {}, dict(ADVICE)
    evaluated = partial(again, solver=_Stay())
    point = evaluated(stop=Stop.exactly(1)).value.nan_to_num(0, 0, 0)
    first, second = (
        evaluated(stop=Stop.exactly(times), start=point).value.double() for times in (1, 2)
    )
    if failed:
        found, advice = _failed(again, asked, given, longer, failed, point)
    if converged:
        found |= _converged(outcome, asked, again, longer, converged)
    size = first.abs().reshape(len(first), -1).amax(dim=1)
    noisy = (first - second).abs().reshape(len(first), -1).amax(dim=1) > 1e-4 * size
    found |= {
        row: ("random map", "Two evaluations at the same point differ.")
        for row in found
        if noisy[row]
    }
    if spent and not stop.has_tolerance:
        worst = float(worst_token(outcome.stats.residual.detach())[spent].max())
        text = f"{stop.max_steps} iterations, whatever the residual: it is {worst:.1e} or less."
        found.update(dict.fromkeys(spent, ("no tolerance", text)))
    rows = [found[row] for row in range(len(statuses))]
    causes, findings = tuple(cause for cause, _ in rows), {}
    for cause in causes:
        text, *others = dict.fromkeys(text for one, text in rows if one == cause)
        findings[cause] = text + " Other rows are alike." * bool(others)
    return Explanation(
        causes, findings, {cause: advice[cause] for cause in findings if cause in advice}
    )


def _failed(
    again: partial[Any],
    asked: partial[Any],
    given: Stop,
    longer: Stop,
    rows: list[int],
    begun: Tensor,
) -> tuple[Found, dict[str, str]]:
    """Why these rows failed, and advice that names settings with which they converge."""
    records: list[Progress] = []
    solved = again(stop=longer, callback=records.append)
    trace = torch.stack([worst_token(one.residual) for one in records]).cpu().double()
    found, needed, advice = Found(), dict[int, int](), dict(ADVICE)
    sizes = (x.double().reshape(len(x), -1).norm(dim=1) for x in (solved.value, begun))
    growth = torch.div(*sizes).tolist()
    for row in rows:
        size, traced = growth[row], trace[:, row]
        cause, text, needed[row] = _cause(
            solved, row, traced, size, given.max_steps, longer, _precision(asked)
        )
        if cause in ("limit cycle", "budget") and size < 1e-3:
            cause, text = "fixed point zero", f"The state tends to zero; {text}"
        found[row] = cause, text
    stuck = [row for row in rows if found[row][0] in ("limit cycle", "slow convergence", "drift")]
    windowed = _windowed(asked, given) if stuck else []
    late = [row for row in stuck if windowed and windowed[row]]
    if late:  # from left to right their tokens converge one after another
        passed = (solved.stats.residual <= given.rtol).cumprod(dim=1).sum(dim=1).tolist()
        text = (
            f"of {solved.stats.residual.shape[1]} tokens have converged after "
            f"{solved.stats.evaluations} iterations"
        )
        found |= {row: ("budget", f"From left to right, {passed[row]} {text}.") for row in late}
    of = {cause: [row for row in rows if found[row][0] == cause] for cause in ADVICE}
    moving = of["limit cycle"] + of["divergence"]
    hard = moving + of["slow convergence"]
    for cause in ("budget", "slow convergence"):
        counts = [needed[row] for row in of[cause] if row not in late]
        if (
            late and cause == "budget"
        ):  # the iterations that are enough for the others are not for these
            if all(windowed[row] for row in of[cause]):
                tokens = "all tokens together need a max_steps that grows with the length"
                advice[cause] = f"sweep={WINDOW} converges; {tokens}"
        elif counts and min(counts) > 0:
            advice[cause] = f"give more iterations: stop={_written(given, max(counts))}"
    # damping does not help a solve that is only slow
    trials = [
        one for one in DAMPED * bool(moving) + SEVERAL if hard and one != again.keywords["solver"]
    ]
    for solver in trials:
        solved = again(solver=solver, stop=longer)
        if bool(solved.converged[hard].all()):
            stop = _written(given, int(worst_token(solved.stats.iterations)[hard].max()))
            tried = (
                f"solver={solver}, stop={stop} converges in {_range(solved.stats, hard)} iterations"
            )
            advice["slow convergence"] = f"{tried}, or {advice['slow convergence']}"
            advice["limit cycle"] = advice["divergence"] = (
                f"{tried}; to train, make the map contract"
            )
            return found, advice
    for row in moving:
        found[row] = (
            "no fixed point found",
            f"{found[row][1]} {', '.join(map(str, trials))} did not converge either.",
        )
    return found, advice


def _windowed(asked: partial[Any], given: Stop) -> list[bool]:
    """Which rows converge in a window; nothing if there is none."""
    known = asked.keywords
    if "sweep" in known and known["sweep"].block is None and not known["solver"].owns_loop:
        with suppress(NotImplementedError):  # a backbone without advance() has one sweep
            return asked(sweep=WINDOW, stop=given).converged.tolist()
    return []


def _precision(asked: partial[Any]) -> torch.dtype:
    """The dtype in which the map was evaluated."""
    known = asked.keywords
    return known["autocast"] or (known["value"] if "value" in known else asked.args[1]).dtype


def _cause(
    solved: Any, row: int, trace: Tensor, growth: float, budget: int, stop: Stop, dtype: torch.dtype
) -> tuple[str, str, int]:
    """Why a row failed, from the residuals of a longer solve, and how many iterations are enough, 0
    if unknown.

    The difference has fallen as the residual has, times the ``growth`` of the state.
    """
    iterations, status = int(worst_token(solved.stats.iterations)[row]), int(solved.status[row])
    if status == Status.DIVERGED and iterations <= 1:
        return "map not finite", "The first value of the map is not finite.", 0
    if status == Status.DIVERGED:
        return "divergence", f"The residual grows without bound in {iterations} iterations.", 0
    if status == Status.CONVERGED:
        return (
            "budget",
            f"It converges in {iterations} iterations; the budget was {budget}.",
            iterations,
        )
    # smallest residuals of the last two quarters: an oscillation falls by nothing
    quarter = max(1, len(trace) // 4)
    last = float(trace[-quarter:].min())
    level, tolerance = (
        f"The residual is {last:.1e} after {iterations} iterations",
        f"the tolerance is {stop.rtol:.1e}.",
    )
    drift = "drift", f"{level}, because the state grows: the difference does not fall.", 0
    if 0 < last <= stop.rtol:
        return drift
    if last < (32 if dtype.itemsize > 2 else 4) * torch.finfo(dtype).eps:
        return "precision", f"{level}, which is the precision of {dtype}; {tolerance}", 0
    if len(trace) == 1:  # of a solver of another library
        return "slow convergence", f"{level}; {tolerance}", 0
    before = float(trace[-2 * quarter : -quarter].min())
    rate = (last / before) ** (1 / quarter) if before > 0 else 1.0
    if rate >= 0.999:
        return "limit cycle", f"{level} and does not fall; {tolerance}", 0
    if growth * last > 0.9 * float(trace[0]):
        return drift
    text, needed = f"{level} and falls by a factor of {rate:.3f} per iteration", 0
    if stop.rtol and not stop.atol:
        needed = iterations + int(math.log(stop.rtol / last) / math.log(rate))
    return (
        "slow convergence",
        f"{text}: {f'at least {needed}' if needed else 'more'} iterations are needed.",
        needed,
    )


def _converged(
    outcome: Outcome, asked: partial[Any], again: partial[Any], longer: Stop, rows: list[int]
) -> Found:
    """Whether these rows are found once more: from another start, by another sweep, as they were;
    and what returned.
    """
    assert outcome.stats is not None
    known, tight, found = asked.keywords, replace(longer, rtol=min(longer.rtol, 1e-4)), Found()
    usual, same = again(stop=tight), asked()
    noise = torch.randn(
        usual.value.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu"
    )
    size = usual.value.double().reshape(len(noise), -1).square().mean(dim=1).sqrt().clamp_min(1e-3)
    limit, start = (
        torch.finfo(usual.value.dtype).max,
        noise.to(size) * size.reshape(-1, *[1] * (noise.ndim - 1)),
    )
    other = again(stop=tight, start=start.clamp(-limit, limit).to(usual.value.dtype))
    for row in _apart(usual, other, tight.atol):
        found[row] = "several fixed points", "A solve from a random start converges elsewhere."
    if "sweep" in known:
        with suppress(NotImplementedError):  # a backbone without advance() has one sweep
            found |= _sweeps(asked, longer)
    returned: Any = known.get("value", getattr(outcome, "value", None))
    if known.get("training", returned.requires_grad):
        # the value is the estimator's, which may have left the tolerance where the map expands
        value = asked(with_graph=True).value if "training" in known else returned
        at = again(
            solver=_Stay(),
            stop=replace(known["stop"], max_steps=1, check_every=1),
            start=value.detach(),
        )
        worst = worst_token(at.stats.residual)
        for row in (~at.converged).nonzero()[:, 0].tolist():
            found[row] = (
                "estimator",
                f"The estimator's steps led the value to a residual of {float(worst[row]):.1e}.",
            )
    else:
        for row in _apart(same, replace(same, value=returned), longer.atol):
            found[row] = "changed since", "The same solve now gives another value."
    single = [row for row in rows if row not in found]
    agree = "; from a random start, to the same value" * bool(
        (usual.converged & other.converged)[single].all()
    )
    here = "converged", f"In {_range(outcome.stats, single or rows)} iterations{agree}."
    return {row: found.get(row, here) for row in rows}


def _sweeps(asked: partial[Any], longer: Stop) -> Found:
    """Rows in which the sweep that was used and another one converge to different values."""
    used, found = asked.keywords["sweep"], Found()
    rival = Simultaneous() if used.block is not None else WINDOW
    if asked.keywords["solver"].owns_loop:
        return found
    closer = max(longer.rtol / 100, 8 * torch.finfo(_precision(asked)).eps)
    steps: tuple[tuple[float, str], ...] = (
        (longer.rtol, "loose tolerance"),
        (closer, "several fixed points"),
    )
    for rtol, cause in steps:
        one, two = (asked(sweep=sweep, stop=replace(longer, rtol=rtol)) for sweep in (used, rival))
        text = f"At a tolerance of {rtol:.0e}, {used} and {rival} converge to different values."
        disagree = _apart(one, two, longer.atol)
        found |= dict.fromkeys(disagree, (cause, text))
        if not disagree:
            break
    return found


def _apart(one: Any, two: Any, atol: float) -> list[int]:
    """Rows that converged in both, and whose values differ in a token by a twentieth of a token's
    mean size.
    """
    apart = (
        token_norms(one.value - two.value).amax(dim=1)
        > 0.05 * token_norms(one.value).mean(dim=1) + 100 * atol
    )
    return (apart & one.converged & two.converged).nonzero()[:, 0].tolist()


def _written(stop: Stop, iterations: int) -> str:
    """The stopping rule as a user writes it, with a budget that is enough: a power of two."""
    given = {
        one.name: getattr(stop, one.name)
        for one in fields(stop)
        if getattr(stop, one.name) != one.default
    }
    given["max_steps"] = 2 ** iterations.bit_length()
    return f"Stop({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _range(stats: SolveStats, rows: list[int]) -> str:
    low, high = (int(one) for one in torch.aminmax(worst_token(stats.iterations)[rows]))
    return f"{low}" if low == high else f"{low} to {high}"
