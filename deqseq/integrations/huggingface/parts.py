"""The parts of a recurrent-depth model as fields of a configuration, and of these fields a model."""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from deqseq.backbones import Injected, Llama, LlamaConfig, Mamba2, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface.blocks import config_of
from deqseq.integrations.huggingface.decoder import DecoderBackbone
from deqseq.integrations.huggingface.objects import Json
from deqseq.integrations.huggingface.retrofit import INJECTIONS
from deqseq.models import ExplicitModel, ImplicitModel, RecurrentDepth

PARTS = ("prelude", "core", "coda")


def joined(
    backbones: Mapping[str, LlamaConfig | Mamba2Config],
    injection: str | None,
    solve: SolveConfig,
    eval_solve: SolveConfig | None,
    *,
    shared_norm: bool,
) -> RecurrentDepth:
    """A model of layers of this library, freshly initialised."""
    configs = (backbones[part] for part in PARTS)
    prelude, core, coda = (Llama(one) if isinstance(one, LlamaConfig) else Mamba2(one) for one in configs)
    injected = core if injection is None else Injected(core, INJECTIONS[injection](core.d_model))
    norm = coda.norm if shared_norm and isinstance(coda, Llama) else None
    return RecurrentDepth(ExplicitModel(prelude), ImplicitModel(injected, solve, eval_solve), ExplicitModel(coda), norm)


def parts_of(model: RecurrentDepth) -> Json:
    """The fields that describe a model of the layers of one decoder, or of Llama and Mamba2 backbones."""
    if not isinstance(model.core, ImplicitModel):
        raise TypeError(
            f"the core of a RecurrentDepth must be an ImplicitModel, got an {type(model.core).__name__}: a "
            "configuration cannot name a fixed depth"
        )
    core: Any = model.core.backbone
    injected = isinstance(core, Injected)
    backbones: list[Any] = [model.prelude.backbone, core.backbone if injected else core, model.coda.backbone]
    if all(isinstance(one, Llama | Mamba2) for one in backbones):
        parts = _layers(model, backbones)
    elif injected and all(isinstance(one, DecoderBackbone) for one in backbones):
        parts = _layers_of_decoder(model, backbones)
    else:
        found = ", ".join(type(one).__name__ for one in backbones) + " without an injection" * (not injected)
        raise TypeError(
            "the parts of a RecurrentDepth must be Llama or Mamba2 backbones, or layers of a transformers decoder, as "
            f"those of retrofit(model, ...), got {found}"
        )
    injection = _name(core.injection) if injected else None
    return parts | {"injection": injection, "solve": model.core.solve, "eval_solve": model.core.eval_solve}


def _name(injection: nn.Module) -> str:
    names = [name for name, make in INJECTIONS.items() if type(injection) is type(make(1))]
    if not names:
        raise TypeError(f"a configuration cannot name {type(injection).__name__} (known: {', '.join(INJECTIONS)})")
    return names[0]


def _layers(model: RecurrentDepth, backbones: list[Any]) -> Json:
    coda = backbones[2]
    shared = isinstance(coda, Llama) and coda.config.final_norm and model.norm is coda.norm
    if not shared and not isinstance(model.norm, nn.Identity):
        raise ValueError(
            "the norm of a RecurrentDepth must be None, or the last norm of its coda, a Llama, so that a configuration "
            f"can name it, got {model.norm}"
        )
    places, weights = (len(list(model.named_parameters(remove_duplicate=once))) for once in (False, True))
    if places - weights > int(shared):
        raise ValueError("prelude, core and coda must have weights of their own: only a norm can be shared")
    layers = {part: config_of(backbone) for part, backbone in zip(PARTS, backbones, strict=True)}
    return {"layers": layers, "norm": "coda" if shared else None}


def _layers_of_decoder(model: RecurrentDepth, backbones: list[Any]) -> Json:
    parts, config = [one.part for one in backbones], backbones[0].config
    prelude, middle, coda = parts
    follow = prelude.start == 0 and middle.stop == coda.start and coda.stop == config.num_hidden_layers
    plain = isinstance(model.norm, nn.Identity) and len({id(one.rotary) for one in backbones}) == 1
    if not follow or not plain or middle.start < prelude.stop:
        raise ValueError(
            "prelude, core and coda must be the layers of one decoder in order, without a norm between, as those of "
            f"retrofit(model, ...), got layers {', '.join(f'{part.start} to {part.stop - 1}' for part in parts)}"
        )
    return {
        "decoder_config": copy.deepcopy(config),
        **{name: len(part) for name, part in zip(PARTS, parts, strict=True)},
        "dropped": middle.start - prelude.stop,
    }
