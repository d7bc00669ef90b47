"""How the residual falls from one iteration to the next, and how fast."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.check import check_type
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.figures import Drawable, colour, finish, reference_line, row_label
from deqseq.diagnostics.solved_model import check_call, solved_model
from deqseq.diagnostics.tables import row_table, texts, yes_no
from deqseq.loop import Progress
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.solution import Outcome, worst_token
from deqseq.sweeps import Simultaneous
from deqseq.types import Mask, RowMask

if TYPE_CHECKING:
    import matplotlib.axes


@dataclass(frozen=True)
class ResidualTrace(Drawable):
    """Residuals against iterations; prints as a table.

    Attributes:
        checks: the iterations at which the residual was checked, ``(checks,)``.
        residual: relative residual of each row at each check, the largest over its tokens, ``(checks, batch)``.
        iterations: those until a row ended, ``(batch,)``.
        converged: which rows converged, ``(batch,)``.
        rtol: the relative tolerance.

    Example:
        >>> import deqseq as dq
        >>> checks = []
        >>> solution = dq.solve(lambda z: 0.5 * z + 1, torch.zeros(1, 1), solver=dq.Naive(), stop=dq.Stop(rtol=1e-6),
        ...                     callback=checks.append)
        >>> print(ResidualTrace.of(solution, checks))
        row  iterations  residual   rate  converged
        0            20   9.5e-07  0.500        yes
    """

    checks: Int64[Tensor, " checks"]
    residual: Float[Tensor, "checks batch"]
    iterations: Int64[Tensor, " batch"]
    converged: RowMask
    rtol: float

    @classmethod
    def of(cls, solved: Outcome, checks: SequenceOf[Progress]) -> "ResidualTrace":
        """The trace of any solve whose callback kept what it was given.

        Args:
            solved: what a solve or a model returned.
            checks: what its callback was given, at least one: pass ``callback=checks.append``.

        Returns:
            The trace, on the CPU.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: an explicit model's output, a copy, or no checks.
        """
        check_type("solved", solved, Outcome, "dq.solve(..., callback=checks.append)")
        check_type("checks", checks, (list, tuple), "[], and pass callback=checks.append to the solve")
        for check in checks:
            check_type("checks", check, Progress)
        if solved.stats is None or solved.again is None or not checks:
            raise ValueError(
                "ResidualTrace.of needs a solve as it was returned, and its checks: pass callback=checks.append to it, "
                f"got {solved!r} and {len(checks)} checks"
            )
        residual = torch.stack([worst_token(check.residual) for check in checks]).cpu()
        iterations = worst_token(solved.stats.iterations).cpu()
        when = torch.tensor([check.iteration for check in checks])
        return cls(when, residual, iterations, solved.converged.cpu(), solved.again.keywords["stop"].rtol)

    @property
    def rates(self) -> Float[Tensor, " batch"]:
        """The factor by which each residual falls per iteration in the end, the solver's damping included.

        The geometric mean from the first check in the lower half of the fall, on a logarithmic scale, to the last; in
        the upper half, tokens may still be waiting for those before them. NaN if that is a single check.
        """
        when = self.checks[:, None].expand(self.residual.shape)
        seen = (when <= self.iterations) & (self.residual > 0) & self.residual.isfinite()
        height = torch.where(seen, self.residual.log(), torch.nan)
        top, bottom = height.nan_to_num(nan=-torch.inf).amax(dim=0), height.nan_to_num(nan=torch.inf).amin(dim=0)
        first = (height <= (top + bottom) / 2).int().argmax(dim=0, keepdim=True)
        last = len(height) - 1 - seen.flip(0).int().argmax(dim=0, keepdim=True)
        fall, iterations = (x.gather(0, last) - x.gather(0, first) for x in (height, when))
        return (fall / iterations).exp()[0]

    def __str__(self) -> str:
        columns = {"iterations": texts(self.iterations, "d"), "residual": texts(self.residual[-1], ".1e")}
        columns["rate"] = [text.replace("nan", "-") for text in texts(self.rates, ".3f")]
        return row_table({**columns, "converged": yes_no(self.converged)})

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw a line per row on a logarithmic ``axis``, and the tolerance."""
        residual = self.residual.clamp_min(torch.finfo(self.residual.dtype).tiny)
        for row, line in enumerate(residual.unbind(dim=1)):
            seen = self.checks <= self.iterations[row]
            label = row_label(row, len(self.converged))
            axis.plot(self.checks[seen].tolist(), line[seen].tolist(), color=colour(row), label=label)
        reference_line(axis, self.rtol, "tolerance")
        axis.set_yscale("log")
        finish(axis, "iterations", "relative residual", legend=True)


def residual_trace(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> ResidualTrace:
    """Solve in eval mode, all tokens together, and keep the residual of every check.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        solve: replaces the model's :class:`~deqseq.SolveConfig`; its sweep is not used.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace, except ``sweep``; ``gradient`` has no effect.

    Returns:
        A :class:`ResidualTrace`, on the CPU.

    Raises:
        TypeError: an explicit model, an argument of the wrong type, or ``sweep``.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> trace = residual_trace(lm, torch.arange(6).reshape(2, 3))
        >>> trace.residual.shape[1:], trace.rates.shape
        (torch.Size([2]), torch.Size([2]))
    """
    if "sweep" in fields:
        raise TypeError("residual_trace solves all tokens together: leave out sweep")
    mask, config = check_call(model, ids, mask, solve, {**fields, "sweep": Simultaneous()})
    checks: list[Progress] = []
    with solved_model(model, ids, mask, config, callback=checks.append) as solved:
        return ResidualTrace.of(solved.output, checks)
