"""The processes of a run, as torchrun starts them, and a model spread over them."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Spread = Literal["ddp", "fsdp"]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Processes:
    """Which of a run's processes this one is; by default the only one.

    Args:
        rank: this process's number.
        world: how many there are.
        device: where this one computes.

    Example:
        >>> alone = Processes()
        >>> alone.first, alone.sum(3.0)
        (True, (3.0,))
    """

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and logs."""
        return self.rank == 0

    def sum(self, *values: float) -> tuple[float, ...]:
        """The sums of ``values`` over all processes, in float64; each must call this."""
        if self.world == 1:
            return values
        # gloo and nccl both reduce float64; the values are few
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return tuple(total.tolist())

    def wait(self) -> None:
        """Until all processes have come here."""
        if self.world > 1:
            dist.barrier()

    def spread(self, model: nn.Module, how: Spread) -> nn.Module:
        """The model for training in all processes, each with rows of its own; by itself a process keeps it as it is.

        With ``"ddp"`` each process has all weights. With ``"fsdp"`` weights, gradients and optimizer state are shared
        out, all of the model in one group: self-iterations use every weight again and again, and processes need not
        do equally many, so weights are gathered once a step, before the solve, and not at every self-iteration.

        Args:
            model: on this process's device.
            how: ``"ddp"`` or ``"fsdp"``.

        Returns:
            What to call; make the optimizer afterwards, of its parameters.

        Raises:
            ValueError: another word.
        """
        if how not in get_args(Spread):
            raise ValueError(f"how must be one of {get_args(Spread)}, got {how!r}")
        if self.world == 1:
            return model
        if how == "ddp":
            return DistributedDataParallel(model)
        fully_shard(model, mesh=init_device_mesh(self.device.type, (self.world,)))  # in place
        return model


@contextmanager
def started(device: str = "cpu") -> Iterator[Processes]:
    """Join the processes of ``torchrun``, or be the only one, and leave them at the end.

    Args:
        device: ``"cpu"``, or ``"cuda"``, of which each process takes the one that torchrun has numbered for it.

    Yields:
        This process.

    Example:
        >>> with started("cpu") as processes:
        ...     processes.world
        1
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes(device=torch.device(device))
        return
    here = torch.device(device)
    if here.type != "cpu":
        here = torch.device(here.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(here.index)
    dist.init_process_group("gloo" if here.type == "cpu" else "nccl")
    try:
        yield Processes(dist.get_rank(), world, here)
    finally:
        dist.destroy_process_group()


@contextmanager
def gradients_exchanged(model: nn.Module, exchange: bool) -> Iterator[None]:
    """Whether a backward pass exchanges gradients between processes: only the last one before an update has to.

    Args:
        model: of :meth:`Processes.spread`.
        exchange: whether it does.

    Yields:
        Nothing; the backward pass belongs into the block.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> with gradients_exchanged(model, exchange=False):
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.grad
        tensor([[1., 1.]])
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(exchange)
    if isinstance(model, DistributedDataParallel) and not exchange:
        with model.no_sync():
            yield
    else:
        yield


def whole_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of the whole model and optimizer, however they are spread; all processes must call this.

    Args:
        model: of :meth:`Processes.spread`.
        optimizer: of its parameters, after its first step.

    Returns:
        The two, keyed by the parameters' names, so that another number of processes can go on. Complete in the first
        process.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> weights, state = whole_state(model, optimizer)
        >>> sorted(weights), sorted(state["state"])
        (['bias', 'weight'], ['bias', 'weight'])
    """
    return get_state_dict(model, optimizer, options=WHOLE)


def restore_whole_state(
    model: nn.Module, optimizer: Optimizer, weights: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Bring model and optimizer back to what :func:`whole_state` gave; all processes must call this.

    Args:
        model: of :meth:`Processes.spread`.
        optimizer: of its parameters.
        weights: the model's state dict.
        state: the optimizer's.

    Example:
        >>> model, other = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> one, two = (torch.optim.AdamW(part.parameters()) for part in (model, other))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> one.step()
        >>> restore_whole_state(other, two, *whole_state(model, one))
        >>> torch.equal(model.weight, other.weight)
        True
    """
    set_state_dict(model, optimizer, model_state_dict=dict(weights), optim_state_dict=dict(state), options=WHOLE)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what :meth:`Processes.spread` has made.

    Args:
        model: of :meth:`Processes.spread`.

    Returns:
        The model that was spread.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> unwrapped(Processes().spread(model, "ddp")) is model
        True
    """
    return model.module if isinstance(model, DistributedDataParallel) else model
