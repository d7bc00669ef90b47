"""Eval mode, or the mode and the random numbers of an earlier call, inside a ``with`` block."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn

Modes = list[tuple[nn.Module, bool]]
_blocks: WeakKeyDictionary[nn.Module, list[Modes]] = WeakKeyDictionary()
"""For each block that a model is in, over all threads: its parts, and the modes they were in."""
_lock = Lock()


def eval_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Put a model in eval mode, for all threads; when the last one leaves, every part returns to
    its mode.
    """
    return in_mode(model, training=False)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """As :func:`eval_mode` for any mode; ``training`` leaves a model in training mode as it is."""
    with _lock:
        blocks = _blocks.setdefault(model, [])
        blocks.append([(part, part.training) for part in model.modules()])
        # in training mode, parts that the caller put in eval mode stay there
        if len(blocks) == 1 and not (training and model.training):
            model.train(training)
    try:
        yield
    finally:
        with _lock:
            modes = blocks.pop()
            if not blocks:
                for part, mode in modes:
                    part.training = mode


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Random numbers from seed 0, on the CPU and ``device``; later ones are not affected."""
    devices, device_type = [device], device.type
    if device_type in ("cpu", "meta"):
        devices, device_type = [], "cuda"
    with torch.random.fork_rng(devices, device_type=device_type):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed other devices, too
        if devices:
            accelerator = torch.get_device_module(device)
            with accelerator.device(device):
                accelerator.manual_seed(0)
        yield
