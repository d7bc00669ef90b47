"""Models: a backbone, run once or solved for its fixed point, between an embedding and a head."""

from deqseq.models.base import ExplicitModel, Model
from deqseq.models.causal_lm import CausalLM
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import (
    CausalLMOutput,
    Evaluation,
    Generation,
    ModelOutput,
    NewTokens,
    TokenClassifierOutput,
)
from deqseq.models.presets import EXAMPLES, PRESETS, load_example, preset
from deqseq.models.recurrent_depth import RecurrentDepth
from deqseq.models.specification import LanguageModelSpec
from deqseq.models.token_classifier import TokenClassifier

__all__ = [
    "EXAMPLES",
    "PRESETS",
    "CausalLM",
    "CausalLMOutput",
    "Evaluation",
    "ExplicitModel",
    "Generation",
    "ImplicitModel",
    "LanguageModelSpec",
    "Model",
    "ModelOutput",
    "NewTokens",
    "RecurrentDepth",
    "TokenClassifier",
    "TokenClassifierOutput",
    "load_example",
    "preset",
]
