"""The blocks of a model: their states, their weight normalisation, activations recomputed in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from deqseq.backbones import Llama, LlamaConfig, Mamba2, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.gradients import Phantom, Unrolled
from deqseq.layers.causal_conv import CausalConv1d


@contextmanager
def recorded_states(backbone: Any) -> Iterator[list[Tensor]]:
    """Within this context the state after each block is appended to the list, in calls of the same thread."""
    states: list[Tensor] = []
    thread = get_ident()

    def record(block: nn.Module, given: Any, returned: tuple[Tensor, Any]) -> None:
        if get_ident() == thread:
            states.append(returned[0])

    hooks = [block.register_forward_hook(record) for block in backbone.layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def is_normalised(part: nn.Module) -> bool:
    """Whether a part has weight normalisation now; its configuration says how it was built.

    Raises:
        ValueError: some of its layers have and others have not, which a configuration cannot say.
    """
    found = [
        (name, is_parametrized(layer, "weight"))
        for backbone in part.modules()
        if isinstance(backbone, Llama | Mamba2)
        for name, layer in backbone.named_modules()
        if isinstance(layer, nn.Linear | CausalConv1d) and "lora_" not in name
    ]
    bare = [name for name, normalised in found if not normalised]
    if 0 < len(bare) < len(found):
        raise ValueError(
            f"weight normalisation must be on all layers of a backbone or on none, {bare[0]} has none: call "
            "deqseq.layers.apply_weight_norm or fold_weight_norm of the whole backbone"
        )
    return len(bare) < len(found)


def config_of(backbone: Llama | Mamba2) -> LlamaConfig | Mamba2Config:
    """The configuration of a backbone as it is now."""
    return replace(backbone.config, weight_norm=is_normalised(backbone))


def checkpoint_blocks(backbone: Any, enable: bool) -> None:
    """Recompute the activations of every block in the backward pass, or keep them again."""
    for block in backbone.layers:
        if enable:
            block.forward = partial(_recomputed, block)
        else:
            vars(block).pop("forward", None)


def blocks_are_checkpointed(backbone: Any) -> bool:
    """Whether :func:`checkpoint_blocks` is in force."""
    return any("forward" in vars(block) for block in backbone.layers)


def _recomputed(block: nn.Module, *arguments: Any) -> Any:
    run: Callable[..., Any] = partial(type(block).forward, block)
    if block.training and torch.is_grad_enabled():
        return checkpoint(run, *arguments, use_reentrant=False)
    return run(*arguments)


def checkpointed(solve: SolveConfig, enable: bool = True) -> SolveConfig:
    """The configuration with activation checkpointing on or off, if its gradient has any."""
    if not isinstance(solve.gradient, Phantom | Unrolled):
        return solve
    return replace(solve, gradient=replace(solve.gradient, checkpoint=enable))
