"""From this library's language models and presets, and the paper's checkpoints, to models of transformers; and back."""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from deqseq.backbones import Llama, LlamaConfig, Mamba2
from deqseq.check import check_type
from deqseq.integrations.foreign import from_reference
from deqseq.integrations.foreign.files import add_tensors, config_in, tensors_in
from deqseq.integrations.huggingface.blocks import config_of
from deqseq.integrations.huggingface.configuration import joined_fields
from deqseq.integrations.huggingface.llama import ImplicitLlamaConfig
from deqseq.integrations.huggingface.mamba2 import ImplicitMamba2Config
from deqseq.integrations.huggingface.modeling_causal_lm import ImplicitCausalLM
from deqseq.integrations.huggingface.parts import parts_of
from deqseq.integrations.huggingface.recurrent_depth import RecurrentDepthConfig
from deqseq.models import CausalLM, ImplicitModel, LanguageModelSpec, RecurrentDepth, preset

_NUMBERS = ("embedding_dropout", "embedding_scale", "logit_softcap")


def preset_config(name: str, **fields: Any) -> ImplicitMamba2Config | ImplicitLlamaConfig:
    """One of the paper's models as a configuration.

    Args:
        name: a key of :data:`deqseq.PRESETS`.
        **fields: fields to replace, as in ``AutoConfig.from_pretrained``. Sizes left to their defaults, such as
            ``head_dim``, are computed from the given ones.

    Returns:
        The configuration. Those of language models have the end-of-text token of the GPT-NeoX tokenizer, 0, which
        begins and ends documents; the state-tracking model has none.

    Raises:
        TypeError: a name that is no string.
        ValueError: an unknown name or field, with the nearest known ones.

    Example:
        >>> config = preset_config("mamba2-130m-implicit", num_hidden_layers=2)
        >>> config.hidden_size, config.num_hidden_layers, config.eos_token_id
        (768, 2, 0)
    """
    spec = preset(name)
    text = {} if name.endswith("-state-tracking") else {"bos_token_id": 0, "eos_token_id": 0}
    config = _config(spec, **text)
    follow = [field for ours, field in config.sizes.items() if getattr(spec.backbone, ours) is None]
    content = {field: value for field, value in config.to_dict().items() if field not in follow}
    solves = {field: fields.pop(field) for field in ("solve", "eval_solve") if field in fields}
    return config.from_dict(content | fields, **solves)


def from_causal_lm(lm: CausalLM, **fields: Any) -> ImplicitCausalLM:
    """A model of transformers made of the parts of a :class:`deqseq.CausalLM`; weights are shared, not copied.

    Args:
        lm: with a Mamba2 or a Llama as its backbone; a :class:`deqseq.RecurrentDepth` of these, such as a released one
            from :func:`deqseq.integrations.foreign.from_pretrained`; or from :func:`retrofit`.
        **fields: fields of the configuration that ``lm`` does not decide, such as ``eos_token_id``.

    Returns:
        A model that computes the same, and can be saved.

    Raises:
        TypeError: a model of transformers; another backbone; or an injection, solver, gradient or sweep that a
            configuration cannot name.
        ValueError: a :class:`deqseq.RecurrentDepth` whose parts share weights, or with a norm other than the coda's; a
            field that ``lm`` decides; weight normalisation on some layers of a backbone only; or no soft
            cap in a decoder's model that had one.

    Example:
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> model = from_causal_lm(spec.build(), eos_token_id=0)
        >>> model.config.hidden_size, model.config.eos_token_id
        (16, 0)
    """
    check_type("lm", lm, CausalLM, "deqseq.integrations.foreign.from_pretrained_model(model, implicit=True)")
    config = _config_of(lm, **fields)
    with torch.device("meta"):  # its own weights would be drawn for nothing
        model: ImplicitCausalLM = AutoModelForCausalLM.from_config(config)
    model.model.core, model.model.embed_tokens = lm.model, lm.embedding  # pyright: ignore[reportAttributeAccessIssue]
    if lm.head is not None:
        model.lm_head = lm.head
    model.tie_weights()
    return model.train(lm.training)


def to_causal_lm(model: ImplicitCausalLM) -> CausalLM:
    """The parts of a model of transformers as a :class:`deqseq.CausalLM`; weights are shared, not copied.

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
    check_type("model", model, ImplicitCausalLM)
    config, tied = model.config, model.config.tie_word_embeddings
    numbers = {name: getattr(config, name) for name in _NUMBERS}
    with torch.device("meta"):  # its own weights would be drawn for nothing
        lm = CausalLM(config.vocab_size, model.model.core, tied=tied, **numbers)
    lm.embedding, lm.head = model.model.embed_tokens, None if tied else model.lm_head
    return lm.train(model.training)


def from_reference_folder(folder: str | PathLike[str], **fields: Any) -> ImplicitCausalLM:
    """A model that the paper's reference code has saved.

    ``AutoConfig`` reads the reference's ``config.json`` as it is, but its weights have other names. ``save_pretrained``
    of the result writes a checkpoint that ``AutoModelForCausalLM`` loads.

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
        FileNotFoundError: nowhere has no config.json
    """
    config = config_in(path := Path(folder))
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    return from_causal_lm(from_reference(config, _weights(path)), **tokens | fields).eval()


def _config(spec: LanguageModelSpec, **fields: Any) -> ImplicitMamba2Config | ImplicitLlamaConfig:
    kind = ImplicitLlamaConfig if isinstance(spec.backbone, LlamaConfig) else ImplicitMamba2Config
    return kind.from_specification(spec, **fields)


def _config_of(lm: CausalLM, **fields: Any) -> ImplicitMamba2Config | ImplicitLlamaConfig | RecurrentDepthConfig:
    core, shared = lm.model, {name: getattr(lm, name) for name in _NUMBERS}
    tied = lm.head is None or lm.head.weight is lm.embedding.weight
    if isinstance(core, RecurrentDepth):
        sizes = {"vocab_size": lm.embedding.num_embeddings, "tie_word_embeddings": tied}
        config = RecurrentDepthConfig(**joined_fields(parts_of(core) | sizes | shared, fields))
        if lm.logit_softcap is None and config.logit_softcap is not None:  # None stands for the decoder's there
            raise ValueError(f"lm.logit_softcap must be the decoder's, {config.logit_softcap}, or another, got None")
        return config
    backbone = core.backbone
    if not isinstance(backbone, Mamba2 | Llama):
        raise TypeError(f"the backbone must be a Mamba2 or a Llama, got {type(backbone).__name__}")
    if isinstance(core, ImplicitModel) != backbone.config.injection:
        raise TypeError(
            "an implicit model must have a backbone with injection=True (Ouro's has none), an explicit one with "
            f"injection=False, got {type(core).__name__} with injection={backbone.config.injection}"
        )
    solves = (core.solve, core.eval_solve) if isinstance(core, ImplicitModel) else (None, None)
    sizes = {"tied": tied, **shared}
    return _config(LanguageModelSpec(lm.embedding.num_embeddings, config_of(backbone), *solves, **sizes), **fields)


def _weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the names in its files."""
    tensors, whole = tensors_in(path), path / "pytorch_model.bin"
    files = [whole] if whole.is_file() else sorted(path.glob("pytorch_model*.bin"))
    for file in () if tensors else files:
        add_tensors(tensors, torch.load(file, map_location="cpu", weights_only=True), file)
    if not tensors:
        raise FileNotFoundError(f"there are no weights in {path}: neither *.safetensors nor pytorch_model*.bin")
    return tensors
