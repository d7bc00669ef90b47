"""Eval mode for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

from torch import nn

_inside: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # blocks that a model is in, over all threads
_modes: WeakKeyDictionary[nn.Module, list[tuple[nn.Module, bool]]] = WeakKeyDictionary()
_lock = Lock()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode; when the last thread leaves, every part is in the mode that it was in."""
    with _lock:
        _inside[model] = _inside.get(model, 0) + 1
        if _inside[model] == 1:
            _modes[model] = [(part, part.training) for part in model.modules()]
            model.eval()
    try:
        yield
    finally:
        with _lock:
            _inside[model] -= 1
            if not _inside[model]:
                for part, training in _modes.pop(model):
                    part.training = training
