"""How the residual falls from one self-iteration to the next, and how fast."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.backbones.base import RealTokens
from deqseq.diagnostics.figures import COLOURS, GREY, Drawable, finish, row_label
from deqseq.diagnostics.point import fixed_point_of, implicit_of, stop_of
from deqseq.diagnostics.text import SHOWN, rest, text_table
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.output import ModelOutput
from deqseq.solution import Solution, Status
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.types import Residual, RowMask, Steps

if TYPE_CHECKING:
    import matplotlib.axes

Part = Literal["sample", "token"]


@dataclass(frozen=True)
class ResidualTrace(Drawable):
    """Residuals against self-iterations; printed, it is a table.

    Attributes:
        evaluations: number of the evaluation at each look, ``(looks,)``.
        residual: relative residual at each look, ``(looks, batch)`` or ``(looks, batch, length)``; not a number at
            padding.
        ended: evaluations until a row ended, or a token passed for good, ``(batch,)`` or ``(batch, length)``.
        converged: which rows did, ``(batch,)``.
        rtol: the relative tolerance.

    Example:
        >>> import deqseq as dq
        >>> stop = dq.Stop(rtol=1e-6)
        >>> solution = dq.solve(lambda z: 0.5 * z + 1, torch.zeros(1, 1), solver=dq.Naive(), stop=stop, trace=True)
        >>> print(ResidualTrace.of(solution, stop))
        row  self-iterations  residual   rate  converged
        0                 20   9.5e-07  0.500        yes
    """

    evaluations: Int64[Tensor, " looks"]
    residual: Float[Tensor, "looks batch *tokens"]
    ended: Steps
    converged: RowMask
    rtol: float

    @classmethod
    def of(cls, solved: Solution | ModelOutput, stop: Stop) -> "ResidualTrace":
        """From any solve that kept its residuals.

        Args:
            solved: what a solve or a model returned for ``trace=True``.
            stop: the stopping rule of that solve.

        Returns:
            The trace, on the CPU.

        Raises:
            ValueError: the solve kept no trace.
        """
        stats, status = solved.stats, solved.status
        if stats is None or status is None or stats.trace is None:
            raise ValueError("this solve kept no residuals: solve with trace=True")
        looks = stop.check_every * torch.arange(1, len(stats.trace) + 1)
        looks = looks.clamp(max=min(stop.max_steps, stats.evaluations))
        return cls(looks, stats.trace.cpu(), stats.steps.cpu(), (status == Status.CONVERGED).cpu(), stop.rtol)

    @property
    def rates(self) -> Residual:
        r"""The factor by which each residual falls a self-iteration in the end.

        The slope of a least-squares line through :math:`\log r` against the evaluations, over the lower half of the
        fall: before it, tokens may still be waiting for those before them. It is the rate of the solver, its damping
        included. Where the residual falls by less than ten, as in a limit cycle, it is fitted to the last half of the
        evaluations. Not a number where fewer than three looks can be fitted.
        """
        when = self.evaluations.to(self.residual.dtype).reshape(-1, *[1] * (self.residual.ndim - 1))
        seen = (when <= self.ended) & (self.residual > 0) & self.residual.isfinite()
        largest = torch.where(seen, self.residual, 0).amax(dim=0)
        smallest = torch.where(seen, self.residual, torch.inf).amin(dim=0)
        upper = seen & (self.residual > (largest * smallest).sqrt())
        lower_half = seen & (when > torch.where(upper, when, 0).amax(dim=0))
        chosen = torch.where(largest >= 10 * smallest, lower_half, seen & (when >= self.ended / 2))
        weight = chosen.to(self.residual.dtype)
        count = weight.sum(dim=0)
        height = torch.where(chosen, self.residual, 1).log()
        centre, level = (weight * when).sum(dim=0) / count, (weight * height).sum(dim=0) / count
        spread = weight * (when - centre)
        slope = (spread * (height - level)).sum(dim=0) / (spread * (when - centre)).sum(dim=0)
        return torch.where(count >= 3, slope.exp(), torch.nan)

    def __str__(self) -> str:
        final, rates, ended = self.residual[-1], self.rates, self.ended
        if ended.ndim == 2:  # a row's last token to end, its largest residual, and its median rate
            final, ended = final.nan_to_num(nan=0).amax(dim=1), ended.amax(dim=1)
            rates = rates.nanmedian(dim=1).values
        lines = []
        for row in range(min(SHOWN, len(final))):
            rate = "-" if rates[row].isnan() else f"{rates[row].item():.3f}"
            numbers = (str(ended[row].item()), f"{final[row].item():.1e}", rate)
            lines.append((str(row), *numbers, "yes" if self.converged[row] else "no"))
        rate = "rate" if self.ended.ndim == 1 else "median rate"
        header = ("row", "self-iterations", "residual", rate, "converged")
        return text_table(header, lines) + rest(len(final))

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw a line a row or token (the first tokens dark) on a logarithmic ``axis``, and the tolerance."""
        when, lines = self.evaluations.tolist(), self.residual.clamp_min(torch.finfo(self.residual.dtype).tiny)
        if self.residual.ndim == 2:
            for row, line in enumerate(lines.unbind(dim=1)):
                seen = self.evaluations <= self.ended[row]
                label, colour = row_label(row, len(self.converged)), COLOURS[row % len(COLOURS)]
                axis.plot(self.evaluations[seen].tolist(), line[seen].tolist(), color=colour, label=label)
        else:
            from matplotlib import colormaps

            shades = colormaps["viridis"]
            length = self.residual.shape[2]
            for row in lines.unbind(dim=1):
                for token, line in enumerate(row.unbind(dim=1)):
                    axis.plot(when, line.tolist(), color=shades(0.9 * token / max(1, length - 1)), linewidth=0.9)
        axis.axhline(self.rtol, color=GREY, linewidth=1, linestyle="--", label="tolerance")
        axis.set_yscale("log")
        finish(axis, "self-iterations", "relative residual", legend=True)


def residual_trace(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: RealTokens | None = None,
    solver: Solver | OutsideSolver | None = None,
    stop: Stop | None = None,
    per: Part = "sample",
) -> ResidualTrace:
    """Solve in eval mode, all tokens together, and keep the residual of every look.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: which of them are real, ``(batch, length)``; None: all.
        solver: instead of the model's own.
        stop: instead of the model's own; ``per`` takes the place of its granularity.
        per: a residual a row (the largest over its tokens), or one a token. Tokens that have passed then rest until
            a neighbour wakes them, as with ``Stop(per="token")``.

    Returns:
        A :class:`ResidualTrace`, on the CPU.

    Raises:
        TypeError: an explicit model.
        ValueError: no batch of tokens of the vocabulary, or a stopping rule that does not measure tokens.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> trace = residual_trace(lm, torch.arange(6).reshape(2, 3), per="token")
        >>> trace.residual.shape[1:], trace.rates.shape
        (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    if per not in get_args(Part):
        raise ValueError(f"per must be one of {get_args(Part)}, got {per!r}")
    who = "residual_trace"
    stop = replace(stop_of(implicit_of(model, ids, who), stop), per=per)
    with fixed_point_of(model, ids, asker=who, mask=mask, solver=solver, stop=stop, trace=True) as point:
        trace = ResidualTrace.of(point.output, stop)
    if mask is None or per == "sample":
        return trace
    return replace(trace, residual=trace.residual.masked_fill(~mask.cpu(), torch.nan))
