"""Language models of this library as models of transformers, and decoders the other way."""

import copy
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from deqseq.arguments import NonNegativeInt, PositiveInt, checked
from deqseq.backbones import Injected, Injection
from deqseq.config import SolveConfig
from deqseq.gradients import Unrolled
from deqseq.integrations.huggingface.configuration import DeqseqConfig
from deqseq.integrations.huggingface.decoder import DecoderBackbone, watch
from deqseq.integrations.huggingface.modeling_causal_lm import DeqseqForCausalLM
from deqseq.models import CausalLM, ExplicitModel, ImplicitModel, RecurrentDepth
from deqseq.models.specification import INJECTIONS, Name, specification_of
from deqseq.solvers import Naive
from deqseq.stop import Stop

TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
TRAIN = SolveConfig(Naive(), Stop.exactly(8), Unrolled(last=4))
"""8 iterations from zero, of which the last 4 are differentiated, to begin fine-tuning."""
EVAL = SolveConfig(Naive(), Stop(rtol=1e-3, max_steps=32))
"""To a relative tolerance of 1e-3, within 32 iterations."""


@checked
def from_causal_lm(lm: CausalLM, **fields: Any) -> DeqseqForCausalLM:
    """A model of transformers that computes the same; weights are shared, not copied.

    From now on ``lm``, too, is solved as ``config.solve`` of the result says. If it has layers of a
    transformers decoder, that decoder's generation configuration is copied, without
    ``cache_implementation``.

    Args:
        lm: a model of Mamba2 and Llama backbones, or of the layers of a transformers decoder, as
            from :func:`retrofit`.
        **fields: fields of the configuration that ``lm`` does not decide, such as ``eos_token_id``.

    Raises:
        TypeError: another model, or a part that a configuration cannot name.
        ValueError: parts that share weights; a norm other than the coda's; a field that ``lm``
            decides; weights whose names or shapes a configuration does not give.

    Example:
        >>> from deqseq.integrations.huggingface import from_causal_lm
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> model = from_causal_lm(spec.build(), eos_token_id=0)
        >>> model.config.hidden_size, model.config.eos_token_id
        (16, 0)
    """
    decoders = [module for module in lm.model.modules() if isinstance(module, DecoderBackbone)]
    if any(decoder.config is not decoders[0].config for decoder in decoders):
        raise ValueError(
            "prelude, core and coda must be layers of one decoder, as those of retrofit(model, ...)"
        )
    inherited: dict[str, Any] = {"initializer_range": 0.02}
    if decoders:
        names = ("initializer_range", "max_position_embeddings", *TOKENS)
        declared = decoders[0].config.to_dict()
        inherited |= {name: declared[name] for name in names if name in declared}
        inherited["decoder_config"] = copy.deepcopy(decoders[0].config)
    chosen, fields = fields, inherited | fields
    spec = specification_of(lm, fields.pop("initializer_range"))
    config = DeqseqConfig.from_specification(spec, **fields)
    with torch.device("meta"):  # its own weights would be drawn for nothing
        model = DeqseqForCausalLM(config)
    different = sorted({name for name, _ in _shapes(model.model.core) ^ _shapes(lm.model)})
    if different:
        raise ValueError(
            f"lm has other weights than its configuration describes: {', '.join(different[:8])}"
        )
    model.model.core, model.model.embed_tokens = lm.model, lm.embedding  # pyright: ignore[reportAttributeAccessIssue]
    model.model.take_solves()
    if lm.head is not None:
        model.lm_head = lm.head
    model.tie_weights()
    generation = decoders[0].generation_config if decoders else None
    if generation is not None:
        model.generation_config = copy.deepcopy(generation)
        model.generation_config.cache_implementation = None
        for name in chosen.keys() & set(TOKENS):
            setattr(model.generation_config, name, chosen[name])
    return model.train(lm.training)


@checked
def to_causal_lm(model: DeqseqForCausalLM) -> CausalLM:
    """The inverse of :func:`from_causal_lm`; ``core.solve`` stays that of ``model.config``.

    Args:
        model: of this library.

    Raises:
        TypeError: another model.

    Example:
        >>> from deqseq.integrations.huggingface import from_causal_lm, to_causal_lm
        >>> import deqseq as dq
        >>> lm = dq.LanguageModelSpec(10, dq.LlamaConfig(d_model=16, n_heads=2)).build()
        >>> to_causal_lm(from_causal_lm(lm)).model is lm.model
        True
    """
    config = model.config
    head = None if config.tie_word_embeddings else model.lm_head
    lm = _language_model(
        model.model.core,
        model.model.embed_tokens,
        head,
        embedding_dropout=config.embedding_dropout,
        embedding_scale=config.embedding_scale,
        logit_softcap=config.logit_softcap,
    )
    return lm.train(model.training)


@checked
def from_decoder(model: PreTrainedModel) -> CausalLM:
    """A transformers language model as an explicit :class:`deqseq.CausalLM`; modules are shared.

    Args:
        model: of a family that :class:`DecoderBackbone` runs, with its head.

    Raises:
        TypeError: not a transformers model.
        ValueError: a family or a model that does not fit, and why; or a model without a head.

    Example:
        >>> import torch
        >>> from deqseq.integrations.huggingface import from_decoder
        >>> from transformers import Gemma2Config, Gemma2ForCausalLM
        >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        >>> theirs = Gemma2ForCausalLM(Gemma2Config(vocab_size=10, **heads, **sizes)).eval()
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> torch.allclose(from_decoder(theirs)(ids).logits, theirs(ids).logits, atol=1e-5)
        True
    """
    return _with_head(model, ExplicitModel(DecoderBackbone(model)))


