"""How far a gradient estimator is from the exact gradient, and what it costs."""

import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deqseq.backbones.base import RealTokens
from deqseq.diagnostics.cost import counted_calls, estimator_name, saved_for_backward
from deqseq.diagnostics.figures import COLOURS, GREY, Drawable, finish
from deqseq.diagnostics.point import evaluating, implicit_of
from deqseq.diagnostics.text import text_table
from deqseq.gradients import Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.implicit import ImplicitModel
from deqseq.solution import ConvergenceWarning, Solution, Status
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop

if TYPE_CHECKING:
    import matplotlib.axes

ESTIMATORS: tuple[Gradient, ...] = (OneStep(), Phantom(steps=4), Phantom(steps=16), Unrolled())


@dataclass(frozen=True)
class Agreement:
    """How one gradient lies to another.

    Attributes:
        cosine: of the angle between them; not a number where one of them is zero.
        norm_ratio: the norm of the estimate over that of the exact gradient; not a number where that is zero.

    Example:
        >>> Agreement(cosine=1.0, norm_ratio=0.5).norm_ratio
        0.5
    """

    cosine: float
    norm_ratio: float


@dataclass(frozen=True)
class EstimatorBias:
    """What one estimator gave, and took.

    Attributes:
        estimator: the estimator.
        overall: its gradient of all parameters against the exact one.
        parts: the same for each part of the model.
        evaluations: calls of the map for one loss and its backward pass, the solve included.
        backward_steps: steps of the adjoint solve, for :class:`~deqseq.Implicit`; 0 for others.
        saved_bytes: what autograd keeps for the backward pass, parameters left out.

    Example:
        >>> one = EstimatorBias(OneStep(), Agreement(0.9, 0.5), {}, 9, 0, 4096)
        >>> one.saved_bytes // 1024
        4
    """

    estimator: Gradient
    overall: Agreement
    parts: Mapping[str, Agreement]
    evaluations: int
    backward_steps: int
    saved_bytes: int


