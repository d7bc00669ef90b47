"""Layers sharded by ``fully_shard`` (FSDP2)."""

import sys
from typing import Any

from torch import nn


def sharded_parts(module: nn.Module) -> tuple[Any, ...]:
    """The modules that ``torch.distributed.fsdp.fully_shard`` has been called on.

    Args:
        module: where to look, itself included.

    Returns:
        ``FSDPModule`` objects; none where FSDP has not been imported.

    Example:
        >>> sharded_parts(nn.Linear(2, 2))
        ()
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it has not been imported, nothing is sharded
    return () if fsdp is None else tuple(part for part in module.modules() if isinstance(part, fsdp.FSDPModule))
