"""A model's map at its fixed point, for whoever wants to look at it there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from deqseq.backbones.base import RealTokens, Sequence
from deqseq.backbones.token_map import BackboneMap
from deqseq.layers.sharded import gathered
from deqseq.layers.weight_norm import weights_computed_once
from deqseq.models.causal_lm import CausalLM, Tokens, check_ids
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import ModelOutput
from deqseq.models.padding import Padding
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sweep


@dataclass(frozen=True)
class ModelPoint:
    """A fixed point, and the map that it is one of; padding has been moved behind the real tokens.

    Attributes:
        f: the map, of all tokens.
        start: where the solve began.
        value: what it found.
        output: the model's answer, its tokens in their own places.
        padding: how they came to stand where they do.
    """

    f: BackboneMap
    start: Sequence
    value: Sequence
    output: ModelOutput
    padding: Padding


@contextmanager
def fixed_point_of(
    model: CausalLM,
    ids: Tokens,
    *,
    asker: str,
    mask: RealTokens | None = None,
    solver: Solver | OutsideSolver | None = None,
    stop: Stop | None = None,
    sweep: Sweep = Simultaneous(),
    trace: bool = False,
) -> Iterator[ModelPoint]:
    """Solve in eval mode and without gradients, and keep the weights as they were in the solve within this context.

    Args:
        model: a language model around an :class:`ImplicitModel`.
        ids: tokens, ``(batch, length)``.
        asker: who wants to know, for the text of errors.
        mask: which of them are real; None: all.
        solver: instead of the model's own.
        stop: instead of the model's own.
        sweep: which tokens are solved together.
        trace: whether to keep residuals; with the simultaneous sweep only.

    Yields:
        The point, and the map there.

    Raises:
        TypeError: an explicit model.
        ValueError: no batch of tokens of the vocabulary.
    """
    implicit = implicit_of(model, ids, asker)
    with torch.inference_mode(False), torch.no_grad(), evaluating(model):
        mask = None if mask is None else mask.clone()  # what was made in inference mode would forbid any graph
        x = model.embedding(ids.clone())
        padding = Padding.of(x, mask)
        output = implicit(x, mask=mask, sweep=sweep, solver=solver, stop=stop, trace=trace)
        tokens, value = padding.compact(x), padding.compact(output.value)
        start = torch.zeros_like(tokens) if implicit.start == "zero" else tokens
        backbone = implicit.backbone
        with gathered(backbone), weights_computed_once(backbone):
            f = BackboneMap(backbone, backbone.inject(tokens, None, padding.real))
            yield ModelPoint(f, start, value, output, padding)


def implicit_of(model: object, ids: Tokens, asker: str) -> ImplicitModel:
    """The model inside, once it is clear that there is one and that it can be asked about these tokens."""
    if not isinstance(model, CausalLM) or not isinstance(model.model, ImplicitModel):
        got = f"one around an {type(model.model).__name__}" if isinstance(model, CausalLM) else type(model).__name__
        raise TypeError(f"{asker} needs a CausalLM around an ImplicitModel, got {got}")
    check_ids("ids", ids, model.embedding.num_embeddings)
    return model.model


def stop_of(model: ImplicitModel, stop: Stop | None) -> Stop:
    """The stopping rule of a solve in eval mode."""
    return stop or model.eval_stop or model.stop


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode within this context; afterwards every part is in the mode that it was in."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
