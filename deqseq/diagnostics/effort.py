"""Where the self-iterations go: how many each token took."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.backbones.base import RealTokens
from deqseq.diagnostics.figures import Drawable, finish
from deqseq.diagnostics.point import fixed_point_of, implicit_of, stop_of
from deqseq.diagnostics.text import SHOWN, rest, text_table
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.solution import Status
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep
from deqseq.types import RowMask

if TYPE_CHECKING:
    import matplotlib.axes

WIDTH = 80
"""Columns of text that a printed map takes."""
ROOMY = 160
"""Cells of a drawn map up to which each has room for its label."""


@dataclass(frozen=True)
class TokenEffort(Drawable):
    """Self-iterations of each token; printed, it is a map of them.

    Attributes:
        steps: self-iterations of each token, ``(batch, length)``. Solved together, those after which it passed for
            good; in a sweep of chunks, the same within its chunk; in a sliding window, from its entry to its commit.
        updates: evaluations in which it took part, ``(batch, length)``: the work.
        real: which tokens are no padding, ``(batch, length)``.
        converged: which rows did, ``(batch,)``.
        sweep: which tokens were solved together.
        labels: a text a token; None: their places.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(3, dq.ImplicitModel(dq.Affine(4), solver=dq.Naive()))
        >>> with torch.no_grad():
        ...     _ = lm.model.backbone.A.zero_(), lm.model.backbone.R.zero_()
        >>> print(token_effort(lm, torch.tensor([[0, 1, 2]]), decode="abc".__getitem__))
        Simultaneous(): 2.0 self-iterations a token, at most 2
        6 token-updates, 100% of rows converged
        row 0
          a  b  c
          2  2  2
    """

    steps: Int64[Tensor, "batch length"]
    updates: Int64[Tensor, "batch length"]
    real: RealTokens
    converged: RowMask
    sweep: Sweep
    labels: tuple[tuple[str, ...], ...] | None = None

    @property
    def mean(self) -> float:
        """Self-iterations a real token."""
        return self.steps[self.real].double().mean().item()

    @property
    def most(self) -> int:
        """Self-iterations of the token that took the most."""
        return int(self.steps[self.real].max())

    @property
    def token_updates(self) -> int:
        """Evaluations times real tokens, over the whole batch."""
        return int(self.updates[self.real].sum())

    def __str__(self) -> str:
        lines = [
            f"{self.sweep}: {self.mean:.1f} self-iterations a token, at most {self.most}",
            f"{self.token_updates} token-updates, {self.converged.double().mean().item():.0%} of rows converged",
        ]
        for row in range(min(SHOWN, len(self.steps))):
            texts = self._texts(row)
            numbers = [str(n) if real else "" for n, real in zip(self.steps[row].tolist(), self.real[row], strict=True)]
            lines += [f"row {row}", _in_columns(texts, numbers)]
        return "\n".join(lines) + rest(len(self.steps))

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw a map of rows and tokens on ``axis``, with the tokens' texts where there is room."""
        steps = self.steps.double().masked_fill(~self.real, torch.nan)
        image = axis.imshow(steps.numpy(), aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
        axis.figure.colorbar(image, ax=axis, label="self-iterations")
        finish(axis, "token", "row")
        axis.grid(False)
        axis.set_yticks(range(len(steps)) if len(steps) <= 2 * SHOWN else range(0, len(steps), len(steps) // SHOWN))
        if self.labels is None or steps.numel() > ROOMY:
            return
        for row in range(len(steps)):
            for token, text in enumerate(self._texts(row)):
                dark = self.steps[row, token] < 0.6 * self.most
                colour = "white" if dark and self.real[row, token] else "black"
                place = {"ha": "center", "va": "center", "fontsize": 8, "parse_math": False}
                axis.text(token, row, text, color=colour, **place)

    def _texts(self, row: int) -> SequenceOf[str]:
        return list(map(str, range(self.steps.shape[1]))) if self.labels is None else self.labels[row]


def token_effort(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: RealTokens | None = None,
    solver: Solver | OutsideSolver | None = None,
    stop: Stop | None = None,
    sweep: Sweep = Simultaneous(),
    decode: Callable[[int], str] | None = None,
) -> TokenEffort:
    """Solve in eval mode, each token tested on its own, and count the self-iterations of each.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: which of them are real, ``(batch, length)``; None: all.
        solver: instead of the model's own.
        stop: instead of the model's own; tokens are tested one by one, whatever its granularity.
        sweep: which tokens are solved together.
        decode: the text of a token, for labels; None: its place.

    Returns:
        A :class:`TokenEffort`, on the CPU.

    Raises:
        TypeError: an explicit model.
        ValueError: no batch of tokens of the vocabulary, or a stopping rule that does not measure tokens.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> token_effort(lm, torch.arange(6).reshape(2, 3), sweep=dq.Sequential()).steps.shape
        torch.Size([2, 3])
    """
    who = "token_effort"
    stop = replace(stop_of(implicit_of(model, ids, who), stop), per="token")
    with fixed_point_of(model, ids, asker=who, mask=mask, solver=solver, stop=stop, sweep=sweep) as point:
        stats, status = point.output.stats, point.output.status
    assert stats is not None and status is not None
    labels = None
    if decode is not None:
        labels = tuple(tuple(_visible(decode(token)) for token in row) for row in ids.tolist())
    real = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.cpu()
    converged = (status == Status.CONVERGED).cpu()
    return TokenEffort(stats.steps.cpu(), stats.updates.cpu(), real, converged, sweep, labels)


def _visible(text: str) -> str:
    """A token's text on one line."""
    return text.encode("unicode_escape").decode() if not text.isprintable() else text


def _in_columns(texts: SequenceOf[str], numbers: SequenceOf[str]) -> str:
    """Two lines, a token a column, as far as they go."""
    shown, width = 0, 0
    while shown < len(texts) and width + 2 + max(len(texts[shown]), len(numbers[shown])) <= WIDTH - 5:
        width += 2 + max(len(texts[shown]), len(numbers[shown]))
        shown += 1
    more = [] if shown == len(texts) else ["..."]
    lines = [["", *texts[:shown], *more], ["", *numbers[:shown], *more]]
    return text_table(lines[0], lines[1:])
