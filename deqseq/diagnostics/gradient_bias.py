"""How far a gradient estimator is from the exact gradient, and what it costs."""

import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.cost import counted_calls, estimator_name, saved_for_backward
from deqseq.diagnostics.figures import Drawable, colour, finish, reference_line
from deqseq.diagnostics.solved_model import eval_config, implicit_of
from deqseq.diagnostics.tables import text_table
from deqseq.gradients import Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.solution import ConvergenceWarning, Solution
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous
from deqseq.types import Mask, RowMask

if TYPE_CHECKING:
    import matplotlib.axes

ESTIMATORS: tuple[Gradient, ...] = (OneStep(), Phantom(steps=4), Phantom(steps=16), Unrolled())


@dataclass(frozen=True)
class EstimatorBias:
    """One estimator's gradient against the exact one, and what it cost.

    Attributes:
        estimator: the estimator.
        cosine: of the angle between the two, over ``"all"`` parameters and each part of the model; NaN if one is zero.
        norm_ratio: the norm of the estimate over that of the exact gradient, likewise; NaN if that is zero.
        evaluations: calls of the map for one loss and its backward pass, the solve included.
        saved_bytes: what autograd keeps for the backward pass, without parameters.
    """

    estimator: Gradient
    cosine: Mapping[str, float]
    norm_ratio: Mapping[str, float]
    evaluations: int
    saved_bytes: int


@dataclass(frozen=True)
class GradientBias(Drawable):
    """What :func:`gradient_bias` found; prints as two tables.

    Attributes:
        exact: the exact gradient against itself, for its cost.
        estimators: the others.
        converged: which rows converged in the forward solve, ``(batch,)``.
        adjoint: the second, linear solve of the exact gradient; None if no parameter is reached through the map.
    """

    exact: EstimatorBias
    estimators: tuple[EstimatorBias, ...]
    converged: RowMask
    adjoint: Solution | None

    @property
    def is_exact(self) -> bool:
        """Whether both solves converged in all rows; if not, the "exact" gradient is not."""
        solves = [self.converged] if self.adjoint is None else [self.converged, self.adjoint.converged]
        return all(bool(converged.all()) for converged in solves)

    def __str__(self) -> str:
        stats = None if self.adjoint is None else self.adjoint.stats
        costs = []
        for one in (*self.estimators, self.exact):
            agreement = (f"{one.cosine['all']:.4f}", f"{one.norm_ratio['all']:.4f}")
            calls = f"{one.evaluations} + {stats.evaluations}" if one is self.exact and stats else str(one.evaluations)
            costs.append((estimator_name(one.estimator), *agreement, calls, f"{one.saved_bytes / 2**10:.1f}"))
        names = [estimator_name(one.estimator) for one in self.estimators]
        parts = [
            (part, *(f"{one.cosine[part]:.4f}" for one in self.estimators))
            for part in self.exact.cosine
            if part != "all"
        ]
        lines = [text_table(("estimator", "cosine", "norm ratio", "evaluations", "KiB saved"), costs), ""]
        lines.append(text_table(("cosine of", *names), parts))
        if not self.is_exact:
            residual = f"; adjoint residual {stats.residual.max():.1e}" if stats else ""
            lines.append(f"\nNot exact: {self.converged.double().mean():.0%} of rows converged{residual}.")
        return "\n".join(lines)

    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw the cosine of each estimator on ``axis``, over all parameters and part by part."""
        names = list(self.exact.cosine)
        for i, one in enumerate(self.estimators):
            places = [place + 0.12 * (i - (len(self.estimators) - 1) / 2) for place in range(len(names))]
            style = {"color": colour(i), "marker": "o", "linestyle": "", "markersize": 5}
            axis.plot(places, [one.cosine[name] for name in names], label=estimator_name(one.estimator), **style)
        reference_line(axis, 1.0)
        crowded = len(names) > 4
        axis.set_xticks(range(len(names)), names, rotation=30 * crowded, ha="right" if crowded else "center")
        finish(axis, "parameters of", "cosine with exact", legend=True)


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to: ``"embedding"``, ``"layers.0"``, ``"injection"``..."""
    pieces = name.removeprefix("model.backbone.").split(".")
    return ".".join(pieces[:2]) if pieces[0] == "layers" else pieces[0]


