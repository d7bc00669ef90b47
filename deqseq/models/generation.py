"""Token-by-token generation, as fast as the cache allows."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from deqseq.backbones.base import Backbone, Cache
from deqseq.check import check_integer
from deqseq.config import SolveConfig, SolveFields, resolve
from deqseq.layers.weight_norm import cached_weights
from deqseq.models.explicit import ExplicitModel
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import ModelOutput
from deqseq.models.recurrent_depth import RecurrentDepth, solved_part
from deqseq.models.sampler import Sampler
from deqseq.norms import worst_token
from deqseq.rows import take
from deqseq.stop import Stop
from deqseq.sweeps import Lockstep, Simultaneous, Sliding, Sweep
from deqseq.types import Mask, Sequence


@dataclass(frozen=True)
class Draft:
    """Draft some tokens with few iterations each, then verify all of them in one solve.

    A drafted token is chosen after ``iterations`` more evaluations of all tokens that are not in the cache yet. The
    verifying solve begins at the drafts' states. Each row takes its drafts up to the first one that verification
    rejects, and the right token in its place; so a verification gives from 1 to ``tokens + 1`` tokens. These are the
    tokens of decoding without drafts, as far as the tolerance determines them, sampled ones too: a draft and its
    verification share their random number.

    Args:
        tokens: drafted before each verification, at least 1.
        iterations: evaluations for each drafted token, at least 1.

    Raises:
        TypeError, ValueError: names the field, what it got and what it wants.

    References:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, arXiv 2211.17192. Zhang
        et al., Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding, ACL 2024,
        arXiv 2309.08168.

    Example:
        >>> import deqseq as dq
        >>> lm, prompt = dq.load_example("text"), torch.tensor([list(b"ROMEO:")])
        >>> options = {"max_new_tokens": 20, "stop": dq.Stop(rtol=1e-4, max_steps=256)}
        >>> plain, drafted = lm.generate(prompt, **options), lm.generate(prompt, draft=dq.Draft(), **options)
        >>> torch.equal(drafted.tokens, plain.tokens), drafted.evaluations < plain.evaluations
        (True, True)
    """

    tokens: int = 4
    iterations: int = 2

    def __post_init__(self) -> None:
        check_integer("Draft.tokens", self.tokens, 1)
        check_integer("Draft.iterations", self.iterations, 1)


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
            explicit model. With drafts it is the verifying solve, which several tokens share.
        converged: whether that solve converged, ``(batch, new)``; not if an exit rule ended it; True after a row's end;
            None for an explicit model. The first token's solve is the prompt's.
        evaluations: how many evaluations of the map followed each other after the prompt's solve, those of drafts
            included; None for an explicit model. The rows of a batch share them.
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
    """What has been generated so far, row by row; with drafts, some rows are ahead of others."""

    def __init__(self, batch: int, most: int, enders: tuple[int, ...]) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.iterations: list[list[int]] = [[] for _ in range(batch)]
        self.converged: list[list[bool]] = [[] for _ in range(batch)]
        self.evaluations = 0
        self._most, self._enders, self._told = most, frozenset(enders), 0

    def add(self, rows: list[int], chosen: Tensor, drafts: Tensor, output: ModelOutput) -> list[int]:
        """File what each row takes of its ``chosen`` tokens, and return how many: see :class:`Draft`."""
        counts = []
        for row, new, drafted in zip(rows, chosen.tolist(), drafts.tolist(), strict=True):
            ends = [token != draft or token in self._enders for token, draft in zip(new, drafted, strict=False)]
            count = min([*ends, True].index(True) + 1, self._most - len(self.tokens[row]))
            self.tokens[row] += new[:count]
            counts.append(count)
        if output.stats is not None:
            iterations = worst_token(output.stats.iterations).tolist()
            for row, count, steps, converged in zip(rows, counts, iterations, output.converged.tolist(), strict=True):
                self.iterations[row] += [steps] * count
                self.converged[row] += [converged] * count
        return counts

    def goes_on(self, row: int) -> bool:
        """Whether a row has neither met a stop token nor reached its length."""
        tokens = self.tokens[row]
        return len(tokens) < self._most and tokens[-1] not in self._enders

    def tell(self, callback: Callable[[NewTokens], None], device: torch.device) -> None:
        """Call back with each step that all rows that go on have made."""
        lengths = [len(tokens) for tokens in self.tokens]
        going = [length for row, length in enumerate(lengths) if self.goes_on(row)]
        for step in range(self._told, min(going, default=max(lengths))):
            rows = [row for row, length in enumerate(lengths) if length > step]
            tokens = [self.tokens[row][step] for row in rows]
            callback(NewTokens(step, torch.tensor(rows, device=device), torch.tensor(tokens, device=device)))
            self._told = step + 1

    def generation(self, pad: int, solved: bool, device: torch.device) -> Generation:
        """The record as tensors."""
        lengths = torch.tensor([len(tokens) for tokens in self.tokens], device=device)

        def padded(lists: list[list[Any]], value: int | bool) -> Tensor:
            new = max(len(row) for row in lists)
            return torch.tensor([row + [value] * (new - len(row)) for row in lists], device=device)

        tokens = padded(self.tokens, pad)
        if not solved:
            return Generation(tokens, lengths)
        iterations, converged = padded(self.iterations, 0), padded(self.converged, True)
        return Generation(tokens, lengths, iterations, converged, self.evaluations)


@contextmanager
def cached_backbones(model: nn.Module) -> Iterator[None]:
    """Within this context parametrised weights of all backbones inside are computed once."""
    with ExitStack() as weights:
        for part in (part for part in model.modules() if isinstance(part, Backbone)):
            weights.enter_context(cached_weights(part))
        yield


def generate(
    model: ImplicitModel | ExplicitModel | RecurrentDepth,
    embed: Callable[[Int64[Tensor, "batch length"]], Sequence],
    head: Callable[[Float[Tensor, "rows length d_model"]], Float[Tensor, "rows length vocab"]],
    prompt: Int64[Tensor, "batch length"],
    mask: Mask | None,
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
    pad_token: int,
    draft: Draft | None,
    callback: Callable[[NewTokens], None] | None,
    solve: SolveConfig | None,
    fields: SolveFields,
) -> Generation:
    """Continue a batch of prompts: the loop of :meth:`deqseq.CausalLM.generate`, in eval mode and without gradients.

    Each turn takes tokens, commits them, drafts some, and solves for the last token taken and the drafts together;
    without a draft this is decoding token by token.
    """
    whole, full, few = _calls(solved_part(model), head, draft, solve, fields)
    batch, device = prompt.shape[0], prompt.device
    rows, record = list(range(batch)), _Record(batch, max_new_tokens, stop_tokens)
    random = None if sampler.seed is None else torch.Generator().manual_seed(int(sampler.seed))
    draws: list[list[float]] = []  # of all rows for each new token

    def choose(states: Tensor, drafted: int = 0) -> Tensor:
        """A token for each state, ``(rows, length)``; the first of them follows the row and ``drafted`` tokens."""
        logits = head(states)
        _check_finite(logits, rows)
        uniform = None
        if sampler.temperature:
            places = [(row, len(record.tokens[row]) + drafted + i) for row in rows for i in range(states.shape[1])]
            while len(draws) <= max(step for _, step in places):
                draws.append(torch.rand(batch, generator=random).tolist())
            uniform = torch.tensor([draws[step][row] for row, step in places], device=device)
        return sampler.choose(logits.flatten(0, 1), uniform).reshape(logits.shape[:2])

    def run(window: Tensor, cache: Cache | None, options: dict[str, Any]) -> ModelOutput:
        output = model(embed(window), cache=cache, **options)
        record.evaluations += 0 if output.stats is None else output.stats.evaluations
        return output

    with cached_backbones(model):
        output, window = model(embed(prompt), mask=mask, **whole), prompt[:, -1:]
        states = _last_states(output.value, mask)[:, None]
        while True:
            chosen = choose(states)
            counts = record.add(rows, chosen, window[:, 1:], output)
            if callback is not None:
                record.tell(callback, device)
            going = [place for place, row in enumerate(rows) if record.goes_on(row)]
            if not going:
                return record.generation(pad_token, output.stats is not None, device)
            window, cache = chosen, output.cache
            if output.uncommitted is not None:
                taken = torch.tensor(counts, device=device)
                window, cache = chosen.gather(1, taken[:, None] - 1), output.uncommitted.commit(taken)
            if len(going) < len(rows):  # rows that have ended are not computed any more
                rows = [rows[place] for place in going]
                window, cache = take((window, cache), torch.tensor(going, device=device))
            room = max_new_tokens - min(len(record.tokens[row]) for row in rows)
            start: dict[str, Any] = {}
            for drafted in range(0 if draft is None else min(draft.tokens, room - 1)):
                output = run(window, cache, few | start)
                assert output.uncommitted is not None
                start = {"start": output.uncommitted.states}
                window = torch.cat([window, choose(output.value[:, -1:], drafted)], dim=1)
            output = run(window, cache, full | start)
            states = output.value


def _check_finite(logits: Tensor, rows: list[int]) -> None:
    if not bool(logits.isfinite().all()):
        finite = logits.isfinite().all(dim=-1).all(dim=1).tolist()
        bad = [row for row, good in zip(rows, finite, strict=True) if not good]
        raise ValueError(f"the logits of rows {bad} are not finite: are the weights?")


def _calls(
    core: ImplicitModel | None,
    head: Callable[[Tensor], Tensor],
    draft: Draft | None,
    solve: SolveConfig | None,
    fields: SolveFields,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The model's keyword arguments for the prompt, for a window of new tokens, and for its drafts."""
    given: dict[str, Any] = {**fields, **({} if solve is None else {"solve": solve})}
    if core is None:
        given |= {} if draft is None else {"draft": draft}
        if given:
            raise TypeError(f"an explicit model has nothing to solve: it takes no {', '.join(given)}")
        return {"return_cache": True}, {"return_cache": True}, {}
    config, given = resolve(core.solve_config, solve, fields), given | {"head": head}
    whole = given | {"return_cache": True, "sweep": fields.get("sweep", prompt_sweep(config))}
    if isinstance(config.sweep, Lockstep):
        if draft is not None:
            raise ValueError(f"draft needs a fixed point to verify against, and {config.sweep} finds none")
        return whole, whole, {}
    given.pop("sweep", None)
    if config.stop.exit is not None:
        given["sweep"] = Simultaneous()
    if draft is None:
        return whole, given | {"return_cache": True}, {}
    window = given | {"return_uncommitted": True, "sweep": Simultaneous()}
    return whole, window, window | {"stop": Stop.exactly(draft.iterations)}


def prompt_sweep(config: SolveConfig) -> Sweep:
    """How a prompt is solved unless the caller says: all tokens together would be more work than a window.

    On text a window of 16 needs about 2/3 of the evaluations of one of 8, for a sixth to a third more updates of each
    token.
    """
    if config.stop.exit is not None and not isinstance(config.sweep, Lockstep):
        return Simultaneous()
    return Sliding(16) if isinstance(config.sweep, Simultaneous) and config.stop.norm == "max_token" else config.sweep


def _last_states(value: Sequence, mask: Mask | None) -> Float[Tensor, "batch d_model"]:
    """The state of each row's last real token."""
    if mask is None:
        return value[:, -1]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    return value[torch.arange(len(value), device=value.device), last]
