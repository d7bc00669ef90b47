"""How the residual falls from one iteration to the next, and how fast."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.check import check_type
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.figures import Drawable, colour, finish, reference_line, row_label
from deqseq.diagnostics.solved_model import check_call, solved_model
from deqseq.diagnostics.tables import row_table, texts, yes_no
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.solution import Outcome
from deqseq.stop import Granularity, Stop
from deqseq.sweeps import Simultaneous
from deqseq.types import Iterations, Mask, Residual, RowMask

if TYPE_CHECKING:
    import matplotlib.axes


@dataclass(frozen=True)
class ResidualTrace(Drawable):
    """Residuals against iterations; prints as a table.

    Attributes:
        checks: the iterations at which the residual was checked, ``(checks,)``.
        residual: relative residual at each check, ``(checks, batch)`` or ``(checks, batch, length)``; NaN at padding.
        error: estimated relative error of the value, see :class:`~deqseq.SolveStats`, ``(batch,)`` or
            ``(batch, length)``.
        iterations: those until a row ended, or a token passed for good, ``(batch,)`` or ``(batch, length)``.
        converged: which rows converged, ``(batch,)``.
        rtol: the relative tolerance.

    Example:
        >>> import deqseq as dq
        >>> stop = dq.Stop(rtol=1e-6)
        >>> solution = dq.solve(lambda z: 0.5 * z + 1, torch.zeros(1, 1), solver=dq.Naive(), stop=stop, trace=True)
        >>> print(ResidualTrace.of(solution, stop))
        row  iterations  residual    error   rate  converged
        0            20   9.5e-07  1.9e-06  0.500        yes
    """

    checks: Int64[Tensor, " checks"]
    residual: Float[Tensor, "checks batch *tokens"]
    error: Residual
    iterations: Iterations
    converged: RowMask
    rtol: float

    @classmethod
    def of(cls, solved: Outcome, stop: Stop) -> "ResidualTrace":
        """The trace of any solve that kept its residuals.

        Args:
            solved: what a solve or a model returned with ``trace=True``.
            stop: the stopping rule of that solve.

        Returns:
            The trace, on the CPU.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: the solve kept no trace.
        """
        check_type("solved", solved, Outcome, "dq.solve(..., trace=True)")
        check_type("stop", stop, Stop, "dq.Stop(rtol=1e-3)")
        stats = solved.stats
        if stats is None or stats.trace is None:
            raise ValueError("this solve kept no residuals: solve with trace=True")
        checks = stop.check_every * torch.arange(1, len(stats.trace) + 1)
        checks = checks.clamp(max=min(stop.max_steps, stats.evaluations))
        numbers = (stats.trace.cpu(), stats.error.cpu(), stats.iterations.cpu(), solved.converged.cpu())
        return cls(checks, *numbers, stop.rtol)

    @property
    def rates(self) -> Residual:
        """The factor by which each residual falls per iteration in the end, the solver's damping included.

        The geometric mean from the first check in the lower half of the fall, on a logarithmic scale, to the last; in
        the upper half, tokens may still be waiting for those before them. NaN if that is a single check.
        """
        when = self.checks.reshape(-1, *[1] * (self.residual.ndim - 1)).expand(self.residual.shape)
        seen = (when <= self.iterations) & (self.residual > 0) & self.residual.isfinite()
        height = torch.where(seen, self.residual.log(), torch.nan)
        top, bottom = height.nan_to_num(nan=-torch.inf).amax(dim=0), height.nan_to_num(nan=torch.inf).amin(dim=0)
        first = (height <= (top + bottom) / 2).int().argmax(dim=0, keepdim=True)
        last = len(height) - 1 - seen.flip(0).int().argmax(dim=0, keepdim=True)
        fall, iterations = (x.gather(0, last) - x.gather(0, first) for x in (height, when))
        return (fall / iterations).exp()[0]

    def __str__(self) -> str:
        final, error, rates, iterations, name = self.residual[-1], self.error, self.rates, self.iterations, "rate"
        if iterations.ndim == 2:  # a row's last token to end, its largest residual, and its median rate
            final, error, iterations = (x.nan_to_num(nan=0).amax(dim=1) for x in (final, error, iterations))
            rates, name = rates.nanmedian(dim=1).values, "median rate"
        columns = {"iterations": texts(iterations, "d"), "residual": texts(final, ".1e"), "error": texts(error, ".1e")}
        columns[name] = [text.replace("nan", "-") for text in texts(rates, ".3f")]
        return row_table({**columns, "converged": yes_no(self.converged)})

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw a line per row, or per token (the first ones dark), on a logarithmic ``axis``, and the tolerance."""
        residual = self.residual.clamp_min(torch.finfo(self.residual.dtype).tiny)
        if residual.ndim == 2:
            for row, line in enumerate(residual.unbind(dim=1)):
                seen = self.checks <= self.iterations[row]
                label = row_label(row, len(self.converged))
                axis.plot(self.checks[seen].tolist(), line[seen].tolist(), color=colour(row), label=label)
        else:
            from matplotlib import colormaps

            shades, length = colormaps["viridis"], residual.shape[2]
            for place, line in enumerate(residual.flatten(1).unbind(dim=1)):
                shade = shades(0.9 * (place % length) / max(1, length - 1))
                axis.plot(self.checks.tolist(), line.tolist(), color=shade, linewidth=0.9)
        reference_line(axis, self.rtol, "tolerance")
        axis.set_yscale("log")
        finish(axis, "iterations", "relative residual", legend=True)


def residual_trace(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    per: Granularity = "row",
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> ResidualTrace:
    """Solve in eval mode, all tokens together, and keep the residual of every check.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        per: replaces the granularity of the stopping rule. ``"row"``: one residual per row, the largest over its
            tokens; ``"token"``: one per token, and converged tokens are frozen until their residual rises again.
        solve: replaces the model's :class:`~deqseq.SolveConfig`; its sweep is not used.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace; ``gradient`` has no effect.

    Returns:
        A :class:`ResidualTrace`, on the CPU.

    Raises:
        TypeError: an explicit model, or an argument of the wrong type.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary, the stopping rule does not measure tokens, or
            ``sweep`` is not the simultaneous one.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> trace = residual_trace(lm, torch.arange(6).reshape(2, 3), per="token")
        >>> trace.residual.shape[1:], trace.rates.shape
        (torch.Size([2, 3]), torch.Size([2, 3]))
    """
    fields.setdefault("sweep", Simultaneous())
    mask, config = check_call(model, ids, mask, solve, fields)
    config = replace(config, stop=replace(config.stop, per=per))
    with solved_model(model, ids, mask, config, trace=True) as solved:
        trace = ResidualTrace.of(solved.output, config.stop)
    if per != "token":
        return trace
    residual, error = (x.masked_fill(~mask.cpu(), torch.nan) for x in (trace.residual, trace.error))
    return replace(trace, residual=residual, error=error)
