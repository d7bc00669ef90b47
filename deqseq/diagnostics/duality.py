"""Do all sweeps find the same fixed point?"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from deqseq.arguments import check_integer, check_type, checked
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.reports import check_call, text_table
from deqseq.models.base import Model
from deqseq.models.causal_lm import CausalLM, Tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.models.output import ModelOutput
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep
from deqseq.types import Mask, Sequence

SWEEPS: tuple[Sweep, ...] = (Simultaneous(), Chunked(8), Sliding(8), Sequential())


@dataclass(frozen=True)
class SweepReport:
    """What one sweep took, and how far it agrees with the first.

    Attributes:
        sweep: the sweep.
        converged: share of the rows that converged.
        evaluations: calls of the map.
        updates: evaluations times tokens, over the whole batch.
        state_difference: largest Euclidean distance between the states of a token, relative to the
            larger norm.
        cache_difference: largest distance between two tensors of the caches, relative to the larger
            norm.
        agreement: share of the tokens at which both predict the same.
    """

    sweep: Sweep
    converged: float
    evaluations: int
    updates: int
    state_difference: float
    cache_difference: float
    agreement: float


@dataclass(frozen=True)
class DualityReport:
    """What :func:`check_duality` found; prints as a table.

    Attributes:
        sweeps: what each sweep took, and how far it agrees with the first.
    """

    sweeps: tuple[SweepReport, ...]

    @property
    def worst(self) -> float:
        """The largest difference of states or caches from those of the first sweep; NaN if one of
        them is.
        """
        found = [(one.state_difference, one.cache_difference) for one in self.sweeps]
        return torch.tensor(found, dtype=torch.float64).max().item()

    def __str__(self) -> str:
        header = (
            "sweep",
            "converged",
            "evaluations",
            "updates",
            "states differ",
            "caches differ",
            "agreement",
        )
        lines = []
        for one in self.sweeps:
            costs = (str(one.sweep), f"{one.converged:.1%}", str(one.evaluations), str(one.updates))
            lines.append(
                (
                    *costs,
                    f"{one.state_difference:.1e}",
                    f"{one.cache_difference:.1e}",
                    f"{one.agreement:.2%}",
                )
            )
        return text_table(header, lines)


@checked
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
    """Solve the same tokens with several sweeps in eval mode; compare states, predictions and
    caches with the first.

    Where all sweeps converge and the map has one fixed point, they agree as far as the tolerance
    allows: check ``converged`` and tighten it before you conclude that a model has several fixed
    points.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        sweeps: at least two.
        solve: replaces the model's :class:`~deqseq.SolveConfig`; its sweep is not used.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace, except ``sweep``; ``gradient``
            has no effect.

    Raises:
        TypeError, ValueError: an explicit model, ``ids`` outside the vocabulary, a map that is not
            causal, or another argument that does not fit.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(16))).double()
        >>> report = check_duality(
        ...     lm, torch.arange(10)[None], stop=dq.Stop(rtol=1e-10, max_steps=200)
        ... )
        >>> report.worst < 1e-7, report.sweeps[-1].agreement
        (True, 1.0)
    """
    if "sweep" in fields:
        raise TypeError(
            "check_duality compares several sweeps: give sweeps=(...), at least two, instead of "
            "sweep"
        )
    _, real, config = check_call(model, ids, mask, solve, fields)
    check_integer("len(sweeps)", len(sweeps), 2)
    for sweep in sweeps:
        check_type("sweeps", sweep, Sweep)
    reports: list[SweepReport] = []
    first = None
    with eval_mode(model):
        x = model.embed(ids)
        _check_causal(model.model, x)
        for sweep in sweeps:
            output = model.model(
                x, mask=mask, solve=replace(config, sweep=sweep), return_cache=True
            )
            first = first or output
            reports.append(_compared(model, sweep, output, first, real))
    return DualityReport(tuple(reports))


def _check_causal(model: Model, x: Sequence) -> None:
    """Refuse a map in which a token depends on later ones: no two sweeps would have to agree."""
    z, half = model.evaluate(x).states.nan_to_num(0, 0, 0), x.shape[1] // 2
    noise = torch.randn(x.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(
        x
    )
    later = (torch.arange(x.shape[1], device=x.device) >= half)[:, None]
    changed = model.evaluate(torch.where(later, noise, x), start=torch.where(later, noise, z))
    before, after = model.evaluate(x, start=z).value[:, :half], changed.value[:, :half]
    if half and bool(_distance(after, before) > torch.finfo(x.dtype).eps ** 0.5):
        raise ValueError(
            "model is not causal: its states depend on later tokens, so each sweep solves another "
            "problem"
        )


def _compared(
    model: CausalLM, sweep: Sweep, output: ModelOutput, first: ModelOutput, real: Mask
) -> SweepReport:
    assert output.stats is not None and output.cache is not None and first.cache is not None
    states = output.value[real], first.value[real]
    predictions, known = (model.logits(each).argmax(dim=-1) for each in states)
    pairs = zip(output.cache.tensors(), first.cache.tensors(), strict=True)
    caches = [0.0, *(_distance(x.flatten(), y.flatten()).item() for x, y in pairs)]
    return SweepReport(
        sweep,
        converged=output.converged.double().mean().item(),
        evaluations=output.stats.evaluations,
        updates=int(output.stats.updates.sum()),
        state_difference=_distance(*states).item(),
        cache_difference=torch.tensor(caches, dtype=torch.float64).max().item(),
        agreement=(predictions == known).double().mean().item(),
    )


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Largest distance between vectors, relative to the larger of their norms."""
    norm = torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp_min(torch.finfo(a.dtype).tiny)
    return ((a - b).norm(dim=-1) / norm).max()
