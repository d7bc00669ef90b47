"""A language model of transformers: our model, a head, a loss, and generation."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.utils import GenerationMixin
from transformers.utils.generic import can_return_tuple

from deqseq.arguments import check_known
from deqseq.backbones import Mamba2Config
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface.arguments import check_cache, check_labels, check_positions
from deqseq.integrations.huggingface.cache import ImplicitCache
from deqseq.integrations.huggingface.configuration import DeqseqConfig
from deqseq.integrations.huggingface.modeling import DeqseqModel, SolveChange
from deqseq.integrations.huggingface.outputs import ImplicitCausalLMOutput
from deqseq.integrations.huggingface.pretrained_model import DeqseqPreTrainedModel
from deqseq.integrations.huggingface.windows import in_windows, warn_of_window, window_of
from deqseq.layers import with_weights
from deqseq.models.causal_lm import capped, scaled
from deqseq.models.eval_mode import eval_mode
from deqseq.models.generation import generate, prompt_sweep
from deqseq.sweeps import Simultaneous


class DeqseqForCausalLM(DeqseqPreTrainedModel, GenerationMixin):
    """A model of this library and a head without bias: tokens in, predictions out.

    Args:
        config: a :class:`DeqseqConfig`.

    Attributes:
        model: embedding and backbone.
        lm_head: the head; its weight is that of the embedding if the configuration ties them.

    Example:
        >>> import deqseq as dq
        >>> from deqseq.integrations.huggingface import DeqseqConfig, DeqseqForCausalLM
        >>> config = DeqseqConfig(vocab_size=9, backbone=dq.Mamba2Config(16, headdim=8))
        >>> model, prompt = DeqseqForCausalLM(config), torch.tensor([[1, 2, 3]])
        >>> options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
        >>> output = model.generate(
        ...     prompt, solve={"sweep": "Sequential", "stop": {"rtol": 0.1}}, **options
        ... )
        >>> [solve.stats.iterations.shape for solve in output.cache.solves][
        ...     :2
        ... ]  # prompt, then each token
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
        input_ids: Shaped[Tensor, "..."] | None = None,
        attention_mask: Shaped[Tensor, "..."] | None = None,
        position_ids: Int64[Tensor, "..."] | None = None,
        cache: Any = None,
        inputs_embeds: Float[Tensor, "..."] | None = None,
        labels: Int64[Tensor, "..."] | None = None,
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
            labels: ``(batch, length)``; the one at ``t`` is the answer at ``t - 1``. Those that are
                -100 are left out of the loss; padding is not, as in transformers, so its labels
                must be -100.
            use_cache: whether to advance a cache.
            logits_to_keep: how many of the last positions get logits, or which, ``(kept,)``; 0:
                all.
            num_items_in_batch: what the summed loss is divided by, ``()``. Default: the number of
                scored labels.
            solve: how this call is solved.
            **kwargs: as in :class:`DeqseqModel`; and ``shift_labels``, ``(batch, length)``, of
                which the one at ``t`` is the answer at ``t``.

        Returns:
            Loss, logits, cache, and the numbers of the solve.

        Raises:
            ValueError: what :class:`DeqseqModel` refuses; labels of another shape, outside the
                vocabulary or none to score, or labels with ``logits_to_keep``.
            TypeError: no tensor, a cache of another library, or an unknown keyword.
        """
        shift_labels = kwargs.pop(
            "shift_labels", None
        )  # in the signature the Trainer would require it
        tokens, vocab_size = (
            input_ids if inputs_embeds is None else inputs_embeds,
            self.config.vocab_size,
        )
        check_labels(
            tokens, vocab_size, num_items_in_batch, labels=labels, shift_labels=shift_labels
        )
        scored = labels is not None or shift_labels is not None
        if scored and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels need the logits of all positions: leave out logits_to_keep")
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(
                f"logits_to_keep must be an integer >= 0 or positions, got {logits_to_keep}"
            )
        inputs = (input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache)
        output = self.model(*inputs, solve=solve, **kwargs | {"return_dict": True})
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self._logits(output.last_hidden_state[:, kept]), None
        if scored:
            loss = self.loss_function(
                logits, labels, vocab_size, num_items_in_batch, shift_labels=shift_labels
            )
        own = {name: value for name, value in output.items() if name != "last_hidden_state"}
        predicted = ImplicitCausalLMOutput(loss=loss, logits=logits, **own)
        predicted.call = output.call
        return predicted

    def _get_name(self) -> str:
        """The Trainer shifts smoothed labels by this name, and FSDP2 puts the model into a class of
        its own.
        """
        return DeqseqForCausalLM.__name__

    def _embedded(self, ids: Tensor) -> Tensor:
        return scaled(self.model.embed_tokens(ids), self.config.embedding_scale)

    def _logits(self, states: Tensor) -> Tensor:
        return capped(self.lm_head(states), self.config.logit_softcap)

    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs: Shaped[Tensor, "..."] | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, in eval mode, with two more keywords, which can also be in the
        generation configuration.

        Args:
            inputs: prompts, ``(batch, length)``, padded on the left.
            generation_config: of transformers.
            **kwargs: of transformers, and ``solve`` and ``window``.

                ``solve``: how prompts and new tokens are solved, as in a call; fields of the
                keyword come first, then those of the generation configuration, then the model's
                own. ``sweep`` is that of the prompts. Default: the model's, but ``Sliding(16)``
                instead of ``Simultaneous()``. How each solve went is in ``cache.solves`` of
                ``return_dict_in_generate=True``.

                ``window``: how many tokens of a row are decoded at once, as by
                :meth:`deqseq.CausalLM.generate`. Processors, stopping criteria and streamers are
                called for committed tokens, in order. A cache that is given is not changed, and
                none is returned; the numbers are in ``generation`` of the output. Beams, guidance,
                no cache, ``prefill_chunk_size`` and returned hidden states decode one by one, with
                a warning.

        Returns:
            What transformers returns: ``(batch, length + new)``, or an output object.

        Raises:
            ValueError: an unknown field, name or number; padding on the right; a cache of other
                rows; ``solve`` for an explicit model; a window where tokens cannot be iterated
                together.
        """
        with torch.no_grad(), eval_mode(self):  # the Trainer leaves a model in training mode
            theirs: Any = super(DeqseqForCausalLM, with_weights(self))
            return theirs.generate(inputs, generation_config, **kwargs)

    def init_continuous_batching(self, *_: Any, **unused: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Not supported."""
        raise NotImplementedError(
            "continuous batching is not supported: call generate, or serve the model with vLLM"
        )

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor
        | None = None,  # transformers looks for this name before it takes embedded prompts
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of the next call; ValueError for prompts padded on the right."""
        if (
            is_first_iteration
            and attention_mask is not None
            and not bool(attention_mask[:, -1].all())
        ):
            raise ValueError(
                "prompts must be padded on the left, but a row ends in padding, after which "
                "nothing can be predicted: "
                "set padding_side='left' in the tokenizer"
            )
        kwargs |= {"cache": cache, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        theirs: Any = super()
        prepared = theirs.prepare_inputs_for_generation(
            input_ids, is_first_iteration=is_first_iteration, **kwargs
        )
        if cache is not None and not is_first_iteration and "solve" in prepared:
            prepared["solve"] = replace(
                prepared["solve"], sweep=Simultaneous()
            )  # a token has nothing to sweep over
        return prepared

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """``solve`` becomes one argument of the model's calls, and ``window`` a field of the
        configuration.
        """
        keyword, window = kwargs.pop("solve", None), kwargs.pop("window", None)
        theirs: Any = super()
        config, model_kwargs = theirs._prepare_generation_config(generation_config, **kwargs)
        for name in vars(config):  # transformers keeps what it does not know
            if name.startswith(("solv", "wind")):
                check_known("generation configuration: field", name, ("solve", "window"))
        config.window = window_of(config, window)
        changes = [change for change in (vars(config).get("solve"), keyword) if change is not None]
        solve = None
        for change in changes:
            solve = self.model.solve_config(change, solve)
        if self.model.solved is not None:
            solve = solve or self.model.solve_config({})
            chosen = any(isinstance(change, SolveConfig) or "sweep" in change for change in changes)
            model_kwargs["solve"] = solve if chosen else replace(solve, sweep=prompt_sweep(solve))
        return config, model_kwargs

    def _sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The loop of transformers, or decoding in windows."""
        theirs: Any = super()
        if vars(generation_config)["window"] is None or synced_gpus:
            if vars(generation_config)["window"] is not None:
                warn_of_window("processes that share weights must call the model equally often")
            options: Any = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
            return theirs._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, **options
            )
        cache, mask, prompt = model_kwargs["cache"], model_kwargs.get("attention_mask"), input_ids
        if model_kwargs.get("inputs_embeds") is not None:
            prompt = model_kwargs["inputs_embeds"]
        total = vars(generation_config)["_mask_length"] if mask is None else mask.shape[1]
        # a prompt is whole, or what is not in the cache yet
        model_kwargs["next_sequence_length"] = (
            prompt.shape[1] - cache.length if prompt.shape[1] == total else None
        )
        given = self.prepare_inputs_for_generation(
            input_ids, is_first_iteration=True, **model_kwargs
        )
        ids, mask, embeds = (
            given.get(name) for name in ("input_ids", "attention_mask", "inputs_embeds")
        )
        x, mask = self.model.embedded(ids, mask, cache, embeds)
        check_positions(given.get("position_ids"), mask, cache.length, (len(x), x.shape[1]))
        mask = None if mask is None else mask[:, cache.length :]
        run = partial(generate, self.model.core, self._embedded, self._logits, x, mask, cache.value)
        solve: SolveConfig | None = given.get("solve")
        # the solve's sweep is the one of the prompts, which a solve alone would not say
        run = partial(
            run, callback=None, solve=solve, fields={} if solve is None else {"sweep": solve.sweep}
        )
        return in_windows(
            run, input_ids, logits_processor, stopping_criteria, generation_config, streamer
        )

    def _get_candidate_generator(
        self, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An assistant is solved in its own way."""
        theirs: Any = super()
        own = {name: value for name, value in model_kwargs.items() if name != "solve"}
        return theirs._get_candidate_generator(*args, model_kwargs=own, **kwargs)

    def _get_logits_processor(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, model_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> LogitsProcessorList:
        """Guidance calls the model by itself, for the prompt without the condition: it is solved in
        the same way.
        """
        theirs: Any = super()
        processors = theirs._get_logits_processor(*args, model_kwargs=model_kwargs, **kwargs)
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                processor.model = partial(self, solve=(model_kwargs or {}).get("solve"))
        return processors

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *_: Any,
    ) -> None:
        """An :class:`ImplicitCache`, instead of the cache of transformers."""
        config, cache, mask = (
            generation_config,
            model_kwargs.get("cache"),
            model_kwargs.get("attention_mask"),
        )
        if config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation {config.cache_implementation!r} is not available: leave it "
                "out"
            )
        drafts = generation_mode == GenerationMode.ASSISTED_GENERATION or vars(config).get(
            "is_assistant"
        )
        parts = self.config.specification().parts
        if drafts and (
            recurrent := ", ".join(name for name in parts if isinstance(parts[name], Mamba2Config))
        ):
            raise ValueError(
                f"assisted decoding takes tokens back, which the state of a Mamba2 ({recurrent}) "
                "cannot: leave out "
                "assistant_model and prompt_lookup_num_tokens"
            )
        if config.prefill_chunk_size is not None and mask is not None:
            longest = int((mask == 0).sum(dim=1).max())  # of each row the first chunk needs a token
            config.prefill_chunk_size = max(config.prefill_chunk_size, longest + 1)
        if cache is not None:
            check_cache(
                cache, batch_size * max(config.num_beams or 1, config.num_return_sequences or 1)
            )
            cache._is_user_defined = True  # transformers then does not take it for its own
        elif config.use_cache is not False:
            model_kwargs["cache"] = ImplicitCache()
