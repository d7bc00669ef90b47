"""Rows of nested records: one function takes them from solver states, caches and inputs alike."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from torch import Tensor, nn

from deqseq.types import RowIndex

T = TypeVar("T")


@runtime_checkable
class OwnRows(Protocol):
    """A record that has tensors without a row dimension, and so takes rows by itself.

    Example:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Biased:
        ...     x: torch.Tensor
        ...     bias: torch.Tensor                # shared by all rows
        ...     def take_rows(self, rows): return Biased(self.x[rows], self.bias)
        >>> take(Biased(torch.arange(4), torch.ones(2)), torch.tensor([3])).x
        tensor([3])
    """

    def take_rows(self, rows: RowIndex, /) -> Any:
        """The record of ``rows`` alone, ``(rows,)``."""
        ...


def take(tree: T, rows: RowIndex) -> T:
    """The given rows of every tensor in a record.

    Args:
        tree: a tensor ``(batch, ...)``, or dataclasses, named tuples, tuples, lists and dicts of them, nested; anything
            else (None, numbers) is returned as it is.
        rows: positions, int64 of shape ``(rows,)``; in any order, and repeated ones are repeated.

    Returns:
        A record of the same type.

    Example:
        >>> import torch
        >>> take((torch.tensor([1.0, 2.0, 3.0]), {"step": 7}), torch.tensor([2, 0]))
        (tensor([3., 1.]), {'step': 7})
    """
    if isinstance(tree, Tensor):
        return cast(T, tree[rows])
    if isinstance(tree, OwnRows):
        return tree.take_rows(rows)
    return _mapped(lambda part: take(part, rows), tree)


def put(tree: T, rows: RowIndex, other: T) -> T:
    """``tree`` with the given rows replaced by ``other``, which has the same structure and only these rows.

    Example:
        >>> import torch
        >>> put(torch.zeros(3), torch.tensor([2]), torch.ones(1))
        tensor([0., 0., 1.])
    """
    if isinstance(tree, Tensor):
        return cast(T, tree.index_copy(0, rows, cast(Tensor, other)))
    return _mapped(lambda part, new: put(part, rows, new), tree, other)


def map_tensors(function: Callable[[Tensor], Tensor], tree: T) -> T:
    """``function`` of every tensor in a record.

    Example:
        >>> import torch
        >>> map_tensors(lambda x: x[:, :1], (torch.ones(1, 3), None))
        (tensor([[1.]]), None)
    """
    if isinstance(tree, Tensor):
        return function(tree)
    return _mapped(lambda part: map_tensors(function, part), tree)


def tensors_of(tree: Any) -> tuple[Tensor, ...]:
    """Every tensor in a record, in the order of its fields.

    Example:
        >>> import torch
        >>> len(tensors_of((torch.ones(1), [torch.ones(2), None])))
        2
    """
    if isinstance(tree, Tensor):
        return (tree,)
    return tuple(tensor for part in _parts(tree) for tensor in tensors_of(part))


def check_rows(name: str, tree: Any, rows: int) -> None:
    """Refuse a record unless every tensor in it has this many rows, and :func:`take` finds them all.

    Raises:
        TypeError: an object that holds tensors and is no record.
        ValueError: a tensor with other rows.
    """
    if isinstance(tree, Tensor):
        if tree.ndim == 0 or len(tree) != rows:
            raise ValueError(
                f"{name} must have one row per row of z0, {rows}, got a tensor of shape {tuple(tree.shape)}"
            )
    elif not isinstance(tree, OwnRows):
        parts = _parts(tree)
        held = () if parts or isinstance(tree, nn.Module) else getattr(tree, "__dict__", {}).values()
        if any(isinstance(part, Tensor) for part in held):
            raise TypeError(
                f"{name} must be tensors, in dataclasses, tuples, lists and dicts, or have take_rows(rows), got a "
                f"{type(tree).__name__} that holds tensors"
            )
        for part in parts:
            check_rows(name, part, rows)


def _parts(tree: Any) -> Iterable[Any]:
    """What a record consists of; nothing for None and numbers."""
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in fields(tree)]
    if isinstance(tree, dict):
        return tree.values()
    return tree if isinstance(tree, tuple | list) else ()


def _mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The record of what ``function`` gives for each part of a record (and for the same part of others)."""
    kind: Any = type(tree)
    if isinstance(tree, tuple | list):
        parts = [function(*part) for part in zip(tree, *others, strict=True)]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree)]
        return replace(tree, **{name: function(*(getattr(one, name) for one in (tree, *others))) for name in names})
    if isinstance(tree, dict):
        parts = {key: function(*(one[key] for one in (tree, *others))) for key in tree}
        return parts if kind is dict else kind(parts)
    return tree
