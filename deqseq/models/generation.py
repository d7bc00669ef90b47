"""Generation: tokens are chosen, committed and told to the caller until every row has ended.

The states that they are chosen from come from a decoder: a solve per token, or a window of tokens
at once. Both have a ``width``, a ``cache``, a number of ``evaluations``, and three methods, called
in turn. ``evaluate`` gives states for the head, ``(rows,
width, d_model)``, and a report, floats ``(rows, numbers)`` that ``judge`` needs on the host.
``judge`` says which tokens may be committed. ``move`` commits the first ``counts`` tokens of every
row, and removes the rows that do not ``stay``.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.backbones.base import Cache
from deqseq.config import SolveConfig, SolveFields, resolve
from deqseq.layers import with_weights
from deqseq.models.base import Model
from deqseq.models.output import Evaluation, Generation, NewTokens
from deqseq.models.padding import last_real
from deqseq.models.recurrent_depth import solved_part
from deqseq.models.sampler import Logits, Sampler
from deqseq.rows import on_device, on_host, take
from deqseq.solution import Status
from deqseq.solvers.base import Solver
from deqseq.start import Start
from deqseq.step import next_point
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sliding, Sweep
from deqseq.types import Mask, Sequence
from deqseq.windows import Window


@runtime_checkable
class Settle(Protocol):
    """Decides which of the tokens that may be committed are committed."""

    def __call__(
        self, logits: Logits, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens, how many of each row are committed, and which rows go on.

        Args:
            logits: of each token, ``(rows, width, vocab)``.
            rows: their places in the batch, ``(rows,)``.
            tokens: what the sampler chose, ``(rows, width)``.
            counts: how many leading tokens of each row may be committed, ``(rows,)``.
        """
        ...


WINDOW = 8
"""Tokens that are decoded together unless the caller says."""

States = Float[Tensor, "rows width d_model"]


class Verdict(NamedTuple):
    """What a decoder says of the tokens of an evaluation; arrays of the host."""

    counts: np.ndarray
    """How many leading tokens each row may commit, ``(rows,)``."""
    status: np.ndarray
    """How their solve ended, ``(rows,)``."""
    iterations: np.ndarray
    """Of each token, ``(rows, width)``."""
    updates: np.ndarray
    """How many evaluations of one token each row took, ``(rows,)``."""


class OneByOne:
    """Each token is solved before the next one is chosen; an explicit model is run."""

    width = 1

    def __init__(self, model: Model, cache: Cache | None, options: dict[str, Any]) -> None:
        self.cache: Any = cache
        self.evaluations = 0
        self._model, self._options = model, options

    def evaluate(self, x: Sequence) -> tuple[States, Tensor]:
        self._device = x.device
        output = self._model(x, cache=self.cache, return_cache=True, **self._options)
        self.cache, stats = output.cache, output.stats
        states = last_real(output.value, self._options.get("mask"))
        if stats is None:
            # status, iterations, updates, as below; the default dtype may be too narrow for tokens
            return states, torch.zeros(len(x), 3, dtype=torch.float32, device=x.device)
        self.evaluations += stats.evaluations
        columns = output.status, stats.iterations.amax(dim=1), stats.updates.sum(dim=1)
        return states, torch.stack(columns, dim=1).float()

    def judge(self, report: np.ndarray, inputs_are_right: np.ndarray) -> Verdict:
        status, iterations, updates = report.astype(np.int64).T
        return Verdict(np.ones_like(updates), status, iterations[:, None], updates)

    def move(self, counts: np.ndarray, changed: np.ndarray, stay: np.ndarray) -> None:
        if not stay.all():  # the solve has committed all of its tokens
            self.cache = take(self.cache, on_device(np.flatnonzero(stay), self._device))


