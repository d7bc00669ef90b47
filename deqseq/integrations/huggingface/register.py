"""Our model types in transformers' registries."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from deqseq.integrations.huggingface.configuration_llama import ImplicitLlamaConfig
from deqseq.integrations.huggingface.configuration_mamba2 import ImplicitMamba2Config
from deqseq.integrations.huggingface.models import (
    ImplicitLlamaForCausalLM,
    ImplicitLlamaModel,
    ImplicitMamba2ForCausalLM,
    ImplicitMamba2Model,
)

MODEL_TYPES = (
    (ImplicitMamba2Config, ImplicitMamba2Model, ImplicitMamba2ForCausalLM),
    (ImplicitLlamaConfig, ImplicitLlamaModel, ImplicitLlamaForCausalLM),
)


def register() -> None:
    """Make our model types known to ``AutoConfig``, ``AutoModel`` and ``AutoModelForCausalLM``; again does nothing.

    Importing :mod:`deqseq.integrations.huggingface` calls it. Without that, transformers cannot know the types, and its
    error for a checkpoint of ours says that it does not recognise the architecture; ``registered_by`` in the
    checkpoint's ``config.json`` names the import.

    Example:
        >>> register()
        >>> from transformers import AutoConfig
        >>> type(AutoConfig.for_model("implicit_llama3")).__name__
        'ImplicitLlamaConfig'
    """
    for config, base, causal in MODEL_TYPES:
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, base, exist_ok=True)
        AutoModelForCausalLM.register(config, causal, exist_ok=True)
