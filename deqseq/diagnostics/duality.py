"""Do all sweeps find the same fixed point?"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Unpack

import torch
from torch import Tensor

from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.solved_model import eval_config, implicit_of
from deqseq.diagnostics.tables import text_table
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.models.output import ModelOutput
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep
from deqseq.types import Mask

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
    """What :func:`check_duality` found; prints as two tables.

    Attributes:
        sweeps: what each sweep took.
        pairs: how far any two agree.
    """

    sweeps: tuple[SweepReport, ...]
    pairs: tuple[PairReport, ...]

    @property
    def worst(self) -> float:
        """The largest difference of states or caches between any two sweeps."""
        return _largest(x for pair in self.pairs for x in (pair.state_difference, pair.cache_difference))

    def __str__(self) -> str:
        costs = [(str(x.sweep), f"{x.converged:.1%}", str(x.evaluations), str(x.token_updates)) for x in self.sweeps]
        differences = []
        for pair in self.pairs:
            numbers = (f"{pair.state_difference:.1e}", f"{pair.cache_difference:.1e}", f"{pair.agreement:.2%}")
            differences.append((f"{pair.first} and {pair.second}", *numbers))
        first = text_table(("sweep", "converged", "evaluations", "token updates"), costs)
        return f"{first}\n\n{text_table(('between', 'states', 'caches', 'agreement'), differences)}"


@torch.no_grad()
def check_duality(
    model: CausalLM,
    ids: Tokens,
    *,
    mask: Mask | None = None,
    sweeps: SequenceOf[Sweep] = SWEEPS,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> DualityReport:
    """Solve the same tokens with several sweeps in eval mode, and compare states, predictions and caches.

    Where all sweeps converge and the map has one fixed point, they agree as far as the tolerance allows. Check
    ``converged`` first, and take a tight tolerance, before you conclude that a model has several fixed points.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        sweeps: at least two.
        solve: replaces the model's :class:`~deqseq.SolveConfig`; its sweep is not used.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace, except ``sweep``; ``gradient`` has no effect.

    Returns:
        The report.

    Raises:
        TypeError: an explicit model, or ``sweep`` instead of ``sweeps``.
        ValueError: ``ids`` is not a batch of tokens of the vocabulary, or there are fewer than two sweeps.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(16))).double()
        >>> report = check_duality(lm, torch.arange(10)[None], stop=dq.Stop(rtol=1e-10, max_steps=200))
        >>> report.worst < 1e-7, report.pairs[0].agreement
        (True, 1.0)
    """
    implicit = implicit_of(model, ids, "check_duality")
    if "sweep" in fields:
        raise TypeError("check_duality compares several sweeps: give sweeps=(...), at least two, instead of sweep")
    if len(sweeps) < 2:
        raise ValueError(f"sweeps must be at least two, to be compared, got {len(sweeps)}")
    config = eval_config(implicit, solve, fields)
    with eval_mode(model):
        x = model.embedding(ids)
        outputs = [implicit(x, mask=mask, solve=replace(config, sweep=s), return_cache=True) for s in sweeps]
    reports = tuple(_sweep_report(sweep, output) for sweep, output in zip(sweeps, outputs, strict=True))
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    pairs = []
    for (first, one), (second, other) in combinations(zip(sweeps, outputs, strict=True), 2):
        a, b = one.value[mask], other.value[mask]
        predictions = [model.logits(states).argmax(dim=-1) for states in (a, b)]
        agreement = (predictions[0] == predictions[1]).float().mean().item()
        assert one.cache is not None and other.cache is not None
        tensors = zip(one.cache.tensors(), other.cache.tensors(), strict=True)
        caches = _largest(_distance(x.flatten(), y.flatten()) for x, y in tensors)
        pairs.append(PairReport(first, second, _distance(a, b), agreement, caches))
    return DualityReport(reports, tuple(pairs))


def _sweep_report(sweep: Sweep, output: ModelOutput) -> SweepReport:
    assert output.stats is not None
    converged, updates = output.converged.float().mean().item(), int(output.stats.updates.sum())
    return SweepReport(sweep, converged, output.stats.evaluations, updates)


def _largest(values: Iterable[float]) -> float:
    """The largest; NaN if any of them is."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest distance between vectors, relative to the larger of their norms."""
    norm = torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp_min(torch.finfo(a.dtype).tiny)
    return ((a - b).norm(dim=-1) / norm).max().item()
