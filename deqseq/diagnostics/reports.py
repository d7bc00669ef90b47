"""Reports on a model: whether all sweeps agree, and what more iterations than in training do."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from deqseq.arguments import PositiveInt, check_integer, check_type, checked
from deqseq.backbones.base import Backbone
from deqseq.config import SolveConfig, SolveFields, resolve
from deqseq.models.causal_lm import CausalLM, CausalLMOutput, Tokens, token_ids
from deqseq.models.eval_mode import eval_mode
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import ModelOutput
from deqseq.models.padding import last_real
from deqseq.start import RandomStart
from deqseq.stop import Stop
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep
from deqseq.tokens import check_backbone
from deqseq.types import Mask


def check_call(
    model: CausalLM,
    ids: Tokens,
    mask: Mask | None,
    solve: SolveConfig | None,
    fields: Mapping[str, Any],
) -> tuple[ImplicitModel, Mask, SolveConfig]:
    """Check the arguments; return the part that is solved, the real tokens, and how to solve.

    Random starts get a seed, so that all solves of a diagnostic begin at the same states. The model
    itself checks the shape of the mask.
    """
    core: Any = model.core or model.model
    check_type("model.model", core, ImplicitModel)
    config = resolve(core.eval_solve or core.solve, solve, fields)
    if isinstance(config.start, RandomStart) and config.start.seed is None:
        config = replace(config, start=replace(config.start, seed=0))
    ids = token_ids("ids", ids, model.embedding)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return core, real, config


def text_table(header: SequenceOf[str], lines: Iterable[SequenceOf[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    rows = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    template = "  ".join(f"{{:>{width}}}" for width in widths).replace(">", "<", 1)
    return "\n".join(template.format(*row).rstrip() for row in rows)


SWEEPS: tuple[Sweep, ...] = (Simultaneous(), Chunked(8), Sliding(8), Sequential())


@dataclass(frozen=True)
class SweepReport:
    """The cost of one sweep, and how closely it agrees with the first.

    Attributes:
        sweep: the sweep.
        converged: share of the rows that converged.
        evaluations: calls of the map.
        updates: sum over all tokens of the evaluations that they took part in.
        state_difference: largest Euclidean distance between a token's two states, relative to the
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

    Duality: a model has the same fixed point whether its tokens are solved together or in turn. If
    all sweeps converge and the map has one fixed point, they agree up to the tolerance. If they
    differ, check ``converged`` and tighten the tolerance before you assume several fixed points.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        sweeps: the sweeps to compare, at least two. Default: ``Simultaneous()``, ``Chunked(8)``,
            ``Sliding(8)``, ``Sequential()``.
        solve: replaces the model's :class:`~deqseq.SolveConfig`; its sweep is not used.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace, except ``sweep``; ``gradient``
            has no effect.

    Raises:
        TypeError, ValueError: an explicit model, ``ids`` outside the vocabulary, a map that is not
            causal, or another argument that does not fit.
        NotImplementedError: a backbone without ``advance``.

    Example:
        >>> import torch, deqseq as dq
        >>> from deqseq.diagnostics import check_duality
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
        for part in model.model.modules():
            if isinstance(part, Backbone):
                check_backbone(part, x)
        for sweep in sweeps:
            config = replace(config, sweep=sweep)
            output = model.model(x, mask=real, solve=config, return_cache=True)
            first = first or output
            reports.append(_compared(model, sweep, output, first, real))
    return DualityReport(tuple(reports))


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


SETTLED = 0.01  # relative residual, at most
WORSE = 0.05  # nats by which the loss may grow; of a loss above 1, this share
FORGOTTEN = 0.1  # share of the trained depth's difference between rows


@dataclass(frozen=True)
class Depth:
    """What a model does after some iterations of all tokens together.

    Attributes:
        iterations: how many.
        loss: mean cross entropy, nats.
        residual: median over the rows of the largest relative residual of a row's tokens.
        difference: total variation distance between the predictions at the last tokens of two rows,
            0 to 1; mean over all pairs of rows.
    """

    iterations: int
    loss: float
    residual: float
    difference: float


