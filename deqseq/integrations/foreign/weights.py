"""Weights under other names and in other layouts: one engine, which runs the rules of every format."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deqseq.check import check_type

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")
Rule = tuple[str, str] | tuple[str, str, Callable[[Tensor], Tensor]]
"""A pattern in our names, what replaces it in theirs, and which part of their tensor is ours. Default: all of it."""

_COMPUTED = re.compile(r"(^freqs_cis|\.rotary_emb\.inv_freq)$")
"""Tensors that older files have and that follow from the configuration."""


def on_meta(build: Callable[..., R], *args: Any) -> R:
    """A model without storage, to be given the weights of another."""
    with torch.device("meta"):
        return build(*args)


def from_foreign(
    state: Mapping[str, Tensor], model: nn.Module, rules: Sequence[Rule], new: str | None = None
) -> dict[str, Tensor]:
    """The tensors of another library under the names of ``model``; ValueError lists all that do not fit.

    A tied head, which ``model`` does not have, must be equal to the embedding. What has ``new`` in its name is left
    out.
    """
    shapes = {name: x.shape for name, x in model.state_dict().items() if new is None or new not in name}
    head, embedding = (_foreign(name, rules)[0] for name in ("head.weight", "embedding.weight"))
    used = {head} if "head.weight" not in shapes and embedding in state else set[str]()
    if used and not torch.equal(state.get(head, state[embedding]), state[embedding]):
        raise ValueError(
            f"the configuration ties the head to the embedding, but {head!r} differs from {embedding!r}: untie them in "
            "the configuration"
        )
    found: dict[str, Tensor] = {}
    missing, misshapen, not_finite = set[str](), list[str](), set[str]()
    for name, shape in shapes.items():
        theirs, part = _foreign(name, rules)
        used.add(theirs)
        if theirs not in state:
            missing.add(theirs)
            continue
        check_type(f"the state dict's {theirs}", state[theirs], Tensor)
        found[name] = part(state[theirs])
        if not (state[theirs].is_meta or bool(torch.isfinite(found[name]).all())):
            not_finite.add(theirs)
        if found[name].shape != shape:
            misshapen.append(f"{theirs} as {name} {tuple(found[name].shape)} instead of {tuple(shape)}")
    unexpected = sorted(name for name in state if name not in used and not _COMPUTED.search(name))
    faults = {"missing": sorted(missing), "unexpected": unexpected, "of another shape": misshapen}
    faults["with NaN or infinity"] = sorted(not_finite)
    listed = "; ".join(f"{len(which)} {what}: {', '.join(which)}" for what, which in faults.items() if which)
    if listed:
        raise ValueError(f"the state dict does not fit the configuration: {listed}")
    return found


def to_foreign(state: Mapping[str, Tensor], model: nn.Module, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """The tensors of ``model`` under another library's names, a tied head under its own; rules must be renames."""
    theirs = {_foreign(name, rules)[0]: tensor for name, tensor in from_foreign(state, model, ()).items()}
    return {_foreign("head.weight", rules)[0]: state["embedding.weight"]} | theirs


def assembled(model: M, weights: Mapping[str, Tensor]) -> M:
    """A model without storage, with copies of these weights."""
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in weights.items()}, assign=True)
    return model


def _foreign(name: str, rules: Sequence[Rule]) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Their name of our tensor, and the part of theirs that it is."""
    part: Callable[[Tensor], Tensor] = _whole
    for pattern, theirs, *parts in rules:
        name, count = re.subn(pattern, theirs, name)
        part = parts[0] if count and parts else part
    return name, part


def _whole(tensor: Tensor) -> Tensor:
    return tensor
