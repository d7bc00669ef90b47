"""A language model of transformers: our model, a head, a loss, and generation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, no_type_check

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from deqseq.arguments import Within, check_ids, check_integer, check_known, check_type
from deqseq.backbones import Mamba2Config
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface.cache import (
    ImplicitCache,
    check_cache,
    check_positions,
    check_tensors,
)
from deqseq.integrations.huggingface.configuration import DeqseqConfig
from deqseq.integrations.huggingface.modeling import (
    DeqseqModel,
    DeqseqPreTrainedModel,
    OptionalTensor,
    SolveChange,
)
from deqseq.integrations.huggingface.windowed_generation import (
    in_windows,
    warn_of_window,
    window_of,
)
from deqseq.layers import with_weights
from deqseq.models.causal_lm import as_int64, capped, check_scored, scaled
from deqseq.models.eval_mode import eval_mode
from deqseq.models.generation import generate, prompt_sweep
from deqseq.solution import Outcome, SolveStats
from deqseq.sweeps import Simultaneous

TheirGeneration: Any = GenerationMixin  # its type for ``self`` leaves out our models


@no_type_check
@dataclass
class ImplicitCausalLMOutput(CausalLMOutputWithPast, Outcome):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Transformers' ``loss``, ``logits`` and other fields, and those of a solve.

    Attributes:
        stats: numbers of the solve, per token; None for an explicit model.
        status: a :class:`deqseq.Status` per row, ``(batch,)``; None for an explicit model.
    """

    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None


