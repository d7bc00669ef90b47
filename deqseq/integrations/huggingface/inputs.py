"""Attention masks and positions of transformers, checked and turned into what this library takes."""

from typing import Any

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from deqseq.backbones.base import RealTokens
from deqseq.integrations.huggingface.cache import ImplicitCache

Mask = Shaped[Tensor, "..."]


def check_cache(cache: object, rows: int) -> None:
    """Refuse a cache of another library, or of another number of rows.

    Raises:
        TypeError: another library's cache.
        ValueError: names both numbers of rows and how to get from one to the other.

    Example:
        >>> check_cache(ImplicitCache(), 3)
    """
    if not isinstance(cache, ImplicitCache):
        raise TypeError(
            f"past_key_values must be an ImplicitCache, got {type(cache).__name__}: leave it out, or give "
            "deqseq.integrations.huggingface.ImplicitCache()"
        )
    if cache.batch_size not in (-1, rows):
        raise ValueError(
            f"the cache holds {cache.batch_size} rows and the input has {rows}: repeat the cache's rows with "
            "cache.batch_repeat_interleave(n), or choose some with cache.batch_select_indices(rows)"
        )


def all_real(attention_mask: Mask | None, batch: int, length: int, cache: ImplicitCache | None) -> RealTokens | None:
    """Which tokens are real, those that have settled included.

    Args:
        attention_mask: ``(batch, settled + length)``, 0 at padding; None: no padding among the new tokens.
        batch: rows.
        length: new tokens.
        cache: the settled tokens; None: there are none.

    Returns:
        ``(batch, settled + length)``, or None if all are.

    Raises:
        ValueError: another shape, or other padding than when the settled tokens settled.
    """
    settled, known = (0, None) if cache is None else (cache.length, cache.real)
    if attention_mask is None:
        if known is None:
            return None
        return torch.cat([known, known.new_ones(batch, length)], dim=1)
    wanted = (batch, settled + length)
    if attention_mask.shape != wanted:
        raise ValueError(
            f"attention_mask must have shape {wanted}, for {settled} tokens in the cache and {length} new ones, got "
            f"{tuple(attention_mask.shape)}; masks between pairs of tokens are not supported"
        )
    real = attention_mask != 0
    if settled:
        before = real.new_ones(batch, settled) if known is None else known
        if not torch.equal(real[:, :settled], before.to(real.device)):
            raise ValueError("attention_mask has padding at other tokens of the cache than when they were computed")
    return None if bool(real.all()) else real


def check_positions(
    position_ids: Int64[Tensor, "..."] | None, real: Bool[Tensor, "batch all"] | None, settled: int, length: int
) -> None:
    """Refuse positions that are not those that the model counts itself: real tokens from 0, padding left out.

    Args:
        position_ids: of the new tokens, ``(batch or 1, length)``; what it says of padding does not matter. None: fine.
        real: which tokens are real, ``(batch, settled + length)``; None: all.
        settled: tokens in the cache.
        length: new tokens.

    Raises:
        ValueError: another shape or other positions, as in packed sequences.

    Example:
        >>> check_positions(torch.tensor([[0, 1, 2]]), None, 0, 3)
    """
    if position_ids is None:
        return
    if position_ids.ndim != 2 or position_ids.shape[1] != length:
        raise ValueError(f"position_ids must have shape (batch, {length}), got {tuple(position_ids.shape)}")
    if real is None:
        own = torch.arange(settled, settled + length, device=position_ids.device)[None]
        fits = position_ids == own
    else:
        own = (real.cumsum(dim=1) - 1)[:, settled:]
        fits = (position_ids == own) | ~real[:, settled:]
    if not bool(fits.all()):
        raise ValueError(
            "position_ids must count the real tokens of a row from 0, those of the cache included, as the model does "
            "itself: leave them out (packed sequences and shifted positions are not supported)"
        )


def refuse_solve_options(options: dict[str, Any], model: str) -> None:
    """Refuse a sweep, a solver or a stopping rule for a model that solves nothing.

    Raises:
        ValueError: names what was given.

    Example:
        >>> refuse_solve_options({"sweep": None}, "MyModel")
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"this {model} is explicit (implicit=False) and solves nothing: leave out {', '.join(given)}")
