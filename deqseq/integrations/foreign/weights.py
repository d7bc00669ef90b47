"""Weights under other names and in other layouts: one engine, which runs the rules of every model."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deqseq.integrations.fields import Fields, Only
from deqseq.models import CausalLM, LanguageModelSpec

Rule = tuple[str, str] | tuple[str, str, Callable[[Tensor], Tensor]]
"""A pattern in our names, what replaces it in theirs, and which part of their tensor is ours. Default: all of it."""

Foreign = tuple[LanguageModelSpec, tuple[Rule, ...], nn.Module | None]
"""What a configuration and a state dict describe: a model, the rules of its weights, and :attr:`Looped.choose`."""
Reader = Callable[[Fields, Mapping[str, Tensor]], Foreign]

_COMPUTED = re.compile(r"(^freqs_cis|\.rotary_emb\.inv_freq)$")
"""Tensors that older files have and that follow from the configuration."""


def described(config: Mapping[str, Any], state: Mapping[str, Tensor], readers: Mapping[str, Reader]) -> Foreign:
    """What a configuration and a state dict describe, read by the reader for their kind."""
    kinds = Only(*readers, default="mamba_ssm" if "ssm_cfg" in config else str)
    kind = Fields(config, "configuration: ").read("model_type", kinds)
    return readers[kind](Fields(config, f"{kind} configuration: "), state)


def loaded(
    spec: LanguageModelSpec, state: Mapping[str, Tensor], rules: Sequence[Rule] = (), choose: nn.Module | None = None
) -> CausalLM:
    """A model with copies of another library's tensors; ValueError lists those that do not fit.

    ``choose`` is that of its :class:`deqseq.Looped`. A head that is stored although it is tied must be the embedding.
    """
    with torch.device("meta"):
        lm = spec.build()
    if choose is not None:
        lm.model.backbone.choose = choose  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    unused, found = {name: x for name, x in state.items() if not _COMPUTED.search(name)}, dict[str, Tensor]()
    for name in lm.state_dict():
        theirs, part = foreign_name(name, rules)
        unused.pop(theirs, None)
        if theirs in state:
            found[name] = part(state[theirs]).detach().clone()
    head, embedding = (foreign_name(name, rules)[0] for name in ("head.weight", "embedding.weight"))
    if (tied := unused.pop(head, None)) is not None and not torch.equal(tied, state.get(embedding, tied)):
        raise ValueError(f"the configuration ties the head, but {head!r} differs from {embedding!r}: untie them there")
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
