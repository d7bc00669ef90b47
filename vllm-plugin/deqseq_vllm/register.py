"""What vLLM calls in each of its processes, to learn of the configuration and of the model."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from vllm import ModelRegistry

from deqseq.arguments import check_integer
from deqseq.as_json import SECTIONS
from deqseq_vllm.plan import INTEGERS, SIZES, changed, check_name, decoder_changed


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
        super().__post_init__(**{"head_dim": None} | dict(ordered))
        for name in ("num_hidden_layers", *SIZES):
            if name != "head_dim" and content and content.get(name) is None:
                raise ValueError(
                    f"config.json must have {name!r}: save the model again by save_pretrained"
                )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Mapping):  # vLLM sets such an override as an attribute
            check_name(name, value)
        content = vars(self)
        if name == "solve" and content.get("eval_solve") is not None and value is not None:
            self.eval_solve = value  # a server is in eval mode
        if name in SECTIONS:
            value = changed(name, value, content)
        elif name == "decoder_config":
            value = decoder_changed(value, content)
        elif name in INTEGERS and value is not None:
            check_integer(f"DeqseqConfig.{name}", value, 1)
        super().__setattr__(name, value)

    def update(self, config_dict: dict[str, Any]) -> None:
        """As in transformers; refuses unknown fields."""
        for name, value in config_dict.items():
            check_name(name, value)
        super().update(config_dict)


def register() -> None:
    """Tell vLLM and transformers of this library's models."""
    AutoConfig.register(DeqseqConfig.model_type, DeqseqConfig, exist_ok=True)
    ModelRegistry.register_model("DeqseqForCausalLM", "deqseq_vllm.model:DeqseqForCausalLM")
