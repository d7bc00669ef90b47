"""Layers sharded by ``fully_shard`` (FSDP2)."""

import sys
from typing import Any

from torch import nn


def sharded_parts(module: nn.Module) -> tuple[Any, ...]:
    """The modules inside, or itself, that ``torch.distributed.fsdp.fully_shard`` has been called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it has not been imported, nothing is sharded
    return () if fsdp is None else tuple(part for part in module.modules() if isinstance(part, fsdp.FSDPModule))
