"""What all models have in common: loading, saving, initial weights, folding weight
normalisation.
"""

import json
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init

from deqseq.arguments import check_type
from deqseq.as_json import to_json
from deqseq.integrations.huggingface.configuration import PARTS, DeqseqConfig
from deqseq.integrations.huggingface.decoder import DecoderBackbone
from deqseq.layers import fold_weight_norm
from deqseq.models.specification import parts_of


class DeqseqPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation of all models of this library.

    Args:
        config: a :class:`DeqseqConfig`.

    Example:
        >>> import tempfile
        >>> from transformers import AutoModelForCausalLM
        >>> from deqseq.integrations.huggingface import DeqseqConfig, DeqseqForCausalLM
        >>> config = DeqseqConfig(
        ...     vocab_size=9, backbone={"name": "LlamaConfig", "d_model": 16, "n_heads": 2}
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     DeqseqForCausalLM(config).save_pretrained(folder)
        ...     type(AutoModelForCausalLM.from_pretrained(folder)).__name__
        'DeqseqForCausalLM'
    """

    config_class = DeqseqConfig
    config: DeqseqConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["LlamaBlock", "Mamba2Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache"]  # noqa: RUF012

    def __init__(self, config: DeqseqConfig) -> None:
        check_type("config", config, DeqseqConfig)
        super().__init__(config)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike[str] | None,
        *model_args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, but ValueError for weights that are missing, unexpected or of another
        shape.

        With ``output_loading_info=True``, which also returns the report, a missing embedding or
        head is drawn, and unexpected weights are dropped.
        """
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        model, report = loaded
        _check_weights(
            report,
            pretrained_model_name_or_path or "the given state dict",
            reported=output_loading_info,
        )
        return (model, report) if output_loading_info else model

    def save_pretrained(
        self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers; whether weights are normalised is saved as the core is now.

        TypeError: ``generation_config.solve`` has an object that JSON cannot name. ValueError: only
        some layers of a backbone have weight normalisation.
        """
        if self.can_generate():
            generation = vars(self.generation_config)
            generation["_from_model_config"] = (
                False  # or ``solve`` would be dropped when the file is read
            )
            if "solve" in generation:
                generation["solve"] = json.loads(json.dumps(generation["solve"], default=to_json))
        self._follow_core()
        super().save_pretrained(save_directory, *args, **kwargs)

    def fold_weight_norm(self) -> None:
        """Replace weight-normalised weights by plain ones of the same value, here and in the
        configuration.

        Do this before tools that write weights (merging LoRA, quantisation), and before an
        optimizer is made.
        """
        base: Any = self.base_model
        fold_weight_norm(base.core)
        self._follow_core()

    def _follow_core(self) -> None:
        """Say in the configuration what the backbones are now: their weight normalisation may have
        changed.
        """
        base: Any = self.base_model
        for name, sizes in parts_of(base.core).items():
            if name in PARTS:
                setattr(self.config, name, sizes)

    def set_attn_implementation(
        self, attn_implementation: str, allow_all_kernels: bool = False
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As in transformers, also in the layers of a decoder, whose family must support the
        function.
        """
        check_type("attn_implementation", attn_implementation, str)
        family: Any = self if self.config.decoder_config is None else self._decoder()
        chosen = family._check_and_adjust_attn_implementation(
            attn_implementation, allow_all_kernels=allow_all_kernels
        )
        for config in (
            self.config,
            *(part.config for part in self.modules() if isinstance(part, DecoderBackbone)),
        ):
            config._attn_implementation = chosen

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing to do: ``auto_map`` of a saved configuration names installed classes."""

    def compile(self, **options: Any) -> None:
        """Compile the blocks with ``torch.compile``; the code around them stays as it is.

        Args:
            **options: of ``torch.compile``.
        """
        base: Any = self.base_model
        base.core.compile(**options)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw an embedding or a head; a backbone has initialised itself, but for the layers of a
        decoder.

        Their rotary frequencies, and Gemma's scale, are in no checkpoint.
        """
        if self.config.decoder_config is not None:
            self._decoder()._init_weights(module)
        elif isinstance(module, nn.Embedding | nn.Linear):
            init.normal_(module.weight, std=self.config.initializer_range)

    def _decoder(self) -> Any:
        """A model of the decoder's family, without weights."""
        with torch.device("meta"):
            return AutoModel.from_config(self.config.decoder_config)


def _check_weights(report: dict[str, Any], source: object, *, reported: bool) -> None:
    """Refuse weights that do not fit: those of a core are never drawn, and other fixed points would
    be found.
    """
    # of a vocabulary, or a number of labels, of another size
    redrawn = ("embed_tokens.weight", "lm_head.weight", "score.weight")
    drawn = redrawn if reported else "score.weight"  # the head of a new task
    found = {
        "missing": [key for key in report.get("missing_keys", ()) if not key.endswith(drawn)],
        "of another shape": [
            key for key, *_ in report.get("mismatched_keys", ()) if not key.endswith(redrawn)
        ],
        "unexpected": () if reported else report.get("unexpected_keys", ()),
    }
    faults = "; ".join(
        f"{fault} {', '.join(sorted(names)[:8])}" for fault, names in found.items() if names
    )
    if faults:
        raise ValueError(
            f"the weights in {source} do not fit: {faults}. Does its config.json describe them? "
            "With "
            "output_loading_info=True a missing embedding or head is drawn, unexpected weights "
            "are dropped, and both "
            "are reported"
        )
