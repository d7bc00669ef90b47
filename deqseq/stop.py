"""When a solve ends: tolerances, budget, and how far a point is from the map's value there."""

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.arguments import NonNegativeFloat, PositiveInt, Within, checked, shown, versions
from deqseq.types import Residual, State, float32_at_least, is_dense

Numbers = Any
"""One number per token, ``(rows, tokens)``: tensors, or arrays of NumPy."""


def token_norms(x: State) -> Float[Tensor, "batch tokens"]:
    """Euclidean norm over the last dimension of the event, one number per token.

    Half-precision states are accumulated in float32. A state without a token dimension,
    ``(batch,)`` or ``(batch, dim)``, has one token per row.

    Example:
        >>> import torch
        >>> from deqseq.stop import token_norms
        >>> token_norms(torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]))
        tensor([[5., 1.]])
    """
    accumulate = float32_at_least(x)
    if x.ndim == 1:
        return x.abs().to(accumulate)[:, None]
    return torch.linalg.vector_norm(x, dim=-1, dtype=accumulate).reshape(len(x), -1)


class Pair(NamedTuple):
    """A point ``z``, and :math:`f(z) - z` there."""

    point: State
    residual: State


NEAR = 100
"""How many tolerances a token that passes may be away from its fixed point, as estimated."""

NEGATIVE = 1e-4
"""A residual of a rule may be negative by this, as a divergence that is rounded is."""

ROUNDING = 8
"""In units of precision times the size of the state: a smaller residual is not told from zero."""


class Rule(ABC):
    """A residual of your own, for ``Stop(norm=...)``: a token passes if its residual is at most
    ``atol + rtol`` and the secant test of :class:`Stop` holds.

    In the formulas of :class:`Stop` it replaces :math:`d`, and :math:`s` is 1. The stopping rule
    then does not see the size of a state: return NaN or infinity where the state is not finite.

    Example:
        Tokens converge when their predictions stop changing. The residual is the KL divergence of
        the predictions of ``f(z)`` from those of ``z``.

        >>> from deqseq import Rule
        >>> import torch, deqseq as dq
        >>> class LogitKL(Rule):
        ...     def __init__(self, head):
        ...         self.head = head
        ...
        ...     def residual(self, z, fz):
        ...         old, new = self.head(z).log_softmax(-1), self.head(fz).log_softmax(-1)
        ...         return (new.exp() * (new - old)).sum(-1)
        >>> lm = dq.load_example("parity")
        >>> output = lm(
        ...     torch.tensor([[1, 0, 1, 1]]), stop=dq.Stop(rtol=1e-3, norm=LogitKL(lm.logits))
        ... )
        >>> output.logits.argmax(-1), output.converged
        (tensor([[1, 1, 0, 1]]), tensor([True]))
    """

    @abstractmethod
    def residual(self, z: State, fz: State) -> Float[Tensor, "rows tokens"]:
        """The residual of each token, ``(rows, tokens)``, floating point and at least 0.

        ``z`` is the point and ``fz`` the map's value there, both ``(rows, *event)``; do not change
        them in place. ``tokens`` is the product of all dimensions of the event but the last: 1 for
        a state ``(rows, dim)``.
        """


