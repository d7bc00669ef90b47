"""The attention functions and masks that transformers knows, for our layers and for those of a
decoder.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deqseq.backbones import LlamaCache
from deqseq.layers import Attention


class ChosenAttention:
    """What ``config._attn_implementation`` names at each call, in place of torch's own
    attention.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def mask(self, z: Tensor, cache: Any) -> Any:
        """What the function takes as its mask."""
        return attention_mask(self.config, z, cache)

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Tensor:
        """Mixed values, ``(batch, new, heads, headdim)``."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        return attend(layer, q, k, v, mask, dropout=0.0, scaling=layer.headdim**-0.5)[0]


def choose_attention(core: nn.Module, config: Any) -> None:
    """Let the attention layers inside ``core`` follow ``config``, and have what the functions ask
    of a layer.
    """
    layers: Any = [part for part in core.modules() if isinstance(part, Attention)]
    for index, layer in enumerate(layers):
        layer.attend, layer.config, layer.layer_idx = ChosenAttention(config), config, index
        layer.is_causal, layer.num_key_value_groups = True, layer.groups


def attention_mask(
    config: Any, z: Tensor, cache: LlamaCache | None, window: int | None = None
) -> Any:
    """The mask for new tokens ``(batch, new, d_model)`` that see the last ``window``, as
    ``config``'s attention has it.

    Transformers makes it. ValueError: rows of unequal length, for a function whose masks it cannot
    make.
    """
    name, (rows, new), length = (
        config._attn_implementation,
        z.shape[:2],
        0 if cache is None else cache.length,
    )
    if window is not None and length + new <= window:
        window = None
    if name == "sdpa" and window is None:
        return None if cache is None else cache.visible
    real = place = None
    if (
        cache is not None and cache.visible is not None and cache.counts is not None
    ):  # gaps between rows and new tokens
        real, own = (
            cache.visible[:, 0, -1].expand(rows, -1),
            cache.positions(new),
        )  # the last token sees all real ones
        place = torch.cat([torch.arange(length, device=own.device).expand(rows, -1), own], dim=1)
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        if real is not None:
            raise ValueError(
                f'the attention implementation "{name}" has no masks, and rows of '
                "unequal length need one: call "
                f'transformers.AttentionMaskInterface.register("{name}", function)'
            )
        return None
    function = causal_mask_function
    if window is not None and place is not None:
        function = and_masks(causal_mask_function, partial(_near, window, place))
    elif window is not None:
        function = sliding_window_causal_mask_function(window)
    return ALL_MASK_ATTENTION_FUNCTIONS[name](
        batch_size=rows,
        q_length=new,
        kv_length=length + new,
        q_offset=length,
        kv_offset=0,
        mask_function=function,
        attention_mask=real,
        local_size=window,
        dtype=z.dtype,
        device=z.device,
        config=config,
    )


def _near(
    window: int, place: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    """Whether a window reaches a token; a gap takes none of its room."""
    return place[row, query] - place[row, key] < window


def eager(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Softmax written out, in float32 at least, as transformers' models have it each for itself."""
    k, v = (part.repeat_interleave(layer.num_key_value_groups, dim=1) for part in (k, v))
    scores = q @ k.mT * scaling
    scores = scores if mask is None else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (weights @ v).transpose(1, 2), weights
