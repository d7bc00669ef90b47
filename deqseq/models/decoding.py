"""Two ways to find the states that new tokens are chosen from: a solve per token, or a window of
tokens at once.

Both have three methods, called in turn. ``evaluate`` gives states for the head, ``(rows, width,
d_model)``, and marks that ``judge`` needs on the host. ``judge`` says which tokens may be
committed, if those with a wrong input may not. ``move`` commits ``counts`` tokens of the rows that
``stay``, and removes the others; ``changed`` marks new inputs.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.backbones.base import Cache
from deqseq.config import SolveConfig
from deqseq.loop import next_point
from deqseq.models.base import Model
from deqseq.models.output import Evaluation
from deqseq.rows import take
from deqseq.solution import Status
from deqseq.types import Mask, Sequence
from deqseq.windows import on_device

States = Float[Tensor, "rows width d_model"]

Verdict = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""How many leading tokens each row may commit and how their solve ended, ``(rows,)``; the
iterations of each token, ``(rows, width)``; how many evaluations of one token each row took,
``(rows,)``."""


class OneByOne:
    """Each token is solved before the next one is chosen, by a call of the model; an explicit model
    is run.
    """

    width = 1

    def __init__(self, model: Model, cache: Cache | None, options: dict[str, Any]) -> None:
        self.cache: Any = cache
        self.evaluations = 0
        self._model, self._options = model, options

    def evaluate(self, x: Sequence) -> tuple[States, Tensor]:
        output = self._model(x, cache=self.cache, return_cache=True, **self._options)
        self.cache, stats = output.cache, output.stats
        states = _last(output.value, self._options.get("mask"))
        if stats is None:
            return states, torch.zeros(len(x), 3, dtype=torch.int64, device=x.device)
        self.evaluations += stats.evaluations
        return states, torch.stack(
            [output.status, stats.iterations.amax(dim=1), stats.updates.sum(dim=1)], dim=1
        )

    def judge(self, marks: np.ndarray, right: np.ndarray) -> Verdict:
        status, iterations, updates = marks.T
        return np.ones_like(updates), status, iterations[:, None], updates

    def move(self, counts: np.ndarray, changed: np.ndarray, stay: np.ndarray) -> None:
        if not stay.all():
            self.cache = take(
                self.cache, on_device(np.flatnonzero(stay), self.cache.tensors()[0].device)
            )


class InWindow:
    """A window of tokens is iterated, whose inputs are guesses until the tokens before them are
    committed.

    A token keeps its state when its input changes, and the solver begins afresh in that row. A new
    token begins at the state of the one before. A row that has committed nothing in
    ``stop.max_steps`` evaluations commits its first token as it is; one whose first token diverges
    commits it too, and the token after it is chosen from a state of zeros.
    """

    def __init__(
        self, model: Model, config: SolveConfig, cache: Cache, rows: int, width: int
    ) -> None:
        self.width, self.cache, self.evaluations = width, cache.reserve(width), 0
        self._model, self._solver, self._stop = model, config.solver, config.stop
        self._each = min(
            config.stop.check_every, config.stop.max_steps
        )  # evaluations between two choices
        self._last_commit = np.zeros(rows, dtype=np.int64)  # evaluations at the last commit
        self._input_since = np.zeros(
            (rows, width), dtype=np.int64
        )  # evaluations when each input changed last
        self._start: Tensor | None = None  # states to evaluate next; None: where the model begins
        self._limit: Any = None  # the difference above which a token has diverged
        self._bound: Any = None  # the largest difference that may pass, as Stop.bound says
        self._memory: Any = None
        device = cache.tensors()[0].device
        # tokens whose input is new since the last evaluation; None: no token
        self._fresh: Tensor | None = torch.ones(rows, width, dtype=torch.bool, device=device)

    def evaluate(self, x: Sequence) -> tuple[States, Tensor]:
        self.evaluations += self._each
        self._latest = now = self._model.evaluate(x, self.cache, self._start, self._each)
        difference, scale = self._stop.distances(now.point, now.states, 1)
        bound = self._stop.bound(difference, scale, self._bound)
        if self._fresh is not None:  # the first evaluation on an input decides
            limit = self._stop.limit(difference, scale)
            self._limit = (
                limit if self._limit is None else torch.where(self._fresh, limit, self._limit)
            )
            bound = torch.where(self._fresh, self._stop.bound(difference, scale, None), bound)
        self._bound, sound = bound, self._stop.sound(difference, scale, self._limit)
        passed = self._stop.passes(difference, scale, bound) & sound
        return now.value.masked_fill(~sound[..., None], 0), torch.cat([passed, sound], dim=1)

    def judge(self, marks: np.ndarray, right: np.ndarray) -> Verdict:
        passed, self._sound = marks[:, : self.width] > 0, marks[:, self.width :] > 0
        counts = np.logical_and.accumulate(passed & right, axis=1).sum(axis=1)
        late = self.evaluations - self._last_commit + self._each > self._stop.max_steps
        diverged = (counts == 0) & ~self._sound[:, 0]
        status = np.where(
            diverged, Status.DIVERGED, Status.MAX_STEPS_REACHED * (late & (counts == 0))
        )
        updates = np.full_like(counts, self.width * self._each)
        return (
            counts + (status != Status.CONVERGED),
            status,
            self.evaluations - self._input_since,
            updates,
        )

    def move(self, counts: np.ndarray, changed: np.ndarray, stay: np.ndarray) -> None:
        now, device = self._latest, self._latest.states.device
        z, limit, bound = self._next(now, device), self._limit, self._bound
        if counts.any():
            self.cache = self._model.commit(self.cache, now, on_device(counts, device)).reserve(
                self.width
            )
            source = np.minimum(counts[:, None] + np.arange(self.width), self.width - 1)
            self._input_since = np.take_along_axis(self._input_since, source, axis=1)
            places = on_device(source, device)
            z = z.gather(1, places[..., None].expand_as(z))
            limit, bound = limit.gather(1, places), bound.gather(1, places)
        self._last_commit[counts > 0] = self.evaluations
        self._input_since[changed] = self.evaluations
        if not stay.all():
            kept = on_device(np.flatnonzero(stay), device)
            z, limit, bound, self._memory, self.cache = take(
                (z, limit, bound, self._memory, self.cache), kept
            )
            self._last_commit, self._input_since = self._last_commit[stay], self._input_since[stay]
            changed = changed[stay]
        rows = np.flatnonzero(changed.any(axis=1))
        if len(rows) == len(z):
            self._memory = self._solver.init(z)
        elif len(rows):
            self._memory = self._solver.restart(self._memory, z, on_device(rows, device))
        self._fresh = on_device(changed, device) if len(rows) else None
        self._start, self._limit, self._bound = z, limit, bound

    def _next(self, now: Evaluation, device: torch.device) -> Sequence:
        """The solver's next point; a token that has diverged, on a wrong guess, say, begins again
        at zero.
        """
        memory = self._solver.init(now.point) if self._start is None else self._memory
        if self._sound.all():
            z, self._memory = next_point(self._solver, now.point, now.states, memory)
            return z
        sound = on_device(self._sound, device)[..., None]
        z, self._memory = next_point(
            self._solver, now.point, torch.where(sound, now.states, now.point), memory
        )
        return z.masked_fill(~sound, 0)


def _last(value: Sequence, mask: Mask | None) -> States:
    """The state of each row's last real token, ``(batch, 1, d_model)``."""
    if mask is None:
        return value[:, -1:]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    return value[torch.arange(len(value), device=value.device), last][:, None]