class InWindow:
    """A window of tokens is iterated, whose inputs are guesses until those before are committed.

    A token keeps its state when its input changes; its solver begins anew, there or in its row. A
    new token begins at the state of the one before. A row that has committed nothing when another
    check would exceed ``stop.max_steps`` evaluations commits its first token as it is; one whose
    first token diverges commits it too, with zeros for states that are not finite.
    """

    def __init__(
        self,
        model: Model,
        solver: Solver[Any],
        stop: Stop,
        start: Start,
        cache: Cache,
        rows: int,
        width: int,
    ) -> None:
        self.width, self.cache, self.evaluations = width, cache.reserve(width), 0
        self._model, self._solver, self._stop = model, solver, stop
        # evaluations between two choices; what combines points is measured after each of its steps
        self._steps = 1 if solver.combines else min(stop.check_every, stop.max_steps)
        self._window = Window(stop, solver, rows, width)
        self._start: Start | Tensor = start  # where the next evaluation is
        self._memory: Any = None  # the solver's; it may be None
        self._stepped = False  # whether the solver has made its first step

    def evaluate(self, x: Sequence) -> tuple[States, Tensor]:
        self.evaluations += self._steps
        self._latest = now = self._model.evaluate(
            x, self.cache, self._start, self._steps, self._between
        )
        numbers = self._window.measure(now.point, now.states, 1)
        # the head is not given states that are not finite
        finite = now.value.isfinite().all(dim=2, keepdim=True)
        # each row's numbers one after another, which judge() divides again
        return now.value.masked_fill(~finite, 0), numbers.transpose(0, 1).flatten(1)

    def judge(self, report: np.ndarray, inputs_are_right: np.ndarray) -> Verdict:
        numbers = report.reshape(len(report), -1, self.width).swapaxes(0, 1)
        precision = torch.finfo(self._latest.point.dtype).eps
        passed, self._sound = self._window.judge(numbers, precision)
        # a later token that diverged, perhaps on a wrong guess, begins again; its age is kept
        self._window.fresh |= ~self._sound
        counts = np.logical_and.accumulate(passed & inputs_are_right, axis=1).sum(axis=1)
        age = self.evaluations - self._window.moved_at
        spent = (counts == 0) & (age + self._steps > self._stop.max_steps)
        diverged = (counts == 0) & ~self._sound[:, 0]
        status = np.where(spent, Status.MAX_STEPS_REACHED, Status.CONVERGED)
        status = np.where(diverged, Status.DIVERGED, status)
        iterations = self.evaluations - self._window.known_since
        updates = np.full_like(counts, self.width * self._steps)
        return Verdict(np.where(spent | diverged, 1, counts), status, iterations, updates)

    def move(self, counts: np.ndarray, changed: np.ndarray, stay: np.ndarray) -> None:
        now, window, device = self._latest, self._window, self._latest.states.device
        z, source = self._next(now, device), None
        if counts.any():
            after = self._model.commit(self.cache, now, on_device(counts, device))
            self.cache = after.reserve(self.width)
            source = window.move(counts, self.evaluations)
        window.change(changed, self.evaluations)
        if source is not None:
            places = window.shift(source, device)
            z = z.gather(1, places[..., None].expand_as(z))
        if not stay.all():
            staying = window.keep(stay, device)
            z, self._memory, self.cache = take((z, self._memory, self.cache), staying)
        self._memory = window.carry(self._memory, z)
        self._start = z

    def _next(self, now: Evaluation, device: torch.device) -> Sequence:
        """The solver's next point; a token that diverged, on a wrong guess, begins at zero."""
        states, sound = now.states, None
        if not self._sound.all():
            sound = on_device(self._sound, device)[..., None]
            states = torch.where(sound, states, now.point)
        z = self._step(now.point, states)
        return z if sound is None else z.masked_fill(~sound, 0)

    def _between(self, point: Sequence, states: Sequence) -> Sequence:
        """The same between two choices; a token that is not finite stays where it was."""
        finite = states.isfinite().all(dim=2, keepdim=True)
        return self._step(point, torch.where(finite, states, point))

    def _step(self, point: Sequence, states: Sequence) -> Sequence:
        if not self._stepped:
            self._memory, self._stepped = self._solver.init(point), True
        z, self._memory = next_point(self._solver, point, states, self._memory)
        return z


