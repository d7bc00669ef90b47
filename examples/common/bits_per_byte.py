"""Bits per byte: how well a language model predicts a text, whatever its tokenizer, and what its solves took."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Float64, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from common.tokens import Stream
from deqseq.check import check_integer

IGNORED = -100  # a target that is not counted


class Rows(NamedTuple):
    """A text in order, cut into rows: every token of every document, and the end of each, is a target exactly once.

    Attributes:
        inputs: token ids, shape (rows, length); the end-of-text token behind the end of the text.
        targets: the next token, shape (rows, length); -100 behind the end of the text.
        text_bytes: bytes of text that the targets of a row stand for, shape (rows,).
    """

    inputs: Int64[Tensor, "rows length"]
    targets: Int64[Tensor, "rows length"]
    text_bytes: Int64[Tensor, " rows"]

    def chosen(self, rows: list[int]) -> "Rows":
        """Some of the rows."""
        return Rows(*(part[rows] for part in self))

    def filled(self, multiple: int) -> "Rows":
        """With rows that have no targets at the end, until their number is a multiple of ``multiple``."""
        missing, eos = -len(self.inputs) % multiple, int(self.inputs[0, 0])
        return Rows(
            *(
                F.pad(part, (0, 0) * (part.ndim - 1) + (0, missing), value=value)
                for part, value in zip(self, (eos, IGNORED, 0), strict=True)
            )
        )


def rows_in_order(stream: Stream, length: int) -> Rows:
    """Cut a stream of :func:`common.tokens.encode` into rows of ``length`` tokens for :func:`score`.

    Raises:
        ValueError: a length below 1, or no text.

    Example:
        >>> from common.tokenizer import load_tokenizer
        >>> from common.tokens import encode
        >>> rows = rows_in_order(encode(["To be", "or not"], load_tokenizer("bytes")), length=5)
        >>> rows.inputs.shape, rows.text_bytes.tolist()
        (torch.Size([3, 5]), [5, 4, 2])
    """
    ids, byte_counts = stream
    check_integer("length", length, 1)
    if len(ids) < 2:
        raise ValueError(f"documents must have text, got {len(ids)} tokens")
    end = (0, -(len(ids) - 1) % length)
    parts = (
        np.pad(ids[:-1], end, constant_values=ids[0]).reshape(-1, length),
        np.pad(ids[1:], end, constant_values=IGNORED).reshape(-1, length),
        np.pad(byte_counts[1:], end).reshape(-1, length).sum(axis=1),
    )
    return Rows(*(torch.from_numpy(part.astype(np.int64)) for part in parts))


def excerpts(rows: Rows, tokens: int, lengths: Sequence[int]) -> Rows:
    """Some of a text's rows, spread evenly over it: the same excerpts at every row length that is compared.

    Args:
        rows: of :func:`rows_in_order`.
        tokens: about how many; 0: the whole text.
        lengths: of the rows that are compared; an excerpt has as many tokens as their least common multiple.
    """
    span, (count, length) = math.lcm(*lengths), rows.inputs.shape
    whole, parts = math.ceil(count * length / span), span // length
    wanted = min(whole, max(1, tokens // span)) if tokens else whole
    chosen = [n * whole // wanted * parts + part for n in range(wanted) for part in range(parts)]
    return rows.chosen([row for row in chosen if row < count])


@dataclass(frozen=True)
class Score:
    """What :func:`score` found.

        bits per byte = (sum over the targets of -ln p(target)) / (ln 2 · bytes of text)

    The loss of every target counts, also that of the end of each document, which stands for no byte.

    Attributes:
        nats: loss summed over the targets.
        tokens: number of targets.
        text_bytes: bytes of text that the targets stand for.
        by_position: mean loss at each position of a row in nats, shape (length,); NaN where there is no target.
        iterations: mean over tokens. None: an explicit model.
        updates: mean over tokens of the iterations that each took part in. None: an explicit model.
        converged: share of the rows whose solve has converged. None: an explicit model.
    """

    nats: float
    tokens: int
    text_bytes: int
    by_position: Float64[Tensor, " length"]
    iterations: float | None
    updates: float | None
    converged: float | None

    @property
    def bits_per_byte(self) -> float:
        """Loss per byte of text, in bits."""
        return self.nats / math.log(2) / self.text_bytes

    @property
    def perplexity(self) -> float:
        """Of a token: the exponential of the mean loss."""
        return math.exp(self.nats / self.tokens)


@torch.no_grad()
def score(
    model: nn.Module,
    rows: Rows,
    *,
    batch_size: int,
    accelerator: Accelerator | None = None,
    progress: Callable[[int], Any] | None = None,
    **solve_options: Any,
) -> Score:
    """Predict a text, each row from its own beginning.

    Args:
        model: a :class:`deqseq.CausalLM`; in eval mode meanwhile.
        rows: of :func:`rows_in_order`.
        batch_size: rows of all processes together.
        accelerator: of several processes, all of which must call this. Default: this process alone.
        progress: called after each batch with the number of rows that are done.
        **solve_options: of an implicit model's call, as ``sweep``.

    Returns:
        The score, the same in all processes.

    Raises:
        ValueError: a batch size that is no multiple of the number of processes, or no rows.
    """
    world, rank = (accelerator.num_processes, accelerator.process_index) if accelerator else (1, 0)
    if batch_size < 1 or batch_size % world or not len(rows.inputs):
        raise ValueError(
            f"batch_size must be a multiple of the number of processes {world} and rows at least one, got {batch_size} "
            f"and {len(rows.inputs)}"
        )
    device, filled = next(model.parameters()).device, rows.filled(batch_size)
    total = torch.zeros(5 + 2 * rows.inputs.shape[1], dtype=torch.float64)
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        for begin in range(0, len(filled.inputs), batch_size):
            mine = range(begin + rank * batch_size // world, begin + (rank + 1) * batch_size // world)
            total += _sums(model, filled.chosen(list(mine)), device, solve_options)
            if progress is not None:
                progress(min(begin + batch_size, len(rows.inputs)))
    finally:
        for part, training in modes:
            part.training = training
    if accelerator is not None and world > 1:
        summed = accelerator.reduce(total.to(device), "sum")
        assert isinstance(summed, Tensor)
        total = summed.cpu()
    text_bytes, iterations, updates, converged, solved = total[:5].tolist()
    nats, counts = total[5:].chunk(2)
    means = [value / solved if solved else None for value in (iterations, updates, converged)]
    return Score(nats.sum().item(), int(counts.sum()), int(text_bytes), nats / counts, *means)


def _sums(model: nn.Module, rows: Rows, device: torch.device, options: dict[str, Any]) -> Tensor:
    """Bytes; iterations, updates, convergence and number of rows; losses and number of targets by position."""
    output = model(rows.inputs.to(device), **options)
    logits = output.logits.transpose(1, 2).float()
    losses = F.cross_entropy(logits, rows.targets.to(device), ignore_index=IGNORED, reduction="none").cpu().double()
    counted, solves = rows.targets != IGNORED, torch.zeros(4)
    if output.stats is not None:
        real = counted.any(dim=1)  # rows that fill the last batch up are solved and not counted
        each = (output.stats.iterations.cpu(), output.stats.updates.cpu(), output.converged.cpu(), real)
        per_row = (value.double() if value.ndim == 1 else value.double().mean(dim=1) for value in each)
        solves = torch.stack([value[real].sum() for value in per_row])
    parts = (rows.text_bytes.sum()[None], solves, losses.sum(dim=0), counted.sum(dim=0))
    return torch.cat([part.double() for part in parts])
