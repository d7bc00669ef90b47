"""Token-by-token generation, as fast as the cache allows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from deqseq.config import SolveConfig, SolveFields, resolve
from deqseq.layers import with_weights
from deqseq.models.base import Model
from deqseq.models.explicit import check_nothing_to_solve
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import ModelOutput
from deqseq.models.recurrent_depth import solved_part
from deqseq.models.sampler import Sampler
from deqseq.rows import take
from deqseq.solution import worst_token
from deqseq.sweeps import Simultaneous, Sliding, Sweep
from deqseq.types import Mask, Sequence


@dataclass(frozen=True)
class NewTokens:
    """What a streaming callback receives at each step.

    Attributes:
        step: how many tokens were generated before these.
        rows: which rows of the batch are still being continued, ``(rows,)``.
        tokens: the new token of each of them, ``(rows,)``.
    """

    step: int
    rows: Int64[Tensor, " rows"]
    tokens: Int64[Tensor, " rows"]


@dataclass(frozen=True)
class Generation:
    """Generated tokens, and the numbers of their solves.

    Attributes:
        tokens: ``(batch, new)``; after a row's end, the padding token.
        lengths: tokens of each row, its stop token included, ``(batch,)``.
        iterations: of the solve that each token was chosen from, ``(batch, new)``; 0 after a row's end; None for an
            explicit model. The first token's solve is the prompt's, of which the largest number counts.
        converged: whether that solve converged, ``(batch, new)``; True after a row's end; None for an explicit model.
        evaluations: how many evaluations of the map followed each other after the prompt's solve; None for an explicit
            model. The rows of a batch share them.
    """

    tokens: Int64[Tensor, "batch new"]
    lengths: Int64[Tensor, " batch"]
    iterations: Int64[Tensor, "batch new"] | None = None
    converged: Bool[Tensor, "batch new"] | None = None
    evaluations: int | None = None

    def rows(self) -> list[list[int]]:
        """The tokens of each row, without padding."""
        pairs = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in pairs]


class _Record:
    """What has been generated so far, a column per step; rows that have ended keep their padding."""

    def __init__(self, batch: int, pad: int, device: torch.device) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.evaluations, self._columns = 0, []
        self._ended = torch.full((batch,), pad, device=device), self.lengths, torch.ones_like(self.lengths).bool()

    def add(self, rows: Tensor, tokens: Tensor, output: ModelOutput) -> None:
        """The tokens of one step, and the solve that they were chosen from."""
        found = (tokens,) if output.stats is None else (tokens, worst_token(output.stats.iterations), output.converged)
        self._columns.append([all_.index_copy(0, rows, own) for all_, own in zip(self._ended, found, strict=False)])
        self.lengths = self.lengths.index_add(0, rows, torch.ones_like(rows))

    def generation(self) -> Generation:
        """The record as tensors."""
        columns = [torch.stack(column, dim=1) for column in zip(*self._columns, strict=True)]
        if len(columns) == 1:
            return Generation(columns[0], self.lengths)
        tokens, iterations, converged = columns
        return Generation(tokens, self.lengths, iterations, converged, self.evaluations)


def generate(
    model: Model,
    embed: Callable[[Int64[Tensor, "batch length"]], Sequence],
    head: Callable[[Float[Tensor, "rows d_model"]], Float[Tensor, "rows vocab"]],
    prompt: Int64[Tensor, "batch length"],
    mask: Mask | None,
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
    pad_token: int,
    callback: Callable[[NewTokens], None] | None,
    solve: SolveConfig | None,
    fields: SolveFields,
) -> Generation:
    """Continue a batch of prompts: the loop of :meth:`deqseq.CausalLM.generate`, in eval mode and without gradients."""
    whole, single = _calls(solved_part(model), solve, fields)
    batch, device = prompt.shape[0], prompt.device
    rows, record = torch.arange(batch, device=device), _Record(batch, pad_token, device)
    enders = torch.tensor(stop_tokens, dtype=torch.int64, device=device)
    random = None if sampler.seed is None else torch.Generator().manual_seed(int(sampler.seed))
    model = with_weights(model)
    output = model(embed(prompt), mask=mask, **whole)
    states = _last_states(output.value, mask)
    for step in range(max_new_tokens):
        logits = head(states)
        _check_finite(logits, rows)
        # numbers for all rows, so that those of a row do not depend on when the others end
        uniform = torch.rand(batch, generator=random).to(device)[rows] if sampler.temperature else None
        tokens = sampler.choose(logits, uniform)
        record.add(rows, tokens, output)
        if callback is not None:
            callback(NewTokens(step, rows, tokens))
        going = (~torch.isin(tokens, enders)).nonzero()[:, 0]
        if step + 1 == max_new_tokens or not len(going):
            break
        cache = output.cache
        if len(going) < len(rows):  # rows that have ended are not computed any more
            rows, tokens, cache = take((rows, tokens, cache), going)
        output = model(embed(tokens[:, None]), cache=cache, **single)
        record.evaluations += 0 if output.stats is None else output.stats.evaluations
        states = output.value[:, -1]
    return record.generation()


def _check_finite(logits: Tensor, rows: Tensor) -> None:
    if not bool(logits.isfinite().all()):
        bad = rows[~logits.isfinite().all(dim=-1)].tolist()
        raise ValueError(f"the logits of rows {bad} are not finite: are the weights?")


def _calls(
    core: ImplicitModel | None, solve: SolveConfig | None, fields: SolveFields
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's keyword arguments for the prompt, and for each new token."""
    given: dict[str, Any] = {**fields, **({} if solve is None else {"solve": solve})}
    if core is None:
        check_nothing_to_solve(given)
        return {"return_cache": True}, {"return_cache": True}
    given["return_cache"] = True
    sweep = fields.get("sweep", prompt_sweep(resolve(core.solve_config, solve, fields)))
    return given | {"sweep": sweep}, given | {"sweep": Simultaneous()}


def prompt_sweep(config: SolveConfig) -> Sweep:
    """How a prompt is solved unless the caller says: all tokens together would be more work than a window.

    On text a window of 16 needs about 2/3 of the evaluations of one of 8, for a sixth to a third more updates of each
    token.
    """
    return config.sweep if config.sweep.block is not None or config.solver.owns_loop else Sliding(16)


def _last_states(value: Sequence, mask: Mask | None) -> Float[Tensor, "batch d_model"]:
    """The state of each row's last real token."""
    if mask is None:
        return value[:, -1]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    return value[torch.arange(len(value), device=value.device), last]