@dataclass(frozen=True)
class GradientBias(Drawable):
    """What :func:`gradient_bias` found; printed, it is two tables.

    Attributes:
        exact: the exact gradient against itself, for its cost.
        estimators: the others.
        converged: share of the rows whose solve converged.
        adjoint_residual: largest relative residual of the adjoint solve of the exact gradient.
        adjoint_converged: whether that solve converged in all rows; if not, "exact" is not.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8))).double()
        >>> report = gradient_bias(lm, torch.arange(6)[None], estimators=[dq.Unrolled()])
        >>> round(report.estimators[0].overall.cosine, 6)
        1.0
    """

    exact: EstimatorBias
    estimators: tuple[EstimatorBias, ...]
    converged: float
    adjoint_residual: float
    adjoint_converged: bool

    def __str__(self) -> str:
        costs = []
        for one in (*self.estimators, self.exact):
            evaluations = f"{one.evaluations} + {one.backward_steps}" if one.backward_steps else str(one.evaluations)
            agreement = (f"{one.overall.cosine:.4f}", f"{one.overall.norm_ratio:.4f}")
            costs.append((estimator_name(one.estimator), *agreement, evaluations, f"{one.saved_bytes / 2**10:.1f}"))
        lines = [text_table(("estimator", "cosine", "norm ratio", "evaluations", "KiB saved"), costs), ""]
        header = ("cosine of", *(estimator_name(one.estimator) for one in self.estimators))
        parts = [(part, *(f"{one.parts[part].cosine:.4f}" for one in self.estimators)) for part in self.exact.parts]
        lines.append(text_table(header, parts))
        if self.converged < 1 or not self.adjoint_converged:
            lines.append(
                f"\nNot exact: {self.converged:.0%} of rows converged; adjoint residual {self.adjoint_residual:.1e}."
            )
        return "\n".join(lines)

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw the cosine of each estimator on ``axis``, over all parameters and part by part."""
        names = ["all", *self.exact.parts]
        for i, one in enumerate(self.estimators):
            cosines = [one.overall.cosine, *(part.cosine for part in one.parts.values())]
            places = [place + 0.12 * (i - (len(self.estimators) - 1) / 2) for place in range(len(names))]
            style = {"color": COLOURS[i % len(COLOURS)], "marker": "o", "linestyle": "", "markersize": 5}
            axis.plot(places, cosines, label=estimator_name(one.estimator), **style)
        axis.axhline(1, color=GREY, linewidth=1, linestyle="--")
        crowded = len(names) > 4
        axis.set_xticks(range(len(names)), names, rotation=30 * crowded, ha="right" if crowded else "center")
        finish(axis, "parameters of", "cosine with exact", legend=True)


def part_of(name: str) -> str:
    """Which part of a model a parameter belongs to: ``"embedding"``, ``"layers.0"``, ``"injection"``...

    Example:
        >>> part_of("model.backbone.layers.3.mixer.in_proj.parametrizations.weight.original0")
        'layers.3'
    """
    pieces = name.removeprefix("model.backbone.").split(".")
    return ".".join(pieces[:2]) if pieces[0] == "layers" else pieces[0]


def gradient_bias(
    model: CausalLM,
    ids: Tokens,
    *,
    targets: Tokens | None = None,
    mask: RealTokens | None = None,
    estimators: SequenceOf[Gradient] = ESTIMATORS,
    solver: Solver | OutsideSolver | None = None,
    stop: Stop | None = None,
    part: Callable[[str], str] = part_of,
) -> GradientBias:
    r"""Compare estimators of the loss's gradient with the exact, implicit one, on the same batch in eval mode.

    Every estimator acts at the same tightly solved fixed point, so that what differs is the estimator alone. Nothing
    is left behind: ``.grad`` of the parameters is not touched, and the model keeps its own estimator and mode.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        targets: the answer at each position, ``(batch, length)``; None: the next token.
        mask: which tokens are real, ``(batch, length)``; None: all.
        estimators: any gradient estimators, at least one.
        solver: of the forward solve, instead of the model's own.
        stop: of the forward solve and, with a norm over the whole row, of the exact gradient's adjoint solve; None:
            500 steps and the precision of the parameters to the power of 3/4.
        part: the name of the part that a parameter, given by name, is counted to.

    Returns:
        A :class:`GradientBias`.

    Raises:
        TypeError: an explicit model.
        ValueError: no batch of tokens, nothing to score, no estimators, or no parameter that wants a gradient.

    References:
        Geng et al., On Training Implicit Models, NeurIPS 2021, arXiv 2111.05177.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8))).double()
        >>> report = gradient_bias(lm, torch.arange(6)[None], estimators=[dq.OneStep(), dq.Phantom(steps=8)])
        >>> one_step, phantom = report.estimators
        >>> one_step.overall.cosine < phantom.overall.cosine < 1
        True
    """
    implicit = implicit_of(model, ids, "gradient_bias")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not estimators or not names:
        what = "an estimator to compare" if not estimators else "a parameter that requires a gradient"
        raise ValueError(f"gradient_bias needs at least {what}, got none")
    stop = stop or Stop(rtol=torch.finfo(model.embedding.weight.dtype).eps ** 0.75, max_steps=500)
    adjoint: list[Solution] = []
    exactly = Implicit(stop=replace(stop, norm="frobenius", per="sample"), report=adjoint.append)
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the report says so
        # copies: what was made in inference mode would forbid any graph
        targets, mask = (None if given is None else given.clone() for given in (targets, mask))
        batch = _Batch(ids.clone(), targets, mask, solver, stop)
        exact = _measure(model, implicit, exactly, batch)
        found = [(estimator, _measure(model, implicit, estimator, batch)) for estimator in estimators]
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(part(name), []).append(place)
    compared = [_compared(estimator, one, exact, groups) for estimator, one in found]
    steps = sum(solution.stats.evaluations for solution in adjoint)
    itself = replace(_compared(exactly, exact, exact, groups), backward_steps=steps)
    residual = max((solution.stats.residual.max().item() for solution in adjoint), default=0.0)
    settled = all(bool(solution.converged.all()) for solution in adjoint)
    return GradientBias(itself, tuple(compared), exact.converged, residual, settled)


@dataclass(frozen=True)
class _Batch:
    ids: Tokens
    targets: Tokens | None
    mask: RealTokens | None
    solver: Solver | OutsideSolver | None
    stop: Stop


@dataclass(frozen=True)
class _Measured:
    gradients: list[Tensor]
    evaluations: int
    saved_bytes: int
    converged: float


def _measure(model: CausalLM, implicit: ImplicitModel, estimator: Gradient, batch: _Batch) -> _Measured:
    """The gradient of the loss by one estimator, and what it took."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    answers = {"labels": batch.ids} if batch.targets is None else {"targets": batch.targets}
    own, implicit.gradient = implicit.gradient, estimator
    try:
        with counted_calls(implicit.backbone) as calls:
            with saved_for_backward(model) as count:
                output = model(batch.ids, mask=batch.mask, solver=batch.solver, stop=batch.stop, **answers)
                saved = count()
            gradients = torch.autograd.grad(output.loss, parameters, allow_unused=True)
    finally:
        implicit.gradient = own
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    converged = (output.status == Status.CONVERGED).float().mean().item()
    return _Measured(filled, len(calls), saved, converged)


def _compared(estimator: Gradient, one: _Measured, exact: _Measured, groups: Mapping[str, list[int]]) -> EstimatorBias:
    """The numbers of an estimator's gradient."""
    everything = range(len(exact.gradients))
    overall = _agreement(one.gradients, exact.gradients, everything)
    parts = {name: _agreement(one.gradients, exact.gradients, places) for name, places in groups.items()}
    return EstimatorBias(estimator, overall, parts, one.evaluations, 0, one.saved_bytes)


def _agreement(ours: SequenceOf[Tensor], exact: SequenceOf[Tensor], places: SequenceOf[int]) -> Agreement:
    """Of the gradients at some places, seen as one vector."""
    a, b = (torch.cat([every[place].double().flatten() for place in places]) for every in (ours, exact))
    products = torch.stack([a @ b, a @ a, b @ b]).tolist()
    both = (products[1] * products[2]) ** 0.5
    cosine = products[0] / both if both > 0 else torch.nan
    ratio = (products[1] / products[2]) ** 0.5 if products[2] > 0 else torch.nan
    return Agreement(cosine, ratio)
