"""The processes of a run, as accelerate and torchrun make them."""

import logging
import os
from functools import cache

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

log = logging.getLogger("examples")


def one_process(script: str) -> None:
    """Refuse to be one of several processes, which would write the same files."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SystemExit(f"{script} runs in one process: start it with python examples/{script}, without torchrun")


def make_accelerator(device: str = "cpu", *, bfloat16: bool = False, fsdp: bool = False) -> Accelerator:
    """The accelerator of this process, started by itself or by ``torchrun``.

    Args:
        device: ``"cpu"``, or what accelerate finds.
        bfloat16: compute under autocast to bfloat16; weights and optimizer stay float32.
        fsdp: with several processes, shard weights, gradients and optimizer state (FSDP2) instead of DDP. The model is
            one group: iterations use every weight again and again, so weights are gathered once a step.
    """
    plugin = None
    if fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=False,
            auto_wrap_policy="no_wrap",
            state_dict_type="FULL_STATE_DICT",  # any number of processes can go on
            mixed_precision_policy=MixedPrecisionPolicy(),  # autocast does it
        )
    precision = "bf16" if bfloat16 else "no"
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision, fsdp_plugin=plugin)
    if fsdp and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate knows FSDP on GPUs alone and would silently use DDP; FSDP2 itself runs on CPUs
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


@cache
def can_compile(device: torch.device) -> bool:
    """Whether ``torch.compile`` finds what it needs; compiles something small."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as error:  # of whatever kind: compilers differ
        log.warning("torch.compile does not work here: %s", error)
        return False
    return True


def whole(tensor: Tensor | None) -> Tensor | None:
    """A tensor that is sharded over the processes, as a whole in each of them; every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
