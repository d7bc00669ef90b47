"""Models: a backbone, run once or solved for its fixed point, between an embedding and a head."""

from deqseq.models.causal_lm import CausalLM
from deqseq.models.examples import EXAMPLES, load_example
from deqseq.models.explicit import ExplicitModel
from deqseq.models.generation import Draft, Generation, NewTokens
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import CausalLMOutput, ModelOutput
from deqseq.models.presets import PRESETS, ParameterCount, parameter_count, preset
from deqseq.models.recurrent_depth import RecurrentDepth, RecurrentDepthCache
from deqseq.models.specification import LanguageModelSpec
from deqseq.sweeps.tokens import Uncommitted

__all__ = [
    "EXAMPLES",
    "PRESETS",
    "CausalLM",
    "CausalLMOutput",
    "Draft",
    "ExplicitModel",
    "Generation",
    "ImplicitModel",
    "LanguageModelSpec",
    "ModelOutput",
    "NewTokens",
    "ParameterCount",
    "RecurrentDepth",
    "RecurrentDepthCache",
    "Uncommitted",
    "load_example",
    "parameter_count",
    "preset",
]
