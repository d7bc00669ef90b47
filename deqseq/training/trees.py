"""Nested state taken apart into JSON and tensors, and put together again: what pickle does, without running code."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TENSOR, TUPLE, PAIRS = "$tensor", "$tuple", "$pairs"


def split(tree: object, where: str) -> tuple[Any, dict[str, Tensor]]:
    """Take a nest of dicts, lists and tuples apart.

    Args:
        tree: with tensors, numbers, strings, booleans and None at its ends, and keys of any of these but tensors.
        where: what it is; errors begin with it, and so do the tensors' names.

    Returns:
        The nest as JSON, with a name in the place of each tensor, and the tensors by name.

    Raises:
        TypeError: something else inside, or a tensor that is a part of one over several processes.

    Example:
        >>> import torch
        >>> split({"betas": (0.9, 0.95), "state": {0: torch.zeros(2)}}, "optimizer")
        ({'betas': {'$tuple': [0.9, 0.95]}, 'state': {'$pairs': [[0, {'$tensor': 'optimizer.state.0'}]]}},
         {'optimizer.state.0': tensor([0., 0.])})
    """
    tensors: dict[str, Tensor] = {}
    return _without_tensors(tree, where, tensors), tensors


def joined(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The nest that :func:`split` took apart, with dicts, lists and tuples where they were.

    Args:
        data: the JSON.
        tensors: by name.

    Returns:
        The nest.

    Example:
        >>> joined({"$pairs": [[0, {"$tuple": [1, 2]}]]}, {})
        {0: (1, 2)}
    """
    if isinstance(data, list):
        return [joined(part, tensors) for part in data]
    if not isinstance(data, dict):
        return data
    if TENSOR in data:
        return tensors[data[TENSOR]]
    if TUPLE in data:
        return tuple(joined(part, tensors) for part in data[TUPLE])
    pairs = data[PAIRS] if PAIRS in data else data.items()
    return {joined(key, tensors): joined(value, tensors) for key, value in pairs}


def whole_tensor(tensor: Tensor, where: str) -> Tensor:
    """The tensor without its history, if a file can hold it.

    Args:
        tensor: any.
        where: what the error is to call it.

    Returns:
        The same numbers.

    Raises:
        TypeError: it holds a part of a tensor that is spread over several processes, no numbers of its own, or numbers
            of a kind that safetensors does not know.
    """
    plain = tensor.detach()
    if type(plain) is not Tensor or plain.is_meta:
        kind = "tensor on the meta device" if plain.is_meta else type(plain).__name__
        raise TypeError(
            f"{where} is a {kind}: only whole tensors can be written; gather a sharded model first, with "
            "torch.distributed.checkpoint.state_dict and StateDictOptions(full_state_dict=True)"
        )
    if plain.layout != torch.strided or plain.is_quantized or plain.dtype == torch.complex128:
        raise TypeError(f"{where} is a {plain.layout} tensor of {plain.dtype}: safetensors cannot hold it")
    return plain


def _without_tensors(tree: object, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        name = where if where not in tensors else f"{where}#{len(tensors)}"  # keys 1 and "1" of one dict
        tensors[name] = whole_tensor(tree, where)
        return {TENSOR: name}
    if tree is None or type(tree) in (bool, int, float, str):
        return tree
    if type(tree) in (list, tuple):
        assert isinstance(tree, list | tuple)
        parts = [_without_tensors(part, f"{where}.{index}", tensors) for index, part in enumerate(tree)]
        return parts if isinstance(tree, list) else {TUPLE: parts}
    if isinstance(tree, Mapping):
        pairs = [[key, _without_tensors(value, f"{where}.{key}", tensors)] for key, value in tree.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return dict(pairs)
        return {PAIRS: [[_without_tensors(key, f"{where}: key {key!r}", {}), value] for key, value in pairs]}
    raise TypeError(f"a checkpoint cannot hold {where}, a {type(tree).__name__}: {tree!r}")