def gradient_bias(
    model: CausalLM,
    ids: Tokens,
    *,
    targets: Tokens | None = None,
    mask: Mask | None = None,
    estimators: SequenceOf[Gradient] = ESTIMATORS,
    part: Callable[[str], str] = part_of,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> GradientBias:
    r"""Compare estimators of the loss's gradient with the exact, implicit one, on the same batch in eval mode.

    All estimators act at the same tightly solved fixed point. The ``.grad`` of the parameters is not touched, and the
    model keeps its mode and configuration.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        targets: the answer at each position, ``(batch, length)``. Default: the next token.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        estimators: gradient estimators, at least one.
        part: the part of the model that a parameter, given by name, is counted to. Default: its layer, or its name.
        solve: replaces the model's :class:`~deqseq.SolveConfig`; its sweep and gradient are not used. Its stopping
            rule, with a norm over the whole row, is also that of the adjoint solve. Default: the model's, with 500
            steps and the precision of the parameters to the power of 3/4 as tolerance.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace, except ``gradient``.

    Returns:
        A :class:`GradientBias`.

    Raises:
        TypeError: an explicit model, or ``gradient`` instead of ``estimators``.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary; there is nothing to score, no estimator, or no
            parameter that requires a gradient; or a sweep that an estimator cannot follow.

    References:
        Geng et al., On Training Implicit Models, NeurIPS 2021, arXiv 2111.05177.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(8))).double()
        >>> report = gradient_bias(lm, torch.arange(6)[None], estimators=[dq.OneStep(), dq.Phantom(steps=8)])
        >>> one_step, phantom = report.estimators
        >>> one_step.cosine["all"] < phantom.cosine["all"] < 1
        True
    """
    implicit = implicit_of(model, ids, "gradient_bias")
    if "gradient" in fields:
        raise TypeError("gradient_bias compares estimators: give estimators=[...] instead of gradient")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not estimators:
        raise ValueError("estimators must be at least one, got none")
    if not names:
        raise ValueError("model must have at least one parameter that requires a gradient, got none")
    fields.setdefault("sweep", Simultaneous())
    if solve is None:
        tight = torch.finfo(model.embedding.weight.dtype).eps ** 0.75
        fields.setdefault("stop", Stop(rtol=tight, max_steps=500))
    config = eval_config(implicit, solve, fields)
    parts = {"all": list(range(len(names)))}
    for place, name in enumerate(names):
        parts.setdefault(part(name), []).append(place)
    adjoint: list[Solution] = []
    exactly = Implicit(stop=replace(config.stop, norm="frobenius", per="sample"), report=adjoint.append)
    given = {"input_ids": ids, "mask": mask, "targets": targets, "labels": ids if targets is None else None}
    with torch.inference_mode(False), torch.enable_grad(), eval_mode(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the report says so
        # copies: tensors made in inference mode would forbid any graph
        batch = {name: tensor.clone() for name, tensor in given.items() if tensor is not None}
        exact, gradients, converged = _measure(model, replace(config, gradient=exactly), batch, parts)
        others = [_measure(model, replace(config, gradient=one), batch, parts, gradients)[0] for one in estimators]
    return GradientBias(exact, tuple(others), converged.cpu(), next(iter(adjoint), None))


def _measure(
    model: CausalLM,
    config: SolveConfig,
    batch: Mapping[str, Any],
    parts: Mapping[str, list[int]],
    exact: list[Tensor] | None = None,
) -> tuple[EstimatorBias, list[Tensor], RowMask]:
    """An estimator's numbers, its gradient of each parameter, and which rows converged."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with counted_calls(model.model.backbone) as calls:
        with saved_for_backward(model) as count:
            output = model(**batch, solve=config)
            saved = count()
        found = torch.autograd.grad(output.loss, parameters, allow_unused=True)
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    agreements = {name: _agreement(gradients, exact or gradients, places) for name, places in parts.items()}
    cosine, ratio = ({name: pair[i] for name, pair in agreements.items()} for i in (0, 1))
    return EstimatorBias(config.gradient, cosine, ratio, len(calls), saved), gradients, output.converged


def _agreement(ours: list[Tensor], exact: list[Tensor], places: list[int]) -> tuple[float, float]:
    """Cosine and norm ratio of the gradients at some places, seen as one vector."""
    a, b = (torch.cat([every[place].double().flatten() for place in places]) for every in (ours, exact))
    product, ours_squared, exact_squared = torch.stack([a @ b, a @ a, b @ b]).tolist()
    norms = (ours_squared * exact_squared) ** 0.5
    cosine = product / norms if norms > 0 else torch.nan
    return cosine, (ours_squared / exact_squared) ** 0.5 if exact_squared > 0 else torch.nan
