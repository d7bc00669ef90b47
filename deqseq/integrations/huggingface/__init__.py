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

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from deqseq.integrations.huggingface.cache import ImplicitCache, Solve
from deqseq.integrations.huggingface.conversion import from_causal_lm, from_reference_folder, to_causal_lm
from deqseq.integrations.huggingface.curriculum_callback import CurriculumCallback
from deqseq.integrations.huggingface.llama import ImplicitLlamaConfig, ImplicitLlamaForCausalLM, ImplicitLlamaModel
from deqseq.integrations.huggingface.mamba2 import ImplicitMamba2Config, ImplicitMamba2ForCausalLM, ImplicitMamba2Model
from deqseq.integrations.huggingface.objects import from_json, to_json
from deqseq.integrations.huggingface.outputs import ImplicitCausalLMOutput, ImplicitModelOutput
from deqseq.integrations.huggingface.presets import deqseq_preset, preset_config

# without these transformers reports an unknown architecture; config.json names this module in registered_by
for _config, _model, _causal_lm in (
    (ImplicitMamba2Config, ImplicitMamba2Model, ImplicitMamba2ForCausalLM),
    (ImplicitLlamaConfig, ImplicitLlamaModel, ImplicitLlamaForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)

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
    "to_causal_lm",
    "to_json",
]
