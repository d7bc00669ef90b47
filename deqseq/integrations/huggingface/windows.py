"""Decoding in windows for ``generate`` of transformers, with its processors, criteria and
streamers.
"""

import warnings
from collections.abc import Callable
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
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from deqseq.arguments import check_integer
from deqseq.integrations.huggingface.outputs import WindowedOutput
from deqseq.models.generation import up_to_stop
from deqseq.models.output import Generation
from deqseq.models.sampler import Logits, Sampler, gumbel
from deqseq.rows import on_device, on_host

_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
"""What a sampler of this library does as well, in this order."""
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def window_of(config: GenerationConfig, keyword: int | None) -> int | None:
    """The window of a call: the keyword, or else that of the configuration; None where it decodes
    one by one.
    """
    window = vars(config).get("window") if keyword is None else keyword
    if window is None:
        return None
    check_integer("window", window, 1)
    reasons = {
        "beams and assistants choose tokens in a way of their own": config.get_generation_mode()
        not in _MODES,
        "guidance calls the model for every token": config.guidance_scale not in (None, 1),
        "use_cache=False leaves nothing to commit tokens to": config.use_cache is False,
        "prefill_chunk_size is an option of transformers' own loop": config.prefill_chunk_size
        is not None,
        "hidden states are those of single calls": config.return_dict_in_generate
        and (config.output_hidden_states or config.output_attentions),
    }
    for reason, holds in reasons.items():
        if holds:
            warn_of_window(reason)
            return None
    return window


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
    """Generate by ``run``, which is :func:`deqseq.models.generation.generate`, as transformers'
    loop would.

    What is only greedy, or a temperature, top-k and top-p, and ends at a length or a token, is done
    by this library, and each row moves on its own. Anything else of transformers is called as
    without a window, by :class:`InStep`.
    """
    sampler = _sampler(config, processors)
    pad_token = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    kept = [
        name
        for name in ("scores", "logits")
        if config.return_dict_in_generate and vars(config)[f"output_{name}"]
    ]
    step = InStep(
        processors, criteria, ids, sampler, pad_token=pad_token, streamer=streamer, keep=bool(kept)
    )
    settle = step.settle
    if _are_usual(config, processors, criteria) and not kept and streamer is None:
        ends = [
            each.eos_token_id.tolist() for each in criteria if isinstance(each, EosTokenCriteria)
        ]
        settle = partial(up_to_stop, tuple(chain.from_iterable(ends)))
    longest = min(each.max_length for each in criteria if isinstance(each, MaxLengthCriteria))
    most = longest - ids.shape[1]
    found = run(
        sampler, settle, window=vars(config)["window"], max_new_tokens=most, pad_token=pad_token
    )
    sequences: Any = torch.cat([ids, found.tokens], dim=1)
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return sequences
    return WindowedOutput(
        sequences, generation=found, **{name: getattr(step, name) for name in kept}
    )


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


def _are_usual(
    config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList
) -> bool:
    """Whether processors and criteria are among those that need not be called."""
    chosen = [type(each) for each in processors]
    warpers = [each for each in _WARPERS if config.do_sample and each in chosen]
    others = {
        (vars(each).get("min_tokens_to_keep", 1), vars(each).get("filter_value", -inf))
        for each in processors
    }
    return (
        chosen == warpers
        and others <= {(1, -inf)}
        and {type(each) for each in criteria} <= {MaxLengthCriteria, EosTokenCriteria}
    )


class InStep:
    """Tokens are chosen by processors of transformers and rows end by its criteria, called as
    without a window.

    They may remember what they have seen, so they are called once for each position, with all rows:
    the rows commit equally many tokens. What the ``sampler`` of a window chooses is a guess of what
    the processors will, and its noise is theirs. Rows that have ended are filled with
    ``pad_token``; without a token that ends a row, all rows go on until all have ended. With
    ``keep``, ``logits`` and ``scores`` of each new position are kept, 0 in rows that have ended.
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
        self._processors, self._criteria, self._streamer, self._keep = (
            processors,
            criteria,
            streamer,
            keep,
        )
        self._sampler, self._pad = sampler, torch.full_like(ids[:, :1], pad_token)
        self._over = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self._ids, self._before = ids, ids.shape[1]
        self.logits: tuple[Float[Tensor, "batch vocab"], ...] = ()
        self.scores: tuple[Float[Tensor, "batch vocab"], ...] = ()

    def settle(
        self, logits: Logits, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As :func:`deqseq.models.generation.up_to_stop`, with the choices of the processors as
        tokens.
        """
        tokens, taken, goes_on = tokens.copy(), 0, np.ones(len(rows), dtype=bool)
        while taken < counts.min():
            chosen, goes_on = self._step(rows, logits[:, taken])
            guessed = (chosen == tokens[:, taken]).all()
            tokens[:, taken] = chosen
            taken += 1
            if not (guessed and goes_on.all()):
                break
        return tokens, np.full_like(counts, taken), goes_on

    def _step(
        self, rows: np.ndarray, logits: Float[Tensor, "rows vocab"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next token of each row, and which rows go on."""
        places, batch = on_device(rows, logits.device), len(self._ids)
        given = logits.new_zeros(batch, logits.shape[1], dtype=torch.float32).index_copy(
            0, places, logits.float()
        )
        scores: Tensor = self._processors(self._ids, given.clone())  # pyright: ignore[reportArgumentType]
        noisy = scores
        if self._sampler.temperature:
            position = np.full((batch, 1), self._ids.shape[1] - self._before)
            noisy = (
                scores
                + gumbel(int(self._sampler.seed or 0), np.arange(batch), position, scores[:, None])[
                    :, 0
                ]
            )
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
            raise ValueError(
                "the logits processors leave no token to choose in rows "
                f"{rows[known[2] == 0].tolist()}"
            )
        if self._streamer is not None:
            self._streamer.put(new[:, 0].cpu())
        return known[0], known[1] == 0
