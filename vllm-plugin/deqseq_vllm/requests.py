"""The requests of a forward pass: where their tokens are, and how some of them leave it."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, subclass_attention_backend


@lru_cache
def remembering(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend whose metadata remember of what they were built."""
    base: Any = backend.get_builder_cls()

    class Builder(base):
        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.builder, metadata.common = self, common_attn_metadata
            return metadata

    return subclass_attention_backend("Remembering", backend, Builder)


class Requests:
    """The requests whose tokens the core iterates; attention sees no others.

    As a context it leaves the pass as it was, for the layers after the core.

    Args:
        layers: names of the core's attention layers.
    """

    def __init__(self, layers: list[str]) -> None:
        self.layers, self.context = layers, get_forward_context()
        self.before: Any = (self.context.attn_metadata, self.context.slot_mapping)
        self.metadata: Any = self.before[0][layers[0]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each request; rows of padding have none, and are left out."""
        lengths = self.metadata.common.query_start_loc_cpu.diff().numpy()
        return lengths[lengths > 0]

    def keep(self, requests: Tensor, tokens: Tensor) -> None:
        """Keep some ``requests``, given by their places, as are their ``tokens``."""
        common = self.metadata.common
        on_host = requests.cpu()
        lengths = common.query_start_loc_cpu.diff()[on_host]
        starts = torch.zeros_like(common.query_start_loc_cpu[: len(lengths) + 1])
        starts[1:] = lengths.cumsum(dim=0)
        common = replace(
            common,
            query_start_loc=starts.to(common.query_start_loc.device),
            query_start_loc_cpu=starts,
            seq_lens=common.seq_lens[requests],
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound[on_host],
            is_prefilling=common.is_prefilling[on_host],
            num_reqs=len(requests),
            num_actual_tokens=len(tokens),
            max_query_len=int(lengths.max()),
            block_table_tensor=common.block_table_tensor[requests],
            slot_mapping=common.slot_mapping[tokens],
            positions=common.positions[tokens],
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        self.metadata = self.metadata.builder.build(0, common)
        self.context.attn_metadata = dict.fromkeys(self.layers, self.metadata)
        self.context.slot_mapping = dict.fromkeys(self.layers, common.slot_mapping)

    def __enter__(self) -> "Requests":
        return self

    def __exit__(self, *error: object) -> None:
        self.context.attn_metadata, self.context.slot_mapping = self.before