class _Record:
    """What has been generated so far, on the host."""

    def __init__(
        self, batch: int, callback: Callable[[NewTokens], None] | None, device: torch.device
    ) -> None:
        self._callback, self._device = callback, device
        self._added: list[tuple[np.ndarray, ...]] = []
        # one for each row; the status is the worst of its tokens
        self.lengths, self.status, self.updates, self.guessed = np.zeros((4, batch), dtype=np.int64)

    def add(
        self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray, verdict: Verdict
    ) -> None:
        """Add the first ``counts`` tokens of each row."""
        row, column = (np.arange(tokens.shape[1]) < counts[:, None]).nonzero()
        new = rows[row], self.lengths[rows[row]] + column, tokens[row, column]
        status = verdict.status[row]
        self._added.append((*new, verdict.iterations[row, column], status))
        self.lengths[rows] += counts
        np.maximum.at(self.status, rows[row], status)
        if self._callback is not None and len(row):
            copies = (x.copy() for x in new)  # a callback may write into its tensors
            self._callback(NewTokens(*(on_device(x, self._device) for x in copies)))

    def count(
        self, rows: np.ndarray, updates: np.ndarray, right: np.ndarray, decided: np.ndarray
    ) -> None:
        """Count the work of an evaluation, and which of the first ``decided`` inputs were guessed
        right; the first one is always given.
        """
        self.updates[rows] += updates
        counted = np.arange(right.shape[1]) < decided[:, None]
        self.guessed[rows] += (right & counted)[:, 1:].sum(axis=1)

    def generation(self, pad_token: int, evaluations: int | None) -> Generation:
        """The record as tensors; without ``evaluations``, nothing was solved."""
        columns = [np.concatenate(column) for column in zip(*self._added, strict=True)]
        rows, positions, *columns = columns
        arrays = [self.lengths, self.updates, self.guessed]
        for column, fill in zip(columns, (pad_token, 0, Status.CONVERGED), strict=True):
            shape = len(self.lengths), self.lengths.max()
            array = np.full(shape, fill, dtype=column.dtype)
            array[rows, positions] = column
            arrays.append(array)
        tensors = [on_device(array, self._device) for array in arrays]
        lengths, updates, guessed, tokens, iterations, status = tensors
        if evaluations is None:
            return Generation(tokens, lengths)
        converged = status == Status.CONVERGED
        return Generation(tokens, lengths, iterations, converged, evaluations, updates, guessed)


def generate(
    model: Model,
    embed: Callable[[Int64[Tensor, "batch length"]], Sequence],
    head: Callable[[States], Logits],
    x: Sequence,
    mask: Mask | None,
    cache: Cache | None,
    sampler: Sampler,
    settle: Settle,
    *,
    window: int | None,
    max_new_tokens: int,
    pad_token: int,
    callback: Callable[[NewTokens], None] | None,
    solve: SolveConfig | None,
    fields: SolveFields,
) -> Generation:
    """Continue a batch of prompts: the loop of :meth:`deqseq.CausalLM.generate`.

    The model is in eval mode, without gradients. Everything is decided on the host, after one
    transfer per evaluation; a commit makes one more.
    """
    core, options = solved_part(model), dict[str, Any](fields)
    if solve is not None:
        options["solve"] = solve
    config, for_prompt, for_token = None, options, options
    if core is not None:
        config = resolve(core.solve_config, solve, fields)
        for_prompt = {"sweep": prompt_sweep(config), **options}
        for_token = {**options, "sweep": Simultaneous()}
    # the first token is chosen from the prompt; the first window ends at the last one
    width, device = min(width_of(window, config), max(1, max_new_tokens - 1)), x.device
    weighted = with_weights(model)
    record = _Record(len(x), callback, device)
    rows, inputs = np.arange(len(x)), np.zeros((len(x), 1), dtype=np.int64)
    decoder = OneByOne(weighted, cache, {**for_prompt, "mask": mask})
    in_prompt = True
    if sampler.temperature and sampler.seed is None:
        sampler = replace(sampler, seed=int(torch.randint(2**62, (), device="cpu")))
    while True:
        states, report = decoder.evaluate(x)
        logits = head(states)
        positions = record.lengths[rows, None] + np.arange(decoder.width)
        chosen = sampler.choose(logits, rows, positions)
        # in one transfer; float32 is exact to 2^24 tokens
        numbers = on_host(torch.cat([chosen.to(report.dtype), report], dim=1))
        tokens, report = np.split(numbers, [decoder.width], axis=1)
        tokens = tokens.astype(np.int64)
        verdict = decoder.judge(report, _guessed_right(inputs, tokens))
        counts = np.minimum(verdict.counts, max_new_tokens - record.lengths[rows])
        _check_finite(tokens, counts, rows)
        tokens, counts, stay = settle(logits, rows, np.maximum(tokens, 0), counts)
        record.add(rows, tokens, counts, verdict)
        stay &= record.lengths[rows] < max_new_tokens
        if not in_prompt:
            decided = counts + stay.astype(int)  # inputs: of these tokens, and of the next one
            # compared once more, because settle may have replaced the sampler's tokens
            record.count(rows, verdict.updates, _guessed_right(inputs, tokens), decided)
        if not stay.any():
            break
        inputs, changed = _next_inputs(inputs, tokens, counts, width)
        decoder.move(counts, changed, stay)
        rows, inputs = rows[stay], inputs[stay]
        if in_prompt:
            in_prompt = False
            decoder = _after_prompt(weighted, config, for_token, decoder.cache, len(rows), width)
        x = embed(on_device(inputs, device))
    if core is None or config is None:
        return record.generation(pad_token, None)
    if width > 1:  # one by one, the model warns
        core.warn_once(record.status, config.stop)
    return record.generation(pad_token, 0 if in_prompt else decoder.evaluations)


