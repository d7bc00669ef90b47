"""The residual of a fixed-point iterate, per token, per row or per batch."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from deqseq.stop import Stop
from deqseq.types import Residual, State


class Measurement(NamedTuple):
    """What one evaluation says about each row, or each token when the rule is per token.

    Attributes:
        residual: relative residual ``d / s``.
        passed: whether ``d <= atol + rtol * s``, or, as the rule says, the estimated error is.
        difference: the absolute residual ``d`` of each row (its largest over the tokens).
        scale: ``s`` of each token, or one number per row.
    """

    residual: Residual
    passed: Bool[Tensor, "batch *tokens"]
    difference: Float[Tensor, " batch"]
    scale: Float[Tensor, "batch _"]


def token_norms(x: State) -> Float[Tensor, "batch tokens"]:
    """Euclidean norm over the last dimension of the event, one number per token.

    Half-precision states are accumulated in float32. A state without a token dimension, ``(batch,)`` or
    ``(batch, dim)``, has one token per row.

    Example:
        >>> token_norms(torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]))
        tensor([[5., 1.]])
    """
    accumulate = torch.promote_types(x.dtype, torch.float32)
    if x.ndim == 1:
        return x.abs().to(accumulate)[:, None]
    norms = torch.linalg.vector_norm(x, dim=-1, dtype=accumulate)
    return norms if norms.ndim == 2 else norms.reshape(x.shape[0], -1)


def worst_token(numbers: Shaped[Tensor, "batch *tokens"]) -> Shaped[Tensor, " batch"]:
    """The largest number of each row."""
    return numbers if numbers.ndim == 1 else numbers.amax(dim=1)


def measure(
    z: State, fz: State, stop: Stop, before: Residual | None = None, held: Residual | None = None
) -> Measurement:
    """Residual of ``z`` under ``stop``, given ``fz = f(z)``; stays on the device of ``z``.

    Args:
        z: the point, ``(batch, *event)``.
        fz: the map at that point, the same shape.
        stop: tolerances, granularity and norm.
        before: the residuals of the check before, NaN where there was none; for a tolerance of the error.
        held: of :func:`earlier`.

    Returns:
        A :class:`Measurement`; shapes ``(batch, tokens)`` when ``stop.per == "token"``, else ``(batch,)``.
    """
    with torch.no_grad():
        difference, scale = token_norms(fz - z), token_norms(fz)
        if stop.norm == "frobenius":
            difference, scale = difference.norm(dim=1, keepdim=True), scale.norm(dim=1, keepdim=True)
        if stop.per == "batch":
            difference, scale = _as_one_row(difference, scale, stop)
        residual = difference / scale.clamp_min(torch.finfo(scale.dtype).tiny)
        residual = residual if stop.per == "token" else residual.amax(dim=1)
        if stop.atol == 0 and stop.of == "residual":  # the usual case takes fewer operations; NaN does not pass
            passed = residual <= stop.rtol
        else:
            tolerance = stop.atol + stop.rtol * scale
            if stop.of == "error":
                before = torch.full_like(residual, torch.nan) if before is None else before[: len(residual)]
                before = earlier(residual, before, held)
                tolerance = tolerance * _one_minus_rate(residual, before, stop).reshape(len(residual), -1)
            passed = tolerance - difference >= 0  # infinity minus infinity does not pass
            passed = passed if stop.per == "token" else passed.all(dim=1)
        seen = Measurement(residual, passed, difference.amax(dim=1), scale)
        return Measurement(*(x.expand(len(z), *x.shape[1:]) for x in seen)) if stop.per == "batch" else seen


def error_estimate(residual: Residual, before: Residual, stop: Stop) -> Residual:
    """Relative errors, given residuals and those of the check before: see :class:`SolveStats`.

    Example:
        >>> error_estimate(torch.tensor([0.01, 0.02]), torch.tensor([0.1, 0.01]), Stop())
        tensor([0.0111,    inf])
    """
    return torch.where(residual == 0, residual, residual / _one_minus_rate(residual, before, stop))


def earlier(residual: Residual, before: Residual, held: Residual | None) -> Residual:
    """The residuals of the check before; those of frozen tokens, which do not move, such that they keep their rate.

    Args:
        residual: of this check.
        before: of the check before.
        held: of frozen tokens, the ratio of the last two residuals when they moved; NaN: not frozen.
    """
    return before if held is None else torch.where(held.isnan(), before, residual * held)


def divergence_limit(seen: Measurement, stop: Stop) -> Tensor:
    """The difference above which a row has diverged, ``(rows,)``, given its first measurement."""
    reference = torch.maximum(seen.difference, seen.scale.amax(dim=1)).clamp_min(1)
    limit = (stop.divergence * reference).clamp(max=torch.finfo(reference.dtype).max)  # infinity itself has diverged
    return torch.where(reference.isinf(), -1, limit)  # a norm that overflows: nothing can be said of the residual


def _one_minus_rate(residual: Residual, before: Residual, stop: Stop) -> Residual:
    """One minus the factor by which the residual falls per evaluation; 0 where it does not fall or is not known."""
    return (1 - (residual / before) ** (1 / stop.check_every)).clamp_min(0).nan_to_num(0)


def _as_one_row(difference: Tensor, scale: Tensor, stop: Stop) -> tuple[Tensor, Tensor]:
    """The batch as one row, whose verdict all rows are given."""
    if stop.norm == "frobenius":
        return difference.norm().reshape(1, 1), scale.norm().reshape(1, 1)
    return difference.reshape(1, -1), scale.reshape(1, -1)
