"""Decoding in windows for ``generate`` of transformers, with its processors, criteria and streamers."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from math import inf
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from deqseq.check import check_integer
from deqseq.integrations.huggingface.outputs import WindowedOutput
from deqseq.models.generation import Generation, up_to_stop
from deqseq.models.sampler import Logits, Sampler, gumbel
from deqseq.windows import on_device, on_host

_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
"""What a sampler of this library does as well, in this order."""


def window_of(config: GenerationConfig, keyword: int | None) -> int | None:
    """The window of a call: the keyword, or else that of the configuration; None where it decodes one by one."""
    window = vars(config).get("window") if keyword is None else keyword
    if window is None:
        return None
    check_integer("window", window, 1)
    reason = None
    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        reason = "beams and assistants choose tokens in a way of their own"
    elif config.guidance_scale not in (None, 1):
        reason = "guidance calls the model for every token"
    elif config.use_cache is False:
        reason = "use_cache=False leaves nothing to commit tokens to"
    elif config.prefill_chunk_size is not None:
        reason = "prefill_chunk_size is an option of transformers' own loop"
    elif config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions):
        reason = "hidden states are those of single calls"
    if reason is None:
        return window
    warn_of_window(reason)
    return None


def warn_of_window(reason: str) -> None:
    """Tell that a window is not used."""
    warnings.warn(f"window is not used, tokens are decoded one by one: {reason}", stacklevel=2)


def in_windows(
    run: Callable[..., Generation],
    ids: Int64[Tensor, "batch length"],
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
) -> Int64[Tensor, "batch longer"] | WindowedOutput:
    """Generate by :func:`deqseq.models.generation.generate`, as transformers' loop would.

    What is only greedy, or a temperature, top-k and top-p, and ends at a length or a token, is done by this library,
    and each row moves on its own. Anything else of transformers is called as without a window, by :class:`InStep`.

    Args:
        run: ``generate``, without what is given here.
        ids: the tokens before the new ones.
        processors: of transformers.
        criteria: of transformers.
        config: of the call.
        streamer: of transformers, or None.
    """
    sampler = _sampler(config, processors)
    pad_token = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    keep = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    step = InStep(processors, criteria, ids, sampler, pad_token=pad_token, streamer=streamer, keep=keep)
    settle = step.settle
    if _are_usual(config, processors, criteria) and not keep and streamer is None:
        ends = [each.eos_token_id.tolist() for each in criteria if isinstance(each, EosTokenCriteria)]
        settle = partial(up_to_stop, tuple(chain.from_iterable(ends)))
    longest = min(each.max_length for each in criteria if isinstance(each, MaxLengthCriteria))
    most = longest - ids.shape[1]
    found = run(sampler, settle, window=vars(config)["window"], max_new_tokens=most, pad_token=pad_token)
    sequences: Any = torch.cat([ids, found.tokens], dim=1)
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return sequences
    kept: Any = {name: getattr(step, name) for name in ("scores", "logits") if vars(config)[f"output_{name}"]}
    return WindowedOutput(sequences, generation=found, **kept)


def _sampler(config: GenerationConfig, processors: LogitsProcessorList) -> Sampler:
    """Draws as the processors do, if they are a temperature, top-k and top-p."""
    if not config.do_sample:
        return Sampler()
    found: dict[type, Any] = {type(each): each for each in processors}
    temperature, top_k, top_p = map(found.get, _WARPERS)
    return Sampler(
        temperature=1.0 if temperature is None else temperature.temperature,
        top_k=None if top_k is None else top_k.top_k,
        top_p=None if top_p is None else top_p.top_p,
        seed=int(torch.randint(2**62, (), device="cpu")),
    )


def _are_usual(config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Whether processors and criteria are among those that need not be called."""
    chosen = [type(each) for each in processors]
    warpers = [each for each in _WARPERS if config.do_sample and each in chosen]
    others = {(vars(each).get("min_tokens_to_keep", 1), vars(each).get("filter_value", -inf)) for each in processors}
    return (
        chosen == warpers
        and others <= {(1, -inf)}
        and {type(each) for each in criteria} <= {MaxLengthCriteria, EosTokenCriteria}
    )


