"""Does a model hold what it predicts when it iterates longer than it was trained to?"""

from dataclasses import dataclass
from typing import Any, Unpack

import torch

from deqseq.arguments import PositiveInt, checked
from deqseq.config import SolveConfig, SolveFields
from deqseq.diagnostics.reports import check_call, text_table
from deqseq.models.causal_lm import CausalLM, CausalLMOutput, Tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.models.padding import last_real
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous
from deqseq.types import Mask

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
        depths: the results at each depth, up to 8 times the trained depth.
    """

    trained: int
    depths: tuple[Depth, ...]

    @property
    def verdict(self) -> str:
        """``"forgets its prompt"``: rows differ by less than a tenth of their difference at the
        trained depth. ``"drifts"``: beyond the trained depth the loss grows by more than 0.05 nats,
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
    """Measure a looped model at 1, 2, 4, … iterations, up to 8 times as many as in training.

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
        >>> import deqseq as dq
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