class DeqseqForCausalLM(DeqseqPreTrainedModel, TheirGeneration):
    """A model of this library and a head without bias: tokens in, predictions out.

    Args:
        config: a :class:`DeqseqConfig`.

    Attributes:
        model: embedding and backbone.
        lm_head: the head; its weight is that of the embedding if the configuration ties them.

    Example:
        >>> import torch, deqseq as dq
        >>> from deqseq.integrations.huggingface import DeqseqConfig, DeqseqForCausalLM
        >>> config = DeqseqConfig(vocab_size=9, backbone=dq.Mamba2Config(16, headdim=8))
        >>> model, prompt = DeqseqForCausalLM(config), torch.tensor([[1, 2, 3]])
        >>> options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        >>> solve = {"sweep": "Sequential", "stop": {"rtol": 0.1}}
        >>> solves = model.generate(prompt, solve=solve, **options).cache.solves
        >>> [solve.stats.iterations.shape for solve in solves[:2]]  # prompt, then each token
        [torch.Size([1, 3]), torch.Size([1, 1])]
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DeqseqConfig) -> None:
        super().__init__(config)
        self.model = DeqseqModel(config)
        self.lm_head = nn.Linear(self.model.core.d_model, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: OptionalTensor = None,
        attention_mask: OptionalTensor = None,
        position_ids: OptionalTensor = None,
        cache: Any = None,
        inputs_embeds: OptionalTensor = None,
        labels: OptionalTensor = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Shaped[Tensor, "..."] = 0,
        num_items_in_batch: int | Shaped[Tensor, "..."] | None = None,
        solve: SolveChange | None = None,
        **kwargs: Any,
    ) -> ImplicitCausalLMOutput | tuple[Any, ...]:
        """Predict a token at every position.

        Args:
            input_ids: ``(batch, length)``; these and the next four as in :class:`DeqseqModel`.
            attention_mask: ``(batch, committed + length)``.
            position_ids: ``(batch, length)``.
            cache: an :class:`ImplicitCache`, which is advanced by these tokens.
            inputs_embeds: ``(batch, length, hidden_size)``.
            labels: ``(batch, length)``; the logits at ``t - 1`` are scored against the label at
                ``t``. Labels of -100 are left out of the loss. As in transformers, padding is not:
                set its labels to -100.
            use_cache: whether to advance a cache.
            logits_to_keep: how many of the last positions get logits, or which, ``(kept,)``; 0:
                all.
            num_items_in_batch: what the summed loss is divided by, ``()``. Default: the number of
                scored labels.
            solve: how this call is solved.
            **kwargs: as in :class:`DeqseqModel`; and ``shift_labels``, ``(batch, length)``: the
                logits at ``t`` are scored against the one at ``t``.

        Returns:
            Loss, logits, cache, and the numbers of the solve.

        Raises:
            ValueError: what :class:`DeqseqModel` refuses; labels of another shape, outside the
                vocabulary or none to score, or labels with ``logits_to_keep``.
            TypeError: no tensor, a cache of another library, or an unknown keyword.
        """
        # in the signature the Trainer would require it
        shift_labels = kwargs.pop("shift_labels", None)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        vocab_size = self.config.vocab_size
        positions: Any = logits_to_keep
        if isinstance(positions, int):
            check_integer("logits_to_keep", positions, 0)
            positions = slice(-positions, None)
        else:
            check_type("logits_to_keep", positions, Tensor)
        scored = labels is not None or shift_labels is not None
        if scored and (isinstance(positions, Tensor) or positions.start):
            raise ValueError("labels need the logits of all positions: leave out logits_to_keep")
        answers = {"labels": labels, "shift_labels": shift_labels}
        check_tensors(**answers)
        if not torch.compiler.is_compiling():
            items: Any = num_items_in_batch
            if isinstance(items, Tensor) and items.numel() == 1:
                items = items.item()
            if scored and items is not None:
                Within("(0, inf)")("num_items_in_batch", items)
            for name, ids in answers.items():
                _check_labels(name, ids, tokens, vocab_size, may_be_empty=items is not None)
        inputs = (input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache)
        output = self.model(*inputs, solve=solve, **kwargs | {"return_dict": True})
        logits = self._logits(output.last_hidden_state[:, positions])
        loss = None
        if scored:
            loss = self.loss_function(
                logits, labels, vocab_size, num_items_in_batch, shift_labels=shift_labels
            )
        others = {name: value for name, value in output.items() if name != "last_hidden_state"}
        predicted = ImplicitCausalLMOutput(loss=loss, logits=logits, **others)
        predicted.call = output.call
        return predicted

    def _get_name(self) -> str:
        """The Trainer shifts smoothed labels by this name; FSDP2 would change it."""
        return DeqseqForCausalLM.__name__

    def _embedded(self, ids: Tensor) -> Tensor:
        return scaled(self.model.embed_tokens(ids), self.config.embedding_scale)

    def _logits(self, states: Tensor) -> Tensor:
        return capped(self.lm_head(states), self.config.logit_softcap)

    def generate(
        self,
        inputs: Shaped[Tensor, "..."] | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, in eval mode (which other threads see, too), with two more keywords.

        They can also be fields of the generation configuration.

        Args:
            inputs: prompts, ``(batch, length)``, padded on the left.
            generation_config: of transformers.
            **kwargs: of transformers, and ``solve`` and ``window``.

                ``solve``: how prompts and new tokens are solved, as in a call; fields of the
                keyword come first, then those of the generation configuration, then the model's
                own. ``sweep`` is that of the prompts. Default: the model's, but ``Sliding(16)``
                instead of ``Simultaneous()``. With ``return_dict_in_generate=True``, the output's
                ``cache.solves`` has the outcome of each solve.

                ``window``: how many tokens of a row are decoded at once, as by
                :meth:`deqseq.CausalLM.generate`. Default: one token after another. Processors,
                stopping criteria and streamers are called for committed tokens, in order. A cache
                that is given is not changed, and none is returned; the numbers are in
                ``generation`` of the output. Beams, guidance, no cache, ``prefill_chunk_size`` and
                returned hidden states decode one by one, with a warning.

        Returns:
            What transformers returns: ``(batch, length + new)``, or an output object.

        Raises:
            ValueError: an unknown field, name or number; padding on the right; a cache of other
                rows; ``solve`` for an explicit model; a window where tokens cannot be iterated
                together.
        """
        starts = {"inputs_embeds": kwargs.get("inputs_embeds"), "inputs": inputs}
        starts["input_ids"] = kwargs.get("input_ids")
        check_tensors(**starts, attention_mask=kwargs.get("attention_mask"))
        for name in ("inputs", "input_ids"):
            if starts[name] is not None:
                check_ids(name, as_int64(starts[name]), self.config.vocab_size)
        prompts = next((tokens for tokens in starts.values() if tokens is not None), None)
        if kwargs.get("max_new_tokens") is not None:
            check_integer("max_new_tokens", kwargs["max_new_tokens"], 1)
        _check_mask(prompts, **kwargs)
        with torch.no_grad(), eval_mode(self):  # the Trainer leaves a model in training mode
            theirs: Any = super(DeqseqForCausalLM, with_weights(self))
            return theirs.generate(inputs, generation_config, **kwargs)

    def init_continuous_batching(self, *_: Any, **unused: Any) -> NoReturn:
        """Not supported."""
        raise NotImplementedError(
            "continuous batching is not supported: call generate, or serve the model with vLLM"
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        inputs_embeds: Any = None,  # transformers looks for this name
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of the next call; ValueError for prompts padded on the right."""
        if is_first_iteration and attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError(
                "prompts must be padded on the left, but a row ends in padding, after which "
                "nothing can be predicted: set padding_side='left' in the tokenizer"
            )
        prepared = super().prepare_inputs_for_generation(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if "cache" in prepared and not is_first_iteration and "solve" in prepared:
            # a token has nothing to sweep over
            prepared["solve"] = replace(prepared["solve"], sweep=Simultaneous())
        return prepared

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """``solve`` becomes an argument of the calls, ``window`` a field of the configuration."""
        solve_keyword = kwargs.pop("solve", None)
        window = kwargs.pop("window", None)
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name in vars(config):  # transformers keeps what it does not know
            if name.startswith(("solv", "wind")):
                check_known("generation configuration: field", name, ("solve", "window"))
        config.window = window_of(config, window)
        both = (vars(config).get("solve"), solve_keyword)
        changes = [change for change in both if change is not None]
        if changes or self.model.solved is not None:
            solve = self.model.solve_config({})
            for change in changes:
                solve = self.model.solve_config(change, solve)
            if not any(isinstance(change, SolveConfig) or "sweep" in change for change in changes):
                solve = replace(solve, sweep=prompt_sweep(solve))
            model_kwargs["solve"] = solve
        return config, model_kwargs

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The loop of transformers, or decoding in windows."""
        choices = (input_ids, logits_processor, stopping_criteria, generation_config)
        window = generation_config.window
        if window is not None and synced_gpus:
            warn_of_window("processes that share weights must call the model equally often")
        if window is None or synced_gpus:
            return super()._sample(
                *choices, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs
            )
        cache = model_kwargs["cache"]
        mask = model_kwargs.get("attention_mask")
        prompt = model_kwargs.get("inputs_embeds")
        length = (input_ids if prompt is None else prompt).shape[1]
        total = generation_config._mask_length if mask is None else mask.shape[1]
        # a prompt is whole, or what is not in the cache yet
        model_kwargs["next_sequence_length"] = length - cache.length if length == total else None
        inputs = self.prepare_inputs_for_generation(
            input_ids, is_first_iteration=True, **model_kwargs
        ).get
        x, mask = self.model.embedded(
            inputs("input_ids"), inputs("attention_mask"), cache, inputs("inputs_embeds")
        )
        check_positions(inputs("position_ids"), mask, cache.length, (len(x), x.shape[1]))
        if mask is not None:
            mask = mask[:, cache.length :]
        solve = inputs("solve")
        # without it, the prompts would be solved by Sliding(16) instead of Simultaneous()
        fields = {} if solve is None else {"sweep": solve.sweep}
        models = (self.model.core, self._embedded, self._logits)
        options: Any = {"callback": None, "solve": solve, "fields": fields}
        run = partial(generate, *models, x, mask, cache.value, **options)
        return in_windows(run, *choices, streamer)

    def _get_candidate_generator(
        self, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """An assistant is solved in its own way."""
        others = {name: value for name, value in model_kwargs.items() if name != "solve"}
        return super()._get_candidate_generator(*args, model_kwargs=others, **kwargs)

    def _get_logits_processor(
        self, *args: Any, model_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> LogitsProcessorList:
        """Guidance calls the model itself for another prompt, which is solved in the same way."""
        processors = super()._get_logits_processor(*args, model_kwargs=model_kwargs, **kwargs)
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                processor.model = partial(self, solve=(model_kwargs or {}).get("solve"))
        return processors

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *_: Any,
    ) -> None:
        """An :class:`ImplicitCache`, instead of the cache of transformers."""
        config: Any = generation_config
        cache = model_kwargs.get("cache")
        mask = model_kwargs.get("attention_mask")
        if config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation {config.cache_implementation!r} is not available: leave it "
                "out"
            )
        drafts = vars(config).get("is_assistant")
        if drafts or generation_mode == GenerationMode.ASSISTED_GENERATION:
            sections = self.config.specification().parts.items()
            recurrent = [name for name, sizes in sections if isinstance(sizes, Mamba2Config)]
            if recurrent:
                raise ValueError(
                    "assisted decoding takes tokens back, which the state of a Mamba2 "
                    f"({', '.join(recurrent)}) cannot: leave out assistant_model and "
                    "prompt_lookup_num_tokens"
                )
        if config.prefill_chunk_size is not None and mask is not None:
            longest = int((mask == 0).sum(dim=1).max())
            # the first chunk needs a token of each row
            config.prefill_chunk_size = max(config.prefill_chunk_size, longest + 1)
        if cache is not None:
            copies = max(config.num_beams or 1, config.num_return_sequences or 1)
            check_cache(cache, batch_size * copies)
            cache._is_user_defined = True  # transformers then does not take it for its own
        elif config.use_cache is not False:
            model_kwargs["cache"] = ImplicitCache()


def _check_mask(prompts: Any, attention_mask: Any = None, cache: Any = None, **_: Any) -> None:
    """Refuse a mask that is not one of the prompts, or of the cache and the prompts."""
    if isinstance(prompts, Tensor) and isinstance(attention_mask, Tensor):
        rows, length = prompts.shape[:2]
        shapes = [(rows, length)]
        if isinstance(cache, ImplicitCache) and cache.length:
            shapes.append((rows, length + cache.length))
        if tuple(attention_mask.shape) not in shapes:
            wanted = " or ".join(map(str, shapes))
            got = tuple(attention_mask.shape)
            raise ValueError(f"attention_mask must have shape {wanted}, of the prompts, got {got}")


def _check_labels(name: str, ids: Any, tokens: Any, vocab_size: int, *, may_be_empty: bool) -> None:
    """Refuse labels that do not fit the tokens, or leave nothing to score.

    As in transformers a label counts unless it is -100, in padding, too. The labels of a part of a
    larger batch may be empty: its loss is 0.
    """
    if ids is None or not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return  # the model refuses the tokens
    shape = tuple(tokens.shape[:2])
    if ids.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(ids.shape)}")
    scored = ids[:, 1:] if name == "labels" else ids
    check_scored(name, scored, vocab_size, may_be_empty=may_be_empty)