class InStep:
    """Tokens are chosen by processors of transformers and rows end by its criteria, called as without a window.

    They may remember what they have seen, so they are called once for each position, with all rows: the rows commit
    equally many tokens. What the sampler of a window chooses is a guess of what the processors will.

    Args:
        processors: of transformers.
        criteria: of transformers; without a token that ends a row, all rows go on until all have ended.
        ids: the tokens before, as transformers' loop has them, ``(batch, length)``.
        sampler: of the guesses, whose noise is that of the choices.
        pad_token: fills rows that have ended.
        streamer: of transformers, or None.
        keep: whether logits and scores are kept.

    Attributes:
        logits: of each new position, ``(batch, vocab)``; 0 in rows that have ended.
        scores: what the processors made of them.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        ids: Int64[Tensor, "batch length"],
        sampler: Sampler,
        *,
        pad_token: int,
        streamer: Any,
        keep: bool,
    ) -> None:
        self._processors, self._criteria, self._streamer, self._keep = processors, criteria, streamer, keep
        self._sampler, self._pad = sampler, torch.full_like(ids[:, :1], pad_token)
        self._over = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self._ids, self._before = ids, ids.shape[1]
        self.logits: tuple[Float[Tensor, "batch vocab"], ...] = ()
        self.scores: tuple[Float[Tensor, "batch vocab"], ...] = ()

    def settle(
        self, logits: Logits, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As :func:`deqseq.models.generation.up_to_stop`, with the choices of the processors as tokens."""
        tokens, taken, goes_on = tokens.copy(), 0, np.ones(len(rows), dtype=bool)
        while taken < counts.min():
            chosen, goes_on = self._step(rows, logits[:, taken])
            guessed = (chosen == tokens[:, taken]).all()
            tokens[:, taken] = chosen
            taken += 1
            if not (guessed and goes_on.all()):
                break
        return tokens, np.full_like(counts, taken), goes_on

    def _step(self, rows: np.ndarray, logits: Float[Tensor, "rows vocab"]) -> tuple[np.ndarray, np.ndarray]:
        """The next token of each row, and which rows go on."""
        places, batch = on_device(rows, logits.device), len(self._ids)
        given = logits.new_zeros(batch, logits.shape[1], dtype=torch.float32).index_copy(0, places, logits.float())
        scores: Tensor = self._processors(self._ids, given.clone())  # pyright: ignore[reportArgumentType]
        noisy = scores
        if self._sampler.temperature:
            position = np.full((batch, 1), self._ids.shape[1] - self._before)
            noisy = scores + gumbel(int(self._sampler.seed or 0), np.arange(batch), position, scores[:, None])[:, 0]
        best, choice = noisy.max(dim=1)
        new = self._pad.index_copy(0, places, choice[places, None])
        self._ids = torch.cat([self._ids, new], dim=1)
        if self._keep:
            self.logits, self.scores = (*self.logits, given), (*self.scores, scores)
        so_far: Any = self.scores or None
        self._over = self._over | self._criteria(self._ids, so_far)  # pyright: ignore[reportArgumentType]
        over = self._over
        if not any(hasattr(each, "eos_token_id") for each in self._criteria):  # as in transformers
            over = over.all().expand(batch)
        known = on_host(torch.stack([new[:, 0], over.long(), best.isfinite().long()])[:, places])
        if not known[2].all():
            raise ValueError(f"the logits processors leave no token to choose in rows {rows[known[2] == 0].tolist()}")
        if self._streamer is not None:
            self._streamer.put(new[:, 0].cpu())
        return known[0], known[1] == 0


def tokens_to_solve(ids: Tensor, config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> int | None:
    """How many of the prompt's tokens are not in the cache yet, as transformers counts them; None: all."""
    cache, embedded, mask = (model_kwargs.get(name) for name in ("cache", "inputs_embeds", "attention_mask"))
    if cache is None:
        return None
    if embedded is not None:
        return embedded.shape[1] - cache.length
    whole = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    return ids.shape[1] - cache.length if whole == ids.shape[1] else None
