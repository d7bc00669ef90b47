"""How well a language model predicts a text, and what its solves took."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.models.causal_lm import IGNORED
from deqseq.solution import Status
from deqseq.tasks.text.packing import PackedText, TextBatch, bits_per_byte
from deqseq.training.processes import Processes


@dataclass(frozen=True)
class TextScore:
    """What :func:`score` has found.

    Attributes:
        nats: loss summed over the targets.
        tokens: number of targets.
        text_bytes: of text that the targets stand for.
        by_position: mean loss of the targets at each position of a row in nats, ``(length,)``; NaN where there was
            none.
        self_iterations: mean over tokens, if the stopping rule tells them apart, or rows; None: an explicit model.
        updates: mean over tokens of the self-iterations that each took part in; None: an explicit model.
        converged: share of the rows whose solve has converged; None: an explicit model.
    """

    nats: float
    tokens: int
    text_bytes: int
    by_position: Float64[Tensor, " length"]
    self_iterations: float | None
    updates: float | None
    converged: float | None

    @property
    def bits_per_byte(self) -> float:
        """As :func:`~deqseq.tasks.text.bits_per_byte` says."""
        return bits_per_byte(self.nats, self.text_bytes)

    @property
    def perplexity(self) -> float:
        """Of a token: the exponential of the mean loss."""
        return math.exp(self.nats / self.tokens)


@torch.no_grad()
def score(
    model: nn.Module,
    text: PackedText,
    *,
    batch_size: int,
    rows: Sequence[int] | None = None,
    processes: Processes = Processes(),
    progress: Callable[[int], Any] | None = None,
    **solve_options: Any,
) -> TextScore:
    """Predict a text in order, each row from its own beginning.

    Args:
        model: a :class:`deqseq.CausalLM`, also one spread over processes; it is in eval mode meanwhile.
        text: its row length is the context.
        batch_size: rows of all processes together.
        rows: these alone, counted from 0; None: all.
        processes: of the run; every one must call this.
        progress: called with the number of rows after each batch.
        **solve_options: ``sweep``, ``solver``, ``stop`` of an implicit model's call.

    Returns:
        The score, the same in all processes.

    Raises:
        ValueError: a number out of its range, or no row at all.

    Example:
        >>> import deqseq as dq
        >>> from deqseq.tasks.text import ByteEncoder
        >>> text = PackedText.pack(["To be, or not to be"], ByteEncoder(), length=8)
        >>> lm = dq.CausalLM(257, dq.ImplicitModel(dq.Affine(16)))
        >>> found = score(lm, text, batch_size=2)
        >>> found.tokens, found.text_bytes, round(found.bits_per_byte)
        (20, 19, 8)
    """
    batches = text.in_order(batch_size, rows=rows, rank=processes.rank, world=processes.world)
    total = torch.zeros(5 + 2 * text.length, dtype=torch.float64)
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        for batch in batches:
            total += _scored(model, batch, processes.device, solve_options)
            if progress is not None:
                progress(batch_size)
    finally:
        for part, training in modes:
            part.training = training
    total = torch.tensor(processes.sum(*total.tolist()), dtype=torch.float64)
    text_bytes, steps, updates, converged, solved = total[:5].tolist()
    nats, counts = total[5:].chunk(2)
    means = [value / solved if solved else None for value in (steps, updates, converged)]
    return TextScore(nats.sum().item(), int(counts.sum()), int(text_bytes), nats / counts, *means)


def _scored(model: nn.Module, batch: TextBatch, device: torch.device, options: dict[str, Any]) -> Tensor:
    """Bytes, then self-iterations, updates, convergence and number of rows, then losses and targets by position."""
    output = model(batch.inputs.to(device), **options)
    targets = batch.targets.to(device)
    losses = F.cross_entropy(output.logits.transpose(1, 2).float(), targets, ignore_index=IGNORED, reduction="none")
    counted = targets != IGNORED
    solved = torch.zeros(4, dtype=torch.float64, device=device)
    if output.stats is not None:
        real = counted.any(dim=1)  # rows that fill the last batch up are solved and not counted
        each = (output.stats.steps, output.stats.updates, output.status == Status.CONVERGED, real)
        solved = torch.stack([per_row(value.double())[real].sum() for value in each])
    parts = (batch.text_bytes.sum()[None].to(device), solved, losses.double().sum(dim=0), counted.sum(dim=0))
    return torch.cat([part.double() for part in parts]).cpu()


def per_row(value: Tensor) -> Tensor:
    """The mean over a row's tokens, where there is a number for each."""
    return value if value.ndim == 1 else value.mean(dim=1)
