"""Models sharded by ``fully_shard`` (FSDP2), whose weights are gathered once per solve."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deqseq.arguments import checked
from deqseq.backbones import Backbone, Injection
from deqseq.config import SolveFields, resolve
from deqseq.gradients import Implicit, Unrolled
from deqseq.layers.weight_norm import sharded_parts
from deqseq.models import CausalLM, ExplicitModel, ImplicitModel


@checked
def gather_once(model: nn.Module) -> None:
    """Gather sharded blocks once per solve; call this after ``fully_shard`` (FSDP2).

    ``fully_shard`` gathers weights in every iteration, so processes that take unequal numbers of
    iterations would wait for each other forever. After this call, every
    :class:`deqseq.ImplicitModel` inside gathers the sharded parts of its backbone before its solve,
    and shards them again afterwards, until the backward pass. An :class:`deqseq.ExplicitModel` does
    so if it returns a cache, which is computed after the layers have run. The models of
    :mod:`deqseq.integrations.huggingface` call it themselves.

    Shard each block, and then the whole model: backbones, injections and tied embeddings are used
    outside of their own forward pass, too, where ``fully_shard`` does not gather their weights.

    Args:
        model: a model that contains or is an implicit model; ``reshard_after_forward`` of its
            sharded parts is switched off.

    Raises:
        ValueError: a backbone, an injection or a tied embedding is sharded by itself; or in a later
            call of the model, while gradients are enabled, if the backward pass can take more steps
            in one process than in another: :class:`deqseq.Implicit`, :class:`deqseq.Unrolled` that
            can end early.

    References:
        Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023,
        arXiv 2304.11277.

    Example:
        >>> from deqseq.training import gather_once
        >>> import deqseq as dq
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(16)))
        >>> gather_once(lm)  # after fully_shard(block) for the blocks, and fully_shard(lm)
    """
    _check_parts(model)
    for part in model.modules():
        if isinstance(part, ImplicitModel | ExplicitModel) and sharded_parts(part.backbone):
            if _gather in part._forward_pre_hooks.values():
                continue
            part.register_forward_pre_hook(_gather, with_kwargs=True)
            part.register_forward_hook(_reshard, with_kwargs=True, always_call=True)


def _check_parts(model: nn.Module) -> None:
    """Refuse sharded parts that are used outside of their own forward pass."""
    used_outside: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        if isinstance(part, Backbone | Injection):
            used_outside[name] = part
        elif isinstance(part, CausalLM) and part.head is None:
            used_outside[f"{name}.embedding".removeprefix(".")] = part.embedding
    sharded = sharded_parts(model)
    for name, part in used_outside.items():
        if part in sharded:
            raise ValueError(
                f"{name} must not be sharded by itself, as it is used outside of its own forward "
                "pass, too: call fully_shard for each of the blocks (backbone.layers) and for the "
                "whole model only"
            )


def _gather(model: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Gather the parts before a call."""
    parts = _gathered_parts(model, keywords)
    if parts and isinstance(model, ImplicitModel) and torch.is_grad_enabled():
        _check_backward(model, keywords)
    for part in parts:
        # its own resharding would act at the end of every iteration
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()


def _reshard(model: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any], output: Any) -> None:
    """Shard them again after a call, also after one that has failed."""
    for part in _gathered_parts(model, keywords):
        part.reshard()


def _gathered_parts(model: Any, keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """The parts to gather for a call."""
    if isinstance(model, ExplicitModel) and not keywords.get("return_cache"):
        return ()  # each layer is used once
    return sharded_parts(model.backbone)


def _check_backward(model: ImplicitModel, keywords: Mapping[str, Any]) -> None:
    """Refuse a backward pass that gathers the weights a different number of times per process."""
    # states to begin from are not a part of the configuration
    names = SolveFields.__annotations__.keys() - {"start"}
    values: Any = {name: keywords[name] for name in names & keywords.keys()}
    config = resolve(model.solve_config, keywords.get("solve"), values)
    gradient, stop = config.gradient, None
    if isinstance(gradient, Implicit):
        stop = gradient.stop
    elif isinstance(gradient, Unrolled):
        stop = config.stop
    if stop is not None and not stop.runs_to_the_end:
        raise ValueError(
            f"{type(gradient).__name__} with {stop} can take a different number of backward "
            "steps in each process, which deadlocks a sharded backbone: use Phantom, OneStep or "
            "Stop.exactly(n)"
        )
