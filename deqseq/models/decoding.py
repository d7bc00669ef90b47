"""Two ways to find the states that new tokens are chosen from: a solve per token, or a window of tokens at once."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

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


class Verdict(NamedTuple):
    """What is decided after an evaluation; arrays of the host.

    ``counts`` says how many leading tokens each row may commit, and ``status`` how the solve of these ended, both
    ``(rows,)``; ``iterations`` are those of each token, ``(rows, width)``; ``updates``, how many evaluations of one
    token a row took, ``(rows,)``.
    """

    counts: np.ndarray
    status: np.ndarray
    iterations: np.ndarray
    updates: np.ndarray


class Decoder(ABC):
    """The tokens of each row that are evaluated together, after those that are committed."""

    width: int
    """Tokens of a row in one evaluation."""
    cache: Cache | None
    """Of the committed tokens."""
    evaluations = 0
    """Evaluations of the map one after another."""

    @abstractmethod
    def evaluate(self, x: Sequence) -> tuple[States, Tensor]:
        """States for the head, ``(rows, width, d_model)``, and what :meth:`judge` needs on the host, ``(rows, n)``."""

    @abstractmethod
    def judge(self, marks: np.ndarray, right: np.ndarray) -> Verdict:
        """Which tokens may be committed, if those with a wrong input, ``(rows, width)``, may not."""

    @abstractmethod
    def move(self, counts: np.ndarray, changed: np.ndarray, stay: np.ndarray) -> None:
        """Commit ``counts`` tokens, ``(rows,)``, of the rows that ``stay``, ``(rows,)``, and remove the others.

        ``changed`` marks tokens that have another input than before, ``(rows, width)``.
        """


class OneByOne(Decoder):
    """Each token is solved before the next one is chosen, by a call of the model; an explicit model is run."""

    width = 1

    def __init__(self, model: Model, cache: Cache | None, options: dict[str, Any]) -> None:
        self.cache, self._model, self._options = cache, model, options

    def evaluate(self, x: Sequence) -> tuple[States, Tensor]:
        output = self._model(x, cache=self.cache, return_cache=True, **self._options)
        self.cache, stats = output.cache, output.stats
        states = _last(output.value, self._options.get("mask"))
        if stats is None:
            return states, torch.zeros(len(x), 3, dtype=torch.int64, device=x.device)
        self.evaluations += stats.evaluations
        return states, torch.stack([output.status, stats.iterations.amax(dim=1), stats.updates.sum(dim=1)], dim=1)

    def judge(self, marks: np.ndarray, right: np.ndarray) -> Verdict:
        status, iterations, updates = marks.T
        return Verdict(np.ones_like(updates), status, iterations[:, None], updates)

    def move(self, counts: np.ndarray, changed: np.ndarray, stay: np.ndarray) -> None:
        if not stay.all():
            assert self.cache is not None
            self.cache = take(self.cache, on_device(np.flatnonzero(stay), self.cache.tensors()[0].device))


class InWindow(Decoder):
    """A window of tokens is iterated, whose inputs are guesses until the tokens before them are committed.

    A token keeps its state when its input changes, and the solver begins afresh in that row. A new token begins at the
    state of the one before. A row that has committed nothing in ``stop.max_steps`` evaluations commits its first token
    as it is; one whose first token diverges commits it too, and the token after it is chosen from a state of zeros.
    """

    def __init__(self, model: Model, config: SolveConfig, cache: Cache, rows: int, width: int) -> None:
        self.width, self.cache = width, cache.reserve(width)
        self._model, self._solver, self._stop = model, config.solver, config.stop
        self._each = min(config.stop.check_every, config.stop.max_steps)  # evaluations between two choices
        self._last_commit = np.zeros(rows, dtype=np.int64)  # evaluations at the last commit
        self._input_since = np.zeros((rows, width), dtype=np.int64)  # evaluations when each input changed last
        self._start: Tensor | None = None  # states to evaluate next; None: where the model begins
        self._fresh: Tensor | None = None  # tokens whose input is new since the last evaluation; None: no token
        self._limit: Tensor | None = None  # divergence: the difference above which a token has diverged
        self._bound: Tensor | None = None  # drift: the largest difference that may pass, as Stop.bound says
        self._memory: Any = None

    def evaluate(self, x: Sequence) -> tuple[States, Tensor]:
        self.evaluations += self._each
        self._latest = now = self._model.evaluate(x, self.cache, self._start, self._each)
        difference, scale = self._stop.distances(now.point, now.states, 1)
        bound = self._stop.bound(difference, scale, self._bound)
        limit = self._stop.limit(difference, scale) if self._limit is None else self._limit
        if self._fresh is not None:
            bound = torch.where(self._fresh, self._stop.bound(difference, scale, None), bound)
            limit = torch.where(self._fresh, self._stop.limit(difference, scale), limit)
        self._bound, self._limit, sound = bound, limit, self._stop.sound(difference, scale, limit)
        passed = self._stop.passes(difference, scale, bound) & sound
        return now.value.masked_fill(~sound[..., None], 0), torch.cat([passed, sound], dim=1)

    def judge(self, marks: np.ndarray, right: np.ndarray) -> Verdict:
        passed, self._sound = marks[:, : self.width] > 0, marks[:, self.width :] > 0
        counts = np.logical_and.accumulate(passed & right, axis=1).sum(axis=1)
        late = self.evaluations - self._last_commit + self._each > self._stop.max_steps
        diverged = (counts == 0) & ~self._sound[:, 0]
        status = np.where(diverged, Status.DIVERGED, Status.MAX_STEPS_REACHED * (late & (counts == 0)))
        updates = np.full_like(counts, self.width * self._each)
        return Verdict(counts + (status != Status.CONVERGED), status, self.evaluations - self._input_since, updates)

    def move(self, counts: np.ndarray, changed: np.ndarray, stay: np.ndarray) -> None:
        now, device = self._latest, self._latest.states.device
        z, limit, bound = self._next(now, device), self._limit, self._bound
        assert limit is not None
        assert bound is not None
        if counts.any():
            self.cache = self._model.commit(self.cache, now, on_device(counts, device)).reserve(self.width)
            source = np.minimum(counts[:, None] + np.arange(self.width), self.width - 1)
            self._input_since = np.take_along_axis(self._input_since, source, axis=1)
            places = on_device(source, device)
            z, limit, bound = (
                z.gather(1, places[..., None].expand_as(z)),
                limit.gather(1, places),
                bound.gather(1, places),
            )
        self._last_commit = np.where(counts > 0, self.evaluations, self._last_commit)
        self._input_since = np.where(changed, self.evaluations, self._input_since)
        if not stay.all():
            kept = on_device(np.flatnonzero(stay), device)
            z, limit, bound, self._memory, self.cache = take((z, limit, bound, self._memory, self.cache), kept)
            self._last_commit, self._input_since, changed = (
                self._last_commit[stay],
                self._input_since[stay],
                changed[stay],
            )
        rows = np.flatnonzero(changed.any(axis=1))
        if len(rows) == len(z):
            self._memory = self._solver.init(z)
        elif len(rows):
            self._memory = self._solver.restart(self._memory, z, on_device(rows, device))
        self._fresh = on_device(changed, device) if len(rows) else None
        self._start, self._limit, self._bound = z, limit, bound

    def _next(self, now: Evaluation, device: torch.device) -> Sequence:
        """The solver's next point; a token that has diverged, on a wrong guess, say, begins again at zero."""
        memory = self._solver.init(now.point) if self._start is None else self._memory
        if self._sound.all():
            z, self._memory = next_point(self._solver, now.point, now.states, memory)
            return z
        sound = on_device(self._sound, device)[..., None]
        z, self._memory = next_point(self._solver, now.point, torch.where(sound, now.states, now.point), memory)
        return z.masked_fill(~sound, 0)


def _last(value: Sequence, mask: Mask | None) -> States:
    """The state of each row's last real token, ``(batch, 1, d_model)``."""
    if mask is None:
        return value[:, -1:]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    return value[torch.arange(len(value), device=value.device), last][:, None]
