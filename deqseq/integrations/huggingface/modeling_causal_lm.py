"""A language model of transformers: our model, a head, a loss, and generation."""

from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from deqseq.integrations.huggingface.cache import ImplicitCache
from deqseq.integrations.huggingface.configuration import ImplicitConfig
from deqseq.integrations.huggingface.generation import FIELDS, solve_options
from deqseq.integrations.huggingface.inputs import check_cache
from deqseq.integrations.huggingface.modeling import ImplicitBaseModel, ImplicitPreTrainedModel
from deqseq.integrations.huggingface.output import ImplicitCausalLMOutput
from deqseq.layers.weight_norm import weights_computed_once
from deqseq.models.causal_lm import IGNORED, check_ids
from deqseq.solvers import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Sweep


class ImplicitCausalLM(ImplicitPreTrainedModel, GenerationMixin):
    """A model of this library and a head without bias: tokens in, predictions out.

    Abstract: take the class of a model type, or ``AutoModelForCausalLM``.

    Args:
        config: of a model type.
        **unknown: refused, with the nearest known name.

    Attributes:
        model: embedding and backbone.
        lm_head: the head; its weight is the embedding's if the configuration ties them.

    Example:
        >>> from deqseq.integrations.huggingface import ImplicitMamba2Config, ImplicitMamba2ForCausalLM
        >>> config = ImplicitMamba2Config(vocab_size=9, hidden_size=16, head_dim=8, num_hidden_layers=1)
        >>> how = {"deq_sweep": {"name": "Sequential"}, "return_dict_in_generate": True}
        >>> model, prompt = ImplicitMamba2ForCausalLM(config), torch.tensor([[1, 2, 3]])
        >>> output = model.generate(prompt, max_new_tokens=4, do_sample=False, **how)
        >>> [solve.stats.steps.shape for solve in output.past_key_values.solves][:2]     # the prompt's, the next one's
        [torch.Size([1, 3]), torch.Size([1])]
    """

    base_class: type[ImplicitBaseModel]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ImplicitConfig, **unknown: Any) -> None:
        super().__init__(config, **unknown)
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Shaped[Tensor, "..."] | None = None,
        attention_mask: Shaped[Tensor, "..."] | None = None,
        position_ids: Int64[Tensor, "..."] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "..."] | None = None,
        labels: Int64[Tensor, "..."] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Shaped[Tensor, "..."] = 0,
        num_items_in_batch: int | Shaped[Tensor, "..."] | None = None,
        sweep: Sweep | None = None,
        solver: Solver | OutsideSolver | None = None,
        stop: Stop | None = None,
    ) -> ImplicitCausalLMOutput | tuple[Any, ...]:
        """Predict a token at every position.

        Args:
            input_ids: ``(batch, length)``.
            attention_mask: 0 at padding, on either side of a row, ``(batch, settled + length)``.
            position_ids: none but the model's own are accepted, ``(batch, length)``.
            past_key_values: an :class:`ImplicitCache`, which goes on to what follows these tokens.
            inputs_embeds: embedded tokens ``(batch, length, hidden_size)``, instead of ``input_ids``.
            labels: ``(batch, length)``; the one at ``t`` is the answer at ``t - 1``. -100 and what concerns padding is
                left out of the loss.
            use_cache: whether to commit to a cache.
            output_attentions: not available.
            output_hidden_states: whether embedded tokens and states are returned as ``hidden_states``.
            return_dict: False returns a tuple.
            logits_to_keep: how many of the last positions get logits, or which, ``(kept,)``; 0: all.
            num_items_in_batch: what the summed loss is divided by, ``()``; None: the number of labels that count.
            sweep: which tokens are solved together; None: all.
            solver: instead of the configuration's.
            stop: instead of the configuration's.

        Returns:
            Loss, logits, cache, and the numbers of the solve.

        Raises:
            ValueError: what :class:`ImplicitBaseModel` refuses; labels of another shape or outside the vocabulary,
                none that counts, or logits at some positions only beside labels.
            TypeError: a cache of another library.
        """
        answers = self._answers(input_ids if inputs_embeds is None else inputs_embeds, labels, attention_mask)
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError("labels need the logits of all positions: leave out logits_to_keep")
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            sweep=sweep,
            solver=solver,
            stop=stop,
        )
        logits = self.lm_head(kept(output.last_hidden_state, logits_to_keep))
        loss = None
        if answers is not None:
            loss = self.loss_function(
                logits=logits, labels=answers, vocab_size=logits.shape[-1], num_items_in_batch=num_items_in_batch
            )
        result = ImplicitCausalLMOutput(
            loss, logits, output.past_key_values, output.hidden_states, output.stats, output.status
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs: Shaped[Tensor, "..."] | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers; the fields ``deq_sweep``, ``deq_solver`` and ``deq_stop`` say how to solve.

        They stand in the generation configuration or among the keywords, as JSON; ``sweep``, ``solver`` and ``stop``
        take objects. How each solve went is in ``past_key_values.solves`` of ``return_dict_in_generate=True``.

        Args:
            inputs: prompts, ``(batch, length)``, padded on the left.
            generation_config: of transformers.
            **kwargs: of transformers, of the model's call, and our three fields.

        Returns:
            What transformers returns: ``(batch, length + new)``, or an output object.

        Raises:
            ValueError: an unknown field, name or number; padding on the right; a cache of other rows.
        """
        with torch.no_grad(), weights_computed_once(self.model.core.backbone):
            theirs: Any = super()
            return theirs.generate(inputs, generation_config, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of the next call, a sweep for prompts alone; ValueError for prompts padded on the right."""
        if is_first_iteration and attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise ValueError(
                "prompts must be padded on the left: some row ends in padding, after which nothing can be predicted "
                "(padding_side='left' in the tokenizer)"
            )
        theirs: Any = super()
        prepared = theirs.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if past_key_values is not None and not is_first_iteration:
            prepared.pop("sweep", None)
        return prepared

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Where transformers merges configurations and keywords, our fields become arguments of the model's call."""
        ours = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        theirs: Any = super()
        config, model_kwargs = theirs._prepare_generation_config(generation_config, **kwargs)
        for name, value in ours.items():
            setattr(config, name, value)
        given = {name.removeprefix("deq_"): model_kwargs.pop(name.removeprefix("deq_"), None) for name in FIELDS}
        return config, model_kwargs | solve_options(config, self.model.stop, given)

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *_: Any,
    ) -> None:
        """Our own cache, for every model type under the name ``past_key_values``."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation {generation_config.cache_implementation!r} is not available: leave it out"
            )
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            check_cache(
                cache, batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            )
            cache._is_user_defined = True  # transformers then does not take it for its own
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = ImplicitCache()

    def compile(self, **options: Any) -> None:
        """Compile the blocks with ``torch.compile``; what is around them stays as it is.

        Args:
            **options: of ``torch.compile``.
        """
        self.model.compile(**options)

    def _answers(self, tokens: Tensor | None, labels: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """The labels that count, checked before anything is solved."""
        if labels is None or tokens is None:
            return None
        if labels.shape != tokens.shape[:2]:
            raise ValueError(f"labels must have shape {tuple(tokens.shape[:2])}, got {tuple(labels.shape)}")
        if attention_mask is not None and attention_mask.ndim == 2:
            real = attention_mask[:, -labels.shape[1] :] != 0
            told = real & F.pad(real[:, :-1], (1, 0))  # a label is told by the token before
            labels = labels.masked_fill(~told, IGNORED)
        counting = labels[:, 1:][labels[:, 1:] != IGNORED]
        if counting.numel():
            check_ids("labels", counting[None], self.lm_head.out_features)
        return labels


def kept(
    states: Float[Tensor, "batch length width"], which: int | Shaped[Tensor, "..."]
) -> Float[Tensor, "*kept width"]:
    """The states that get logits.

    Args:
        states: ``(batch, length, width)``.
        which: how many of the last positions, 0 for all; or the positions themselves, ``(kept,)``.

    Returns:
        ``(batch, kept, width)``.

    Raises:
        ValueError: a negative number.

    Example:
        >>> kept(torch.zeros(2, 5, 3), 1).shape
        torch.Size([2, 1, 3])
    """
    if isinstance(which, int):
        if which < 0:
            raise ValueError(f"logits_to_keep must be an integer >= 0 or positions, got {which}")
        return states[:, -which:]
    return states[:, which]
