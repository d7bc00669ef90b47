"""Rows of nested records: one function takes them from solver states, caches and inputs alike."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from numbers import Number
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from deqseq.arguments import shown
from deqseq.types import RowIndex

T = TypeVar("T")
ROWLESS = (type(None), Number, str, bytes, Enum, torch.dtype, torch.device, nn.Module)


def take(tree: T, rows: RowIndex) -> T:
    """The given rows of every tensor in a record.

    Args:
        tree: a tensor ``(batch, ...)``, or dataclasses, named tuples, tuples, lists and dicts of
            them, nested; anything else (None, numbers) is returned as it is. A record with tensors
            that have no row dimension needs its own method ``take_rows(rows)``.
        rows: positions, int64 of shape ``(rows,)``, in any order; they may repeat.

    Returns:
        A record of the same type.

    Raises:
        TypeError: ``rows`` are not positions.

    Example:
        >>> from deqseq import take
        >>> import torch
        >>> take((torch.tensor([1.0, 2.0, 3.0]), {"step": 7}), torch.tensor([2, 0]))
        (tensor([3., 1.]), {'step': 7})
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Biased:
        ...     x: torch.Tensor
        ...     bias: torch.Tensor  # shared by all rows
        ...
        ...     def take_rows(self, rows):
        ...         return Biased(self.x[rows], self.bias)
        >>> take(Biased(torch.arange(4), torch.ones(2)), torch.tensor([3])).x
        tensor([3])
    """
    if isinstance(tree, Tensor):
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
            raise TypeError(f"rows must be positions in an int64 tensor (rows,), got {shown(rows)}")
        return cast(T, tree.index_select(0, rows))
    method = _take_rows(tree)
    return method(rows) if method is not None else _mapped(lambda part: take(part, rows), tree)


def put(tree: T, rows: RowIndex, other: T) -> T:
    """``tree`` with the given rows replaced by ``other``, which has the same structure and only
    these rows; what is not a tensor is that of ``other``. See :func:`check_put`.
    """
    return map_tensors(lambda new, x: x.index_copy(0, rows, new), other, tree)


def check_put(name: str, tree: Any) -> None:
    """Refuse a record that takes its rows by itself, so that :func:`put` cannot replace them."""
    if isinstance(tree, Tensor):
        return
    if _take_rows(tree) is not None:
        raise TypeError(
            f"{name} must be tensors, in dataclasses, tuples, lists and dicts, got a "
            f"{type(tree).__name__} with take_rows(rows), whose rows cannot be put together again"
        )
    for part in _parts(tree):
        check_put(name, part)


def map_tensors(function: Callable[..., Tensor], tree: T, *others: T) -> T:
    """``function`` of every tensor in a record (and of the same one in others)."""
    if isinstance(tree, Tensor):
        return cast(T, function(tree, *others))
    return _mapped(lambda *parts: map_tensors(function, *parts), tree, *others)


def tensors_of(tree: Any) -> tuple[Tensor, ...]:
    """Every tensor in a record, in the order of its fields."""
    if isinstance(tree, Tensor):
        return (tree,)
    return tuple(tensor for part in _parts(tree) for tensor in tensors_of(part))


def has_numbers(tree: Any) -> bool:
    """Whether a record has numbers outside of tensors."""
    return isinstance(tree, Number) or any(has_numbers(part) for part in _parts(tree))


def on_host(x: Tensor) -> np.ndarray:
    """A tensor as an array of the host, in one transfer."""
    return x.cpu().numpy()


def on_device(x: np.ndarray, device: torch.device) -> Tensor:
    """An array of the host as a tensor, for which the host does not wait.

    On a CPU they share their memory, so the array must not be changed later.
    """
    here = torch.from_numpy(x)
    if device.type in ("cpu", "mps") or torch.compiler.is_compiling():
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


def per_row(flags: Tensor, z: Tensor) -> Tensor:
    """One flag or number per row, shaped to broadcast over the state."""
    return flags.reshape(-1, *[1] * (z.ndim - 1))


def check_rows(name: str, tree: Any, rows: int, of: str = "z0") -> None:
    """Refuse a record unless every tensor in it has this many rows, and :func:`take` finds them
    all.
    """
    if isinstance(tree, Tensor):
        if tree.ndim == 0 or len(tree) != rows:
            raise ValueError(
                f"{name} must have one row per row of {of}, {rows}, got a tensor of shape "
                f"{tuple(tree.shape)}: "
                "what all rows share stays outside, or in a record with take_rows(rows)"
            )
    elif _take_rows(tree) is None:
        parts = _parts(tree)
        numbers = (
            isinstance(tree, list)
            and len(tree) == rows
            and all(isinstance(part, Number) for part in tree)
        )
        if numbers or not (_is_record(tree) or isinstance(tree, ROWLESS) or _is_function(tree)):
            raise TypeError(
                f"{name} must be tensors, in dataclasses, tuples, lists and dicts, or have "
                "take_rows(rows), got a "
                f"{type(tree).__name__}{' of numbers, one per row' * numbers}: make it a tensor, "
                "or use it inside f"
            )
        for part in parts:
            check_rows(name, part, rows, of)


def check_record(name: str, tree: Any, rows: int) -> None:
    """Refuse what is not a record of tensors with a row for each row of ``x``; None and numbers are
    none.
    """
    if not isinstance(tree, Tensor) and not _is_record(tree) and _take_rows(tree) is None:
        got = "None" if tree is None else f"a {type(tree).__name__}"
        raise TypeError(
            f"{name} must be tensors, in dataclasses, tuples, lists and dicts, got {got}"
        )
    check_rows(name, tree, rows, "x")


def _take_rows(tree: Any) -> Callable[[RowIndex], Any] | None:
    """A record's own way to take rows."""
    return getattr(tree, "take_rows", None)


def _is_record(tree: Any) -> bool:
    return isinstance(tree, tuple | list | dict) or (
        is_dataclass(tree) and not isinstance(tree, type)
    )


def _is_function(tree: Any) -> bool:
    """Whether it can be called, and has no tensors that would have to be cut."""
    return callable(tree) and not any(
        isinstance(part, Tensor) for part in getattr(tree, "__dict__", {}).values()
    )


def _parts(tree: Any) -> Iterable[Any]:
    """What a record consists of; nothing for None and numbers."""
    if not _is_record(tree):
        return ()
    if isinstance(tree, dict):
        return tree.values()
    return (
        tree
        if isinstance(tree, tuple | list)
        else [getattr(tree, field.name) for field in fields(tree)]
    )


def _mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The record of what ``function`` gives for each part of a record (and for the same part of
    others).
    """
    kind: Any = type(tree)
    if isinstance(tree, tuple | list):
        parts = [function(*part) for part in zip(tree, *others, strict=True)]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if is_dataclass(tree) and not isinstance(tree, type):
        new = {
            one.name: function(*(getattr(each, one.name) for each in (tree, *others)))
            for one in fields(tree)
        }
        made = replace(tree, **{one.name: new[one.name] for one in fields(tree) if one.init})
        for one in fields(tree):
            if not one.init:
                object.__setattr__(made, one.name, new[one.name])  # a frozen one, too
        return made
    if isinstance(tree, dict):
        made = copy.copy(tree)  # a defaultdict keeps its default
        made.update({key: function(*(one[key] for one in (tree, *others))) for key in tree})
        return made
    return tree
