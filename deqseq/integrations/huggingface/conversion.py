"""From this library's language models to those of transformers, and back; weights are shared, not copied."""

from typing import Any, cast

import torch

from deqseq.backbones import Llama, LlamaConfig, Mamba2, Mamba2Config
from deqseq.integrations.huggingface.configuration_llama import ImplicitLlamaConfig
from deqseq.integrations.huggingface.configuration_mamba2 import ImplicitMamba2Config
from deqseq.integrations.huggingface.modeling_causal_lm import ImplicitCausalLM
from deqseq.integrations.huggingface.models import ImplicitLlamaForCausalLM, ImplicitMamba2ForCausalLM
from deqseq.models import CausalLM, ImplicitModel, LanguageModelSpec, Solving
from deqseq.models.implicit import Start
from deqseq.solvers import Solver


def from_causal_lm(lm: CausalLM, **fields: Any) -> ImplicitMamba2ForCausalLM | ImplicitLlamaForCausalLM:
    """A model of transformers around the parts of a :class:`deqseq.CausalLM`, which it shares.

    Args:
        lm: with a Mamba2 or a Llama as its backbone.
        **fields: of the configuration, of which ``lm`` says nothing, as ``eos_token_id``.

    Returns:
        A model that computes the same, and can be saved.

    Raises:
        TypeError: another backbone, or a solver or gradient that a configuration cannot name.

    Example:
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> model = from_causal_lm(spec.build(), eos_token_id=0)
        >>> model.config.hidden_size, model.config.eos_token_id
        (16, 0)
    """
    spec = specification(lm)
    with torch.device("meta"):  # its own weights would be drawn for nothing
        if isinstance(spec.backbone, LlamaConfig):
            model = ImplicitLlamaForCausalLM(ImplicitLlamaConfig.from_specification(spec, **fields))
        else:
            model = ImplicitMamba2ForCausalLM(ImplicitMamba2Config.from_specification(spec, **fields))
    model.model.core, model.model.embed_tokens = lm.model, lm.embedding
    if lm.head is not None:
        model.lm_head = lm.head
    model.tie_weights()
    return model.train(lm.training)


def to_causal_lm(model: ImplicitCausalLM) -> CausalLM:
    """The parts of a model of transformers as a :class:`deqseq.CausalLM`, which shares them.

    Args:
        model: of this package.

    Returns:
        A language model that computes the same.

    Example:
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.LlamaConfig(d_model=16, n_heads=2))
        >>> lm = spec.build()
        >>> to_causal_lm(from_causal_lm(lm)).model is lm.model
        True
    """
    lm = CausalLM(
        model.config.vocab_size,
        model.model.core,
        tied=model.config.tie_word_embeddings,
        embedding_dropout=model.config.embedding_dropout,
    )
    lm.embedding = model.model.embed_tokens
    lm.head = None if model.config.tie_word_embeddings else model.lm_head
    return lm.train(model.training)


def specification(lm: CausalLM) -> LanguageModelSpec:
    """What a language model is, as data.

    Args:
        lm: with a Mamba2 or a Llama as its backbone.

    Returns:
        The description; the standard deviation of its first embedding is not known any more.

    Raises:
        TypeError: another backbone, or a solver of another library.
    """
    model, backbone = lm.model, lm.model.backbone
    if not isinstance(backbone, Mamba2 | Llama):
        raise TypeError(f"the backbone must be a Mamba2 or a Llama, got {type(backbone).__name__}")
    config: Mamba2Config | LlamaConfig = backbone.config
    solving = None
    if isinstance(model, ImplicitModel):
        for solver in (model.solver, model.eval_solver):
            if solver is not None and not isinstance(solver, Solver):
                raise TypeError(f"a configuration cannot name the solver {solver!r} of another library")
        solving = Solving(
            model.solver,  # pyright: ignore[reportArgumentType]
            model.stop,
            model.gradient,
            model.eval_stop,
            model.eval_solver,  # pyright: ignore[reportArgumentType]
            cast(Start, model.start),
        )
    return LanguageModelSpec(
        lm.embedding.num_embeddings,
        config,
        solving,
        tied=lm.head is None,
        embedding_dropout=lm.embedding_dropout,
    )
