"""Generation: tokens are chosen, committed and told to the caller until every row has ended."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from deqseq.backbones.base import Cache
from deqseq.config import SolveConfig, SolveFields, resolve
from deqseq.layers import with_weights
from deqseq.models.base import Model
from deqseq.models.decoding import InWindow, OneByOne
from deqseq.models.recurrent_depth import solved_part
from deqseq.models.sampler import Logits, Sampler
from deqseq.solution import Status
from deqseq.sweeps import Simultaneous, Sliding, Sweep
from deqseq.types import Mask, Sequence
from deqseq.windows import on_device, on_host

Settle = Callable[
    [Logits, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]
]
"""Which of the tokens that may be committed are: from logits, ``(rows, tokens, vocab)``, the rows'
places in the batch, tokens, ``(rows, tokens)``, and how many of each row may be, to tokens, how
many are, and which rows go on."""

WINDOW = 8
"""Tokens that are decoded together unless the caller says."""


@dataclass(frozen=True)
class NewTokens:
    """What a callback receives when tokens are committed: of each row one, or with a window none or
    several.

    Attributes:
        rows: the row of the batch that each token belongs to, in ascending order, ``(new,)``.
        positions: how many tokens were generated before it in its row, ``(new,)``.
        tokens: ``(new,)``.
    """

    rows: Int64[Tensor, " new"]
    positions: Int64[Tensor, " new"]
    tokens: Int64[Tensor, " new"]


@dataclass(frozen=True)
class Generation:
    """Generated tokens, and the numbers of their solves.

    Attributes:
        tokens: ``(batch, new)``; after a row's end, the padding token.
        lengths: tokens of each row, its stop token included, ``(batch,)``.
        iterations: evaluations that the state of each token's input took, in a window since the
            input was known, ``(batch, new)``; 0 after a row's end; None for an explicit model. The
            first token's solve is the prompt's, of which the largest number counts.
        converged: whether the solve that each token was chosen from converged, ``(batch, new)``;
            True after a row's end; None for an explicit model.
        evaluations: how many evaluations of the map followed each other after the prompt's solve;
            None for an explicit model. The rows of a batch share them.
        updates: how many evaluations of one token each row took after the prompt's solve,
            ``(batch,)``; None for an explicit model.
        guessed: of how many tokens the input was guessed before the one before was committed,
            ``(batch,)``; 0 without a window.
    """

    tokens: Int64[Tensor, "batch new"]
    lengths: Int64[Tensor, " batch"]
    iterations: Int64[Tensor, "batch new"] | None = None
    converged: Bool[Tensor, "batch new"] | None = None
    evaluations: int | None = None
    updates: Int64[Tensor, " batch"] | None = None
    guessed: Int64[Tensor, " batch"] | None = None

    def rows(self) -> list[list[int]]:
        """The tokens of each row, without padding."""
        pairs = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in pairs]


class _Record:
    """What has been generated so far, on the host."""

    def __init__(
        self, batch: int, callback: Callable[[NewTokens], None] | None, device: torch.device
    ) -> None:
        self._callback, self._device = callback, device
        self._added: list[tuple[np.ndarray, ...]] = []
        # of each row; the status is the worst of its tokens
        self.lengths, self.status, self.updates, self.guessed = np.zeros((4, batch), dtype=np.int64)

    def add(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        counts: np.ndarray,
        status: np.ndarray,
        iterations: np.ndarray,
    ) -> None:
        """Add the first ``counts`` tokens of each row."""
        row, offset = (np.arange(tokens.shape[1]) < counts[:, None]).nonzero()
        new = rows[row], self.lengths[rows[row]] + offset, tokens[row, offset]
        self._added.append((*new, iterations[row, offset], status[row]))
        self.lengths[rows] += counts
        np.maximum.at(self.status, rows[row], status[row])
        if self._callback is not None and len(row):
            self._callback(NewTokens(*(on_device(x, self._device) for x in new)))

    def generation(self, pad_token: int, evaluations: int | None) -> Generation:
        """The record as tensors; without ``evaluations``, nothing was solved."""
        rows, positions, *columns = (
            np.concatenate(column) for column in zip(*self._added, strict=True)
        )
        found = [self.lengths, self.updates, self.guessed]
        for column, fill in zip(columns, (pad_token, 0, Status.CONVERGED), strict=True):
            found.append(np.full((len(self.lengths), self.lengths.max()), fill, dtype=column.dtype))
            found[-1][rows, positions] = column
        lengths, updates, guessed, tokens, iterations, status = (
            on_device(x, self._device) for x in found
        )
        if evaluations is None:
            return Generation(tokens, lengths)
        return Generation(
            tokens, lengths, iterations, status == Status.CONVERGED, evaluations, updates, guessed
        )


def generate(
    model: Model,
    embed: Callable[[Int64[Tensor, "batch length"]], Sequence],
    head: Callable[[Float[Tensor, "rows d_model"]], Float[Tensor, "rows vocab"]],
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
    """Continue a batch of prompts: the loop of :meth:`deqseq.CausalLM.generate`, in eval mode and
    without gradients.

    Everything is decided on the host, after one transfer per evaluation.
    """
    core, given = solved_part(model), {**fields, **({} if solve is None else {"solve": solve})}
    config, whole, single = None, given, given
    if core is not None:
        config = resolve(core.solve_config, solve, fields)
        if (
            core is not model
        ):  # the layers around it run for every choice, and cost more than a choice gains
            config = replace(
                config, stop=replace(config.stop, check_every=max(2, config.stop.check_every))
            )
        whole, single = {"sweep": prompt_sweep(config), **given}, {**given, "sweep": Simultaneous()}
    width, model, device = width_of(window, config), with_weights(model), x.device
    record = _Record(len(x), callback, device)
    rows, inputs = np.arange(len(x)), np.zeros((len(x), 1), dtype=np.int64)
    decoder = prompt = OneByOne(model, cache, {**whole, "mask": mask})
    if sampler.temperature and sampler.seed is None:
        sampler = replace(sampler, seed=int(torch.randint(2**62, (), device="cpu")))
    while True:
        states, marks = decoder.evaluate(x)
        logits, positions = head(states), record.lengths[rows, None] + np.arange(decoder.width)
        known = on_host(torch.cat([sampler.choose(logits, rows, positions), marks], dim=1))
        tokens, marks = known[:, : decoder.width], known[:, decoder.width :]
        counts, status, iterations, updates = decoder.judge(marks, _right(inputs, tokens))
        counts = np.minimum(counts, max_new_tokens - record.lengths[rows])
        _check_finite(tokens, counts, rows)
        tokens, counts, stay = settle(logits, rows, np.maximum(tokens, 0), counts)
        record.add(rows, tokens, counts, status, iterations)
        stay &= record.lengths[rows] < max_new_tokens
        if decoder is not prompt:
            record.updates[rows] += updates
            final = np.arange(decoder.width) < (counts + stay)[:, None]
            record.guessed[rows] += (_right(inputs, tokens) & final)[:, 1:].sum(axis=1)
        if not stay.any():
            break
        inputs, changed = _moved(inputs, tokens, counts, width)
        decoder.move(counts, changed, stay)
        rows, inputs = rows[stay], inputs[stay]
        if decoder is prompt:
            decoder = OneByOne(model, prompt.cache, single)
            if config is not None and width > 1:
                decoder = InWindow(model, config, prompt.cache, len(rows), width)
        x = embed(on_device(inputs, device))
    if core is None or config is None:
        return record.generation(pad_token, None)
    if width > 1:  # one by one, the model tells
        advice = "print(model(input_ids).explain()) says why and what to do."
        core.warn_once(torch.from_numpy(record.status), config.stop, advice)
    return record.generation(pad_token, 0 if decoder is prompt else decoder.evaluations)


def up_to_stop(
    stops: tuple[int, ...], logits: Logits, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A :data:`Settle` for given ``stops``: those up to a row's first stop token."""
    ends = np.isin(tokens, stops) & (np.arange(tokens.shape[1]) < counts[:, None])
    stopped = ends.any(axis=1)
    return tokens, np.where(stopped, ends.argmax(axis=1) + 1, counts), ~stopped


