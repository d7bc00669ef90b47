"""Where the generators of random numbers stand."""

import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """The state of the global generators of this process: torch's, Python's, and NumPy's if it is loaded.

    Generators that a program has made itself are not known here: seed them from the step, or keep their state among
    the data's position.

    Returns:
        Numbers, tuples and uint8 tensors: ``"torch"``, ``"cuda"`` (one a device, none before CUDA is used),
        ``"python"``, ``"numpy"``.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(())
        >>> restore_random_state(state)
        >>> bool(torch.rand(()) == first)
        True
    """
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": None if numpy is None else _plain(numpy.random.get_state()),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set the global generators to where they stood.

    On CUDA, as many devices as both the state and this machine have.

    Args:
        state: what :func:`random_state` gave.

    Raises:
        ImportError: NumPy was in use and is not installed here.

    Example:
        >>> state = random_state()
        >>> first = random.random()
        >>> restore_random_state(state)
        >>> random.random() == first
        True
    """
    torch.set_rng_state(state["torch"].cpu())
    devices = torch.cuda.device_count() if state["cuda"] else 0
    for device, generator in zip(range(devices), state["cuda"], strict=False):
        torch.cuda.set_rng_state(generator.cpu(), device)
    random.setstate(state["python"])
    if state["numpy"] is not None:
        importlib.import_module("numpy").random.set_state(state["numpy"])


def _plain(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """NumPy's state with a list for its array of keys."""
    name, keys, *rest = state
    return (name, keys.tolist(), *rest)
