"""Implicit models as models of transformers; importing this registers them with its Auto classes."""

try:
    import transformers
except ImportError as error:
    raise ImportError('deqseq.integrations.huggingface needs transformers: pip install "deqseq[hf]"') from error

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):  # which named the cache anew
    raise ImportError(
        f"deqseq.integrations.huggingface needs transformers 5.24 or newer, found {transformers.__version__}: "
        'pip install --upgrade "deqseq[hf]"'
    )

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from deqseq.integrations.huggingface.cache import ImplicitCache, Solve
from deqseq.integrations.huggingface.conversion import (
    from_causal_lm,
    from_reference_folder,
    preset_config,
    to_causal_lm,
)
from deqseq.integrations.huggingface.curriculum_callback import CurriculumCallback
from deqseq.integrations.huggingface.decoder import DecoderBackbone, from_decoder
from deqseq.integrations.huggingface.llama import (
    ImplicitLlamaConfig,
    ImplicitLlamaForCausalLM,
    ImplicitLlamaForSequenceClassification,
    ImplicitLlamaModel,
)
from deqseq.integrations.huggingface.mamba2 import (
    ImplicitMamba2Config,
    ImplicitMamba2ForCausalLM,
    ImplicitMamba2ForSequenceClassification,
    ImplicitMamba2Model,
)
from deqseq.integrations.huggingface.objects import from_json, to_json
from deqseq.integrations.huggingface.outputs import ImplicitCausalLMOutput, ImplicitModelOutput
from deqseq.integrations.huggingface.recurrent_depth import (
    RecurrentDepthConfig,
    RecurrentDepthForCausalLM,
    RecurrentDepthForSequenceClassification,
    RecurrentDepthModel,
)
from deqseq.integrations.huggingface.retrofit import retrofit

# without these transformers needs trust_remote_code=True, and the module that a saved configuration names
for _config, *_models in (
    (ImplicitMamba2Config, ImplicitMamba2Model, ImplicitMamba2ForCausalLM, ImplicitMamba2ForSequenceClassification),
    (ImplicitLlamaConfig, ImplicitLlamaModel, ImplicitLlamaForCausalLM, ImplicitLlamaForSequenceClassification),
    (RecurrentDepthConfig, RecurrentDepthModel, RecurrentDepthForCausalLM, RecurrentDepthForSequenceClassification),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    for _auto, _model in zip(
        (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification), _models, strict=True
    ):
        _auto.register(_config, _model, exist_ok=True)

__all__ = [
    "CurriculumCallback",
    "DecoderBackbone",
    "ImplicitCache",
    "ImplicitCausalLMOutput",
    "ImplicitLlamaConfig",
    "ImplicitLlamaForCausalLM",
    "ImplicitLlamaForSequenceClassification",
    "ImplicitLlamaModel",
    "ImplicitMamba2Config",
    "ImplicitMamba2ForCausalLM",
    "ImplicitMamba2ForSequenceClassification",
    "ImplicitMamba2Model",
    "ImplicitModelOutput",
    "RecurrentDepthConfig",
    "RecurrentDepthForCausalLM",
    "RecurrentDepthForSequenceClassification",
    "RecurrentDepthModel",
    "Solve",
    "from_causal_lm",
    "from_decoder",
    "from_json",
    "from_reference_folder",
    "preset_config",
    "retrofit",
    "to_causal_lm",
    "to_json",
]
