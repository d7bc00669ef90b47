"""Layers sharded by ``fully_shard`` (FSDP2), unsharded once per solve."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def unsharded(module: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Within this context sharded parts are unsharded, from one iteration to the next.

    They are gathered once per solve, not at every iteration: processes that take unequal numbers of iterations would
    otherwise wait for each other for ever. Afterwards they are sharded again, until the backward pass.

    Args:
        module: may have sharded parts; without any, this does nothing. Their ``reshard_after_forward`` is switched
            off, because it would act at the end of each iteration.
        enabled: False does nothing.

    Example:
        >>> with unsharded(nn.Linear(2, 2)):
        ...     pass
    """
    parts = sharded_parts(module) if enabled else ()
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
