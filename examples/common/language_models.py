"""The language models that examples/pretrain.py compares: presets, and small ones of three kinds and two families."""

import math
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import deqseq as dq
from common import options as opt
from deqseq.check import check_choice
from deqseq.training import Curriculum, bounded, free

SCALED = tuple(f"{kind}-{family}" for family in ("llama", "mamba2") for kind in ("implicit", "bounded", "explicit"))


@dataclass(frozen=True)
class Sizes:
    """Options of the models and of their curricula."""

    d_model: opt.Size = 160  # width of the small models
    layers: opt.Blocks = 2  # their blocks
    heads: opt.Size = 5  # llama: attention heads
    mlp_width: opt.Size = 432  # llama: hidden width of the feed-forward layer
    d_state: opt.Size = 32  # mamba2: state size of each channel
    headdim: opt.Size = 32  # mamba2: channels of a head
    bounded_steps: opt.Count = 4  # iterations of the bounded phase
    bounded_share: opt.Share = 0.8  # share of an implicit model's run that is bounded
    budget: opt.Natural = 0  # iterations of the free phase at most; 0: the paper's, 32 for Llama, 24 for Mamba2
    phantom: opt.Count = 4  # phantom steps of the free phase; the bounded one has 1
    rtol: opt.Positive = 0.05  # relative tolerance of each token


def kind_of(name: str) -> tuple[str, str]:
    """Kind (implicit, bounded, explicit) and family (llama, mamba2) that a model's name stands for.

    Raises:
        ValueError: there is no such model.
    """
    check_choice("--models", name, (*SCALED, *(one for one in dq.PRESETS if not one.endswith("state-tracking"))))
    first, last = name.split("-")[0], name.split("-")[-1]
    return first if name in SCALED else last.replace("pretrain", "bounded"), "llama" if "llama" in name else "mamba2"


def spec_of(name: str, sizes: Sizes, vocab_size: int) -> dq.LanguageModelSpec:
    """The model, as data; an explicit one is widened until it has as many parameters as the implicit one."""
    kind, family = kind_of(name)
    if name not in SCALED:
        return replace(dq.preset(name), vocab_size=vocab_size)
    shared: dict[str, Any] = {"d_model": sizes.d_model, "n_layers": sizes.layers}
    if family == "llama":
        backbone = dq.LlamaConfig(**shared, n_heads=sizes.heads, mlp_width=sizes.mlp_width)
    else:
        backbone = dq.Mamba2Config(**shared, d_state=sizes.d_state, headdim=sizes.headdim)
    implicit = dq.LanguageModelSpec(vocab_size, backbone)
    if kind != "explicit":
        return implicit
    plain = replace(implicit.explicit(), backbone=replace(backbone, weight_norm=False))
    return widened(plain, dq.parameter_count(implicit))


def widened(spec: dq.LanguageModelSpec, parameters: int) -> dq.LanguageModelSpec:
    """The same model, but so wide that it has about as many ``parameters`` as another one.

    An explicit model lacks an implicit one's injection and magnitudes; this makes up for them. Only ``d_model`` grows,
    by steps that keep heads whole, a Llama's of even width. A model that is large enough stays as it is.
    """
    sizes = spec.backbone
    step = (
        2 * sizes.n_heads
        if isinstance(sizes, dq.LlamaConfig)
        else sizes.headdim // math.gcd(sizes.headdim, sizes.expand)
    )
    narrower, below = spec, dq.parameter_count(spec)
    if below >= parameters:
        return spec
    for d_model in count(sizes.d_model + step, step):
        wider = replace(spec, backbone=replace(sizes, d_model=d_model))
        above = dq.parameter_count(wider)
        if above >= parameters:
            return wider if above - parameters < parameters - below else narrower
        narrower, below = wider, above
    raise AssertionError("widths do not end")


def curriculum_of(name: str, sizes: Sizes) -> Curriculum:
    """Bounded throughout, or bounded and then free, damped as the presets; an explicit model has nothing to solve."""
    (kind, family), damped = kind_of(name), dq.SolveConfig(dq.Relaxed(0.8))
    if kind != "implicit":
        return Curriculum((bounded(sizes.bounded_steps, 1, until=None, base=damped),))
    budget = sizes.budget or {"llama": 32, "mamba2": 24}[family]
    first = bounded(sizes.bounded_steps, 1, until=sizes.bounded_share, base=damped)
    return Curriculum((first, free(budget, sizes.phantom, rtol=sizes.rtol, base=damped)))


def lr_factor(step: int, *, steps: int, warmup: int, decay: int, floor: float) -> float:
    """Learning rate of a step over its peak: linear warm-up, constant, and 1 - sqrt decay to ``floor`` at the end.

    References:
        Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, arXiv 2405.18392.
    """
    if step < warmup:
        return (step + 1) / warmup
    past = max(0, step - steps + decay) / decay
    return floor + (1 - floor) * (1 - math.sqrt(min(1, past)))
