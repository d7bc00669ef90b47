"""Reads other libraries' models: configurations by tables of fields, weights by renaming rules."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deqseq.arguments import (
    Between,
    Instance,
    Within,
    check_known,
    check_type,
)
from deqseq.models import CausalLM, LanguageModelSpec
from deqseq.ops.reference import Bounds


class Only:
    """The values of a field that deqseq computes; others are refused.

    A missing field has the ``default``, which is the first value unless it is given. A type as the
    default means that the field is required.
    """

    def __init__(self, *values: Any, default: Any = ...) -> None:
        self.values = values
        self.default = values[0] if default is ... else default


Table = Mapping[str, Any]
"""What each field of a configuration means.

- A tuple: our name for the field, and what :meth:`Fields.read` takes.
- A default, or a type if the field is required: the field has the same name here.
- :class:`Only`: the values that deqseq computes.
- None: the field does not change what the model computes.
"""
Weights = Mapping[str, Tensor]


def only(**values: Any) -> dict[str, Only]:
    """Fields of which deqseq computes one value, which is also the default."""
    return {name: Only(value) for name, value in values.items()}


def unused(*names: str) -> dict[str, None]:
    """Fields that do not change what the model computes."""
    return dict.fromkeys(names)


_CHECKS = {
    bool: Instance(bool),
    int: Between(1),
    NoneType: Between(1),
    float: Within("(-inf, inf)"),
    tuple: Bounds(),
    dict: partial(check_type, wanted=Mapping),
}


class Fields:
    """The fields of a configuration; a field that no table names is refused.

    Example:
        >>> from deqseq.integrations.foreign.engine import Fields, only, unused
        >>> fields = Fields({"width": 4, "hieght": 2}, "toy configuration: ")
        >>> fields.take(
        ...     {
        ...         "width": ("d_model", int),
        ...         "height": 1,
        ...         **only(bias=False),
        ...         **unused("author"),
        ...     }
        ... )
        {'d_model': 4, 'height': 1}
        >>> fields.close()
        Traceback (most recent call last):
        ...
        ValueError: toy configuration: 'hieght' is unknown; did you mean 'height'? (known: width,
        height, bias, author)
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content = content
        self.where = where
        self._known: dict[str, None] = {}

    def take(self, table: Table) -> dict[str, Any]:
        """The fields that describe the model, under our names."""
        taken: dict[str, Any] = {}
        for name, entry in table.items():
            self._known[name] = None
            if isinstance(entry, tuple):
                our_name, wanted = entry
                taken[our_name] = self.read(name, wanted)
            elif isinstance(entry, Only):
                self.read(name, entry)
            elif entry is not None:
                taken[name] = self.read(name, entry)
        return taken

    def read(self, name: str, wanted: Any) -> Any:
        """The value of a field.

        ``wanted`` is a default, whose type the value must have; or a type, if the field is
        required; or :class:`Only`. A default of None is that of an integer. Integers other than the
        default are at least 1.
        """
        self._known[name] = None
        called = f"{self.where}{name!r}"
        default = wanted.default if isinstance(wanted, Only) else wanted
        missing = name not in self.content
        if missing and isinstance(default, type):
            raise ValueError(f"{called} is missing")
        value: Any = default if missing else self.content[name]
        if isinstance(wanted, Only):
            if value not in wanted.values:
                values = " or ".join(map(repr, wanted.values))
                note = " (the default)" if missing else ""
                raise ValueError(
                    f"{called} must be {values}, got {value!r}{note}: deqseq computes nothing else"
                )
            return value
        kind = default if isinstance(default, type) else type(default)
        if kind is tuple and isinstance(value, list):
            # transformers writes infinity as {"__float__": "Infinity"}
            value = tuple(float(x["__float__"]) if isinstance(x, Mapping) else x for x in value)
        if type(value) is not type(default) or value != default:
            _CHECKS[kind](called, value)
        return float(value) if kind is float else value

    def inner(self, name: str, wanted: Any = dict) -> "Fields":
        """The fields of a field that is a mapping."""
        return Fields(self.read(name, wanted), f"{self.where}{name}: ")

    def close(self) -> None:
        """Refuse fields that have not been read."""
        for name in self.content:
            check_known(self.where.rstrip(), name, self._known)


class Foreign(NamedTuple):
    """What a configuration describes.

    ``rules`` replace patterns in our names of tensors by theirs. Where their tensor is more than
    ours, ``slices`` take ours from it, by the end of our name.
    """

    spec: LanguageModelSpec
    rules: Mapping[str, str] = {}
    slices: Mapping[str, Callable[[Tensor], Tensor]] = {}


Reader = Callable[[Fields, Weights], Foreign]

_UNUSED = re.compile(r"(^freqs_cis|\.rotary_emb\.inv_freq|^model\.early_exit_gate\.(weight|bias))$")
"""Tensors that follow from the configuration, in older files; the gate of Ouro, which chooses the
last loop at the only threshold that is read.
"""


def described(config: Mapping[str, Any], state: Weights, readers: Mapping[str, Reader]) -> Foreign:
    """The model that a configuration and a state dict describe, by the reader of its kind."""
    for name, tensor in state.items():
        check_type("a name in state", name, str)
        check_type(f"state[{name!r}]", tensor, Tensor)
        if tensor.is_meta:
            raise ValueError(
                f"state[{name!r}] has no values, because it is on the meta device: load the "
                "weights first"
            )
    kind = "mamba_ssm"  # the only library that does not write a model_type
    if "ssm_cfg" not in config:
        kinds = Only(*readers, default=str)
        kind = Fields(config, "configuration: ").read("model_type", kinds)
    return readers[kind](Fields(config, f"{kind} configuration: "), state)


def loaded(foreign: Foreign, state: Weights) -> CausalLM:
    """The model with copies of another library's tensors; ValueError lists those that do not fit.

    A head that is stored although it is tied must be the embedding.
    """
    with torch.device("meta"):
        lm = foreign.spec.build()
    unexpected = {name: x for name, x in state.items() if not _UNUSED.search(name)}
    ours: dict[str, Tensor] = {}
    for name in lm.state_dict():
        their_name = foreign_name(name, foreign.rules)
        unexpected.pop(their_name, None)
        if their_name in state:
            tensor = state[their_name].detach()
            ending = ".".join(name.split(".")[-2:])
            if ending in foreign.slices:
                tensor = foreign.slices[ending](tensor)
            ours[name] = tensor.clone()
    head = foreign_name("head.weight", foreign.rules)
    embedding = foreign_name("embedding.weight", foreign.rules)
    tied = unexpected.pop(head, None)
    if tied is not None and not torch.equal(tied, state.get(embedding, tied)):
        raise ValueError(
            f"the configuration ties the head, but {head!r} differs from {embedding!r}: untie "
            "them there"
        )
    if bad := sorted(name for name, tensor in ours.items() if not torch.isfinite(tensor).all()):
        raise ValueError(f"the state dict has NaN or infinity in {', '.join(bad)}")
    try:
        lm.load_state_dict(ours | unexpected, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the state dict does not fit the configuration: {error}") from error
    return lm


def foreign_name(name: str, rules: Mapping[str, str]) -> str:
    """Their name of our tensor."""
    for pattern, replacement in rules.items():
        name = re.sub(pattern, replacement, name)
    return name
