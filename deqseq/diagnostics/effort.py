"""Where the iterations go: how many each token took."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.figures import Drawable, finish
from deqseq.diagnostics.solved_model import solved_model
from deqseq.diagnostics.tables import SHOWN, remaining, text_table
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.sweeps import Sweep
from deqseq.types import Mask, RowMask

if TYPE_CHECKING:
    import matplotlib.axes

WIDTH = 75
"""Characters of a printed row of tokens."""
LABELLED = 160
"""Tokens of a figure up to which each has room for its label."""


@dataclass(frozen=True)
class TokenEffort(Drawable):
    """Iterations of each token; prints as a map of them.

    Attributes:
        iterations: iterations of each token, ``(batch, length)``: solved together, those until it passed for good; in
            a sweep of chunks, the same within its chunk; in a sliding window, those from its entry to its commit.
        updates: evaluations in which it took part, ``(batch, length)``: the work.
        mask: True at real tokens, ``(batch, length)``.
        converged: which rows converged, ``(batch,)``.
        sweep: which tokens were solved together.
        labels: a text per token. Default: positions.
    """

    iterations: Int64[Tensor, "batch length"]
    updates: Int64[Tensor, "batch length"]
    mask: Mask
    converged: RowMask
    sweep: Sweep
    labels: tuple[tuple[str, ...], ...] | None = None

    @property
    def mean(self) -> float:
        """Iterations per real token."""
        return self.iterations[self.mask].double().mean().item()

    @property
    def most(self) -> int:
        """Iterations of the token that took the most."""
        return int(self.iterations[self.mask].max())

    @property
    def token_updates(self) -> int:
        """Updates of all real tokens."""
        return int(self.updates[self.mask].sum())

    def __str__(self) -> str:
        lines = [
            f"{self.sweep}: {self.mean:.1f} iterations per token, at most {self.most}",
            f"{self.token_updates} token updates, {self.converged.double().mean().item():.0%} of rows converged",
        ]
        for row, (iterations, mask) in enumerate(zip(self.iterations[:SHOWN].tolist(), self.mask, strict=False)):
            numbers = [str(n) if real else "" for n, real in zip(iterations, mask, strict=True)]
            lines += [f"row {row}", _in_columns(self._texts(row), numbers)]
        return "\n".join(lines) + remaining(len(self.iterations))

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw a map of rows and tokens on ``axis``, with labels where there is room."""
        shown = self.iterations.double().masked_fill(~self.mask, torch.nan)
        image = axis.imshow(shown.numpy(), aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
        axis.figure.colorbar(image, ax=axis, label="iterations")
        finish(axis, "token", "row")
        axis.grid(False)
        axis.set_yticks(range(0, len(shown), 1 if len(shown) <= 2 * SHOWN else len(shown) // SHOWN))
        if self.labels is None or shown.numel() > LABELLED:
            return
        style = {"ha": "center", "va": "center", "fontsize": 8, "parse_math": False}
        for row, numbers in enumerate(shown.tolist()):
            for token, text in enumerate(self._texts(row)):
                axis.text(token, row, text, color="white" if numbers[token] < 0.6 * self.most else "black", **style)

    def _texts(self, row: int) -> SequenceOf[str]:
        return list(map(str, range(self.iterations.shape[1]))) if self.labels is None else self.labels[row]


def token_effort(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    decode: Callable[[int], str] | None = None,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> TokenEffort:
    """Solve in eval mode, testing each token on its own, and count the iterations of each.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        decode: the text of a token, for labels. Default: its position.
        solve: replaces the model's :class:`~deqseq.SolveConfig`. Its stopping rule is applied per token, whatever its
            granularity.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Returns:
        A :class:`TokenEffort`, on the CPU.

    Raises:
        TypeError: an explicit model.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary, or the stopping rule does not measure tokens.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(3, dq.ImplicitModel(dq.Affine(4)))
        >>> with torch.no_grad():
        ...     _ = lm.model.backbone.A.zero_(), lm.model.backbone.R.zero_()
        >>> print(token_effort(lm, torch.tensor([[0, 1, 2]]), solver=dq.Naive(), decode="abc".__getitem__))
        Simultaneous(): 2.0 iterations per token, at most 2
        6 token updates, 100% of rows converged
        row 0
          a  b  c
          2  2  2
    """
    with solved_model(model, ids, "token_effort", mask=mask, solve=solve, fields=fields, per="token") as solved:
        output, sweep = solved.output, solved.config.sweep
    assert output.stats is not None
    labels = None
    if decode is not None:
        labels = tuple(tuple(_printable(decode(token)) for token in row) for row in ids.tolist())
    mask = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.cpu()
    stats, converged = output.stats, output.converged.cpu()
    return TokenEffort(stats.iterations.cpu(), stats.updates.cpu(), mask, converged, sweep, labels)


def _printable(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _in_columns(labels: SequenceOf[str], numbers: SequenceOf[str]) -> str:
    """Two lines with a token per column, cut at the width of a page."""
    shown, width = 0, 0
    for label, number in zip(labels, numbers, strict=True):
        width += 2 + max(len(label), len(number))
        if width > WIDTH:
            break
        shown += 1
    cut = ["..."] * (shown < len(labels))
    return text_table(["", *labels[:shown], *cut], [["", *numbers[:shown], *cut]])
