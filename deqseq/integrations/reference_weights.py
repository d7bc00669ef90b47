"""Weights of the paper's reference code under our names, and back."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deqseq.integrations.reference_config import from_reference_config
from deqseq.models.causal_lm import CausalLM
from deqseq.models.specification import LanguageModelSpec

EMBEDDING, HEAD = "word_emb.emb.weight", "criterion.decoder.weight"

# our names and the reference's; the final norm comes first, because ".norm." is that of a block there
_PARTS: tuple[tuple[str, str], ...] = (
    ("model.backbone.norm.", "backbone.norm_f."),
    ("model.backbone.", "backbone."),
    ("parametrizations.weight.original0", "weight_g"),
    ("parametrizations.weight.original1", "weight_v"),
    (".self_attn.q_proj.", ".mixer.wq."),
    (".self_attn.k_proj.", ".mixer.wk."),
    (".self_attn.v_proj.", ".mixer.wv."),
    (".self_attn.o_proj.", ".mixer.out_proj."),
    (".mlp.gate_proj.", ".mlp.w1."),
    (".mlp.up_proj.", ".mlp.w3."),
    (".mlp.down_proj.", ".mlp.fc2."),
    (".input_layernorm.", ".norm."),
    (".post_attention_layernorm.", ".norm2."),
    (".post_norm.", ".norm2."),
)


def from_reference_state(state: Mapping[str, Tensor], spec: LanguageModelSpec) -> dict[str, Tensor]:
    """A state dict of the reference code under our names.

    Args:
        state: of its Mamba2 or Llama, explicit or implicit.
        spec: the model that the weights are for; :func:`from_reference_config` makes it.

    Returns:
        What ``spec.build().load_state_dict`` takes; the tensors are the same ones.

    Raises:
        ValueError: missing or unexpected tensors, or some of another shape, all of them named; or a tied head that
            differs from the embedding.

    Example:
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> theirs = to_reference_state(spec.build().state_dict(), spec)
        >>> spec.build().load_state_dict(from_reference_state(theirs, spec))
        <All keys matched successfully>
    """
    if spec.tied:
        state = without_tied_head(state, HEAD, EMBEDDING)
    return renamed(state, expected(spec), _reference_name)


def to_reference_state(state: Mapping[str, Tensor], spec: LanguageModelSpec) -> dict[str, Tensor]:
    """Our state dict under the names of the reference code.

    Args:
        state: of a model that ``spec`` builds.
        spec: the model.

    Returns:
        What the reference code saves; the tensors are the same ones. As there, a tied head is the same tensor under two
        names, which safetensors only writes if one is cloned.

    Raises:
        ValueError: missing or unexpected tensors, or some of another shape, all of them named.

    Example:
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.LlamaConfig(d_model=16, n_heads=2))
        >>> sorted(name for name in to_reference_state(spec.build().state_dict(), spec) if "layers" not in name)[:3]
        ['backbone.injection.bias', 'backbone.injection.weight_g', 'backbone.injection.weight_v']
    """
    ours = renamed(state, expected(spec), lambda name: name)
    theirs = {_reference_name(name): tensor for name, tensor in ours.items()}
    return theirs | {HEAD: theirs[EMBEDDING]} if spec.tied else theirs


def from_reference(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> CausalLM:
    """A model of the reference code, from its configuration and its weights.

    Args:
        config: the parsed ``config.json``.
        state: its state dict; it is copied.

    Returns:
        The model, its weights in their own dtypes.

    Raises:
        ValueError: as :func:`from_reference_config` and :func:`from_reference_state`.

    Example:
        >>> block = {"block_type": "mamba2", "block_cfg": {"d_state": 4, "headdim": 8}, "d_model": 16, "n_layer": 1}
        >>> block |= {"pre_norm": True, "d_inner": 0}
        >>> config = {"model_type": "implicit_mamba2", "backbone_type": "explicit", "backbone_config": block}
        >>> config |= {"n_tokens": 10, "vocab_size": 10, "d_embed": 16}
        >>> spec = from_reference_config(config)
        >>> lm = from_reference(config, to_reference_state(spec.build().state_dict(), spec))
        >>> type(lm.model).__name__
        'ExplicitModel'
    """
    spec = from_reference_config(config)
    return assembled(spec, from_reference_state(state, spec))


def assembled(spec: LanguageModelSpec, state: Mapping[str, Tensor]) -> CausalLM:
    """The model of a specification with copies of these weights; nothing else is allocated or initialised."""
    with torch.device("meta"):
        model = spec.build()
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, assign=True)
    return model


def expected(spec: LanguageModelSpec) -> dict[str, torch.Size]:
    """Our names of a model's tensors, and their shapes."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in spec.build().state_dict().items()}


def without_tied_head(state: Mapping[str, Tensor], head: str, embedding: str) -> dict[str, Tensor]:
    """The state dict without a tied head; ValueError if the head differs from the embedding."""
    rest = dict(state)
    if head in rest and embedding in rest and not torch.equal(rest.pop(head), rest[embedding]):
        raise ValueError(
            f"the configuration ties the head to the embedding, but {head!r} differs from {embedding!r}: untie them in "
            "the configuration"
        )
    return rest


def renamed(
    state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], name_of: Callable[[str], str]
) -> dict[str, Tensor]:
    """The tensors of a state dict under our names; ValueError lists those that do not fit.

    ``shapes`` are those expected under our names, and ``name_of`` maps such a name to that in ``state``.
    """
    names = {name: name_of(name) for name in shapes}
    missing, extra = sorted({*names.values()} - state.keys()), sorted(state.keys() - {*names.values()})
    found = {name: state[other] for name, other in names.items() if other in state}
    misshapen = [
        f"{names[name]} {tuple(tensor.shape)} instead of {tuple(shapes[name])}"
        for name, tensor in found.items()
        if tensor.shape != shapes[name]
    ]
    faults = {"missing": missing, "unexpected": extra, "of another shape": misshapen}
    listed = "; ".join(f"{len(which)} {what}: {', '.join(which)}" for what, which in faults.items() if which)
    if listed:
        raise ValueError(f"the state dict does not fit the specification: {listed}")
    return found


def _reference_name(ours: str) -> str:
    if ours in ("embedding.weight", "head.weight"):
        return EMBEDDING if ours == "embedding.weight" else HEAD
    for part, theirs in _PARTS:
        ours = ours.replace(part, theirs)
    return ours
