"""Checks of what a call of a model is given, before anything is solved."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deqseq.arguments import check_type, suggestion
from deqseq.config import SolveFields
from deqseq.integrations.huggingface.cache import ImplicitCache
from deqseq.models.base import Model
from deqseq.models.causal_lm import IGNORED, check_ids
from deqseq.models.recurrent_depth import solved_part
from deqseq.types import Mask

_UNUSED = (
    *("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "cache_position"),
    *("num_items_in_batch", "output_router_logits", "tokenizer", "assistant_tokenizer"),
    *("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
)
"""What transformers passes to every model, and these models do not need."""
_REFUSED = {
    "output_attentions": "no attention weights are computed",
    "past_key_values": (
        "transformers 5.24 and this library call it cache, and PEFT's prefix tuning does not work"
    ),
}
_TAKEN = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "cache",
    "inputs_embeds",
    "labels",
    "use_cache",
)
_TAKEN += ("shift_labels", "logits_to_keep", "output_hidden_states", "return_dict", "solve")


def watch(core: Model) -> None:
    """Refuse, from now on and at each call, offloaded layers and adapters with dropout: values
    would be wrong.
    """
    if _check_layers not in core._forward_pre_hooks.values():
        core.register_forward_pre_hook(_check_layers)


def _check_layers(core: Model, *_: Any) -> None:
    if any(
        weight.is_meta for weight in core.parameters()
    ):  # accelerate loads them for their own module's forward
        raise ValueError(
            "the layers of this model are offloaded (cpu_offload, disk_offload or device_map), "
            "but every iteration of "
            "a solve needs all of them: load the whole model onto one device, as "
            "device_map={'': 0} does"
        )
    solved = solved_part(core)
    drops: dict[str, float] = {}
    for name, part in (
        solved.backbone.named_modules() if solved is not None and solved.training else ()
    ):
        # by name, because PEFT has a class of its own, in OFT; its LoHa and LoKr draw without a
        # module
        found: dict[str, Any] = (
            {"": getattr(part, "p", 0)} if "Dropout" in type(part).__name__ else {}
        )
        for kind in ("rank_dropout", "module_dropout"):
            found |= {f".{kind}.{adapter}": p for adapter, p in getattr(part, kind, {}).items()}
        drops |= {name + place: p for place, p in found.items() if p and part.training}
    if drops:
        raise ValueError(
            "a map that is solved must have no dropout, which would be drawn anew in every "
            f"iteration, got {drops}: "
            "set it to 0, as LoraConfig(lora_dropout=0.0)"
        )


def check_keywords(given: Mapping[str, Any]) -> None:
    """Refuse keywords that would change the result of a call, and unknown ones; None and False ask
    for nothing.
    """
    if given.get("position_ids") is None and any(
        given.get(name) is not None for name in ("cu_seq_lens_q", "seq_idx")
    ):
        raise ValueError(
            "position_ids must be given too: where they begin again a packed sequence begins"
        )
    for name, value in given.items():
        if name == "is_causal" and value is False:
            raise ValueError("is_causal=False is not available: these models are causal")
        if name in _REFUSED and value is not None and value is not False:
            raise ValueError(f"{name} is not available: {_REFUSED[name]}")
        if name not in (*_UNUSED, *_REFUSED, "is_causal"):
            solves = name in SolveFields.__annotations__
            remedy = f': write solve={{"{name}": ...}}' if solves else suggestion(name, _TAKEN)
            raise TypeError(f"unexpected keyword argument {name!r}{remedy}")


def check_tensors(**given: object) -> None:
    """Refuse what is no tensor."""
    for name, value in given.items():
        check_type(name, value, (Tensor, type(None)), "torch.tensor([[1, 2, 3]])")


def check_labels(
    tokens: Tensor | None, vocab_size: int, count: Any, **given: Tensor | None
) -> None:
    """Refuse ``labels`` or ``shift_labels`` that do not fit the tokens, or leave nothing to score.

    As in transformers a label counts unless it is -100, in padding, too.
    """
    check_tensors(**given)
    for name, answers in given.items():
        if (
            answers is None
            or torch.compiler.is_compiling()
            or not isinstance(tokens, Tensor)
            or tokens.ndim < 2
        ):
            continue  # the model refuses the tokens
        if answers.shape != tokens.shape[:2]:
            raise ValueError(
                f"{name} must have shape {tuple(tokens.shape[:2])}, got {tuple(answers.shape)}"
            )
        scored = answers if name == "shift_labels" else answers[:, 1:]
        scored = scored[scored != IGNORED]
        if scored.numel():
            check_ids(name, scored[None], vocab_size)
        elif (
            count is None or not count
        ):  # otherwise this is a part of a larger batch, with a loss of 0
            raise ValueError(
                f"{name} leave nothing to score: all of them are {IGNORED}, or there is no next "
                "token"
            )


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
    attention_mask: Tensor | None, batch: int, new: int, cache: ImplicitCache
) -> Mask | None:
    """The mask of the committed and the new tokens, ``(batch, committed + new)``; None without
    padding.
    """
    committed, known = cache.length, cache.mask
    if attention_mask is None:
        return None if known is None else torch.cat([known, known.new_ones(batch, new)], dim=1)
    wanted = (batch, committed + new)
    if attention_mask.shape != wanted:
        raise ValueError(
            f"attention_mask must have shape {wanted}, for {committed} tokens in the cache and "
            f"{new} new ones, got "
            f"{tuple(attention_mask.shape)}; masks between pairs of tokens are not supported"
        )
    mask = attention_mask != 0
    before = mask[:, :committed]
    if not torch.equal(before, torch.ones_like(before) if known is None else known.to(mask.device)):
        raise ValueError(
            "attention_mask must mark the same padding among the tokens of the cache as when they "
            "were computed"
        )
    return None if bool(mask.all()) else mask


def check_positions(
    position_ids: Tensor | None, mask: Mask | None, committed: int, shape: tuple[int, int]
) -> None:
    """Refuse positions other than the model's own: real tokens counted from 0; those of padding do
    not matter.
    """
    if position_ids is None:
        return
    if position_ids.shape not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids must have shape {shape}, got {tuple(position_ids.shape)}")
    if mask is None:
        fits = position_ids == torch.arange(
            committed, committed + shape[1], device=position_ids.device
        )
    else:
        fits = (position_ids == (mask.cumsum(dim=1) - 1)[:, committed:]) | ~mask[:, committed:]
    if not bool(fits.all()):
        raise ValueError(
            "position_ids must count the real tokens of a row, or of each sequence in it, from 0, "
            "those of the cache "
            "included, as the model does itself: leave them out (shifted positions are not "
            "supported)"
        )
