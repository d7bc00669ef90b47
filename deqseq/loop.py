"""The one loop: evaluate, check, ask the solver for the next point, move on."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from deqseq.arguments import check_like, versions
from deqseq.evaluate import evaluate
from deqseq.rows import check_rows, take
from deqseq.solution import Solution
from deqseq.solvers.base import Solver
from deqseq.types import FixedPointMap, Residual, State
from deqseq.windows import Windows


@dataclass(frozen=True)
class Progress:
    """What a callback receives at each check of the residual.

    Attributes:
        iteration: evaluations so far.
        max_steps: the budget; of a window, counted from its last move.
        active_rows: rows that have not ended.
        residual: the latest residual of each token, ``(batch, tokens)``, on the device of the
            state; ``inf`` where there is none yet. Padding has no meaning.
    """

    iteration: int
    max_steps: int
    active_rows: int
    residual: Residual


Callback = Callable[[Progress], None]
"""Called with a :class:`Progress` at each check of the residual."""


def iterate(
    f: FixedPointMap,
    solver: Solver[Any],
    windows: Windows,
    *,
    has_aux: bool,
    callback: Callback | None,
) -> Solution:
    """Iterate until every row has ended, in the caller's gradient mode.

    ``f`` is called as ``f(z, windows.part)``, or as ``f(z)`` if that is None; ``windows`` decides
    what ends.
    """

    def evaluated(z: State) -> tuple[State, Any]:
        windows.evaluations += 1
        return evaluate(f, z, windows.part, has_aux=has_aux)

    z, state = solver.begin(evaluated, windows.states(), windows.stop)
    first = True
    while True:
        fz, aux = evaluated(z)
        measured = windows.check(z, fz)
        if measured and callback is not None:
            budget, residuals = windows.stop.max_steps, windows.residuals()
            callback(Progress(windows.evaluations, budget, windows.active_rows, residuals))
        if first:
            check_rows("aux", aux, len(z))
        if windows.done:
            return windows.solution(z, fz, aux)
        proposal, state = next_point(solver, z, fz, state)
        if first and windows.part is not None:
            check_rows(f"the state of {type(solver).__name__}", state, len(z))
        z, stay = windows.move(z, fz, aux, proposal)
        del fz, proposal, aux  # not held while the map is evaluated
        if stay is not None:
            state = take(state, stay)
        if windows.restarted is not None and len(windows.restarted) == len(z):
            z, state = solver.begin(evaluated, z, windows.stop)
        elif windows.restarted is not None:
            restarted = solver.restart(state, z, windows.restarted)
            if type(restarted) is not type(state):
                kinds = type(state).__name__, type(restarted).__name__
                raise TypeError(
                    f"{type(solver).__name__}.restart must return a state like {kinds[0]}, got "
                    f"{kinds[1]}"
                )
            check_rows(f"what {type(solver).__name__}.restart returns", restarted, len(z))
            state = restarted
        first = False


def next_point(solver: Solver[Any], z: State, fz: State, state: Any) -> tuple[State, Any]:
    """One checked step of the solver, in full precision: under autocast only the map is in half
    precision.
    """
    kind, before = z.device.type, versions(z, fz)
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        pair = solver.step(z, fz, state)
    name = f"{type(solver).__name__}.step"
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{name} must return a pair (next point, state), got {type(pair).__name__}")
    check_like(name, pair[0], z, "z")
    if versions(z, fz) != before:
        raise ValueError(
            f"{name} must not change z or fz in place: they are values of the solve. Return a new "
            "tensor"
        )
    return pair
