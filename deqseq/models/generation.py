"""Token-by-token generation, as fast as the cache allows."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from deqseq.backbones.base import Backbone, Cache
from deqseq.check import check_integer, check_number
from deqseq.config import SolveConfig
from deqseq.layers.weight_norm import cached_weights
from deqseq.models.explicit import ExplicitModel
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import ModelOutput
from deqseq.models.recurrent_depth import RecurrentDepth
from deqseq.rows import take
from deqseq.sweeps import Simultaneous, Sliding, Sweep
from deqseq.types import Mask, Sequence

Logits = Float[Tensor, "rows vocab"]


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen from its logits.

    Args:
        temperature: logits are divided by it; 0: the most probable token is taken.
        top_k: how many of the most probable tokens to draw from, at least 1. Default: all.
        top_p: probability, in (0, 1], of the most probable tokens to draw from. Default: 1, all.
        seed: of the random numbers. Default: torch's global generator. The draws of a row do not depend on
            which other rows have finished.

    Raises:
        ValueError: a number out of its range, or a choice among tokens that a temperature of 0 does not make.

    Example:
        >>> Sampler(temperature=0.8, top_p=0.95, seed=0).top_k is None
        True
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "[0, inf)")
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1)
        if self.top_p is not None:
            check_number("top_p", self.top_p, "(0, 1]")
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)  # what torch.manual_seed takes
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p need a temperature above 0; a temperature of 0 takes the best token")

    def choose(self, logits: Logits, uniform: Float[Tensor, " rows"] | None) -> Int64[Tensor, " rows"]:
        """One token per row.

        Args:
            logits: ``(rows, vocab)``.
            uniform: a random number in [0, 1) per row; None takes the most probable token.

        Returns:
            The tokens.
        """
        if self.temperature == 0 or uniform is None:
            return logits.argmax(dim=-1)
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / self.temperature  # the largest is 0: nothing overflows
        probability, token = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            probability[:, self.top_k :] = 0
        if self.top_p is not None:  # a token stays if those before it do not reach top_p yet
            before = probability.cumsum(dim=-1) - probability
            probability = probability.masked_fill(before >= self.top_p * probability.sum(-1, keepdim=True), 0)
        total = probability.cumsum(dim=-1)
        below = uniform.to(total)[:, None] * total[:, -1:]
        place = (total <= below).sum(dim=-1, keepdim=True)
        last = (probability > 0).sum(dim=-1, keepdim=True) - 1  # rounding must not select what top_k or top_p excluded
        return token.gather(1, torch.minimum(place, last))[:, 0]


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
            explicit model.
        converged: whether that solve converged, ``(batch, new)``; True after a row's end; None for an explicit model.
            The first token's solve is the prompt's.
    """

    tokens: Int64[Tensor, "batch new"]
    lengths: Int64[Tensor, " batch"]
    iterations: Int64[Tensor, "batch new"] | None = None
    converged: Bool[Tensor, "batch new"] | None = None

    def rows(self) -> list[list[int]]:
        """The tokens of each row, without padding."""
        pairs = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in pairs]


@dataclass
class _Record:
    """What has been generated so far, column by column."""

    batch: int
    pad: int
    tokens: list[Tensor] = field(default_factory=list)
    iterations: list[Tensor] = field(default_factory=list)
    converged: list[Tensor] = field(default_factory=list)

    def add(self, rows: Tensor, chosen: Tensor, output: ModelOutput) -> None:
        """File one token of each row that is being continued."""
        self.tokens.append(self._column(rows, chosen, self.pad))
        if output.stats is not None and output.status is not None:
            iterations = output.stats.iterations
            iterations = iterations if iterations.ndim == 1 else iterations.amax(dim=1)
            self.iterations.append(self._column(rows, iterations, 0))
            self.converged.append(self._column(rows, output.converged, True))

    def _column(self, rows: Tensor, values: Tensor, elsewhere: int | bool) -> Tensor:
        column = torch.full((self.batch,), elsewhere, dtype=values.dtype, device=values.device)
        return column.index_copy(0, rows, values)

    def generation(self, lengths: Tensor) -> Generation:
        """The record as tensors."""
        iterations = torch.stack(self.iterations, dim=1) if self.iterations else None
        converged = torch.stack(self.converged, dim=1) if self.converged else None
        return Generation(torch.stack(self.tokens, dim=1), lengths, iterations, converged)