@checked
def retrofit(
    model: PreTrainedModel | str | PathLike[str],
    *,
    prelude: PositiveInt,
    core: PositiveInt,
    coda: PositiveInt,
    dropped: NonNegativeInt = 0,
    injection: Name | Injection = "concat",
    solve: SolveConfig = TRAIN,
    eval_solve: SolveConfig | None = EVAL,
) -> CausalLM:
    r"""A pretrained decoder whose middle layers are iterated; modules are shared, not copied.

    .. math:: e = \mathrm{prelude}(x), \qquad z^* = \mathrm{core}(\mathrm{enter}(z^*, e)), \qquad
              y = \mathrm{head}(\mathrm{coda}(z^*))

    Before any training, and with ``dropped=0``, one iteration from zero gives the outputs of the
    pretrained model. With ``"concat"``, whose gate is 0, any number of iterations does; with
    ``"add"`` and ``"decay"`` the core sees its own output from the second iteration on, for which
    it was not trained. With ``ConcatInjection(width, gate=0.5)`` and ``start="input"`` one
    iteration does; trained so, the model of the tutorial gains from more iterations. Fine-tune the
    result with a drawn number of iterations: :func:`deqseq.training.unrolled`.

    Args:
        model: a language model of a family that :class:`DecoderBackbone` runs; or a folder or a
            name on the hub.
        prelude: how many of the first layers run once, before the core.
        core: how many layers are iterated.
        coda: how many of the last layers run once, after the core.
        dropped: how many layers between prelude and core are left out, as in the published
            retrofits. This changes the outputs: train the model to recover.
        injection: how the prelude's output enters each iteration: ``"concat"``
            (:class:`deqseq.ConcatInjection`), ``"add"`` (:class:`deqseq.AddInjection`), ``"decay"``
            (:class:`deqseq.DecayInjection`), or an object.
        solve: how the core is solved and differentiated. Default: 8 iterations, the last 4 of which
            are differentiated.
        eval_solve: the same in eval mode. Default: to a relative tolerance of 1e-3, within 32
            iterations.

    Returns:
        The model, whose ``model`` is a :class:`deqseq.RecurrentDepth`. For transformers' Trainer,
        ``save_pretrained`` and ``push_to_hub``, pass it to :func:`from_causal_lm`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: layers that do not add up; a family or a model that does not fit, and why; a
            model without a head.

    References:
        McLeish et al., Teaching Pretrained Language Models to Think Deeper with Retrofitted
        Recurrence, 2025, arXiv 2511.07384.

    Example:
        >>> from deqseq.integrations.huggingface import retrofit
        >>> import torch, deqseq as dq
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
        >>> theirs = Qwen3ForCausalLM(Qwen3Config(vocab_size=10, **heads, **sizes)).eval()
        >>> lm, ids = retrofit(theirs, prelude=1, core=2, coda=1), torch.tensor([[1, 2, 3]])
        >>> output = lm(ids)
        >>> torch.allclose(output.logits, theirs(ids).logits, atol=1e-5), output.stats.iterations
        (True, tensor([[2, 2, 2]]))
    """
    if not isinstance(model, PreTrainedModel):
        model = AutoModelForCausalLM.from_pretrained(model)
    assert isinstance(model, PreTrainedModel)
    sizes = (prelude, core, coda, dropped)
    count = len(DecoderBackbone(model).layers)
    if sum(sizes) != count:
        raise ValueError(
            f"prelude, core, coda and dropped must add up to the model's {count} layers, got "
            f"{' + '.join(map(str, sizes))} = {sum(sizes)}"
        )
    end = count - coda
    middle = DecoderBackbone(model, slice(end - core, end), final_norm=False)
    if isinstance(injection, str):
        injection = INJECTIONS[injection](middle.d_model)
    embedding: Any = model.get_input_embeddings()
    device = next(middle.parameters()).device
    dtype = embedding.weight.dtype
    layers = RecurrentDepth(
        ExplicitModel(DecoderBackbone(model, slice(prelude), final_norm=False)),
        ImplicitModel(Injected(middle, injection.to(device, dtype)), solve, eval_solve),
        ExplicitModel(DecoderBackbone(model, slice(end, None))),
    )
    watch(layers)
    return _with_head(model, layers)


def _shapes(module: nn.Module) -> set[tuple[str, torch.Size]]:
    """The names of all tensors, with their shapes."""
    return {(name, tensor.shape) for name, tensor in module.state_dict().items()}


def _with_head(model: PreTrainedModel, layers: ExplicitModel | RecurrentDepth) -> CausalLM:
    """A language model of ``layers`` and the embedding and the head of ``model``."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ValueError(
            "model must have a language model's head, as a ...ForCausalLM, got "
            f"{type(model).__name__}"
        )
    if head.bias is not None:
        raise ValueError("model's head must have no bias, which a CausalLM would not add, got one")
    if head.weight is embedding.weight:
        head = None
    softcap = getattr(model.config, "final_logit_softcapping", None)
    return _language_model(layers, embedding, head, logit_softcap=softcap).train(model.training)


def _language_model(
    layers: Any, embedding: nn.Embedding, head: nn.Linear | None, **fields: Any
) -> CausalLM:
    """A language model of these modules; the embedding may be of a class that scales by itself."""
    with torch.device("meta"):  # its own weights would be drawn for nothing
        lm = CausalLM(embedding.num_embeddings, layers, tied=head is None, **fields)
    lm.embedding = embedding
    lm.head = head
    return lm
