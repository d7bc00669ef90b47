"""The paper's models, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import torch

from deqseq.annotations import checked
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.check import suggestion
from deqseq.config import SolveConfig
from deqseq.gradients import Phantom
from deqseq.models.specification import LanguageModelSpec
from deqseq.solvers import Relaxed
from deqseq.stop import Stop

Family = Literal["llama3", "mamba2"]
Kind = Literal["explicit", "pretrain", "implicit"]

VOCABULARY = 50277  # tokens of the GPT-NeoX tokenizer
PADDED_VOCABULARY = 50288  # the next multiple of 16


@dataclass(frozen=True)
class Size:
    """One of the paper's four sizes.

    Attributes:
        d_model: width, of both families.
        mamba2_layers: blocks of the Mamba2.
        llama_layers: blocks of the Llama.
        llama_heads: its heads.
        llama_budget: iterations that it is allowed in the free phase.
    """

    d_model: int
    mamba2_layers: int
    llama_layers: int
    llama_heads: int
    llama_budget: int = 32


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "130m": Size(768, 24, 12, 12),
        "370m": Size(1024, 48, 24, 16, llama_budget=24),
        "760m": Size(1536, 48, 24, 16),
        "1.3b": Size(2048, 48, 24, 32),
    }
)
"""The paper's sizes, by name."""


@checked
def preset(name: str) -> LanguageModelSpec:
    """One of the paper's models: ``FAMILY-SIZE-KIND``, or the state-tracking model.

    Families are ``llama3`` and ``mamba2``, sizes ``130m``, ``370m``, ``760m`` and ``1.3b``. Kinds:

    - ``explicit``: one pass, no injection, no weight normalisation.
    - ``pretrain``: bounded, at most 4 iterations, then 1 phantom step: the (4+1)-model.
    - ``implicit``: free, at most 24 iterations (Llama: 32, its 370m: 24), then 4 phantom steps.

    Implicit ones are solved by the relaxed iteration, damping 0.8, to a relative difference of 0.05 of each token,
    with 4 times the budget in evaluation. The reference code trains undamped and measures a sequence by one norm;
    :func:`deqseq.integrations.foreign.from_reference_config` gives that. As there, the Mamba2 models pad
    their vocabulary of 50277 tokens to 50288 rows of the embedding, but for ``mamba2-130m-explicit``; Llamas do not.

    Args:
        name: a key of :data:`PRESETS`.

    Returns:
        The specification; ``build()`` makes the model, with fresh weights.

    Raises:
        ValueError: an unknown name; the nearest ones are in the message.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, and the configuration files of
        its public code.

    Example:
        >>> spec = preset("mamba2-1.3b-implicit")
        >>> spec.backbone.n_layers, spec.solve.stop.max_steps, spec.eval_solve.stop.max_steps
        (48, 24, 96)
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset name {name!r}{suggestion(name, PRESETS)} (all names: list(deqseq.PRESETS))")
    return PRESETS[name]


def _language_model(family: Family, size: str, kind: Kind) -> LanguageModelSpec:
    sizes = SIZES[size]
    if family == "llama3":
        backbone = LlamaConfig(
            d_model=sizes.d_model,
            n_layers=sizes.llama_layers,
            n_heads=sizes.llama_heads,
            mlp_width=8 * sizes.d_model // 3,
        )
        vocabulary, budget = VOCABULARY, sizes.llama_budget
    else:
        backbone = Mamba2Config(d_model=sizes.d_model, n_layers=sizes.mamba2_layers)
        # the reference's file of this one model does not pad
        vocabulary = VOCABULARY if (size, kind) == ("130m", "explicit") else PADDED_VOCABULARY
        budget = 24
    if kind == "explicit":
        return LanguageModelSpec(vocabulary, replace(backbone, weight_norm=False, injection=False), solve=None)
    return LanguageModelSpec(vocabulary, backbone, *(_solves(4, 1) if kind == "pretrain" else _solves(budget, 4)))


def _solves(budget: int, phantom_steps: int, eval_budget: int | None = None) -> tuple[SolveConfig, SolveConfig]:
    """How the paper solves in training, and in evaluation."""
    stop = Stop(rtol=0.05, max_steps=budget)
    solve = SolveConfig(Relaxed(0.8), stop, Phantom(phantom_steps, damping=0.8))
    return solve, replace(solve, stop=replace(stop, max_steps=eval_budget or 4 * budget))


def _state_tracking() -> LanguageModelSpec:
    """A5 times a monoid of four elements: 240 tokens."""
    backbone = Mamba2Config(d_model=256, n_layers=1, d_state=128, expand=4, headdim=64, dropout=0.05)
    return LanguageModelSpec(240, backbone, *_solves(32, 4, eval_budget=2048))


PRESETS: Mapping[str, LanguageModelSpec] = MappingProxyType(
    {
        f"{family}-{size}-{kind}": _language_model(family, size, kind)
        for family in get_args(Family)
        for size in SIZES
        for kind in get_args(Kind)
    }
    | {"mamba2-state-tracking": _state_tracking()}
)
"""All presets, by name."""


@checked
def parameter_count(spec: LanguageModelSpec) -> int:
    """Count the parameters of a model by building it without memory, on the meta device.

    Args:
        spec: the model.

    Returns:
        Everything that is trained, each parameter once.

    Example:
        >>> f"{parameter_count(preset('llama3-130m-explicit')):,}"
        '123,566,592'
    """
    with torch.device("meta"):
        model = spec.build()
    return sum(parameter.numel() for parameter in model.parameters())
