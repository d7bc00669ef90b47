"""What vLLM calls in each of its processes, to learn of the configuration and of the model."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from vllm import ModelRegistry

from deqseq_vllm.plan import check_backbone, merged


class DeqseqConfig(PreTrainedConfig):
    """A saved configuration, as plain data.

    ``eval_solve`` can be changed for the server, as in ``--hf-overrides '{"eval_solve": {"stop":
    {"rtol": 1e-2}}}'``: what a mapping leaves out stays as it is.
    """

    model_type = "deqseq"

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("prelude", "backbone", "coda") and value is not None:
            check_backbone(name, value)
        if name == "eval_solve" and value is not None:
            fields = vars(self)
            value = merged(fields.get("eval_solve") or fields.get("solve"), value)
        super().__setattr__(name, value)


def register() -> None:
    """Tell vLLM and transformers of this library's models."""
    AutoConfig.register(DeqseqConfig.model_type, DeqseqConfig, exist_ok=True)
    ModelRegistry.register_model("DeqseqForCausalLM", "deqseq_vllm.model:DeqseqForCausalLM")
