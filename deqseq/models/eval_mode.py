"""Eval mode, or the mode and the random numbers of an earlier call, for the length of a block."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn

_inside: WeakKeyDictionary[nn.Module, int] = (
    WeakKeyDictionary()
)  # blocks that a model is in, over all threads
_modes: WeakKeyDictionary[nn.Module, list[tuple[nn.Module, bool]]] = WeakKeyDictionary()
_lock = Lock()


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put a model in eval mode; when the last thread leaves, every part is in the mode that it was
    in.
    """
    return in_mode(model, training=False)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in a mode, unless it is in training mode and is to be so; else as
    :func:`eval_mode`.
    """
    with _lock:
        _inside[model] = _inside.get(model, 0) + 1
        if _inside[model] == 1:
            _modes[model] = [(part, part.training) for part in model.modules()]
            if not (
                training and model.training
            ):  # parts that the caller put in eval mode stay in it
                model.train(training)
    try:
        yield
    finally:
        with _lock:
            _inside[model] -= 1
            if not _inside[model]:
                for part, mode in _modes.pop(model):
                    part.training = mode


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Random numbers of a seed of 0, on the CPU and on ``device``; after it, those of
    before go on.
    """
    accelerator = device.type not in ("cpu", "meta")
    with torch.random.fork_rng(
        [device] if accelerator else [], device_type=device.type if accelerator else "cuda"
    ):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed other devices, too
        if accelerator:
            with torch.get_device_module(device).device(device):
                torch.get_device_module(device).manual_seed(0)
        yield
