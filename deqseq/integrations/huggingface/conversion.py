"""From this library's language models and the paper's checkpoints to models of transformers; and back."""

import copy
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from deqseq.annotations import checked
from deqseq.integrations.foreign import from_pretrained
from deqseq.integrations.foreign.files import content_of
from deqseq.integrations.huggingface.configuration import DeqseqConfig
from deqseq.integrations.huggingface.decoder import DecoderBackbone, language_model
from deqseq.integrations.huggingface.modeling_causal_lm import DeqseqForCausalLM
from deqseq.models import CausalLM
from deqseq.models.specification import specification_of

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@checked
def from_causal_lm(lm: CausalLM, **fields: Any) -> DeqseqForCausalLM:
    """A model of transformers made of the parts of a :class:`deqseq.CausalLM`; weights are shared, not copied.

    ``config.solve`` of the result is also how ``lm`` is solved from now on.

    Args:
        lm: of Mamba2 and Llama backbones, or of the layers of a transformers decoder: implicit, explicit, looped, or a
            :class:`deqseq.RecurrentDepth`, such as one from :func:`retrofit`.
        **fields: fields of the configuration that ``lm`` does not decide, such as ``eos_token_id``.

    Returns:
        A model that computes the same, and can be saved.

    Raises:
        TypeError: a model of transformers; or a backbone, injection, solver, gradient or sweep that a configuration
            cannot name.
        ValueError: parts that share weights; a norm other than the coda's; a field that ``lm`` decides; weights that
            follow from no configuration.

    Example:
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> model = from_causal_lm(spec.build(), eos_token_id=0)
        >>> model.config.hidden_size, model.config.eos_token_id
        (16, 0)
    """
    decoders = [part.config for part in lm.model.modules() if isinstance(part, DecoderBackbone)]
    if any(config is not decoders[0] for config in decoders):
        raise ValueError("prelude, core and coda must be layers of one decoder, as those of retrofit(model, ...)")
    inherited: dict[str, Any] = {"initializer_range": 0.02}
    if decoders:
        names = ("initializer_range", *_TOKENS)
        inherited |= {name: getattr(decoders[0], name) for name in names if hasattr(decoders[0], name)}
        inherited["decoder_config"] = copy.deepcopy(decoders[0])
    fields = inherited | fields
    spec = specification_of(lm, fields.pop("initializer_range"))
    config = DeqseqConfig.from_specification(spec, **fields)
    with torch.device("meta"):  # its own weights would be drawn for nothing
        model = DeqseqForCausalLM(config)
    described, given = (
        {name: tensor.shape for name, tensor in one.state_dict().items()} for one in (model.model.core, lm.model)
    )
    if wrong := sorted(name for name in described | given if described.get(name) != given.get(name)):
        raise ValueError(f"lm has other weights than its configuration describes: {', '.join(wrong[:8])}")
    model.model.core, model.model.embed_tokens = lm.model, lm.embedding  # pyright: ignore[reportAttributeAccessIssue]
    model.model.take_solves()
    if lm.head is not None:
        model.lm_head = lm.head
    model.tie_weights()
    return model.train(lm.training)


@checked
def to_causal_lm(model: DeqseqForCausalLM) -> CausalLM:
    """The parts of a model of transformers as a :class:`deqseq.CausalLM`; weights are shared, not copied.

    Its ``core.solve`` stays that of ``model.config``.

    Args:
        model: of this package.

    Returns:
        A language model that computes the same.

    Raises:
        TypeError: another model.

    Example:
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.LlamaConfig(d_model=16, n_heads=2))
        >>> lm = spec.build()
        >>> to_causal_lm(from_causal_lm(lm)).model is lm.model
        True
    """
    config, head = model.config, None if model.config.tie_word_embeddings else model.lm_head
    numbers = {name: getattr(config, name) for name in ("embedding_dropout", "embedding_scale", "logit_softcap")}
    return language_model(model.model.core, model.model.embed_tokens, head, **numbers).train(model.training)


def from_reference_folder(folder: str | PathLike[str], **fields: Any) -> DeqseqForCausalLM:
    """A model that the paper's reference code has saved.

    ``save_pretrained`` of the result writes a checkpoint that ``AutoModelForCausalLM`` loads.

    Args:
        folder: with ``config.json`` and weights: ``*.safetensors``, or else ``pytorch_model*.bin``, read with
            ``weights_only=True``.
        **fields: fields of our configuration that the reference does not have.

    Returns:
        The model in eval mode, its weights in their own dtypes.

    Raises:
        FileNotFoundError: no configuration, or no weights.
        ValueError: fields without an equivalent here, or weights that do not fit; names all of them.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, and its public code.

    Example:
        >>> from_reference_folder("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: folder_or_name: there is no folder nowhere; a name on the hub is 'owner/model'
    """
    lm, config = from_pretrained(folder), content_of(Path(folder) / "config.json")
    return from_causal_lm(lm, **{name: config[name] for name in _TOKENS if name in config} | fields)
