"""The models of this library as models of transformers: loading and saving, and their states."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, no_type_check

import torch
from jaxtyping import Int64, Shaped
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from deqseq.arguments import check_ids, check_type, shown
from deqseq.as_json import PARTS, from_json, to_json
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface.cache import (
    ImplicitCache,
    Packing,
    check_cache,
    check_keywords,
    check_positions,
    check_tensors,
)
from deqseq.integrations.huggingface.configuration import ConfigSettings, DeqseqConfig
from deqseq.integrations.huggingface.decoder import DecoderBackbone, choose_attention, watch
from deqseq.layers import fold_weight_norm
from deqseq.models import ImplicitModel
from deqseq.models.causal_lm import as_int64, scaled
from deqseq.models.recurrent_depth import check_adapters, solved_part
from deqseq.models.specification import parts_of
from deqseq.solution import Outcome, SolveStats
from deqseq.training import gather_once
from deqseq.types import Mask, Sequence

SolveChange = SolveConfig | Mapping[str, Any]
"""How a call is solved: a whole configuration, or the fields to replace, as objects or JSON."""
OptionalTensor = Shaped[Tensor, "..."] | None
"""A tensor that the model checks by itself."""


class DeqseqPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation of all models of this library.

    Args:
        config: a :class:`DeqseqConfig`.

    Example:
        >>> import tempfile
        >>> from transformers import AutoModelForCausalLM
        >>> from deqseq.integrations.huggingface import DeqseqConfig, DeqseqForCausalLM
        >>> sizes = {"name": "LlamaConfig", "d_model": 16, "n_heads": 2}
        >>> config = DeqseqConfig(vocab_size=9, backbone=sizes)
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

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "peft_config":
            base: Any = self.base_model
            check_adapters(base.core, value)
        super().__setattr__(name, value)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike[str] | None,
        *model_args: Any,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, but ValueError for weights that do not fit or are not finite.

        With ``output_loading_info=True``, which also returns the report, a missing embedding or
        head is initialised, unexpected weights are dropped. Layers split over devices are refused.
        """
        if split := {"tp_plan", "tp_size", "distributed_config"} & kwargs.keys():
            names, other = ", ".join(sorted(split)), "use FSDP for training, vLLM for serving"
            raise ValueError(f"leave out {names}: layers are not split over devices; {other}")
        source = pretrained_model_name_or_path or "the given state dict"
        # sizes that differ are refused below, where they must not
        options = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, **options
            )
        except SafetensorError as error:
            raise ValueError(f"the weights in {source} cannot be read: {error}") from error
        model, report = loaded
        resized = DRAWN if ignore_mismatched_sizes else ()
        _check_weights(model, report, source, resized, reported=output_loading_info)
        return (model, report) if output_loading_info else model

    def save_pretrained(
        self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers; the configuration says whether weights are normalised now.

        TypeError: ``generation_config.solve`` has an object that JSON cannot name. ValueError: only
        some layers of a backbone have weight normalisation.
        """
        if self.can_generate():
            generation = vars(self.generation_config)
            # reading a file would drop the ``solve`` of one that was made from the configuration
            generation["_from_model_config"] = False
            if "solve" in generation:
                generation["solve"] = json.loads(json.dumps(generation["solve"], default=to_json))
        self._follow_core()
        super().save_pretrained(save_directory, *args, **kwargs)

    def fold_weight_norm(self) -> None:
        """Replace weight-normalised weights by plain ones of the same value.

        Do this before tools that write weights (merging LoRA, quantisation), and before an
        optimizer is made. The configuration follows.
        """
        base: Any = self.base_model
        fold_weight_norm(base.core)
        self._follow_core()

    def _follow_core(self) -> None:
        """Describe the backbones as they are now: their weight normalisation may have changed."""
        base: Any = self.base_model
        for name, sizes in parts_of(base.core).items():
            if name in PARTS:
                setattr(self.config, name, sizes)

    def set_attn_implementation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, attn_implementation: str, allow_all_kernels: bool = False
    ) -> None:
        """As in transformers; the family of a decoder must support the function."""
        check_type("attn_implementation", attn_implementation, str)
        family: Any = self if self.config.decoder_config is None else self._decoder()
        chosen = family._check_and_adjust_attn_implementation(
            attn_implementation, allow_all_kernels=allow_all_kernels
        )
        self.config._attn_implementation = chosen
        for module in self.modules():
            if isinstance(module, DecoderBackbone):
                module.config._attn_implementation = chosen

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
        """Draw an embedding or a head, and what a decoder's layers have in no checkpoint."""
        if self.config.decoder_config is not None:
            self._decoder()._init_weights(module)
        elif isinstance(module, nn.Embedding | nn.Linear):
            init.normal_(module.weight, std=self.config.initializer_range)

    def _decoder(self) -> Any:
        """A model of the decoder's family, without weights."""
        with torch.device("meta"):
            return AutoModel.from_config(self.config.decoder_config)


HEAD = "score.weight"  # the head of a new task is missing
# an embedding or a head of another vocabulary or number of labels has another shape
DRAWN = ("embed_tokens.weight", "lm_head.weight", HEAD)


def _not_finite(model: nn.Module) -> list[str]:
    """The names of weights with NaN or infinity; quantised and offloaded ones are not looked at."""
    return [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and weight.itemsize > 1 and not weight.is_meta
        if not bool(weight.isfinite().all())
    ]


def _check_weights(
    model: nn.Module,
    report: dict[str, Any],
    source: object,
    resized: tuple[str, ...],
    *,
    reported: bool,
) -> None:
    """Refuse weights that do not fit: a core with drawn weights would have other fixed points."""
    may_be_missing = DRAWN if reported else HEAD
    misshapen = [name for name, *_ in report["mismatched_keys"]]
    faults = {
        "missing": [name for name in report["missing_keys"] if not name.endswith(may_be_missing)],
        "of another shape": [name for name in misshapen if not name.endswith(resized)],
        "not finite": () if reported else _not_finite(model),
        "unexpected": () if reported else report["unexpected_keys"],
    }
    texts = [f"{fault} {', '.join(sorted(names)[:8])}" for fault, names in faults.items() if names]
    if texts:
        raise ValueError(
            f"the weights in {source} do not fit: {'; '.join(texts)}. Does its config.json "
            "describe them? With output_loading_info=True a missing embedding or head is drawn, "
            "unexpected weights are dropped, and both are reported"
        )


@no_type_check  # accelerate rebuilds an output from a mapping in place of the first field
@dataclass
class ImplicitModelOutput(BaseModelOutputWithPast, Outcome):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Transformers' fields, with the states in ``last_hidden_state``, and those of a solve.

    Attributes:
        stats: numbers of the solve, per token; None for an explicit model.
        status: a :class:`deqseq.Status` per row, ``(batch,)``; None for an explicit model.
    """

    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None


class DeqseqModel(DeqseqPreTrainedModel):
    """An embedding and a model: tokens in, states out.

    Args:
        config: a :class:`DeqseqConfig`.

    Attributes:
        core: the :class:`deqseq.ImplicitModel`, :class:`deqseq.ExplicitModel` or
            :class:`deqseq.RecurrentDepth`.
        embed_tokens: the embedding.

    Example:
        >>> import torch
        >>> from deqseq.integrations.huggingface import DeqseqConfig, DeqseqModel
        >>> sizes = {"name": "LlamaConfig", "d_model": 16, "n_heads": 2}
        >>> model = DeqseqModel(DeqseqConfig(vocab_size=9, backbone=sizes)).eval()
        >>> cache = model(torch.tensor([[1, 2]])).cache
        >>> model(torch.tensor([[3]]), cache=cache).last_hidden_state.shape, cache.length
        (torch.Size([1, 1, 16]), 3)
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^score\."]  # noqa: RUF012

    def __init__(self, config: DeqseqConfig) -> None:
        super().__init__(config)
        self.core, self.embed_tokens = config.build()
        if config.norm is not None:
            self._tied_weights_keys = {"core.norm.weight": "core.coda.backbone.norm.weight"}
        self.take_solves()
        stacks = [module for module in self.core.modules() if isinstance(module, nn.ModuleList)]
        self._no_split_modules = {type(block).__name__ for stack in stacks for block in stack}
        for module in self.core.modules():
            # transformers keeps our own initialisation, but computes again what no checkpoint has
            if not list(module.buffers(recurse=False)):
                module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        cache: Any = None,
        inputs_embeds: OptionalTensor = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        solve: SolveChange | None = None,
        **kwargs: Any,
    ) -> ImplicitModelOutput | tuple[Any, ...]:
        """Solve for the states of these tokens.

        Args:
            input_ids: ``(batch, length)``.
            attention_mask: 0 at padding, anywhere in a row, ``(batch, committed + length)``,
                where committed counts the tokens of the cache. Default: no padding.
            position_ids: real tokens counted from 0, ``(batch, length)``, which is the default.
                Where they restart at 0, a packed sequence begins; it is solved on its own, without
                a cache and ``explain()``.
            cache: an :class:`ImplicitCache`, which is advanced by these tokens. Default: no tokens
                before.
            inputs_embeds: what ``embed_tokens`` gives, ``(batch, length, hidden_size)``, instead of
                ``input_ids``.
            use_cache: whether to advance ``cache``, or a new cache. Default: True with a ``cache``;
                without one as in the configuration, but False in training.
            output_hidden_states: whether ``hidden_states`` are returned: the embedded tokens and
                ``last_hidden_state``.
            solve: how this call is solved: a :class:`deqseq.SolveConfig`, or a mapping of the
                fields to replace, as ``{"sweep": deqseq.Sliding(8), "stop": {"max_steps": 8}}``.
            **kwargs: ``return_dict=False`` returns a tuple. What transformers passes to all models
                and does not matter here, such as ``token_type_ids``, is ignored.

        Returns:
            States, cache, and the numbers of the solve.

        Raises:
            ValueError: a bad shape, ids outside the vocabulary, a cache of other rows, positions
                other than the model's own, packed sequences with a cache, attention weights, or
                ``solve`` for an explicit model.
            TypeError: no tensor, a cache of another library, or an unknown keyword.
        """
        flags = {"use_cache": use_cache, "output_hidden_states": output_hidden_states}
        for name, flag in flags.items():
            check_type(name, flag, (bool, type(None)))
        gather_once(self.core)  # the Trainer and accelerate shard a model after it was built
        check_keywords(position_ids, {"output_attentions": self.config.output_attentions} | kwargs)
        options = {} if solve is None else {"solve": self.solve_config(solve)}
        cache_given = cache is not None
        if not cache_given:
            cache = ImplicitCache()
        embedded, mask = self.embedded(input_ids, attention_mask, cache, inputs_embeds)
        shape = (len(embedded), embedded.shape[1])
        new_mask = None if mask is None else mask[:, cache.length :]
        x = F.dropout(embedded, self.config.embedding_dropout, self.training)
        packing = Packing.of(position_ids, new_mask, shape)
        if packing is None:
            check_positions(position_ids, mask, cache.length, shape)
            if use_cache is None:
                use_cache = cache_given or (self.config.use_cache and not self.training)
        elif cache_given:
            raise ValueError("cache must be left out where sequences are packed into a row")
        else:
            x = packing.rows(x)
            new_mask = packing.apart
            use_cache = False
        output = self.core(x, mask=new_mask, cache=cache.value, return_cache=use_cache, **options)
        if use_cache:
            cache.commit(output, mask)
        if packing is not None:
            output = packing.output(output)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        solved = ImplicitModelOutput(
            last_hidden_state=output.value,
            cache=cache if use_cache else None,
            hidden_states=(embedded, output.value) if output_hidden_states else None,
            stats=output.stats,
            status=output.status,
        )
        solved.call = output.call
        return solved

    def solve_config(self, change: SolveChange, base: SolveConfig | None = None) -> SolveConfig:
        """``base``, by default that of this mode, with ``change``; ValueError if explicit."""
        if self.solved is None:
            raise ValueError(
                f"leave out solve: this {type(self).__name__} is explicit (solve=None)"
            )
        return from_json("solve", change, "solve", base or self.solved.solve_config)

    @property
    def solved(self) -> ImplicitModel | None:
        """The part that is solved, ``core`` or its core; None: an explicit model."""
        return solved_part(self.core)

    def take_solves(self) -> None:
        """Let the core read its solves and its attention from the configuration."""
        watch(self.core)
        choose_attention(self.core, self.config)
        if self.solved is not None:
            self.solved.solves = ConfigSettings(self.config)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """As in transformers, but a norm that two parts share is always tied."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})

    def embedded(
        self,
        input_ids: OptionalTensor,
        attention_mask: OptionalTensor,
        cache: ImplicitCache,
        inputs_embeds: OptionalTensor,
    ) -> tuple[Sequence, Mask | None]:
        """Embedded tokens without dropout, and the mask, that of ``cache`` included, as in a call.

        ValueError: ``input_ids`` ``(batch, length)``, or ``inputs_embeds`` ``(batch, length,
        hidden_size)``, and ``attention_mask`` ``(batch, committed + length)`` do not fit.
        """
        check_tensors(
            input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is not None:
            input_ids = as_int64(input_ids)
            check_ids("input_ids", input_ids, self.config.vocab_size)
            inputs_embeds = self.embed_tokens(input_ids)
        x: Any = inputs_embeds
        if x.ndim != 3 or x.shape[2] != self.core.d_model or not x.is_floating_point():
            wanted = f"floating-point (batch, length, {self.core.d_model} = hidden_size)"
            raise ValueError(f"inputs_embeds must be {wanted}, got {shown(x)}")
        check_cache(cache, len(x))
        mask = cache.joined_mask(attention_mask, len(x), x.shape[1])
        return scaled(x, self.config.embedding_scale), mask


class DeqseqForSequenceClassification(GenericForSequenceClassification, DeqseqPreTrainedModel):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A model of this library that classifies sequences by the state of their last token.

    A batch of several rows needs ``pad_token_id``.

    Args:
        config: a :class:`DeqseqConfig`, with ``num_labels``.

    Attributes:
        model: embedding and backbone.
        score: the head.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForSequenceClassification
        >>> from deqseq.integrations.huggingface import DeqseqConfig
        >>> sizes = {"name": "LlamaConfig", "d_model": 16, "n_heads": 2}
        >>> config = DeqseqConfig(vocab_size=9, backbone=sizes, num_labels=2, pad_token_id=0)
        >>> model = AutoModelForSequenceClassification.from_config(config)
        >>> model(torch.tensor([[1, 2, 3], [4, 0, 0]])).logits.shape
        torch.Size([2, 2])
    """

    accepts_loss_kwargs = False
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012
