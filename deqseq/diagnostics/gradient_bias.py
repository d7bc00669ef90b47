"""How far a gradient estimator is from the exact gradient, and what it costs."""

import warnings
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from deqseq.annotations import checked
from deqseq.check import check_integer, check_type
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.reports import check_call, text_table
from deqseq.gradients import Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.models.implicit import ImplicitModel
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
        norm_ratio: the norm of the estimate over that of the exact gradient, likewise; infinite or NaN if that is zero.
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
        adjoint = None if self.adjoint is None else self.adjoint.stats
        numbers = [str(i + 1) for i in range(len(self.estimators))]
        costs = []
        for name, one in zip((*numbers, "exact"), (*self.estimators, self.exact), strict=True):
            named, calls = f"{name}  {one.estimator}", str(one.evaluations)
            if one is self.exact:
                named, calls = name, f"{calls} + {adjoint.evaluations}" if adjoint else calls
            costs.append((named, f"{one.cosine['all']:.4f}", f"{one.norm_ratio['all']:.4f}", calls))
        cosines = [(part, *(f"{one.cosine[part]:.4f}" for one in self.estimators)) for part in self.exact.cosine]
        costs_table = text_table(("estimator", "cosine", "norm ratio", "evaluations"), costs)
        text = f"{costs_table}\n\n{text_table(('cosine of', *numbers), cosines[1:])}"  # the first is that of all
        if self.is_exact:
            return text
        residual = f"; adjoint residual {adjoint.residual.max():.1e}" if adjoint else ""
        return f"{text}\n\nNot exact: {self.converged.double().mean():.0%} of rows converged{residual}."


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
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model must have at least one parameter that requires a gradient, got none")
    adjoint: list[Solution] = []
    exactly = Implicit(stop=replace(config.stop, norm="row"), report=adjoint.append)
    given = {"input_ids": ids, "mask": mask, "targets": targets, "labels": ids if targets is None else None}
    with torch.inference_mode(False), torch.enable_grad(), eval_mode(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the report says so
        # copies: tensors made in inference mode would forbid any graph
        batch = {name: tensor.clone() for name, tensor in given.items() if tensor is not None}
        exact = _gradient(model, core, batch, replace(config, gradient=exactly))
        others = [_compared(_gradient(model, core, batch, replace(config, gradient=one)), exact) for one in estimators]
    return GradientBias(_compared(exact, exact), tuple(others), exact.converged.cpu(), next(iter(adjoint), None))


class _Estimate(NamedTuple):
    estimator: Gradient
    parts: dict[str, Tensor]  # the gradient over all parameters and over each part, each as one vector
    evaluations: int
    converged: RowMask


def _gradient(model: CausalLM, core: ImplicitModel, batch: Mapping[str, Any], config: SolveConfig) -> _Estimate:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    calls: list[None] = []
    with core.backbone.register_forward_pre_hook(lambda *_: calls.append(None)):
        output = model(**batch, solve=config)
        found = torch.autograd.grad(output.loss, [*named.values()], materialize_grads=True)
    vectors: dict[str, list[Tensor]] = {}
    for name, gradient in zip(named, found, strict=True):
        for part in ("all", part_of(name)):
            vectors.setdefault(part, []).append(gradient.double().flatten())
    return _Estimate(
        config.gradient, {part: torch.cat(each) for part, each in vectors.items()}, len(calls), output.converged
    )


def _compared(ours: _Estimate, exact: _Estimate) -> EstimatorBias:
    pairs = {part: (ours.parts[part], vector) for part, vector in exact.parts.items()}
    cosine = {part: (a @ b / (a.norm() * b.norm())).item() for part, (a, b) in pairs.items()}
    norm_ratio = {part: (a.norm() / b.norm()).item() for part, (a, b) in pairs.items()}
    return EstimatorBias(ours.estimator, cosine, norm_ratio, ours.evaluations)