def _after_prompt(
    model: Model,
    config: SolveConfig | None,
    options: dict[str, Any],
    cache: Cache,
    rows: int,
    width: int,
) -> OneByOne | InWindow:
    """What evaluates new tokens: a window that is iterated, or one token after another."""
    if config is None or width == 1:
        return OneByOne(model, cache, options)
    stop = config.stop
    if solved_part(model) is not model:
        # the layers around the core run for each choice, which costs more than it gains
        stop = replace(stop, check_every=max(2, stop.check_every))
    return InWindow(model, config.solver, stop, config.start, cache, rows, width)


def up_to_stop(
    stops: tuple[int, ...], logits: Logits, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A :class:`Settle` for given ``stops``: those up to a row's first stop token."""
    ends = np.isin(tokens, stops) & (np.arange(tokens.shape[1]) < counts[:, None])
    stopped = ends.any(axis=1)
    return tokens, np.where(stopped, ends.argmax(axis=1) + 1, counts), ~stopped


def _next_inputs(
    inputs: np.ndarray, tokens: np.ndarray, counts: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """The inputs of a window after a move, and which of them are new.

    Inputs a, b, c, d with chosen tokens b, x, y, z (b was guessed right) and two commits give x, y,
    z, z: a token that enters repeats the last choice, and is always new: -1 stands for none.
    """
    shifted = np.concatenate([inputs[:, :1], tokens], axis=1)
    source = np.minimum(counts[:, None] + np.arange(width), inputs.shape[1])
    before = np.concatenate([inputs, np.full_like(inputs[:, :1], -1)], axis=1)
    after = np.take_along_axis(shifted, source, axis=1)
    return after, after != np.take_along_axis(before, source, axis=1)


def _guessed_right(inputs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Which inputs of a window are the tokens that were chosen before them; the first is committed
    already.
    """
    return np.concatenate(
        [np.ones_like(inputs[:, :1], dtype=bool), inputs[:, 1:] == tokens[:, :-1]], axis=1
    )


def _check_finite(tokens: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> None:
    """Refuse a token without finite logits that may be committed; those behind a wrong guess may be
    without.
    """
    bad = ((tokens < 0) & (np.arange(tokens.shape[1]) < counts[:, None])).any(axis=1)
    if bad.any():
        where = rows[bad].tolist()
        raise ValueError(f"the logits of rows {where} are not finite: are the weights?")


def width_of(window: int | None, config: SolveConfig | None) -> int:
    """How many tokens are decoded together: ``window``, or what suits the solve; ValueError where
    they cannot be.
    """
    if config is None:
        reason = "an explicit model has nothing to iterate"
    elif config.solver.owns_loop:
        reason = f"{type(config.solver).__name__} solves each token on its own"
    elif not config.stop.has_tolerance:
        reason = "without a tolerance no token converges"
    elif config.start == "input":
        reason = (
            'with start="input" the result may depend on the start, and a token '
            "in a window keeps its state"
        )
    else:
        return WINDOW if window is None else window
    if window is not None and window > 1:
        raise ValueError(f"window must be 1, got {window}: {reason}")
    return 1


def prompt_sweep(config: SolveConfig) -> Sweep:
    """How a prompt is solved unless the caller says: all tokens together would be more work than a
    window.

    On text a window of 16 needs about 2/3 of the evaluations of one of 8, for a sixth to a third
    more updates of each token.
    """
    if config.sweep.block is not None or config.solver.owns_loop:
        return config.sweep
    return Sliding(16)
