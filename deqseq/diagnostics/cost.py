"""What a loss and its backward pass cost: calls of the map, and the memory that autograd keeps in between."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn


@contextmanager
def counted_calls(module: nn.Module) -> Iterator[list[None]]:
    """Within this context every call of the module appends an entry to the list."""
    calls: list[None] = []
    handle = module.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def saved_for_backward(model: nn.Module) -> Iterator[Callable[[], int]]:
    """A function that counts the bytes saved for the backward pass so far, without the model's own parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    boxes: list[weakref.ref[_Box]] = []

    def pack(tensor: Tensor) -> _Box:
        box = _Box(tensor)
        boxes.append(weakref.ref(box))  # a graph that is dropped takes its boxes with it
        return box

    def count() -> int:
        storages = [box.tensor.untyped_storage() for known in boxes if (box := known()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for address, size in sizes.items() if address not in own)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        yield count


class _Box:
    """What autograd saves in place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph it would keep itself alive


def estimator_name(estimator: object) -> str:
    """The estimator's class with its numbers and the switches that are on: ``"Phantom(4, 0.8)"``."""
    if not is_dataclass(estimator):
        return type(estimator).__name__
    values = {field.name: getattr(estimator, field.name) for field in fields(estimator)}
    switches = [name for name, value in values.items() if value is True]
    numbers = [f"{value:g}" for value in values.values() if type(value) in (int, float)]
    inside = ", ".join(numbers + switches)
    return f"{type(estimator).__name__}({inside})" if inside else type(estimator).__name__