@checked
@dataclass(frozen=True)
class Stop:
    r"""The stopping rule of a solve.

    A token is a vector along the last dimension of the state. With :math:`d = \lVert f(z) - z
    \rVert` and :math:`s = \lVert f(z) \rVert`, it has converged when

    .. math:: d \le \mathrm{atol} + \mathrm{rtol} \cdot s,

    and its residual is :math:`d / s`. The tokens of a block (those that a sweep ends together; by
    default a whole row) converge when all of them pass in one evaluation.

    A state that grows without bound, as with ``f(z) = z + 1``, would pass once :math:`s` is large.
    So there is a secant test, too: the secant through a token's last two residuals has to meet zero
    nearby. With :math:`r = f(z) - z`, and :math:`\Delta` for the change between two measurements,

    .. math:: d \, \frac{\lVert \Delta z \rVert}{\lVert \Delta r \rVert} \le 100 \,
              (\mathrm{atol} + \mathrm{rtol} \cdot s).

    If the state drifts, :math:`r` does not change, and the row spends its budget. The secant test
    is left out at a token's first measurement, and where :math:`d \le 8 \epsilon s`, with the
    machine epsilon :math:`\epsilon` of the state's dtype.

    Args:
        rtol: relative tolerance.
        atol: absolute tolerance, in the units of the state. A fixed point of zero needs one: near
            it, :math:`d / s` does not fall.
        max_steps: the budget: the largest number of evaluations of the map per row; with a window
            (:class:`deqseq.Sweep`), since it last moved.
        check_every: evaluations between two checks of the residual, at least 1. A check copies up
            to four numbers per token to the host, which on CUDA synchronises. Between checks no
            token ends and nothing is recorded. With a tolerance, a solve measures the first
            evaluation in any case: it sets the scale for ``divergence``.
        divergence: float above 1, may be infinite. A row has diverged when :math:`d` or :math:`s`
            of one of its tokens is not finite, or :math:`d` exceeds ``divergence`` times the
            largest of 1 and all :math:`d` and :math:`s` in the row's first measurement.
        norm: ``"token"``: norms over the last dimension, one per token; ``"row"``: one norm over
            all tokens of a block. A norm over a long sequence stops too early, because the few
            tokens that still move add little to it. A :class:`Rule` is a residual of your own.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a number out of its range, or an unknown norm.

    Example:
        >>> import torch, deqseq as dq
        >>> z0, stop = torch.zeros(1, 1), dq.Stop(rtol=1e-5, max_steps=200)
        >>> dq.solve(torch.cos, z0, solver=dq.Naive(), stop=stop).stats.iterations
        tensor([30])
    """

    rtol: NonNegativeFloat = 1e-3
    _: KW_ONLY
    atol: NonNegativeFloat = 0.0
    max_steps: PositiveInt = 64
    check_every: PositiveInt = 1
    divergence: Annotated[float, Within("(1, inf]")] = 1e4
    norm: Literal["token", "row"] | Rule = "token"

    @classmethod
    @checked
    def exactly(cls, steps: PositiveInt) -> "Stop":
        """Run ``steps`` evaluations without a test, check the residual once at the end, and return
        the last value.

        Rows have the status ``MAX_STEPS_REACHED``; ``CONVERGED`` if their residual is exactly 0,
        ``DIVERGED`` if it is not finite. So with ``throw=True`` such a solve is an error.

        Args:
            steps: evaluations, at least 1.

        Returns:
            A rule with zero tolerance that is checked at the last evaluation.
        """
        return cls(rtol=0.0, atol=0.0, max_steps=steps, check_every=steps)

    @property
    def has_tolerance(self) -> bool:
        """Whether a tolerance is above 0; False after ``exactly``."""
        return self.rtol > 0 or self.atol > 0

    @property
    def runs_to_the_end(self) -> bool:
        """Whether every solve takes ``max_steps`` evaluations."""
        return self.check_every >= self.max_steps

    def measure(
        self, z: State, fz: State, block: int, before: Pair | None = None
    ) -> tuple[Float[Tensor, "numbers rows tokens"], Pair]:
        r"""Measure each token, without a graph.

        Args:
            z: the point, ``(rows, *event)``.
            fz: the map there, ``(rows, *event)``.
            block: tokens whose norms are taken together with ``norm="row"``.
            before: the pair of the measurement before, of the same rows. Default: there is none.

        Returns:
            Of each token :math:`d` and :math:`s`; with a measurement before, also the norms of the
            changes of :math:`z` and of :math:`f(z) - z` since then. And the pair for the next one.
        """
        with torch.no_grad():
            pair = Pair(z.detach(), fz - z)
            norms = [token_norms(pair.residual), token_norms(fz)]
            if before is not None:
                norms.append(token_norms(z - before.point))
                norms.append(token_norms(pair.residual - before.residual))
            numbers = torch.stack(norms)
            if isinstance(self.norm, Rule):
                numbers = torch.cat([torch.stack(_measured(self.norm, z, fz)), numbers[2:]])
            elif self.norm == "row" and block > 1:
                blocks = numbers.unflatten(2, (-1, block)).norm(dim=-1, keepdim=True)
                numbers = blocks.expand(-1, -1, -1, block).flatten(2)
            return numbers, pair

    def judge(
        self, numbers: Numbers, limit: Numbers, fresh: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Which tokens pass by their residual, and which have not diverged.

        Args:
            numbers: what :meth:`measure` gives, :math:`d` and :math:`s` first.
            limit: the :math:`d` above which a token has diverged, one for all tokens of a row,
                ``(rows, 1)``, because one token can grow to the size of another. It is
                ``divergence`` times the largest of 1, :math:`d` and :math:`s` over the first
                measurements of the row's tokens.
            fresh: True at tokens that are measured for the first time.

        Returns:
            Which tokens pass, which have not diverged, and the limit for the next measurement.
        """
        difference, scale = numbers[:2]
        if isinstance(self.norm, Rule) and bool((difference < -NEGATIVE).any()):
            lowest = np.nanmin(difference)
            raise ValueError(
                f"{type(self.norm).__name__}.residual must not be negative, got {lowest:.2e}"
            )
        with np.errstate(all="ignore"):
            if fresh.any():
                reference = np.maximum(difference, scale).clip(min=1)
                new_limit = np.where(fresh & (reference < math.inf), self.divergence * reference, 0)
                largest = np.finfo(new_limit.dtype).max
                limit = np.maximum(limit, new_limit.max(axis=1, keepdims=True).clip(max=largest))
            sound = (difference <= limit) & (scale < math.inf)
            passed = (difference <= self.rtol * scale + self.atol) & sound
            return passed, sound, limit

    def near(self, numbers: Numbers, precision: float) -> Numbers:
        """Where the secant meets zero nearby, or the residual is below rounding, per token.

        Args:
            numbers: all four that :meth:`measure` gives.
            precision: the unit of precision of the state.
        """
        difference, scale, step, change = numbers
        with np.errstate(all="ignore"):
            # divided first, because the products of small numbers would be zero
            share = difference / (self.rtol * scale + self.atol)
            rounded = difference <= ROUNDING * precision * scale
            return (share * step <= NEAR * change) | rounded


def _measured(rule: Rule, z: State, fz: State) -> tuple[Residual, Residual]:
    """The residuals of a rule, checked, with a scale of 1."""
    version = versions(z, fz)
    residual, norms = rule.residual(z, fz), token_norms(fz)
    if versions(z, fz) != version:
        raise ValueError(f"{type(rule).__name__}.residual must not change z or fz in place")
    fits = is_dense(residual) and residual.is_floating_point()
    if not fits or residual.shape != norms.shape or residual.device != norms.device:
        wanted = f"floating-point {tuple(norms.shape)}"
        got = shown(residual)
        raise TypeError(f"{type(rule).__name__}.residual must return {wanted}, got {got}")
    # a token that the map does not move has converged: at padding, a relative residual is 0 / 0
    residual = residual.to(float32_at_least(fz))
    residual = residual.masked_fill(token_norms(fz - z) == 0, 0)
    return residual, torch.ones_like(residual)


def relative(numbers: Numbers) -> Numbers:
    """Residuals :math:`d / s`, from an array or a tensor of both; infinite where they are NaN."""
    difference, scale = numbers
    tiny = np.finfo(str(scale.dtype).removeprefix("torch.")).tiny
    with np.errstate(all="ignore"):
        residual = difference / scale.clip(min=float(tiny))
    residual[residual != residual] = math.inf
    return residual
