"""Layers that ``fully_shard`` (FSDP2) has spread over processes, made whole once a solve."""

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
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # whoever has not imported it has sharded nothing
    return () if fsdp is None else tuple(part for part in module.modules() if isinstance(part, fsdp.FSDPModule))


@contextmanager
def gathered(module: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Within this context sharded parts are whole, and stay so from one self-iteration to the next.

    They are gathered once a solve, not at every self-iteration. Processes that take unequal numbers of self-iterations
    would otherwise wait for each other for ever. Afterwards they are sharded again, until the backward pass.

    Args:
        module: of which parts may be sharded; without any this does nothing. Their ``reshard_after_forward`` is
            switched off, because it would act at the end of each self-iteration.
        enabled: False does nothing.

    Example:
        >>> with gathered(nn.Linear(2, 2)):
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
