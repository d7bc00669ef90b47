"""The paper's models, by name."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from deqseq.arguments import checked, suggestion
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.gradients import Phantom
from deqseq.models.specification import LanguageModelSpec
from deqseq.solvers import Relaxed
from deqseq.stop import Stop

SIZES = {
    "130m": (768, 24, 12, 12, 32),
    "370m": (1024, 48, 24, 16, 24),
    "760m": (1536, 48, 24, 16, 32),
    "1.3b": (2048, 48, 24, 32, 32),
}
"""Width; layers of the Mamba2; layers, heads, and iterations in the free phase of the Llama."""


@checked
def preset(name: str) -> LanguageModelSpec:
    """One of the paper's models: ``FAMILY-SIZE-KIND``, or the state-tracking model.

    Families are ``llama3`` and ``mamba2``, sizes ``130m``, ``370m``, ``760m`` and ``1.3b``. Kinds
    are ``explicit``, ``pretrain`` (bounded: at most 4 iterations, then 1 phantom step) and
    ``implicit`` (free: at most 24 iterations, for Llama 32, for its 370m 24, then 4 phantom steps).
    Solves are damped by 0.8 and end at a relative difference of 0.05 of each token, with 4 times
    the budget in evaluation. The reference code trains undamped and measures a sequence by one
    norm; :func:`deqseq.integrations.foreign.from_reference_config` gives that.

    Args:
        name: a key of :data:`PRESETS`.

    Returns:
        The specification; ``build()`` makes the model, with fresh weights.

    Raises:
        ValueError: an unknown name; the nearest ones are in the message.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, and the
        configuration files of its public code.

    Example:
        >>> spec = preset("mamba2-1.3b-implicit")
        >>> spec.backbone.n_layers, spec.solve.stop.max_steps, spec.eval_solve.stop.max_steps
        (48, 24, 96)
    """
    if name not in PRESETS:
        raise ValueError(
            f"unknown preset name {name!r}{suggestion(name, PRESETS)} "
            "(all names: list(deqseq.PRESETS))"
        )
    return PRESETS[name]


def _language_model(family: str, size: str, kind: str) -> LanguageModelSpec:
    width, mamba2_layers, llama_layers, heads, budget = SIZES[size]
    vocabulary = 50277  # tokens of the GPT-NeoX tokenizer
    if family == "llama3":
        backbone = LlamaConfig(width, llama_layers, heads, mlp_width=8 * width // 3)
    else:
        backbone, budget = Mamba2Config(width, mamba2_layers), 24
        if (size, kind) != ("130m", "explicit"):  # the reference pads all of them but this one
            vocabulary = 50288
    if kind == "explicit":
        backbone = replace(backbone, weight_norm=False, injection=False)
        return LanguageModelSpec(vocabulary, backbone, solve=None)
    solves = _solves(4, 1, 16) if kind == "pretrain" else _solves(budget, 4, 4 * budget)
    return LanguageModelSpec(vocabulary, backbone, *solves)


def _solves(budget: int, phantom_steps: int, eval_budget: int) -> tuple[SolveConfig, SolveConfig]:
    """How the paper solves in training, and in evaluation."""
    stop = Stop(rtol=0.05, max_steps=budget)
    solve = SolveConfig(Relaxed(0.8), stop, Phantom(phantom_steps, damping=0.8))
    return solve, replace(solve, stop=replace(stop, max_steps=eval_budget))


_STATE_TRACKING = LanguageModelSpec(
    240,  # A5 times a monoid of four elements
    Mamba2Config(d_model=256, n_layers=1, d_state=128, expand=4, headdim=64, dropout=0.05),
    *_solves(32, 4, 2048),
)
PRESETS: Mapping[str, LanguageModelSpec] = MappingProxyType(
    {
        f"{family}-{size}-{kind}": _language_model(family, size, kind)
        for family in ("llama3", "mamba2")
        for size in SIZES
        for kind in ("explicit", "pretrain", "implicit")
    }
    | {"mamba2-state-tracking": _STATE_TRACKING}
)
"""All presets, by name."""