@dataclass(frozen=True)
class ExtrapolationReport:
    """What :func:`extrapolation` found; prints as a table with the verdict below it.

    Attributes:
        trained: iterations in training.
        depths: the results after each number of iterations, up to 8 times ``trained``.
    """

    trained: int
    depths: tuple[Depth, ...]

    @property
    def verdict(self) -> str:
        """``"forgets its prompt"``: ``difference`` falls below a tenth of that at the trained
        depth. ``"drifts"``: beyond the trained depth the loss grows by more than 0.05 nats,
        or by 5 % if it is above 1. ``"settles"``: neither, and the last residual is at most 0.01.
        ``"marginal"``: neither, but the state still changes.
        """
        first, *beyond = [depth for depth in self.depths if depth.iterations >= self.trained]
        allowed = first.loss + WORSE * max(1.0, first.loss)
        if beyond[-1].difference < FORGOTTEN * first.difference:
            return "forgets its prompt"
        if not all(depth.loss <= allowed for depth in beyond):  # NaN is a drift, too
            return "drifts"
        return "settles" if beyond[-1].residual <= SETTLED else "marginal"

    def __str__(self) -> str:
        lines = []
        for depth in self.depths:
            name = f"{depth.iterations}{' (trained)' * (depth.iterations == self.trained)}"
            numbers = f"{depth.loss:.3f}", f"{depth.residual:.1e}", f"{depth.difference:.2f}"
            lines.append((name, *numbers))
        table = text_table(("iterations", "loss", "residual", "rows differ"), lines)
        return f"{table}\nverdict: {self.verdict}"


@checked
@torch.no_grad()
def extrapolation(
    model: CausalLM,
    ids: Tokens,
    *,
    targets: Tokens | None = None,
    mask: Mask | None = None,
    trained: PositiveInt | None = None,
    solve: SolveConfig | None = None,
    **fields: Unpack[SolveFields],
) -> ExtrapolationReport:
    """Measure an implicit model after 1, 2, 4, … iterations up to the trained number, and after 2,
    4 and 8 times that.

    A model trained at one depth often predicts worse beyond it, or forgets its input.

    Args:
        model: a language model around an :class:`~deqseq.ImplicitModel`, alone or between layers.
        ids: at least two different prompts, ``(batch, length)``.
        targets: targets of the loss, as in :class:`~deqseq.CausalLM`, ``(batch, length)``. Default:
            the next token of ``ids``.
        mask: bool, True at real tokens, ``(batch, length)``. Default: no padding.
        trained: iterations in training. Default: the budget of the model's training solve.
        solve: replaces the model's :class:`~deqseq.SolveConfig`, except sweep and stopping rule.
        **fields: fields of :class:`~deqseq.SolveConfig` to replace, except ``sweep`` and ``stop``.

    Raises:
        TypeError, ValueError: an explicit model, rows that are all equal, or another argument that
            does not fit.

    Example:
        >>> import torch, deqseq as dq
        >>> from deqseq.diagnostics import extrapolation
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(16)))
        >>> extrapolation(lm, torch.tensor([[1, 2], [3, 4]]), trained=8).verdict
        'settles'
    """
    if chosen := {"sweep", "stop"} & fields.keys():
        raise TypeError(f"extrapolation chooses {min(chosen)} itself: leave it out")
    core, real, config = check_call(model, ids, mask, solve, fields)
    if bool((ids == ids[:1]).all()):
        raise ValueError("ids must have two different rows, to see whether they stay different")
    trained = core.solve.stop.max_steps if trained is None else trained
    counts = {2**k for k in range(trained.bit_length())} | {trained * 2**k for k in range(4)}
    answers: dict[str, Any] = {"labels": ids} if targets is None else {"targets": targets}
    depths = []
    with eval_mode(model):
        for count in sorted(counts):
            how = {"stop": Stop.exactly(count), "sweep": Simultaneous()}
            output = model(ids, mask=mask, solve=config, **answers, **how)
            depths.append(_measured(count, output, real))
    return ExtrapolationReport(trained, tuple(depths))


def _measured(iterations: int, output: CausalLMOutput, real: Mask) -> Depth:
    assert output.loss is not None and output.stats is not None
    predicted = last_real(output.logits, real)[:, 0].softmax(dim=-1)
    difference = torch.pdist(predicted, p=1).mean() / 2
    residual = output.stats.residual.amax(dim=1).median()
    return Depth(iterations, output.loss.item(), residual.item(), difference.item())
