"""Pretrained Llama and Mamba2 weights in explicit models, and as the initial weights of implicit ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from deqseq.check import check_flag, check_type
from deqseq.config import SolveConfig
from deqseq.gradients import Phantom
from deqseq.integrations.pretrained_config import Source, pretrained_spec, source_of
from deqseq.integrations.reference_weights import assembled, expected, renamed, without_tied_head
from deqseq.layers import apply_weight_norm
from deqseq.models.causal_lm import CausalLM
from deqseq.models.specification import LanguageModelSpec
from deqseq.stop import Stop

FROM_INPUT = SolveConfig(stop=Stop(rtol=0.05, max_steps=4), gradient=Phantom(steps=1), start="input")
"""At most 4 iterations, from the embedded tokens, then 1 phantom step: for the beginning of fine-tuning."""

_NAMES: Mapping[Source, tuple[str, str]] = {
    "transformers Llama": ("model.embed_tokens.weight", "model."),
    "transformers Mamba2": ("backbone.embeddings.weight", "backbone."),
    "mamba_ssm Mamba2": ("backbone.embedding.weight", "backbone."),
}
_HEAD = "lm_head.weight"


def from_pretrained_model(
    model: object,
    state: Mapping[str, Tensor] | None = None,
    *,
    implicit: bool,
    solve: SolveConfig | None = None,
    eval_solve: SolveConfig | None = None,
    weight_norm: bool | None = None,
) -> CausalLM:
    r"""A language model with the weights of a pretrained one.

    An explicit one computes what the pretrained one does. An implicit one has the same layers, and an injection whose
    weights are zero; its iteration starts at the embedded tokens :math:`e`, so that the first iteration is the
    pretrained model,

    .. math:: z^{(1)} = f(e, u) = f(e, 0), \qquad u = W\, \mathrm{RMSNorm}(e) + b, \quad W = 0,\ b = 0.

    With ``Stop.exactly(1)`` the model predicts as the pretrained one, in every sweep except ``Sliding`` with a window
    above 1, whose later tokens are iterated further while the first is committed (so give ``generate`` another
    ``sweep``). Further iterations feed the layers with their own output, for which they were never trained. As long as
    the injection is zero, the map does not depend on the tokens, which enter only by the start: a converged solve
    only remembers which fixed point the start led to. So train the model before you use it. Fine-tune with few
    iterations first, as the default does (4, then 1 phantom step), and allow more once the loss has settled. From the
    embedded tokens a model may learn to pass the tolerance without having a fixed point: score it at two tolerances
    and with two sweeps. If it is to be solved to its fixed point, set ``start="zero"`` before you fine-tune, which
    loses more of the pretraining. With a phantom or implicit gradient the embedding learns through the injection and
    the tied head; ``Unrolled()`` with ``Stop.exactly(1)`` gives the gradients of the pretrained model.

    Args:
        model: a ``LlamaForCausalLM``, ``Mamba2ForCausalLM`` or ``MambaLMHeadModel``; or the configuration of one, as
            :func:`~deqseq.integrations.pretrained_config.pretrained_spec` takes it.
        state: the state dict that belongs to a configuration, with the head unless the configuration ties it. Default:
            that of the model.
        implicit: whether to make an implicit model; the arguments that follow are for this one alone.
        solve: how it is solved; its ``start`` must be ``"input"``. Default: :data:`FROM_INPUT`.
        eval_solve: the same in eval mode. Default: ``solve``.
        weight_norm: whether its weights are normalised, :math:`w = g\,v / \lVert v \rVert` with the same :math:`w`.
            Default: they are, as in the paper.

    Returns:
        The model, with copies of the weights in their own dtypes; a new injection has the dtype of the embedding.

    Raises:
        TypeError: neither a model with a configuration, nor a configuration with its ``state``; or another argument of
            the wrong type.
        ValueError: something that the layers do not compute; missing or unexpected tensors, or some of another shape,
            all of them named; a start at zero, from which nothing depends on the tokens; or how to solve an explicit
            model.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> theirs = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
        >>> ours = from_pretrained_model(theirs, implicit=True).eval()
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> with torch.no_grad():
        ...     torch.allclose(ours(ids, stop=Stop.exactly(1)).logits, theirs(ids).logits, atol=1e-5)
        True
        >>> same = from_pretrained_model(theirs.config, theirs.state_dict(), implicit=True)
        >>> same.model.solve.start, same.model.backbone.injection.bias.abs().max().item()
        ('input', 0.0)
    """
    _check_solves(implicit, {"solve": solve, "eval_solve": eval_solve}, weight_norm)
    check_type("state", state, (Mapping, type(None)), "model.state_dict()")
    config = model
    if state is None:
        config = getattr(model, "config", None)
        if config is None or not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a transformers model, or a configuration with its state dict, got {model!r:.60}: "
                "load it first, as AutoModelForCausalLM.from_pretrained(name)"
            )
        state = model.state_dict()
    spec = pretrained_spec(config)
    if implicit:
        injected = replace(spec.backbone, injection=True)
        spec = replace(spec, backbone=injected, solve=solve or FROM_INPUT, eval_solve=eval_solve)
    lm = assembled(spec, _translated(source_of(config), state, spec))
    if implicit and weight_norm is not False:
        backbone: Any = lm.model.backbone
        apply_weight_norm(backbone)
        backbone.config = replace(backbone.config, weight_norm=True)
    return lm


def _check_solves(implicit: bool, solves: Mapping[str, SolveConfig | None], weight_norm: bool | None) -> None:
    check_flag("implicit", implicit)
    for name, solve in solves.items():
        check_type(name, solve, (SolveConfig, type(None)), "dq.SolveConfig(start='input')")
    if weight_norm is not None:
        check_flag("weight_norm", weight_norm)
    given = [name for name, value in {**solves, "weight_norm": weight_norm}.items() if value]
    if given and not implicit:
        raise ValueError(f"leave out {', '.join(given)}, or give implicit=True: an explicit model runs as it is")
    for name, solve in solves.items():
        if solve is not None and solve.start != "input":
            raise ValueError(
                f"{name}.start must be 'input', got {solve.start!r}: the new injection is zero, and from zero the "
                "output would not depend on the tokens"
            )


def _translated(source: Source, state: Mapping[str, Tensor], spec: LanguageModelSpec) -> dict[str, Tensor]:
    """A pretrained state dict under our names, with an injection of zero if the specification has one."""
    embedding, prefix = _NAMES[source]
    # older transformers saved the rotary frequencies, which follow from the configuration
    state = {name: tensor for name, tensor in state.items() if not name.endswith(".rotary_emb.inv_freq")}
    if spec.tied:
        state = without_tied_head(state, _HEAD, embedding)

    def name_of(ours: str) -> str:
        special = {"embedding.weight": embedding, "head.weight": _HEAD}
        return special.get(ours, ours.replace("model.backbone.", prefix))

    weights = renamed(state, expected(spec.explicit()), name_of)
    like = weights["embedding.weight"]
    # an injection that adds nothing: its norm is the identity, its weights and bias are zero
    missing = {name: shape for name, shape in expected(spec).items() if name not in weights}
    new = {name: (like.new_ones if "norm" in name else like.new_zeros)(shape) for name, shape in missing.items()}
    return weights | new
