"""A pretrained decoder as a recurrent-depth model: its first layers, an iterated core, its last layers."""

from os import PathLike
from typing import Annotated, Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from deqseq.annotations import AtLeast, checked
from deqseq.backbones import Injected, Injection
from deqseq.config import SolveConfig
from deqseq.gradients import Unrolled
from deqseq.integrations.huggingface.decoder import DecoderBackbone, with_head
from deqseq.integrations.huggingface.surroundings import watch
from deqseq.models import CausalLM, ExplicitModel, ImplicitModel, RecurrentDepth
from deqseq.models.specification import INJECTIONS, Name
from deqseq.solvers import Naive
from deqseq.stop import Stop

TRAIN = SolveConfig(Naive(), Stop.exactly(8), Unrolled(last=4))
"""8 iterations from zero, of which the last 4 are differentiated: for the beginning of fine-tuning."""
EVAL = SolveConfig(Naive(), Stop(rtol=1e-3, max_steps=32))
"""To a relative tolerance of 1e-3, within 32 iterations."""


@checked
def retrofit(
    model: PreTrainedModel | str | PathLike[str],
    *,
    prelude: Annotated[int, AtLeast(1)],
    core: Annotated[int, AtLeast(1)],
    coda: Annotated[int, AtLeast(1)],
    dropped: Annotated[int, AtLeast(0)] = 0,
    injection: Name | Injection = "concat",
    solve: SolveConfig = TRAIN,
    eval_solve: SolveConfig | None = EVAL,
) -> CausalLM:
    r"""A pretrained decoder whose middle layers are iterated; modules are shared, not copied.

    .. math:: e = \mathrm{prelude}(x), \qquad z^* = \mathrm{core}(\mathrm{enter}(z^*, e)), \qquad
              y = \mathrm{head}(\mathrm{coda}(z^*))

    Before any training, one iteration from zero is the pretrained model. With ``"concat"``, whose initial projection
    ignores the state, any number of iterations is, and the second one converges; with the others further iterations
    feed the core with its own output, for which it was never trained. Fine-tune the result: as it is, with few
    iterations, or with a number that is drawn for every update, :func:`deqseq.training.unrolled`.

    Args:
        model: a language model of a family that :class:`DecoderBackbone` runs; or a folder or a name on the hub, which
            ``AutoModelForCausalLM.from_pretrained`` loads.
        prelude: how many of the first layers run once, before the core; at least 1.
        core: how many layers are iterated, at least 1.
        coda: how many of the last layers run once, after the core; at least 1.
        dropped: how many layers between prelude and core are left out. The published retrofits leave out some, which
            makes a different model, that has to be healed by training.
        injection: how the prelude's output enters each iteration: ``"concat"`` (:class:`deqseq.ConcatInjection`),
            ``"add"`` (:class:`deqseq.AddInjection`), ``"decay"`` (:class:`deqseq.DecayInjection`), or an object. It
            gets the dtype of the embedding.
        solve: how the core is solved and differentiated. Default: 8 iterations, the last 4 of which are differentiated.
        eval_solve: the same in eval mode. Default: to a relative tolerance of 1e-3, within 32 iterations.

    Returns:
        The model, whose ``model`` is a :class:`deqseq.RecurrentDepth`.

    Raises:
        TypeError: not a transformers model, nor the name of one; or another argument of the wrong type.
        ValueError: layers that do not add up; a family or a model that does not fit, and why; a model without a head;
            or an unknown injection.

    References:
        McLeish et al., Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence, 2025, arXiv
        2511.07384.

    Example:
        >>> import torch, deqseq as dq
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        >>> theirs = Qwen3ForCausalLM(Qwen3Config(vocab_size=10, num_hidden_layers=4, head_dim=8, **sizes)).eval()
        >>> lm, ids = retrofit(theirs, prelude=1, core=2, coda=1), torch.tensor([[1, 2, 3]])
        >>> output = lm(ids)
        >>> torch.allclose(output.logits, theirs(ids).logits, atol=1e-5), output.stats.iterations
        (True, tensor([[2, 2, 2]]))
    """
    if not isinstance(model, PreTrainedModel):
        model = AutoModelForCausalLM.from_pretrained(model)
    assert isinstance(model, PreTrainedModel)
    sizes, whole = (prelude, core, coda, dropped), len(DecoderBackbone(model).layers)
    if sum(sizes) != whole:
        raise ValueError(
            f"prelude, core, coda and dropped must add up to the model's {whole} layers, got "
            f"{' + '.join(map(str, sizes))} = {sum(sizes)}"
        )
    middle = DecoderBackbone(model, slice(whole - coda - core, whole - coda), final_norm=False)
    if isinstance(injection, str):
        injection = INJECTIONS[injection](middle.d_model)
    embedding: Any = model.get_input_embeddings()
    device, dtype = next(middle.parameters()).device, embedding.weight.dtype
    parts = RecurrentDepth(
        ExplicitModel(DecoderBackbone(model, slice(prelude), final_norm=False)),
        ImplicitModel(Injected(middle, injection.to(device, dtype)), solve, eval_solve),
        ExplicitModel(DecoderBackbone(model, slice(whole - coda, None))),
    )
    watch(parts)
    return with_head(model, parts)
