"""A model solved for some tokens, and its map there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from deqseq.backbones.base import Backbone
from deqseq.config import SolveConfig, resolve
from deqseq.evaluate import evaluate
from deqseq.layers.sharded import unsharded
from deqseq.layers.weight_norm import cached_weights
from deqseq.models.causal_lm import CausalLM, Tokens, check_ids
from deqseq.models.eval_mode import eval_mode
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import ModelOutput
from deqseq.models.padding import Padding
from deqseq.stop import Granularity
from deqseq.sweeps.run import TokenArgs, token_map
from deqseq.types import Mask, Sequence


@dataclass(frozen=True)
class SolvedModel:
    """A fixed point and its map; padding has been moved behind the real tokens, but in ``output``."""

    backbone: Backbone[Any]
    args: TokenArgs
    start: Sequence
    value: Sequence
    padding: Padding
    output: ModelOutput
    config: SolveConfig

    def f(self, z: Sequence) -> Sequence:
        """The map of all tokens."""
        return evaluate(token_map(self.backbone), z, self.args, has_aux=True)[0]


@contextmanager
def solved_model(
    model: CausalLM,
    ids: Tokens,
    caller: str,
    *,
    mask: Mask | None,
    solve: SolveConfig | None,
    fields: Mapping[str, Any],
    per: Granularity | None = None,
    trace: bool = False,
) -> Iterator[SolvedModel]:
    """Solve in eval mode, without gradients; the context keeps that mode and the weights of the solve."""
    implicit = implicit_of(model, ids, caller)
    config = eval_config(implicit, solve, fields)
    if per is not None:
        config = replace(config, stop=replace(config.stop, per=per))
    with torch.inference_mode(False), torch.no_grad(), eval_mode(model):
        mask = None if mask is None else mask.clone()  # a tensor made in inference mode would forbid any graph
        x = model.embedding(ids.clone())
        padding = Padding.of(x, mask)
        output = implicit(x, mask=mask, solve=config, trace=trace)
        tokens, value, backbone = padding.compact(x), padding.compact(output.value), implicit.backbone
        start = torch.zeros_like(tokens) if config.start == "zero" else tokens
        with unsharded(backbone), cached_weights(backbone):
            args = TokenArgs(backbone.prepare(tokens, None, padding.mask), None, padding.mask)
            yield SolvedModel(backbone, args, start, value, padding, output, config)


def implicit_of(model: object, ids: Tokens, caller: str) -> ImplicitModel:
    """The implicit model inside a language model, once it is clear that there is one and that it knows the tokens."""
    if not isinstance(model, CausalLM) or not isinstance(model.model, ImplicitModel):
        got = f"one around an {type(model.model).__name__}" if isinstance(model, CausalLM) else type(model).__name__
        raise TypeError(f"{caller}: model must be a CausalLM around an ImplicitModel, got {got}")
    check_ids("ids", ids, model.embedding.num_embeddings)
    return model.model


def eval_config(implicit: ImplicitModel, solve: SolveConfig | None, fields: Mapping[str, Any]) -> SolveConfig:
    """The configuration of a call in eval mode."""
    return resolve(implicit.eval_solve or implicit.solve, solve, fields)
