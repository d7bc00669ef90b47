"""Checks of what a call of a model is given, before anything is solved."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from deqseq.backbones import Mamba2Config
from deqseq.check import check_type, suggestion
from deqseq.integrations.huggingface.cache import ImplicitCache
from deqseq.integrations.huggingface.configuration import PARTS, DeqseqConfig
from deqseq.models.causal_lm import IGNORED, check_ids
from deqseq.types import Mask

_UNUSED = (
    *("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "cache_position"),
    *("num_items_in_batch", "output_router_logits", "tokenizer", "assistant_tokenizer"),
    *("cu_seq_lens_k", "max_length_q", "max_length_k"),
)
"""What transformers passes to every model, and these models do not need."""
_ATTENTION = "no attention weights are computed"
_REFUSED = {
    "output_attentions": _ATTENTION,
    "past_key_values": "transformers 5.24 and this library call it cache, and PEFT's prefix tuning does not work",
}
_IDS = ("batch", "length")
_EMBEDDED = (*_IDS, "hidden_size")
_TAKEN = ("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "labels", "use_cache")
_TAKEN += ("shift_labels", "logits_to_keep", "output_hidden_states", "return_dict", "solve", "cu_seq_lens_q", "seq_idx")


def check_keywords(given: Mapping[str, Any]) -> None:
    """Refuse keywords that would change the result of a call, and unknown ones; None and False ask for nothing."""
    for name, value in given.items():
        if name == "is_causal" and value is False:
            raise ValueError("is_causal=False is not available: these models are causal")
        if name in _REFUSED and value is not None and value is not False:
            raise ValueError(f"{name} is not available: {_REFUSED[name]}")
        if name not in (*_UNUSED, *_REFUSED, "is_causal"):
            raise TypeError(f"unexpected keyword argument {name!r}{suggestion(name, _TAKEN)}")


def check_inputs(input_ids: object, inputs_embeds: object, **others: object) -> None:
    """Refuse what is no tensor, and ids or embeddings with the wrong number of dimensions."""
    for name, value in {"input_ids": input_ids, "inputs_embeds": inputs_embeds, **others}.items():
        check_type(name, value, (Tensor, type(None)), "torch.tensor([[1, 2, 3]])")
    for name, value, shape in (("input_ids", input_ids, _IDS), ("inputs_embeds", inputs_embeds, _EMBEDDED)):
        if isinstance(value, Tensor) and value.ndim != len(shape):
            raise ValueError(f"{name} must have shape ({', '.join(shape)}), got {tuple(value.shape)}")


def check_labels(
    tokens: Tensor | None, labels: Tensor | None, shift_labels: Tensor | None, vocab_size: int, count: Any
) -> None:
    """Refuse labels that do not fit the tokens, or leave nothing to score.

    As in transformers a label counts unless it is -100, in padding, too.
    """
    for name, answers in (("labels", labels), ("shift_labels", shift_labels)):
        if answers is None or tokens is None or torch.compiler.is_compiling():
            continue
        if answers.shape != tokens.shape[:2]:
            raise ValueError(f"{name} must have shape {tuple(tokens.shape[:2])}, got {tuple(answers.shape)}")
        scored = answers if name == "shift_labels" else answers[:, 1:]
        scored = scored[scored != IGNORED]
        if scored.numel():
            check_ids(name, scored[None], vocab_size)
        elif count is None or not count:  # otherwise this is a part of a larger batch, with a loss of 0
            raise ValueError(f"{name} leave nothing to score: all of them are {IGNORED}, or there is no next token")


def check_cache(cache: object, rows: int) -> None:
    """Refuse the cache of another library, or of another number of rows."""
    if not isinstance(cache, ImplicitCache):
        raise TypeError(
            f"cache must be an ImplicitCache, got {type(cache).__name__}: leave it out, or give "
            "deqseq.integrations.huggingface.ImplicitCache()"
        )
    if cache.batch_size not in (-1, rows):
        raise ValueError(
            f"cache has {cache.batch_size} rows and the input has {rows}: repeat its rows with "
            "cache.batch_repeat_interleave(n), or choose some with cache.batch_select_indices(rows)"
        )


def joined_mask(
    attention_mask: Shaped[Tensor, "..."] | None, batch: int, new: int, cache: ImplicitCache
) -> Mask | None:
    """The mask of the committed and the new tokens, ``(batch, committed + new)``; None without padding."""
    committed, known = cache.length, cache.mask
    if attention_mask is None:
        return None if known is None else torch.cat([known, known.new_ones(batch, new)], dim=1)
    wanted = (batch, committed + new)
    if attention_mask.shape != wanted:
        raise ValueError(
            f"attention_mask must have shape {wanted}, for {committed} tokens in the cache and {new} new ones, got "
            f"{tuple(attention_mask.shape)}; masks between pairs of tokens are not supported"
        )
    mask = attention_mask != 0
    before = mask[:, :committed]
    if not torch.equal(before, torch.ones_like(before) if known is None else known.to(mask.device)):
        raise ValueError(
            "attention_mask must mark the same padding among the tokens of the cache as when they were computed"
        )
    return None if bool(mask.all()) else mask


def check_positions(
    position_ids: Int64[Tensor, "..."] | None, mask: Mask | None, committed: int, shape: tuple[int, int]
) -> None:
    """Refuse positions other than the model's own: real tokens counted from 0; those of padding do not matter."""
    if position_ids is None:
        return
    if position_ids.shape not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids must have shape {shape}, got {tuple(position_ids.shape)}")
    if mask is None:
        fits = position_ids == torch.arange(committed, committed + shape[1], device=position_ids.device)
    else:
        fits = (position_ids == (mask.cumsum(dim=1) - 1)[:, committed:]) | ~mask[:, committed:]
    if not bool(fits.all()):
        raise ValueError(
            "position_ids must count the real tokens of a row, or of each sequence in it, from 0, those of the cache "
            "included, as the model does itself: leave them out (shifted positions are not supported)"
        )


def prepare_cache(
    config: DeqseqConfig, generation: GenerationConfig, model_kwargs: dict[str, Any], mode: Any, batch_size: int
) -> None:
    """Put an :class:`ImplicitCache` among the arguments of a model, unless one is there; refuse what cannot have it."""
    if generation.cache_implementation not in (None, "dynamic"):
        raise ValueError(f"cache_implementation {generation.cache_implementation!r} is not available: leave it out")
    drafts = mode == GenerationMode.ASSISTED_GENERATION or vars(generation).get("is_assistant")
    if drafts and (recurrent := recurrent_parts(config)):
        raise ValueError(
            f"assisted decoding takes tokens back, which the state of a Mamba2 ({recurrent}) cannot: leave out "
            "assistant_model and prompt_lookup_num_tokens"
        )
    cache, mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
    if generation.prefill_chunk_size is not None and mask is not None:
        longest = int((mask == 0).sum(dim=1).max())  # of each row the first chunk needs a token
        generation.prefill_chunk_size = max(generation.prefill_chunk_size, longest + 1)
    if cache is not None:
        check_cache(cache, batch_size * max(generation.num_beams or 1, generation.num_return_sequences or 1))
        cache._is_user_defined = True  # transformers then does not take it for its own
    elif generation.use_cache is not False:
        model_kwargs["cache"] = ImplicitCache()


def recurrent_parts(config: DeqseqConfig) -> str:
    """The parts of a model that keep a state instead of keys and values, by name."""
    return ", ".join(name for name in PARTS if isinstance(config.section(name), Mamba2Config))
