"""Do all sweeps find the same fixed point?"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import combinations

import torch

from deqseq.backbones.base import RealTokens
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import ModelOutput
from deqseq.solution import Status
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep

SWEEPS: tuple[Sweep, ...] = (Simultaneous(), Chunked(8), Sliding(8), Sequential())


@dataclass(frozen=True)
class SweepReport:
    """What one sweep took.

    Attributes:
        sweep: the sweep.
        converged: share of the rows that converged.
        evaluations: calls of the map.
        token_updates: evaluations times tokens, over the whole batch.
    """

    sweep: Sweep
    converged: float
    evaluations: int
    token_updates: int


@dataclass(frozen=True)
class PairReport:
    """How far two sweeps agree.

    Attributes:
        first: one sweep.
        second: the other.
        state_difference: largest Euclidean distance between the states of a token, relative to the larger norm.
        agreement: share of the tokens at which both predict the same.
        cache_difference: largest distance between two tensors of the caches, relative to the larger norm.
    """

    first: Sweep
    second: Sweep
    state_difference: float
    agreement: float
    cache_difference: float


@dataclass(frozen=True)
class DualityReport:
    """What :func:`check_duality` found; printed, it is two tables.

    Attributes:
        sweeps: what each took.
        pairs: how far any two agree.
    """

    sweeps: tuple[SweepReport, ...]
    pairs: tuple[PairReport, ...]

    @property
    def worst(self) -> float:
        """The largest difference of states or caches between any two sweeps."""
        return _largest(x for pair in self.pairs for x in (pair.state_difference, pair.cache_difference))

    def __str__(self) -> str:
        lines = [f"{'sweep':24} {'converged':>9} {'evaluations':>11} {'token-updates':>13}"]
        for one in self.sweeps:
            lines.append(f"{one.sweep!s:24} {one.converged:9.1%} {one.evaluations:11} {one.token_updates:13}")
        lines.append(f"\n{'between':46} {'states':>9} {'caches':>9} {'agreement':>9}")
        for pair in self.pairs:
            names = f"{pair.first} and {pair.second}"
            lines.append(f"{names:46} {pair.state_difference:9.1e} {pair.cache_difference:9.1e} {pair.agreement:9.2%}")
        return "\n".join(lines)


@torch.no_grad()
def check_duality(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: RealTokens | None = None,
    sweeps: SequenceOf[Sweep] = SWEEPS,
    solver: Solver | OutsideSolver | None = None,
    stop: Stop | None = None,
) -> DualityReport:
    """Solve the same tokens with several sweeps, and compare states, predictions and caches.

    The sweeps agree as far as the tolerance allows, where all of them converge and there is one fixed point to be
    found. So look at ``converged`` first, and ask for a tight tolerance before you conclude that a model has several.

    Args:
        model: a language model around an :class:`ImplicitModel`; its mode decides on dropout, so use ``eval()``.
        ids: tokens, ``(batch, length)``.
        mask: which of them are real, ``(batch, length)``; None: all.
        sweeps: at least two.
        solver: instead of the model's own.
        stop: instead of the model's own.

    Returns:
        The report.

    Raises:
        TypeError: an explicit model.
        ValueError: fewer than two sweeps.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(16))).double().eval()
        >>> report = check_duality(lm, torch.arange(10)[None], stop=dq.Stop(rtol=1e-10, max_steps=200))
        >>> report.worst < 1e-7, report.pairs[0].agreement
        (True, 1.0)
    """
    if not isinstance(model.model, ImplicitModel):
        raise TypeError("check_duality needs a CausalLM around an ImplicitModel: an explicit model has no sweeps")
    if len(sweeps) < 2:
        raise ValueError(f"check_duality needs at least two sweeps to compare, got {len(sweeps)}")
    states: list[ModelOutput] = []
    reports: list[SweepReport] = []
    for sweep in sweeps:
        x = model.embedding(ids)
        output = model.model(x, mask=mask, sweep=sweep, solver=solver, stop=stop, return_cache=True)
        assert output.stats is not None and output.status is not None
        converged = (output.status == Status.CONVERGED).float().mean().item()
        updates = int(output.stats.updates.sum())
        reports.append(SweepReport(sweep, converged, output.stats.evaluations, updates))
        states.append(output)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    pairs = [
        _compare(model, real, sweeps[i], states[i], sweeps[j], states[j])
        for i, j in combinations(range(len(sweeps)), 2)
    ]
    return DualityReport(tuple(reports), tuple(pairs))


def _compare(
    model: CausalLM, real: RealTokens, first: Sweep, one: ModelOutput, second: Sweep, other: ModelOutput
) -> PairReport:
    """How far two solutions agree on the real tokens."""
    a, b = one.value[real], other.value[real]
    predictions = [model.logits(states).argmax(dim=-1) for states in (a, b)]
    agreement = (predictions[0] == predictions[1]).float().mean().item()
    assert one.cache is not None and other.cache is not None
    caches = zip(one.cache.tensors(), other.cache.tensors(), strict=True)
    between_caches = _largest(_distance(x.flatten(), y.flatten()) for x, y in caches)
    return PairReport(first, second, _distance(a, b), agreement, between_caches)


def _largest(values: Iterable[float]) -> float:
    """The largest; not a number if any of them is."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest distance of two vectors, relative to the larger of their norms."""
    norm = torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp_min(torch.finfo(a.dtype).tiny)
    return ((a - b).norm(dim=-1) / norm).max().item()
