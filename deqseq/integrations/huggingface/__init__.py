"""Implicit models as models of transformers; importing this registers the model type ``deqseq``,
and lets every Trainer log how its solves went.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError(
        'deqseq.integrations.huggingface needs transformers: pip install "deqseq[hf]"'
    ) from error

from packaging.version import Version

# older ones have another name for the cache
if Version(transformers.__version__).release < (5, 24):
    raise ImportError(
        "deqseq.integrations.huggingface needs transformers 5.24 or newer, found "
        f'{transformers.__version__}: pip install --upgrade "deqseq[hf]"'
    )

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import DEFAULT_CALLBACKS

from deqseq.integrations.huggingface.cache import ImplicitCache, Solve
from deqseq.integrations.huggingface.callbacks import CurriculumCallback, SolveLog
from deqseq.integrations.huggingface.configuration import DeqseqConfig
from deqseq.integrations.huggingface.conversion import (
    from_causal_lm,
    from_decoder,
    retrofit,
    to_causal_lm,
)
from deqseq.integrations.huggingface.decoder import DecoderBackbone
from deqseq.integrations.huggingface.modeling import (
    DeqseqForSequenceClassification,
    DeqseqModel,
    ImplicitModelOutput,
)
from deqseq.integrations.huggingface.modeling_causal_lm import (
    DeqseqForCausalLM,
    ImplicitCausalLMOutput,
)
from deqseq.integrations.huggingface.windowed_generation import WindowedOutput

# otherwise transformers needs trust_remote_code=True and the module that a saved model names
AutoConfig.register(DeqseqConfig.model_type, DeqseqConfig, exist_ok=True)
AutoModel.register(DeqseqConfig, DeqseqModel, exist_ok=True)
AutoModelForCausalLM.register(DeqseqConfig, DeqseqForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    DeqseqConfig, DeqseqForSequenceClassification, exist_ok=True
)
# by these names the Trainer shifts labels, and `transformers serve` knows language models
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DeqseqConfig.model_type] = DeqseqForCausalLM.__name__
if SolveLog not in DEFAULT_CALLBACKS:
    DEFAULT_CALLBACKS.append(SolveLog)  # pyright: ignore[reportArgumentType]

__all__ = [
    "CurriculumCallback",
    "DecoderBackbone",
    "DeqseqConfig",
    "DeqseqForCausalLM",
    "DeqseqForSequenceClassification",
    "DeqseqModel",
    "ImplicitCache",
    "ImplicitCausalLMOutput",
    "ImplicitModelOutput",
    "Solve",
    "SolveLog",
    "WindowedOutput",
    "from_causal_lm",
    "from_decoder",
    "retrofit",
    "to_causal_lm",
]
