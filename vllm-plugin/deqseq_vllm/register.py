"""What vLLM calls in each of its processes, to learn of the configuration and of the model."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from vllm import ModelRegistry

from deqseq_vllm.plan import SECTIONS, changed, check_name


class DeqseqConfig(PreTrainedConfig):
    """A saved configuration, as plain data, whose sections deqseq reads when they are set.

    A section can be changed for the server, as in ``--hf-overrides '{"eval_solve": {"stop":
    {"rtol": 1e-2}}}'``: what a mapping leaves out stays as it is.

    Raises:
        TypeError, ValueError: an unknown field, or a section that deqseq refuses: names the field.
    """

    model_type = "deqseq"

    def __post_init__(self, **content: Any) -> None:
        for name, value in content.items():
            check_name(name, value)
        # as in deqseq: what eval_solve leaves out is as in solve
        ordered = sorted(content.items(), key=lambda field: field[0] == "eval_solve")
        super().__post_init__(**dict(ordered))

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping):  # vLLM sets such an override as an attribute
            check_name(name, value)
        content = vars(self)
        if name == "solve" and content.get("eval_solve") is not None and value is not None:
            self.eval_solve = value  # a server is in eval mode
        super().__setattr__(name, changed(name, value, content) if name in SECTIONS else value)

    def update(self, config_dict: dict[str, Any]) -> None:
        """As in transformers; refuses unknown fields."""
        for name, value in config_dict.items():
            check_name(name, value)
        super().update(config_dict)


def register() -> None:
    """Tell vLLM and transformers of this library's models."""
    AutoConfig.register(DeqseqConfig.model_type, DeqseqConfig, exist_ok=True)
    ModelRegistry.register_model("DeqseqForCausalLM", "deqseq_vllm.model:DeqseqForCausalLM")
