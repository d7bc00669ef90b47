"""What the Trainer, accelerate and PEFT do to a model from outside: told or refused before anything is solved."""

import warnings
from functools import cache
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deqseq.backbones import Injected
from deqseq.layers.weight_norm import sharded_parts
from deqseq.models import ImplicitModel
from deqseq.models.base import Model
from deqseq.models.recurrent_depth import solved_part
from deqseq.training import parameter_groups


def _refuse_compiling() -> NoReturn:
    raise RuntimeError(
        "torch.compile(model), and torch_compile=True in TrainingArguments, would trace the loop of the solve: leave "
        "them out and call model.compile(), which compiles the blocks"
    )


# in traced code an error would only end the tracing; a disabled call is made when the code runs, and raises then
refuse_compiling: Any = torch.compiler.disable(_refuse_compiling)


def watch(core: Model) -> None:
    """Refuse, from now on and at each call, what a solve cannot bear: offloaded weights, adapters with dropout."""
    if _check not in core._forward_pre_hooks.values():
        core.register_forward_pre_hook(_check)


def _check(core: Model, *_: Any) -> None:
    if any(weight.is_meta for weight in core.parameters()):  # accelerate loads them for their own module's forward
        raise ValueError(
            "the layers of this model are offloaded (cpu_offload, disk_offload or device_map), but every iteration of "
            "a solve needs all of them: load the whole model onto one device, as device_map={'': 0} does"
        )
    solved = solved_part(core)
    if solved is not None and solved.training:
        _check_dropout(solved.backbone)
        _check_injection(solved)


def _check_dropout(backbone: nn.Module) -> None:
    drops: dict[str, float] = {}
    for name, part in backbone.named_modules():
        # by name, because PEFT has a class of its own, in OFT
        found: dict[str, Any] = {"": getattr(part, "p", 0)} if "Dropout" in type(part).__name__ else {}
        for kind in ("rank_dropout", "module_dropout"):  # PEFT's LoHa and LoKr draw without a module
            found |= {f".{kind}.{adapter}": p for adapter, p in getattr(part, kind, {}).items()}
        drops |= {name + place: p for place, p in found.items() if p and part.training}
    if drops:
        raise ValueError(
            f"a map that is solved must have no dropout, which would be drawn anew in every iteration, got {drops}: "
            "set it to 0, as LoraConfig(lora_dropout=0.0)"
        )


def _check_injection(core: ImplicitModel) -> None:
    """Warn of a frozen injection that passes no state on, as a concatenation at its start."""
    injection = core.backbone.injection if isinstance(core.backbone, Injected) else None
    weights = [] if injection is None else list(injection.parameters())
    frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
    if injection is None or not frozen or sharded_parts(core):
        return
    zero = weights[0].new_zeros(1, 1, core.d_model)
    with torch.no_grad():
        ignores_state = torch.equal(injection.enter(zero, zero), injection.enter(zero + 1, zero))
    if ignores_state and any(weight.requires_grad for weight in core.parameters()):
        warnings.warn(
            "the injection is frozen and ignores the state, so the iterations after the first change nothing: train it "
            'with the adapter, as LoraConfig(..., modules_to_save=["injection"])',
            stacklevel=2,
        )


def warn_of_decay(model: nn.Module) -> None:
    """Warn at the next step of the optimizer if it decays what :func:`deqseq.training.parameter_groups` protects."""
    _before_a_step.add(model)
    _watch_optimizers()


_before_a_step: WeakSet[nn.Module] = WeakSet()


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_decay)  # stays: torch calls these in a loop, in which none can be removed


def _check_decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for model in tuple(_before_a_step):
        names = {id(weight): name for name, weight in model.named_parameters() if weight.requires_grad}
        if not any(id(weight) in names for group in optimizer.param_groups for weight in group["params"]):
            continue  # the optimizer of another model
        _before_a_step.discard(model)
        protected = {id(weight) for weight in parameter_groups(model)[1]["params"]}
        groups = [group for group in optimizer.param_groups if group.get("weight_decay")]
        decayed = [names[id(weight)] for group in groups for weight in group["params"] if id(weight) in protected]
        if decayed:
            warnings.warn(
                f"weight decay shrinks parameters that should keep their size, as {', '.join(decayed[:4])}: the "
                "Trainer chooses by names. Give it optimizers=(torch.optim.AdamW(deqseq.training.parameter_groups("
                "model, 0.1)), None)",
                stacklevel=2,
            )
