"""What a loss and its backward pass cost: calls of the map, and what autograd keeps meanwhile."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn


@contextmanager
def counted_calls(module: nn.Module) -> Iterator[list[None]]:
    """Within this context every call of a module leaves an entry in the list.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> with counted_calls(layer) as calls:
        ...     _ = layer(layer(torch.zeros(1, 2)))
        >>> len(calls)
        2
    """
    calls: list[None] = []
    handle = module.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


@contextmanager
def saved_for_backward(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Within this context a function tells how many bytes autograd keeps for a backward pass, each storage once.

    Args:
        model: whose parameters are left out: they are there anyway.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> with saved_for_backward(nn.Identity()) as count:
        ...     y = x.exp()      # keeps its result: four numbers of four bytes
        ...     count()
        16
    """
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
    """What autograd keeps in the place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph it would keep itself alive


def estimator_name(estimator: object) -> str:
    """Its class with the numbers that make it, and the switches that are on.

    Example:
        >>> import deqseq as dq
        >>> estimator_name(dq.Phantom(steps=4, damping=0.8)), estimator_name(dq.Unrolled(checkpoint=True))
        ('Phantom(4, 0.8)', 'Unrolled(checkpoint)')
    """
    if not is_dataclass(estimator):
        return type(estimator).__name__
    values = {field.name: getattr(estimator, field.name) for field in fields(estimator)}
    switches = [name for name, value in values.items() if value is True]
    numbers = [f"{value:g}" for value in values.values() if type(value) in (int, float)]
    inside = ", ".join(numbers + switches)
    return f"{type(estimator).__name__}({inside})" if inside else type(estimator).__name__
