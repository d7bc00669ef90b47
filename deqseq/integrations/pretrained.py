"""Pretrained Llama and Mamba2 weights in explicit models of ours, and as the beginning of implicit ones."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from deqseq.gradients import Phantom
from deqseq.integrations.checkpoints import assembled, expected, renamed, without_tied_head
from deqseq.integrations.pretrained_config import Source, pretrained_spec, source_of
from deqseq.models.causal_lm import CausalLM
from deqseq.models.specification import LanguageModelSpec, Solving
from deqseq.stop import Stop

FROM_INPUT = Solving(stop=Stop(rtol=0.05, max_steps=4), gradient=Phantom(steps=1), start="input")
"""At most 4 self-iterations, from the embedded tokens, then 1 phantom step: what to begin fine-tuning with."""

_NAMES: Mapping[Source, tuple[str, str]] = {
    "transformers Llama": ("model.embed_tokens.weight", "model."),
    "transformers Mamba2": ("backbone.embeddings.weight", "backbone."),
    "mamba_ssm Mamba2": ("backbone.embedding.weight", "backbone."),
}
_HEAD = "lm_head.weight"
_INJECTION = "model.backbone.injection."
_MAGNITUDE, _DIRECTION = ".parametrizations.weight.original0", ".parametrizations.weight.original1"


def from_pretrained_backbone(
    config: object,
    state: Mapping[str, Tensor],
    *,
    implicit: bool,
    solving: Solving = FROM_INPUT,
    weight_norm: bool = True,
) -> CausalLM:
    r"""A language model of ours with the weights of a pretrained one.

    An explicit one computes what the pretrained one does. An implicit one has the same layers, and an injection whose
    weights are zero; its iteration starts at the embedded tokens :math:`e`, so that the first self-iteration is the
    pretrained model,

    .. math:: z^{(1)} = f(e, u) = f(e, 0), \qquad u = W\, \mathrm{RMSNorm}(e) + b, \quad W = 0,\ b = 0.

    What this is worth: with ``Stop.exactly(1)`` the model predicts as the pretrained one, in every sweep but
    ``Sliding`` with a window above 1, whose tokens go on while the first is committed (so name the ``sweep`` of
    ``generate``).
    Further self-iterations feed the layers with their own output, which they were never trained for. As long as the
    injection is zero, the map does not depend on the tokens, which enter by the start alone: a converged solve keeps
    no more of them than to which of the map's fixed points the start led. So it is of no use before training.
    Fine-tune with few self-iterations first, as the default does (4, then 1 phantom step), and allow more once the
    loss has settled. From the embedded tokens a model may learn to pass the tolerance without having a fixed point:
    score it at two tolerances and with two sweeps. If it is to be solved to its fixed point, set ``start="zero"``
    before you fine-tune, which costs more of what was pretrained. With a phantom or implicit
    gradient the embedding learns through the injection and the tied head; ``Unrolled()`` with ``Stop.exactly(1)``
    gives the pretrained model's own gradients.

    Args:
        config: of the pretrained model, as :func:`~deqseq.integrations.pretrained_config.pretrained_spec` takes it.
        state: its state dict, with the head that the configuration does not tie; it is copied.
        implicit: whether to make an implicit model.
        solving: how that one is solved; its ``start`` must be ``"input"``.
        weight_norm: whether that one's weights are normalised, :math:`w = g\,v / \lVert v \rVert` with the same
            :math:`w`, as in the paper.

    Returns:
        The model; weights keep their dtypes, those of a new injection have the dtype of the embedding.

    Raises:
        ValueError: something that the layers do not compute, tensors that are missing, too many or of another shape,
            or a start at zero, from where nothing depends on the tokens.

    Example:
        >>> import deqseq as dq
        >>> config = {"d_model": 16, "n_layer": 1, "vocab_size": 8, "ssm_cfg": {"layer": "Mamba2", "headdim": 8}}
        >>> names = {"embedding.weight": "backbone.embedding.weight"}
        >>> state = {
        ...     names.get(name, name.removeprefix("model.")): tensor
        ...     for name, tensor in pretrained_model_spec(config, implicit=False).build().state_dict().items()
        ... }
        >>> explicit = from_pretrained_backbone(config, state, implicit=False)
        >>> implicit = from_pretrained_backbone(config, state, implicit=True)
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> with torch.no_grad():
        ...     one = implicit(ids, stop=dq.Stop.exactly(1)).logits
        ...     torch.allclose(one, explicit(ids).logits, atol=1e-5)
        True
    """
    spec = pretrained_model_spec(config, implicit=implicit, solving=solving, weight_norm=weight_norm)
    return assembled(spec, from_pretrained_state(config, state, spec))


def from_pretrained_model(
    model: nn.Module, *, implicit: bool, solving: Solving = FROM_INPUT, weight_norm: bool = True
) -> CausalLM:
    """The same, from a model of transformers or mamba_ssm that has been loaded.

    Args:
        model: a ``LlamaForCausalLM``, ``Mamba2ForCausalLM`` or ``MambaLMHeadModel``.
        implicit: whether to make an implicit model.
        solving: how that one is solved.
        weight_norm: whether that one's weights are normalised.

    Returns:
        The model, with copies of the weights.

    Raises:
        TypeError: a model without a configuration.
        ValueError: what :func:`from_pretrained_backbone` refuses.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> theirs = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> with torch.no_grad():
        ...     logits = from_pretrained_model(theirs, implicit=False)(ids).logits
        ...     torch.allclose(logits, theirs(ids).logits, atol=1e-5)
        True
    """
    config = getattr(model, "config", None)
    if config is None:
        raise TypeError(f"{type(model).__name__} has no config: call from_pretrained_backbone(config, state_dict)")
    weights = model.state_dict()
    return from_pretrained_backbone(config, weights, implicit=implicit, solving=solving, weight_norm=weight_norm)


def pretrained_model_spec(
    config: object, *, implicit: bool, solving: Solving = FROM_INPUT, weight_norm: bool = True
) -> LanguageModelSpec:
    """The specification of what :func:`from_pretrained_backbone` makes.

    Args:
        config: of the pretrained model.
        implicit: whether it is to be an implicit model.
        solving: how that one is solved.
        weight_norm: whether that one's weights are normalised.

    Returns:
        The specification.

    Raises:
        ValueError: a configuration that the layers do not compute, or a start at zero.

    Example:
        >>> config = {"d_model": 16, "n_layer": 1, "vocab_size": 8, "ssm_cfg": {"layer": "Mamba2", "headdim": 8}}
        >>> pretrained_model_spec(config, implicit=True).solving.start
        'input'
    """
    explicit = pretrained_spec(config)
    if not implicit:
        return explicit
    if solving.start != "input":
        raise ValueError(
            f"solving.start must be 'input', got {solving.start!r}: the new injection is zero, and from zero the "
            "model's output would not depend on its tokens"
        )
    backbone = replace(explicit.backbone, injection=True, weight_norm=weight_norm)
    return replace(explicit, backbone=backbone, solving=solving)


def from_pretrained_state(config: object, state: Mapping[str, Tensor], spec: LanguageModelSpec) -> dict[str, Tensor]:
    """A pretrained state dict under our names, with an injection of zero if the specification has one.

    Args:
        config: of the pretrained model.
        state: its weights.
        spec: of :func:`pretrained_model_spec`.

    Returns:
        What ``spec.build().load_state_dict`` takes.

    Raises:
        ValueError: tensors that are missing, too many or of another shape, all of them named; or a tied head that is
            not the embedding.

    Example:
        >>> config = {"d_model": 16, "n_layer": 1, "vocab_size": 8, "ssm_cfg": {"layer": "Mamba2", "headdim": 8}}
        >>> explicit, implicit = (pretrained_model_spec(config, implicit=wanted) for wanted in (False, True))
        >>> names = {"embedding.weight": "backbone.embedding.weight"}
        >>> ours = explicit.build().state_dict()
        >>> theirs = {names.get(name, name.removeprefix("model.")): tensor for name, tensor in ours.items()}
        >>> from_pretrained_state(config, theirs, implicit)["model.backbone.injection.bias"].abs().max()
        tensor(0.)
    """
    embedding, prefix = _NAMES[source_of(config)]
    # older transformers saved the rotary frequencies, which follow from the configuration
    state = {name: tensor for name, tensor in state.items() if not name.endswith(".rotary_emb.inv_freq")}
    if spec.tied:
        state = without_tied_head(state, _HEAD, embedding)

    def name_of(ours: str) -> str:
        special = {"embedding.weight": embedding, "head.weight": _HEAD}
        return special.get(ours, ours.replace("model.backbone.", prefix))

    explicit = replace(spec.explicit(), backbone=replace(spec.backbone, weight_norm=False))
    weights = renamed(state, expected(explicit), name_of)
    if spec.solving is not None:
        shapes = expected(replace(spec, backbone=replace(spec.backbone, weight_norm=False)))
        weights |= _silent_injection(shapes, weights["embedding.weight"])
    return _weight_normed(weights) if spec.backbone.weight_norm else weights


def _silent_injection(shapes: Mapping[str, torch.Size], like: Tensor) -> dict[str, Tensor]:
    """An injection that adds nothing: its norm is the identity, its weights and bias are zero."""
    zeros = {name: like.new_zeros(shape) for name, shape in shapes.items() if name.startswith(_INJECTION)}
    norm = "model.backbone.injection_norm.weight"
    return zeros | {norm: like.new_ones(shapes[norm])}


def _weight_normed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights as magnitude and direction, wherever the library normalises them."""
    normed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        part, _, kind = name.rpartition(".")
        if kind != "weight" or weight.ndim < 2 or not part.startswith("model.backbone."):
            normed[name] = weight
            continue
        magnitude = torch.norm_except_dim(weight, 2, 0)
        if bool((magnitude == 0).any()):  # a row of zeros has no direction, and 0 / 0 is not a number
            weight = torch.where(magnitude == 0, _directions(weight), weight)
        normed[part + _MAGNITUDE], normed[part + _DIRECTION] = magnitude, weight
    return normed


def _directions(like: Tensor) -> Tensor:
    """Random rows, along which a magnitude of zero can grow."""
    bound = 1 / math.sqrt(like[0].numel())
    return torch.empty_like(like).uniform_(-bound, bound)
