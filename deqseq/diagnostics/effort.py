"""How many iterations each token took."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import torch
from jaxtyping import Int64

from deqseq.annotations import checked
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.reports import SHOWN, check_call, new_figure, remaining, text_table
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.sweeps import Sequential, Sweep
from deqseq.types import Mask, RowMask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = 16
"""How many tokens of a row a report prints."""


@dataclass(frozen=True)
class TokenEffort:
    """Iterations of each token; prints those of the first tokens.

    Attributes:
        iterations: iterations of each token, from its entry into a window to its commit, ``(batch, length)``; 0 at
            padding. Tokens that end together, such as those of a chunk, have the same number.
        mask: True at real tokens, ``(batch, length)``.
        converged: which rows converged, ``(batch,)``.
        sweep: which tokens were solved together.
    """

    iterations: Int64[torch.Tensor, "batch length"]
    mask: Mask
    converged: RowMask
    sweep: Sweep

    @property
    def mean(self) -> float:
        """Iterations per real token."""
        return self.iterations[self.mask].double().mean().item()

    def __str__(self) -> str:
        most, converged = int(self.iterations.max()), self.converged.double().mean().item()
        lines = [
            f"{self.sweep}: {self.mean:.1f} iterations per token, at most {most}; {converged:.0%} of rows converged"
        ]
        for row, real in enumerate(self.mask[:SHOWN]):
            places, more = real.nonzero()[:TOKENS, 0].tolist(), ["..."] * (int(real.sum()) > TOKENS)
            numbers = [str(n) for n in self.iterations[row, places].tolist()]
            lines += [f"row {row}", text_table(["", *map(str, places), *more], [["", *numbers, *more]])]
        return "\n".join(lines) + remaining(len(self.iterations))

    def plot(self) -> "Figure":
        """Draw a map of rows and tokens. Needs matplotlib."""
        figure, axis = new_figure("token", "row")
        shown = self.iterations.double().masked_fill(~self.mask, torch.nan)
        image = axis.imshow(shown.numpy(), aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
        axis.grid(False)
        figure.colorbar(image, ax=axis, label="iterations")
        return figure


@checked
def token_effort(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
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
        solve: replaces the model's :class:`~deqseq.SolveConfig`.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Raises:
        TypeError, ValueError: an explicit model, ``ids`` outside the vocabulary, or another argument that does not fit.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(3, dq.ImplicitModel(dq.Affine(4)))
        >>> with torch.no_grad():
        ...     _ = lm.model.backbone.A.zero_(), lm.model.backbone.R.zero_()
        >>> print(token_effort(lm, torch.tensor([[0, 1, 2]]), solver=dq.Naive()))
        Sequential(): 2.0 iterations per token, at most 2; 100% of rows converged
        row 0
          0  1  2
          2  2  2
    """
    _, real, config = check_call(model, ids, mask, solve, fields)
    if "sweep" not in fields and config.sweep.block is None:
        config = replace(config, sweep=Sequential())
    with torch.no_grad(), eval_mode(model):
        output = model(ids, mask=mask, solve=config)
    return TokenEffort(output.stats.iterations.cpu(), real.cpu(), output.converged.cpu(), config.sweep)
