"""Models: a backbone with an input, an output and, if implicit, a solver."""

from deqseq.models.causal_lm import CausalLM
from deqseq.models.explicit import ExplicitModel
from deqseq.models.generation import Generation, NewTokens
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import CausalLMOutput, ModelOutput
from deqseq.models.presets import PRESETS, ParameterCount, parameter_count, preset, preset_names
from deqseq.models.specification import LanguageModelSpec, Solving

__all__ = [
    "PRESETS",
    "CausalLM",
    "CausalLMOutput",
    "ExplicitModel",
    "Generation",
    "ImplicitModel",
    "LanguageModelSpec",
    "ModelOutput",
    "NewTokens",
    "ParameterCount",
    "Solving",
    "parameter_count",
    "preset",
    "preset_names",
]
