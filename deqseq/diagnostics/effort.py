"""Where the iterations go: how many each token took."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.check import check_type
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.figures import Drawable, finish
from deqseq.diagnostics.solved_model import check_call, solved_model
from deqseq.diagnostics.tables import SHOWN, remaining, text_table
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.sweeps import Sequential, Sweep
from deqseq.types import Mask, RowMask

if TYPE_CHECKING:
    import matplotlib.axes

TOKENS = 16
"""How many tokens of a row a report prints."""


@dataclass(frozen=True)
class TokenEffort(Drawable):
    """Iterations of each token; prints those of the first tokens.

    Attributes:
        iterations: iterations of each token, from its entry into a window to its commit, ``(batch, length)``; 0 at
            padding. Tokens that end together, such as those of a chunk, have the same number.
        updates: evaluations in which it took part, ``(batch, length)``: the work.
        mask: True at real tokens, ``(batch, length)``.
        converged: which rows converged, ``(batch,)``.
        sweep: which tokens were solved together.
        labels: a text per token, to print above its number. Default: positions.
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
        for row, real in enumerate(self.mask[:SHOWN]):
            places, more = real.nonzero()[:TOKENS, 0].tolist(), ["..."] * (int(real.sum()) > TOKENS)
            labels = [str(t) if self.labels is None else self.labels[row][t] for t in places]
            numbers = [str(n) for n in self.iterations[row, places].tolist()]
            lines += [f"row {row}", text_table(["", *labels, *more], [["", *numbers, *more]])]
        return "\n".join(lines) + remaining(len(self.iterations))

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw a map of rows and tokens on ``axis``."""
        shown = self.iterations.double().masked_fill(~self.mask, torch.nan)
        image = axis.imshow(shown.numpy(), aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
        axis.figure.colorbar(image, ax=axis, label="iterations")
        finish(axis, "token", "row")
        axis.grid(False)
        axis.set_yticks(range(0, len(shown), 1 if len(shown) <= 2 * SHOWN else len(shown) // SHOWN))


def token_effort(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    decode: Callable[[int], str] | None = None,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> TokenEffort:
    """Solve in eval mode, and count the iterations of each token.

    Tokens that are solved together share one number of iterations. So a model with the :class:`~deqseq.Simultaneous`
    sweep is solved token by token, each after those before it have converged, unless ``sweep`` is given.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        decode: the text of a token, for labels. Default: its position.
        solve: replaces the model's :class:`~deqseq.SolveConfig`.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Returns:
        A :class:`TokenEffort`, on the CPU.

    Raises:
        TypeError: an explicit model, or an argument of the wrong type.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(3, dq.ImplicitModel(dq.Affine(4)))
        >>> with torch.no_grad():
        ...     _ = lm.model.backbone.A.zero_(), lm.model.backbone.R.zero_()
        >>> print(token_effort(lm, torch.tensor([[0, 1, 2]]), solver=dq.Naive(), decode="abc".__getitem__))
        Sequential(): 2.0 iterations per token, at most 2
        6 token updates, 100% of rows converged
        row 0
          a  b  c
          2  2  2
    """
    mask, config = check_call(model, ids, mask, solve, fields)
    if not (decode is None or callable(decode)):  # a class, such as str, is one too
        raise TypeError(f"decode must be a function, got {decode!r}")
    if "sweep" not in fields and config.sweep.block is None:
        config = replace(config, sweep=Sequential())
    labels = None if decode is None else tuple(tuple(_label(decode, token) for token in row) for row in ids.tolist())
    with solved_model(model, ids, mask, config) as solved:
        output = solved.output
    assert output.stats is not None
    iterations, updates, converged = output.stats.iterations.cpu(), output.stats.updates.cpu(), output.converged.cpu()
    return TokenEffort(iterations, updates, mask.cpu(), converged, config.sweep, labels)


def _label(decode: Callable[[int], str], token: int) -> str:
    text = decode(token)
    check_type(f"decode({token})", text, str)
    return text if text.isprintable() else text.encode("unicode_escape").decode()
