"""All diagnostics of a model at once, in one text and one figure."""

from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from deqseq.backbones.base import RealTokens
from deqseq.diagnostics.collapse import Collapse, check_collapse
from deqseq.diagnostics.effort import TokenEffort, token_effort
from deqseq.diagnostics.figures import new_figure
from deqseq.diagnostics.gradient_bias import GradientBias, gradient_bias
from deqseq.diagnostics.point import implicit_of
from deqseq.diagnostics.residuals import ResidualTrace, residual_trace
from deqseq.diagnostics.spectral import SpectralRadius, model_spectral_radius
from deqseq.gradients import Gradient, OneStep, Phantom
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep

if TYPE_CHECKING:
    import matplotlib.figure


@dataclass(frozen=True)
class Report:
    """What :func:`report` found; printed, it is one table a diagnostic.

    Attributes:
        trace: residuals against self-iterations.
        effort: self-iterations of each token.
        spectral: spectral radius of each token.
        bias: gradient estimators against the exact gradient.
        collapse: whether the model iterates at all.

    Example:
        >>> import torch, deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> report(lm, torch.arange(6).reshape(2, 3)).effort.steps.shape
        torch.Size([2, 3])
    """

    trace: ResidualTrace
    effort: TokenEffort
    spectral: SpectralRadius
    bias: GradientBias
    collapse: Collapse

    def __str__(self) -> str:
        parts = {
            "Residuals": self.trace,
            "Self-iterations of each token": self.effort,
            "Spectral radius at the fixed point": self.spectral,
            "Gradient estimators against the exact gradient": self.bias,
            "Does it iterate?": self.collapse,
        }
        return "\n\n".join(f"{title}\n{'-' * len(title)}\n{part}" for title, part in parts.items())

    def plot(self) -> "matplotlib.figure.Figure":
        """All of it in one figure, 8 by 8 inches.

        Returns:
            The figure, which no window shows.

        Raises:
            ImportError: matplotlib is missing.
        """
        figure = new_figure(8.0, 8.0)
        axes = figure.subplot_mosaic([["trace", "spectral"], ["bias", "collapse"], ["effort", "effort"]])
        for name, axis in axes.items():
            getattr(self, name).draw(axis)
        return figure


def report(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: RealTokens | None = None,
    targets: Tokens | None = None,
    solver: Solver | OutsideSolver | None = None,
    stop: Stop | None = None,
    sweep: Sweep = Simultaneous(),
    path: str | PathLike[str] | None = None,
) -> Report:
    """Run every diagnostic on a batch, with small budgets.

    The model is left as it was: its mode, its parameters and their ``.grad``, and the generators of random numbers. A
    handful of short rows is enough: eigenvalues take 16 small backward passes a token, everything else some dozens of
    passes over the batch.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: which of them are real, ``(batch, length)``; None: all.
        targets: the answer at each position, ``(batch, length)``, for the gradients; None: the next token.
        solver: instead of the model's own.
        stop: instead of the model's own; the gradients are compared at a tolerance of their own.
        sweep: whose self-iterations a token are counted; all else solves all tokens together.
        path: where to save the figure; the suffix decides on the format. None: nowhere.

    Returns:
        A :class:`Report`.

    Raises:
        TypeError: an explicit model.
        ValueError: no batch of tokens of the vocabulary, or nothing to score.
        ImportError: a path is given and matplotlib is missing.

    Example:
        >>> import torch, deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> print(report(lm, torch.arange(6).reshape(2, 3)).trace.converged)
        tensor([True, True])
    """
    implicit = implicit_of(model, ids, "report")
    estimators: list[Gradient] = [OneStep(), Phantom()]
    if implicit.gradient not in estimators:
        estimators.append(implicit.gradient)
    found = Report(
        residual_trace(model, ids, mask=mask, solver=solver, stop=stop),
        token_effort(model, ids, mask=mask, solver=solver, stop=stop, sweep=sweep),
        model_spectral_radius(model, ids, mask=mask, solver=solver, stop=stop, steps=16),
        gradient_bias(model, ids, mask=mask, targets=targets, solver=solver, estimators=estimators),
        check_collapse(model, ids, mask=mask, solver=solver, stop=stop),
    )
    if path is not None:
        found.plot().savefig(path)
    return found
