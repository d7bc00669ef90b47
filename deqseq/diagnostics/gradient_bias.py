"""How far a gradient estimator is from the exact gradient, and what it costs."""

import warnings
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from deqseq.annotations import checked
from deqseq.backbones import Backbone
from deqseq.check import check_integer, check_type
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.arguments import check_call
from deqseq.diagnostics.shown import text_table
from deqseq.gradients import Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.solution import ConvergenceWarning, Solution
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous
from deqseq.types import Mask, RowMask

ESTIMATORS: tuple[Gradient, ...] = (OneStep(), Phantom(steps=4), Phantom(steps=16), Unrolled())


@dataclass(frozen=True)
class EstimatorBias:
    """One estimator's gradient against the exact one, and what it cost.

    Attributes:
        estimator: the estimator.
        cosine: of the angle between the two, over ``"all"`` parameters and each part of the model; NaN if one is zero.
        norm_ratio: the norm of the estimate over that of the exact gradient, likewise; NaN if that is zero.
        evaluations: calls of the map for one loss and its backward pass, the solve included.
    """

    estimator: Gradient
    cosine: Mapping[str, float]
    norm_ratio: Mapping[str, float]
    evaluations: int


@dataclass(frozen=True)
class GradientBias:
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
        numbers = [str(i + 1) for i in range(len(self.estimators))]
        costs = []
        for name, one in zip((*numbers, "exact"), (*self.estimators, self.exact), strict=True):
            named = name if one is self.exact else f"{name}  {one.estimator}"
            calls = f"{one.evaluations} + {stats.evaluations}" if one is self.exact and stats else str(one.evaluations)
            costs.append((named, f"{one.cosine['all']:.4f}", f"{one.norm_ratio['all']:.4f}", calls))
        lines = [text_table(("estimator", "cosine", "norm ratio", "evaluations"), costs), ""]
        parts = [part for part in self.exact.cosine if part != "all"]
        cosines = [(part, *(f"{one.cosine[part]:.4f}" for one in self.estimators)) for part in parts]
        lines.append(text_table(("cosine of", *numbers), cosines))
        if not self.is_exact:
            residual = f"; adjoint residual {stats.residual.max():.1e}" if stats else ""
            lines.append(f"\nNot exact: {self.converged.double().mean():.0%} of rows converged{residual}.")
        return "\n".join(lines)


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to: ``"embedding"``, ``"layers.0"``, ``"injection"``..."""
    pieces = [piece for piece in name.split(".") if piece not in ("model", "backbone")]
    named = 2 if pieces[0] in ("prelude", "core", "coda") else 1
    return ".".join(pieces[: pieces.index("layers") + 2 if "layers" in pieces else named])


@checked
def gradient_bias(
    model: CausalLM,
    ids: Tokens,
    *,
    targets: Tokens | None = None,
    mask: Mask | None = None,
    estimators: SequenceOf[Gradient] = ESTIMATORS,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> GradientBias:
    r"""Compare estimators of the loss's gradient with the exact, implicit one, on the same batch in eval mode.

    All estimators act at the same tightly solved fixed point. The ``.grad`` of the parameters is not touched.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        targets: the answer at each position, ``(batch, length)``. Default: the next token.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        estimators: gradient estimators, at least one.
        solve: replaces the model's :class:`~deqseq.SolveConfig`; its sweep and gradient are not used. Its stopping
            rule, with a norm over the whole row, is also that of the adjoint solve. Default: the model's, with
            ``rtol = eps ** 0.75`` of the parameters' dtype and 500 steps.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace, except ``gradient``.

    Raises:
        TypeError, ValueError: an explicit model, ``ids`` outside the vocabulary, or another argument that does not fit.

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
    if "gradient" in fields:
        raise TypeError("gradient_bias compares estimators: give estimators=[...] instead of gradient")
    core, _, config = check_call(model, ids, mask, solve, {"sweep": Simultaneous(), **fields})
    if solve is None and "stop" not in fields:
        tight = torch.finfo(model.embedding.weight.dtype).eps ** 0.75
        config = replace(config, stop=Stop(rtol=tight, max_steps=500))
    check_integer("len(estimators)", len(estimators), 1)
    for estimator in estimators:
        check_type("estimators", estimator, Gradient, "dq.Phantom()")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise ValueError("model must have at least one parameter that requires a gradient, got none")
    parts = {"all": list(range(len(names)))}
    for place, name in enumerate(names):
        parts.setdefault(part_of(name), []).append(place)
    adjoint: list[Solution] = []
    exactly = Implicit(stop=replace(config.stop, norm="row"), report=adjoint.append)
    given = {"input_ids": ids, "mask": mask, "targets": targets, "labels": ids if targets is None else None}
    with torch.inference_mode(False), torch.enable_grad(), eval_mode(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the report says so
        # copies: tensors made in inference mode would forbid any graph
        batch = {name: tensor.clone() for name, tensor in given.items() if tensor is not None}
        measure = partial(_measure, model, core.backbone, batch, parts)
        exact, gradients, converged = measure(replace(config, gradient=exactly))
        others = [measure(replace(config, gradient=one), gradients)[0] for one in estimators]
    return GradientBias(exact, tuple(others), converged.cpu(), next(iter(adjoint), None))


def _measure(
    model: CausalLM,
    backbone: Backbone[Any],
    batch: Mapping[str, Any],
    parts: Mapping[str, list[int]],
    config: SolveConfig,
    exact: list[Tensor] | None = None,
) -> tuple[EstimatorBias, list[Tensor], RowMask]:
    """An estimator's numbers, its gradient of each parameter, and which rows converged."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    calls: list[None] = []
    with backbone.register_forward_pre_hook(lambda *_: calls.append(None)):
        output = model(**batch, solve=config)
        found = torch.autograd.grad(output.loss, parameters, allow_unused=True)
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    agreements = {name: _agreement(gradients, exact or gradients, places) for name, places in parts.items()}
    cosine, ratio = ({name: pair[i] for name, pair in agreements.items()} for i in (0, 1))
    return EstimatorBias(config.gradient, cosine, ratio, len(calls)), gradients, output.converged


def _agreement(ours: list[Tensor], exact: list[Tensor], places: list[int]) -> tuple[float, float]:
    """Cosine and norm ratio of the gradients at some places, seen as one vector."""
    a, b = (torch.cat([every[place].double().flatten() for place in places]) for every in (ours, exact))
    product, ours_squared, exact_squared = torch.stack([a @ b, a @ a, b @ b]).tolist()
    norms = (ours_squared * exact_squared) ** 0.5
    cosine = product / norms if norms > 0 else torch.nan
    return cosine, (ours_squared / exact_squared) ** 0.5 if exact_squared > 0 else torch.nan
