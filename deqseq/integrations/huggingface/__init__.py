"""Implicit models as models of transformers 5; importing this registers them with its Auto classes."""

try:
    import transformers
except ImportError as error:
    raise ImportError('deqseq.integrations.huggingface needs transformers: pip install "deqseq[hf]"') from error

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"deqseq.integrations.huggingface needs transformers 5 or newer, found {transformers.__version__}: "
        'pip install --upgrade "deqseq[hf]"'
    )

from deqseq.integrations.huggingface.cache import ImplicitCache, Solve
from deqseq.integrations.huggingface.configuration_llama import ImplicitLlamaConfig
from deqseq.integrations.huggingface.configuration_mamba2 import ImplicitMamba2Config
from deqseq.integrations.huggingface.conversion import from_causal_lm, to_causal_lm
from deqseq.integrations.huggingface.curriculum_callback import CurriculumCallback
from deqseq.integrations.huggingface.models import (
    ImplicitLlamaForCausalLM,
    ImplicitLlamaModel,
    ImplicitMamba2ForCausalLM,
    ImplicitMamba2Model,
)
from deqseq.integrations.huggingface.objects import from_json, to_json
from deqseq.integrations.huggingface.output import ImplicitCausalLMOutput, ImplicitModelOutput
from deqseq.integrations.huggingface.presets import deqseq_preset, preset_config
from deqseq.integrations.huggingface.reference import from_reference_folder
from deqseq.integrations.huggingface.register import register

register()

__all__ = [
    "CurriculumCallback",
    "ImplicitCache",
    "ImplicitCausalLMOutput",
    "ImplicitLlamaConfig",
    "ImplicitLlamaForCausalLM",
    "ImplicitLlamaModel",
    "ImplicitMamba2Config",
    "ImplicitMamba2ForCausalLM",
    "ImplicitMamba2Model",
    "ImplicitModelOutput",
    "Solve",
    "deqseq_preset",
    "from_causal_lm",
    "from_json",
    "from_reference_folder",
    "preset_config",
    "register",
    "to_causal_lm",
    "to_json",
]
