"""A model solved for some tokens, and its map there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.check import check_integer, check_type
from deqseq.config import SolveConfig, resolve
from deqseq.evaluate import evaluate
from deqseq.loop import Callback
from deqseq.models.causal_lm import CausalLM, Tokens, check_tokens
from deqseq.models.eval_mode import eval_mode
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import ModelOutput
from deqseq.models.padding import Padding, check_mask
from deqseq.models.recurrent_depth import RecurrentDepth
from deqseq.models.start import start_states
from deqseq.start import RandomStart
from deqseq.tokens import TokenArgs, token_map
from deqseq.types import Mask, Sequence


def check_call(
    model: CausalLM, ids: Tokens, mask: Mask | None, solve: SolveConfig | None, fields: Mapping[str, Any]
) -> tuple[Mask, SolveConfig]:
    """Check what every diagnostic is given; the real tokens, and how to solve in eval mode.

    Random starts have a seed, so that all solves of a diagnostic begin at the same states.
    """
    check_type("model", model, CausalLM, "dq.CausalLM(vocab_size, dq.ImplicitModel(backbone))")
    core = _core(model)
    config = resolve(core.eval_solve or core.solve, solve, fields)
    if isinstance(config.start, RandomStart) and config.start.seed is None:
        config = replace(config, start=replace(config.start, seed=0))
    check_tokens("ids", ids, model.embedding)
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool), config
    check_mask(mask, ids)
    return mask, config


def _core(model: CausalLM) -> ImplicitModel:
    """The part that is solved; TypeError for an explicit model."""
    core = model.core
    check_type("model.model", model.model if core is None else core, ImplicitModel, "dq.ImplicitModel(backbone)")
    assert core is not None
    return core


def seeded(seed: int) -> torch.Generator:
    """Random numbers of a diagnostic's own."""
    check_integer("seed", seed, -(2**63), 2**64 - 1)
    return torch.Generator().manual_seed(int(seed))


@dataclass(frozen=True)
class SolvedModel:
    """A fixed point and its map; padding is behind the real tokens, but in ``output`` and ``mask`` where it was."""

    model: CausalLM
    args: TokenArgs
    start: Sequence
    value: Sequence
    mask: Mask
    output: ModelOutput

    def f(self, z: Sequence) -> Sequence:
        """The map of all tokens."""
        return evaluate(token_map, z, self.args, has_aux=True)[0]

    def logits(self, z: Sequence) -> Float[Tensor, "batch length vocab"]:
        """What the whole model predicts from states of the part that is solved."""
        whole = self.model.model
        states = whole.coda(whole.norm(z)).value if isinstance(whole, RecurrentDepth) else z
        return self.model.logits(states)


@contextmanager
def solved_model(
    model: CausalLM, ids: Tokens, mask: Mask, config: SolveConfig, *, callback: Callback | None = None
) -> Iterator[SolvedModel]:
    """Solve in eval mode, without gradients; the context keeps that mode and the weights of the solve."""
    core = _core(model)
    with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
        mask, x = mask.clone(), model.embed(ids.clone())  # tensors made in inference mode would forbid any graph
        if isinstance(model.model, RecurrentDepth):
            x = model.model.prelude(x, mask=mask).value
        output = core(x, mask=mask, solve=config, callback=callback)
        padding = Padding.of(x, mask)
        tokens = padding.compact(x)
        start = start_states(tokens, None, padding, config.start)
        args = TokenArgs.prepared(core.backbone, tokens, None, padding.mask, need_aux=False)
        yield SolvedModel(model, args, start, padding.compact(output.value), mask, output)
