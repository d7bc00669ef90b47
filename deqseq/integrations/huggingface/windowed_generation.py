"""Decoding in windows for ``generate`` of transformers, with its processors and criteria."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, no_type_check

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
from transformers.generation.utils import GenerateDecoderOnlyOutput

from deqseq.arguments import check_integer
from deqseq.models.generation import up_to_stop
from deqseq.models.output import Generation
from deqseq.models.sampler import Logits, Sampler, gumbel
from deqseq.rows import on_device, on_host

WARPERS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
}
"""What a sampler of this library does as well, in this order, and its options."""
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@no_type_check
@dataclass
class WindowedOutput(GenerateDecoderOnlyOutput):
    """What ``generate(..., window=, return_dict_in_generate=True)`` returns.

    It has ``sequences`` and, if asked for, ``scores`` and ``logits``.

    Attributes:
        generation: the new tokens, and the iterations, updates and guesses that they took.
    """

    generation: Generation | None = None


def window_of(config: GenerationConfig, keyword: int | None) -> int | None:
    """The window of a call: the keyword, or that of the configuration; None: one by one."""
    window = vars(config).get("window") if keyword is None else keyword
    if window is None:
        return None
    check_integer("window", window, 1)
    states = config.output_hidden_states or config.output_attentions
    reasons = {
        "beams and assistants choose tokens in a way of their own": (
            config.get_generation_mode() not in MODES
        ),
        "guidance calls the model for every token": config.guidance_scale not in (None, 1),
        "use_cache=False leaves nothing to commit tokens to": config.use_cache is False,
        "prefill_chunk_size is an option of transformers' own loop": (
            config.prefill_chunk_size is not None
        ),
        "hidden states are those of single calls": config.return_dict_in_generate and states,
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
    config: Any,
    streamer: Any,
) -> Int64[Tensor, "batch longer"] | WindowedOutput:
    """Generate by ``run``, which is :func:`deqseq.models.generation.generate`, as transformers
    would.

    What is only greedy, or a temperature, top-k and top-p, and ends at a length or a token, is done
    by this library, and each row moves on its own. Anything else of transformers is called as
    without a window, by :class:`InStep`.
    """
    pad_token = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    sampler = _sampler(processors) if config.do_sample else Sampler()
    step = InStep(ids, processors, criteria, sampler, pad_token, streamer, config)
    settle = step.settle
    every_step_is_seen = streamer is not None or config.output_scores or config.output_logits
    if not every_step_is_seen and _are_usual(config.do_sample, processors, criteria):
        stops: list[int] = []
        for each in criteria:
            if isinstance(each, EosTokenCriteria):
                stops += each.eos_token_id.tolist()
        settle = partial(up_to_stop, tuple(stops))
    longest = min(each.max_length for each in criteria if isinstance(each, MaxLengthCriteria))
    generation = run(
        sampler,
        settle,
        window=config.window,
        max_new_tokens=longest - ids.shape[1],
        pad_token=pad_token,
    )
    sequences: Any = torch.cat([ids, generation.tokens], dim=1)
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return sequences
    seen: Any = {"scores": step.scores or None, "logits": step.logits or None}
    return WindowedOutput(sequences, generation=generation, **seen)


def _sampler(processors: LogitsProcessorList) -> Sampler:
    """Draws as the processors do, if they are a temperature, top-k and top-p."""
    options: dict[str, Any] = {"temperature": 1.0}
    for each in processors:
        name = WARPERS.get(type(each))
        if name is not None:
            options[name] = vars(each)[name]
    return Sampler(**options, seed=int(torch.randint(2**62, (), device="cpu")))


def _are_usual(
    do_sample: bool, processors: LogitsProcessorList, criteria: StoppingCriteriaList
) -> bool:
    """Whether processors and criteria are among those that need not be called."""
    kinds = [type(each) for each in processors]
    warpers = [kind for kind in WARPERS if do_sample and kind in kinds]
    ends = {type(each) for each in criteria}
    if kinds != warpers or not ends <= {MaxLengthCriteria, EosTokenCriteria}:
        return False
    for each in processors:
        options = vars(each)
        if options.get("min_tokens_to_keep", 1) > 1 or options.get("filter_value", -inf) > -inf:
            return False
    return True


@dataclass
class InStep:
    """Tokens are chosen by processors of transformers and rows end by its criteria.

    They may remember what they have seen, so they are called once for each position, with all rows:
    the rows commit equally many tokens. What the ``sampler`` of a window chooses is a guess of what
    the processors will, and its noise is theirs. Rows that have ended are filled with
    ``pad_token``; without a token that ends a row, all rows go on until all have ended. ``logits``
    and ``scores`` of each new position, 0 in rows that have ended, are kept if the configuration
    wants them.
    """

    ids: Int64[Tensor, "batch length"]
    processors: Any
    criteria: Any
    sampler: Sampler
    pad_token: int
    streamer: Any
    config: Any
    logits: tuple[Float[Tensor, "batch vocab"], ...] = ()
    scores: tuple[Float[Tensor, "batch vocab"], ...] = ()

    def __post_init__(self) -> None:
        self.prompt_length = self.ids.shape[1]
        self.ended = torch.zeros(len(self.ids), dtype=torch.bool, device=self.ids.device)

    def settle(
        self, logits: Logits, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As :func:`deqseq.models.generation.up_to_stop`, with the choices of the processors."""
        tokens = tokens.copy()
        taken = 0
        goes_on = np.ones(len(rows), dtype=bool)
        guessed = True
        while guessed and goes_on.all() and taken < counts.min():
            chosen, goes_on = self._step(rows, logits[:, taken])
            guessed = (chosen == tokens[:, taken]).all()
            tokens[:, taken] = chosen
            taken += 1
        return tokens, np.full_like(counts, taken), goes_on

    def _step(
        self, rows: np.ndarray, logits: Float[Tensor, "rows vocab"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next token of each row, and which rows go on."""
        places = on_device(rows, logits.device)
        batch = len(self.ids)
        whole = logits.new_zeros(batch, logits.shape[1], dtype=torch.float32)
        whole = whole.index_copy(0, places, logits.float())
        scores = noisy = self.processors(self.ids, whole.clone())
        if self.sampler.temperature:
            position = np.full((batch, 1), self.ids.shape[1] - self.prompt_length)
            seed = int(self.sampler.seed or 0)
            noisy = scores + gumbel(seed, np.arange(batch), position, scores[:, None])[:, 0]
        best, choice = noisy.max(dim=1)
        new = torch.full_like(self.ids[:, :1], self.pad_token)
        new = new.index_copy(0, places, choice[places, None])
        self.ids = torch.cat([self.ids, new], dim=1)
        if self.config.output_logits:
            self.logits = (*self.logits, whole)
        if self.config.output_scores:
            self.scores = (*self.scores, scores)
        self.ended = self.ended | self.criteria(self.ids, self.scores or None)
        ended = self.ended
        # as in transformers, without a token that ends a row
        if all(getattr(each, "eos_token_id", None) is None for each in self.criteria):
            ended = ended.all().expand(batch)
        columns = torch.stack([new[:, 0], ended.long(), best.isfinite().long()])
        chosen, over, finite = on_host(columns[:, places])
        if not finite.all():
            raise ValueError(
                "the logits processors leave no token to choose in rows "
                f"{rows[finite == 0].tolist()}"
            )
        if self.streamer is not None:
            self.streamer.put(new[:, 0].cpu())
        return chosen, over == 0