def _moved(
    inputs: np.ndarray, tokens: np.ndarray, counts: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """The inputs of a window after a move, and which of them are new.

    Inputs a, b, c, d with chosen tokens b, x, y, z (b was guessed right) and two commits give x, y,
    z, z: where nothing has been chosen yet, the token before is guessed to follow itself, and is
    always new.
    """
    known = np.concatenate([inputs[:, :1], tokens], axis=1)
    source = np.minimum(counts[:, None] + np.arange(width), inputs.shape[1])
    before = np.concatenate([inputs, np.full_like(inputs[:, :1], -1)], axis=1)
    after = np.take_along_axis(known, source, axis=1)
    return after, after != np.take_along_axis(before, source, axis=1)


def _right(inputs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Which inputs of a window are the tokens that were chosen before them; the first is committed
    already.
    """
    return np.concatenate(
        [np.ones_like(inputs[:, :1], dtype=bool), inputs[:, 1:] == tokens[:, :-1]], axis=1
    )


def _check_finite(tokens: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> None:
    """Refuse a token without finite logits among those that may be committed; a wrong guess may
    have some.
    """
    bad = ((tokens < 0) & (np.arange(tokens.shape[1]) < counts[:, None])).any(axis=1)
    if bad.any():
        raise ValueError(
            f"the logits of rows {rows[bad].tolist()} are not finite: are the weights?"
        )


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
    return (
        config.sweep if config.sweep.block is not None or config.solver.owns_loop else Sliding(16)
    )
