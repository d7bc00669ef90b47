"""Continuous batching of transformers: keys and values are read from its pages before a solve, and written after it."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import ContinuousBatchingConfig

from deqseq.backbones import JointCache, LlamaCache, LlamaConfig, Mamba2Config
from deqseq.integrations.huggingface.configuration import DeqseqConfig
from deqseq.integrations.huggingface.packing import Packing
from deqseq.layers.attention import KeyValues
from deqseq.models.base import Model
from deqseq.models.output import ModelOutput


def recurrent_parts(config: DeqseqConfig) -> str:
    """The parts of a model that keep a state instead of keys and values, by name."""
    return ", ".join(name for name, part in config.specification().parts.items() if isinstance(part, Mamba2Config))


def layers_of(config: DeqseqConfig) -> list[int]:
    """How many layers of pages each part has; ValueError for a model whose tokens do not fit into pages."""
    if recurrent := recurrent_parts(config):
        raise ValueError(f"continuous batching keeps keys and values, and a Mamba2 ({recurrent}) has none")
    if config.steps is not None:
        raise ValueError(f"continuous batching keeps one entry per layer, a loop has {config.steps}")
    parts = config.specification().parts
    heads = {(part.kv_heads, part.head_width) for part in parts.values() if isinstance(part, LlamaConfig)}
    if len(heads) > 1:
        raise ValueError(f"continuous batching needs the same heads in all parts, got {sorted(heads)} (heads, width)")
    return [part.n_layers for part in parts.values()]


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

    def update(layer: int, new: KeyValues) -> KeyValues:  # writes these, and reads (1, kv_heads, all, headdim)
        return KeyValues(*pages.update(*new, layer, {name: given[name] for name in names}))

    before, longest = None, int(past.max())
    if longest:
        places = (total[:-1, None] + torch.arange(longest, device=device)).clamp(max=int(total[-1]) - 1)
        first, counts = pages.layer_to_allocator[0], layers_of(config)
        blank = x.new_zeros(1, first.num_key_value_heads, x.shape[1], first.head_dim, dtype=pages.dtype)
        read = [update(layer, KeyValues(blank, blank)) for layer in range(sum(counts))]  # the solve fills the blanks
        rows = iter(KeyValues(*(kept[0][:, places].transpose(0, 1).to(x.dtype) for kept in pair)) for pair in read)
        lengths = None if bool((past == longest).all()) else past
        parts = [LlamaCache(tuple(islice(rows, count)), longest, lengths) for count in counts]
        before = parts[0] if len(parts) == 1 else JointCache(tuple(parts))
    output = core(packing.apart(x), mask=None if bool(real.all()) else real, cache=before, return_cache=True, **options)
    row, place = torch.arange(len(new), device=device)[:, None], (past[:, None] + offset) * real
    after: Any = output.cache
    found = [packing.together(kept.transpose(1, 2)[row, place]) for kept in after.tensors()]
    written = [kept.transpose(1, 2).to(pages.dtype) for kept in found]
    for layer, pair in enumerate(zip(written[::2], written[1::2], strict=True)):
        update(layer, KeyValues(*pair))
    return packing.output(output)
