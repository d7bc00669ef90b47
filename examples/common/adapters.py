"""LoRA adapters, by PEFT."""

from importlib import import_module
from typing import Any

from torch import nn


def lora_library() -> Any:
    """PEFT; SystemExit names what to install."""
    try:
        return import_module("peft")
    except ImportError as error:
        raise SystemExit("--lora needs PEFT: pip install peft") from error


def adapted(model: nn.Module, rank: int) -> Any:
    """The model with LoRA adapters of its linear maps; a new injection is trained whole."""
    if not rank:
        return model
    peft = lora_library()
    names = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
    whole = ["injection"] if any(name.endswith("injection") for name, _ in model.named_modules()) else None
    targets = [name for name in names if name not in ("lm_head", "embed_out")]
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=targets, modules_to_save=whole)
    return peft.get_peft_model(model, config)


def merged(model: Any, rank: int) -> Any:
    """The model with its adapters added to its weights."""
    return (model.merge_and_unload() if rank else model).eval()
