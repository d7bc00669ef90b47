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
    """The cost of one sweep, and how closely it agrees with the first.

    Attributes:
        sweep: the sweep.
        converged: share of the rows that converged.
        evaluations: calls of the map.
        updates: sum over all tokens of the evaluations that they took part in.
        state_difference: largest Euclidean distance between the states of a token, relative to the
            larger norm.
        cache_difference: largest distance between two tensors of the caches, relative to the larger
            norm.
        agreement: share of the tokens at which both sweeps predict the same.
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
        sweeps: cost of each sweep, and how closely it agrees with the first.
    """

    sweeps: tuple[SweepReport, ...]

    @property
    def worst(self) -> float:
        """The largest difference of states or caches from the first sweep; NaN if one is NaN."""
        pairs = [(sweep.state_difference, sweep.cache_difference) for sweep in self.sweeps]
        return torch.tensor(pairs, dtype=torch.float64).max().item()

    def __str__(self) -> str:
        costs = ("sweep", "converged", "evaluations", "updates")
        header = (*costs, "states differ", "caches differ", "agreement")
        lines = [
            (
                str(sweep.sweep),
                f"{sweep.converged:.1%}",
                str(sweep.evaluations),
                str(sweep.updates),
                f"{sweep.state_difference:.1e}",
                f"{sweep.cache_difference:.1e}",
                f"{sweep.agreement:.2%}",
            )
            for sweep in self.sweeps
        ]
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
    """Solve the same tokens with several sweeps in eval mode, and compare them with the first.

    If all sweeps converge and the map has one fixed point, they agree up to the tolerance. Before
    you conclude that a model has several fixed points, check ``converged`` and tighten the
    tolerance.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        sweeps: the sweeps to compare, at least two.
        solve: replaces the model's :class:`~deqseq.SolveConfig`; its sweep is not used.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace, except ``sweep``; ``gradient``
            has no effect.

    Raises:
        TypeError, ValueError: an explicit model, ``ids`` outside the vocabulary, a map that is not
            causal, or another argument that does not fit.

    Example:
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(16))).double()
        >>> stop = dq.Stop(rtol=1e-10, max_steps=200)
        >>> report = check_duality(lm, torch.arange(10)[None], stop=stop)
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
    reports = []
    first = None
    with eval_mode(model):
        x = model.embed(ids)
        _check_causal(model.model, x)
        for sweep in sweeps:
            config = replace(config, sweep=sweep)
            output = model.model(x, mask=real, solve=config, return_cache=True)
            first = first or output
            reports.append(_compared(model, sweep, output, first, real))
    return DualityReport(tuple(reports))


def _check_causal(model: Model, x: Sequence) -> None:
    """Refuse a map in which a token depends on later ones: sweeps would have different results."""
    half = x.shape[1] // 2
    if half == 0:
        return
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, device="cpu").to(x)[:, half:]
    z = model.evaluate(x).states.nan_to_num(0, 0, 0)
    value = model.evaluate(x, start=z).value
    changed_x, changed_z = (torch.cat([old[:, :half], noise], dim=1) for old in (x, z))
    changed = model.evaluate(changed_x, start=changed_z).value
    if bool(_distance(changed[:, :half], value[:, :half]) > torch.finfo(x.dtype).eps ** 0.5):
        raise ValueError(
            "model is not causal: its states depend on later tokens, so each sweep solves another "
            "problem"
        )


def _compared(
    model: CausalLM, sweep: Sweep, output: ModelOutput, first: ModelOutput, real: Mask
) -> SweepReport:
    assert output.stats is not None and output.cache is not None and first.cache is not None
    states = output.value[real]
    first_states = first.value[real]
    same = model.logits(states).argmax(dim=-1) == model.logits(first_states).argmax(dim=-1)
    pairs = zip(output.cache.tensors(), first.cache.tensors(), strict=True)
    caches = [_distance(x.flatten(), y.flatten()).item() for x, y in pairs]
    return SweepReport(
        sweep,
        converged=output.converged.double().mean().item(),
        evaluations=output.stats.evaluations,
        updates=int(output.stats.updates.sum()),
        state_difference=_distance(states, first_states).item(),
        cache_difference=torch.tensor([0.0, *caches], dtype=torch.float64).max().item(),
        agreement=same.double().mean().item(),
    )


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Largest distance between vectors, relative to the larger of their norms."""
    norm = torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp_min(torch.finfo(a.dtype).tiny)
    return ((a - b).norm(dim=-1) / norm).max()
