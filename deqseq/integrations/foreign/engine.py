"""What reads models of other libraries: tables of fields, so that none is overlooked, and rules for
weights.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from deqseq.arguments import (
    check_bounds,
    check_flag,
    check_integer,
    check_known,
    check_number,
    check_type,
)
from deqseq.models import CausalLM, LanguageModelSpec


class Only:
    """The values of a field that deqseq computes; others are refused.

    A missing field has the first value unless there is a ``default``; a type in its place: the
    field must be there.
    """

    def __init__(self, *values: Any, default: Any = ...) -> None:
        self.values, self.default = values, values[0] if default is ... else default


Table = Mapping[str, tuple[str, Any] | Only | None]
"""Their fields: our name and what :meth:`Fields.read` takes; or the values that deqseq computes; or
None where a field does not change what the model computes."""


def only(**values: Any) -> dict[str, Only]:
    """Fields of which deqseq computes one value, which is also that of a missing field."""
    return {name: Only(value) for name, value in values.items()}


def unused(*names: str) -> dict[str, None]:
    """Fields that do not change what the model computes."""
    return dict.fromkeys(names)


_CHECKS = {
    bool: check_flag,
    int: partial(check_integer, low=1),
    NoneType: partial(check_integer, low=1),
    float: partial(check_number, interval="(-inf, inf)"),
    tuple: check_bounds,
    dict: partial(check_type, wanted=Mapping),
}


class Fields:
    """The fields of a configuration: each is read, known to change nothing, or refused.

    Example:
        >>> fields = Fields({"width": 4, "hieght": 2}, "toy configuration: ")
        >>> fields.take(
        ...     {
        ...         "width": ("d_model", int),
        ...         "height": ("n_layers", 1),
        ...         **only(bias=False),
        ...         **unused("author"),
        ...     }
        ... )
        {'d_model': 4, 'n_layers': 1}
        >>> fields.close()
        Traceback (most recent call last):
        ...
        ValueError: toy configuration: 'hieght' is unknown; did you mean 'height'? (known: width,
        height, bias, author)
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content, self.where = content, where
        self._known = dict[str, None]()

    def take(self, table: Table) -> dict[str, Any]:
        """The fields of a table that have a name of ours, under that name."""
        taken: dict[str, Any] = {}
        for name, entry in table.items():
            self._known[name] = None
            if isinstance(entry, tuple):
                taken[entry[0]] = self.read(name, entry[1])
            elif entry is not None:
                self.read(name, entry)
        return taken

    def read(self, name: str, wanted: Any) -> Any:
        """A field of the type of a default, or of a type if it must be there; None: an integer; or
        :class:`Only`.

        Integers other than the default begin at 1.
        """
        self._known[name] = None
        default, called = (
            wanted.default if isinstance(wanted, Only) else wanted,
            f"{self.where}{name!r}",
        )
        if isinstance(default, type) and name not in self.content:
            raise ValueError(f"{called} is missing")
        value: Any = self.content.get(name, default)
        if isinstance(wanted, Only):
            if value not in wanted.values:
                values, note = (
                    " or ".join(map(repr, wanted.values)),
                    "" if name in self.content else " (the default)",
                )
                raise ValueError(
                    f"{called} must be {values}, got {value!r}{note}: deqseq computes nothing else"
                )
            return value
        kind = wanted if isinstance(wanted, type) else type(wanted)
        if kind is tuple and isinstance(
            value, list
        ):  # transformers writes infinity as {"__float__": "Infinity"}
            value = tuple(float(x["__float__"]) if isinstance(x, Mapping) else x for x in value)
        if type(value) is not type(wanted) or value != wanted:
            _CHECKS[kind](called, value)
        return float(value) if kind is float else value

    def inner(self, name: str, wanted: Any = dict) -> "Fields":
        """The fields of a field that is a mapping."""
        return Fields(self.read(name, wanted), f"{self.where}{name}: ")

    def close(self) -> None:
        """Refuse fields that have not been read."""
        for name in self.content:
            check_known(self.where.rstrip(), name, self._known)


Rule = tuple[str, str] | tuple[str, str, Callable[[Tensor], Tensor]]
"""A pattern in our names, what replaces it in theirs, and which part of their tensor is ours.
Default: all of it.
"""

Foreign = tuple[LanguageModelSpec, tuple[Rule, ...], nn.Module | None]
"""What a configuration and a state dict describe: a model, the rules of its weights, and
:attr:`Looped.choose`.
"""
Reader = Callable[[Fields, Mapping[str, Tensor]], Foreign]

_COMPUTED = re.compile(r"(^freqs_cis|\.rotary_emb\.inv_freq)$")
"""Tensors that older files have and that follow from the configuration."""


def described(
    config: Mapping[str, Any], state: Mapping[str, Tensor], readers: Mapping[str, Reader]
) -> Foreign:
    """What a configuration and a state dict describe, read by the reader for their kind."""
    for name, tensor in state.items():
        check_type("a name in state", name, str)
        check_type(f"state[{name!r}]", tensor, Tensor)
        if tensor.is_meta:
            raise ValueError(
                f"state[{name!r}] has no values, because it is on the meta device: load the "
                "weights first"
            )
    kinds = Only(*readers, default=str)
    kind = (
        "mamba_ssm"
        if "ssm_cfg" in config
        else Fields(config, "configuration: ").read("model_type", kinds)
    )
    return readers[kind](Fields(config, f"{kind} configuration: "), state)


def loaded(
    spec: LanguageModelSpec,
    state: Mapping[str, Tensor],
    rules: Sequence[Rule] = (),
    choose: nn.Module | None = None,
) -> CausalLM:
    """A model with copies of another library's tensors; ValueError lists those that do not fit.

    ``choose`` is that of its :class:`deqseq.Looped`. A head that is stored although it is tied must
    be the embedding.
    """
    with torch.device("meta"):
        lm = spec.build()
    if choose is not None:
        lm.model.backbone.choose = choose  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    unused, found = (
        {name: x for name, x in state.items() if not _COMPUTED.search(name)},
        dict[str, Tensor](),
    )
    for name in lm.state_dict():
        theirs, part = foreign_name(name, rules)
        unused.pop(theirs, None)
        if theirs in state:
            found[name] = part(state[theirs]).detach().clone()
    head, embedding = (foreign_name(name, rules)[0] for name in ("head.weight", "embedding.weight"))
    if (tied := unused.pop(head, None)) is not None and not torch.equal(
        tied, state.get(embedding, tied)
    ):
        raise ValueError(
            f"the configuration ties the head, but {head!r} differs from {embedding!r}: untie "
            "them there"
        )
    if bad := sorted(name for name, tensor in found.items() if not torch.isfinite(tensor).all()):
        raise ValueError(f"the state dict has NaN or infinity in {', '.join(bad)}")
    try:
        lm.load_state_dict(found | unused, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the state dict does not fit the configuration: {error}") from error
    return lm


def foreign_name(name: str, rules: Sequence[Rule]) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Their name of our tensor, and the part of theirs that it is."""
    part: Callable[[Tensor], Tensor] = _whole
    for pattern, theirs, *parts in rules:
        name, count = re.subn(pattern, theirs, name)
        part = parts[0] if count and parts else part
    return name, part


def _whole(tensor: Tensor) -> Tensor:
    return tensor
