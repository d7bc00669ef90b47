"""Continuous batching of transformers: keys and values are read from its pages before a solve, and written after it."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import ContinuousBatchingConfig

from deqseq.backbones import LlamaCache, LlamaConfig
from deqseq.integrations.huggingface.arguments import recurrent_parts
from deqseq.integrations.huggingface.configuration import PARTS, DeqseqConfig
from deqseq.integrations.huggingface.packing import Packing
from deqseq.layers.attention import KeyValues
from deqseq.models.base import Model
from deqseq.models.output import ModelOutput
from deqseq.models.recurrent_depth import RecurrentDepthCache


def layers_of(config: DeqseqConfig) -> tuple[int, ...]:
    """How many layers of pages each part has; ValueError for a model whose tokens do not fit into pages."""
    if recurrent := recurrent_parts(config):
        raise ValueError(f"continuous batching keeps keys and values, and a Mamba2 ({recurrent}) has none")
    parts = {name: part for name in PARTS if (part := config.section(name)) is not None}
    if config.steps is not None:
        raise ValueError(f"continuous batching keeps one entry per layer, a loop has {config.steps}")
    heads = {(part.kv_heads, part.head_width) for part in parts.values() if isinstance(part, LlamaConfig)}
    if len(heads) > 1:
        raise ValueError(f"continuous batching needs the same heads in all parts, got {sorted(heads)} (heads, width)")
    return tuple(part.n_layers for part in parts.values())


def batching_config(config: ContinuousBatchingConfig | None, generation: object) -> ContinuousBatchingConfig:
    """Without CUDA graphs, which cannot hold a loop that ends by itself, and without kernels that read pages."""
    config = ContinuousBatchingConfig() if config is None else config
    asked = (config.varlen_compile_config, config.decode_compile_config, config.max_blocks_per_request or None)
    if config.use_cuda_graph not in (None, False, (False, False)) or any(one is not None for one in asked):
        raise ValueError(
            "leave out use_cuda_graph, max_blocks_per_request, varlen_compile_config and decode_compile_config: a "
            "solve decides on the host when it ends, and reads keys and values from pages before it begins"
        )
    if given := [name for name in ("solve", "window") if vars(generation).get(name) is not None]:
        raise ValueError(f"leave out {given} in continuous batching: set model.config.eval_solve")
    config.use_cuda_graph, config.max_blocks_per_request = False, 0
    return config


@torch.no_grad()
def solved_in_pages(
    config: DeqseqConfig,
    core: Model,
    x: Float[Tensor, "1 new d_model"],
    pages: Any,
    given: Mapping[str, Any],
    **options: Any,
) -> ModelOutput:
    """The output for the new tokens ``x`` of several requests in one row, whose keys and values are then in ``pages``.

    ``pages`` is transformers' ``PagedAttentionCache``, and ``given`` what it passes to a model besides.
    """
    names = ("read_index", "write_index", "cu_seq_lens_k", "max_length_k")
    ends, device = given["cu_seq_lens_q"].long(), x.device
    new = ends.diff()
    total = given["cu_seq_lens_k"]["full_attention"].long() if given["read_index"][0].numel() else ends
    past = total.diff() - new
    offset = torch.arange(int(new.max()), device=device)
    real = offset < new[:, None]
    packing = Packing((1, x.shape[1]), (ends[:-1, None] + offset) * real, real)
    kinds, longest = layers_of(config), int(past.max())

    def update(layer: int, new: KeyValues) -> KeyValues:  # writes these, and reads (1, kv_heads, all, headdim)
        return KeyValues(*pages.update(*new, layer, {name: given[name] for name in names}))

    before = None
    if longest:
        committed = (total[:-1, None] + torch.arange(longest, device=device)).clamp(max=int(total[-1]) - 1)
        first = pages.layer_to_allocator[0]
        blank = x.new_zeros(1, first.num_key_value_heads, x.shape[1], first.head_dim, dtype=pages.dtype)
        read = [update(layer, KeyValues(blank, blank)) for layer in range(sum(kinds))]  # the solve fills the blanks
        layers = iter(_rows(seen, committed, x.dtype) for seen in read)
        counts = None if bool((past == longest).all()) else past
        parts = [LlamaCache(tuple(islice(layers, count)), longest, counts) for count in kinds]
        before = parts[0] if len(parts) == 1 else RecurrentDepthCache(*parts)
    output = core(packing.apart(x), mask=None if bool(real.all()) else real, cache=before, return_cache=True, **options)
    places = past[:, None] + offset
    after: Any = output.cache
    ours: Any = (after.prelude, after.core, after.coda) if isinstance(after, RecurrentDepthCache) else (after,)
    for layer, kept in enumerate(pair for part in ours for pair in part.layers):
        found = (_taken(tensor, places * real) for tensor in kept)
        update(layer, KeyValues(*(packing.together(one).transpose(1, 2).to(pages.dtype) for one in found)))
    return packing.output(output)


def _rows(seen: KeyValues, places: Int64[Tensor, "rows length"], dtype: torch.dtype) -> KeyValues:
    """Keys and values of each request, ``(rows, kv_heads, length, headdim)``."""
    return KeyValues(*(kept[0][:, places].transpose(0, 1).to(dtype) for kept in seen))


def _taken(kept: Tensor, places: Int64[Tensor, "rows new"]) -> Float[Tensor, "rows new heads headdim"]:
    """The tokens at these places of each row."""
    return kept.transpose(1, 2)[torch.arange(len(kept), device=kept.device)[:, None], places]