@contextmanager
def cached_backbones(model: nn.Module) -> Iterator[None]:
    """Within this context parametrised weights of all backbones inside are computed once."""
    with ExitStack() as weights:
        for part in (part for part in model.modules() if isinstance(part, Backbone)):
            weights.enter_context(cached_weights(part))
        yield


@torch.no_grad()
def generate(
    model: ImplicitModel | ExplicitModel | RecurrentDepth,
    embed: Callable[[Int64[Tensor, "batch length"]], Sequence],
    head: Callable[[Float[Tensor, "rows d_model"]], Logits],
    prompt: Int64[Tensor, "batch length"],
    mask: Mask | None,
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...] = (),
    pad_token: int = 0,
    callback: Callable[[NewTokens], None] | None = None,
    prefill: dict[str, Any],
    options: dict[str, Any],
) -> Generation:
    """Continue a batch of prompts: the loop of :meth:`deqseq.CausalLM.generate`, with a model in eval mode."""
    batch, device = len(prompt), prompt.device
    rows, lengths = torch.arange(batch, device=device), torch.full((batch,), max_new_tokens, device=device)
    record, enders = _Record(batch, pad_token), torch.tensor(stop_tokens, device=device, dtype=torch.int64)
    random = None if sampler.seed is None else torch.Generator().manual_seed(sampler.seed)
    with cached_backbones(model):
        output = model(embed(prompt), mask=mask, return_cache=True, **prefill)
        state, cache = _last_states(output.value, mask), output.cache
        for step in range(max_new_tokens):
            drawn = torch.rand(batch, generator=random).to(device)[rows] if sampler.temperature else None
            logits = head(state)
            if not bool(logits.isfinite().all()):
                bad = rows[~logits.isfinite().all(dim=1)].tolist()
                raise ValueError(f"the logits of rows {bad} are not finite at new token {step}: are the weights?")
            chosen = sampler.choose(logits, drawn)
            record.add(rows, chosen, output)
            if callback is not None:
                callback(NewTokens(step, rows, chosen))
            if len(enders):
                ended = torch.isin(chosen, enders)
                lengths[rows[ended]] = step + 1
                rows, chosen, cache = _continuing(~ended, rows, chosen, cache)
            if not len(rows) or step + 1 == max_new_tokens:
                break
            output = model(embed(chosen[:, None]), cache=cache, return_cache=True, **options)
            state, cache = output.value[:, 0], output.cache
    return record.generation(lengths.clamp(max=len(record.tokens)))


def prompt_sweep(config: SolveConfig) -> Sweep:
    """How a prompt is solved unless the caller says: all tokens together would be more work than a window."""
    windows = isinstance(config.sweep, Simultaneous) and config.stop.norm == "max_token"
    return Sliding() if windows else config.sweep


def _last_states(value: Sequence, mask: Mask | None) -> Float[Tensor, "batch d_model"]:
    """The state of each row's last real token."""
    if mask is None:
        return value[:, -1]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    return value[torch.arange(len(value), device=value.device), last]


def _continuing(
    going: Bool[Tensor, " rows"], rows: Tensor, chosen: Tensor, cache: Cache | None
) -> tuple[Tensor, Tensor, Cache | None]:
    """The rows that have not ended; they alone are computed from here on."""
    if bool(going.all()):
        return rows, chosen, cache
    return take((rows, chosen, cache), going.nonzero()[:, 0])
