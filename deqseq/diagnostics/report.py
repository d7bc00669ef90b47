"""All diagnostics of a model at once, in one text and one figure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from deqseq.config import SolveConfig, SolveFields, resolve
from deqseq.diagnostics.collapse import Collapse, collapse_of
from deqseq.diagnostics.effort import TokenEffort, token_effort
from deqseq.diagnostics.explain import Explanation
from deqseq.diagnostics.figures import new_figure
from deqseq.diagnostics.gradient_bias import GradientBias, gradient_bias
from deqseq.diagnostics.residuals import ResidualTrace, residual_trace
from deqseq.diagnostics.solved_model import check_call, seeded, solved_model
from deqseq.diagnostics.spectral import SpectralRadius, radius_of
from deqseq.gradients import Gradient, OneStep, Phantom
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.types import Mask

if TYPE_CHECKING:
    import matplotlib.figure


@dataclass(frozen=True)
class Report:
    """What :func:`report` found; prints as one table per diagnostic.

    Attributes:
        trace: residuals against iterations.
        effort: iterations of each token.
        spectral: spectral radius of each token.
        bias: gradient estimators against the exact gradient.
        collapse: whether the model iterates at all.
        explanation: why rows converged or not, and what to do.
    """

    trace: ResidualTrace
    effort: TokenEffort
    spectral: SpectralRadius
    bias: GradientBias
    collapse: Collapse
    explanation: Explanation

    def __str__(self) -> str:
        parts = {
            "Residuals": self.trace,
            "Iterations of each token": self.effort,
            "Spectral radius at the fixed point": self.spectral,
            "Gradient estimators against the exact gradient": self.bias,
            "Does it iterate?": self.collapse,
            "Does it converge?": self.explanation,
        }
        return "\n\n".join(f"{title}\n{'-' * len(title)}\n{part}" for title, part in parts.items())

    def plot(self) -> "matplotlib.figure.Figure":
        """Residuals, radii and iterations in one figure, 8 by 5.5 inches.

        Returns:
            A figure that is not shown in a window.

        Raises:
            ImportError: matplotlib is missing.
        """
        figure = new_figure(8.0, 5.5)
        axes = figure.subplot_mosaic([["trace", "spectral"], ["effort", "effort"]])
        for name, axis in axes.items():
            getattr(self, name).draw(axis)
        return figure


def report(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    targets: Tokens | None = None,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> Report:
    """Run every diagnostic on a batch, with small budgets.

    The model is left as it was: its mode, its parameters and their ``.grad``, and the random number generators. A few
    short rows are enough: eigenvalues take 16 small backward passes per token, everything else some dozens of passes
    over the batch.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        targets: the answer at each position, ``(batch, length)``, for the gradients. Default: the next token.
        solve: replaces the model's :class:`~deqseq.SolveConfig`. Its gradient is compared with :class:`~deqseq.OneStep`
            and :class:`~deqseq.Phantom`. Residuals and gradients are those of the simultaneous sweep, and gradients
            have a tolerance of their own. Iterations are counted with the sweep of :func:`token_effort`.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace.

    Returns:
        A :class:`Report`.

    Raises:
        TypeError: an explicit model, or an argument of the wrong type.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary, or there is nothing to score.
        NotImplementedError: a backbone without ``advance``, which the spectral radius of a token needs.

    Example:
        >>> import torch, deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8)))
        >>> print(report(lm, torch.arange(6).reshape(2, 3)).trace.converged)
        tensor([True, True])
    """
    real, config = check_call(model, ids, mask, solve, fields)
    core = model.core
    assert core is not None
    with solved_model(model, ids, real, config) as solved:
        spectral = radius_of(solved, 16, seeded(0))
        collapse = collapse_of(solved, 4, seeded(0), limit=0.05, agreed=0.99)
        explanation = solved.output.explain()
    estimators: list[Gradient] = [OneStep(), Phantom()]
    trained = resolve(core.solve, solve, fields).gradient  # that of `eval_solve` is not trained with
    bias = gradient_bias(
        model,
        ids,
        mask=mask,
        targets=targets,
        estimators=estimators if trained in estimators else [*estimators, trained],
        solver=config.solver,
        start=config.start,
    )
    trace = residual_trace(model, ids, mask=mask, solve=config)
    effort = token_effort(model, ids, mask=mask, solve=solve, **fields)
    return Report(trace, effort, spectral, bias, collapse, explanation)
