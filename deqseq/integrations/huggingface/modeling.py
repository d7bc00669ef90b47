"""The models of this library as models of transformers: tokens in, states or classes out."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils.generic import can_return_tuple

from deqseq.as_json import from_json
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface.arguments import (
    check_cache,
    check_keywords,
    check_positions,
    check_tensors,
    joined_mask,
    watch,
)
from deqseq.integrations.huggingface.attention import choose_attention
from deqseq.integrations.huggingface.cache import ImplicitCache
from deqseq.integrations.huggingface.configuration import DeqseqConfig
from deqseq.integrations.huggingface.outputs import ImplicitModelOutput
from deqseq.integrations.huggingface.packing import Packing
from deqseq.integrations.huggingface.pretrained_model import DeqseqPreTrainedModel
from deqseq.models import ImplicitModel
from deqseq.models.causal_lm import check_ids, scaled
from deqseq.models.recurrent_depth import solved_part
from deqseq.training import gather_once
from deqseq.types import Mask, Sequence

SolveChange = SolveConfig | Mapping[str, Any]
"""How a call is solved: a whole configuration, or the fields to replace in the model's own, as
objects or JSON.
"""


class ConfigSettings:
    """How a core is solved: read from the configuration at each call, and written to it."""

    def __init__(self, config: DeqseqConfig) -> None:
        self.config = config

    @property
    def solve(self) -> SolveConfig:
        solve = self.config.section("solve")
        if solve is None:
            raise ValueError(
                "config.solve must not be None, for this model was built as an implicit one"
            )
        return solve

    @solve.setter
    def solve(self, solve: SolveConfig) -> None:
        self.config.solve = solve

    @property
    def eval_solve(self) -> SolveConfig | None:
        return self.config.section("eval_solve")

    @eval_solve.setter
    def eval_solve(self, eval_solve: SolveConfig | None) -> None:
        self.config.eval_solve = eval_solve


class DeqseqModel(DeqseqPreTrainedModel):
    """An embedding and a model: tokens in, states out.

    Args:
        config: a :class:`DeqseqConfig`.

    Attributes:
        core: the :class:`deqseq.ImplicitModel`, :class:`deqseq.ExplicitModel` or
            :class:`deqseq.RecurrentDepth`.
        embed_tokens: the embedding.

    Example:
        >>> from deqseq.integrations.huggingface import DeqseqConfig, DeqseqModel
        >>> config = DeqseqConfig(
        ...     vocab_size=9, backbone={"name": "LlamaConfig", "d_model": 16, "n_heads": 2}
        ... )
        >>> model = DeqseqModel(config).eval()
        >>> cache = model(torch.tensor([[1, 2]])).cache
        >>> model(torch.tensor([[3]]), cache=cache).last_hidden_state.shape, cache.length
        (torch.Size([1, 1, 16]), 3)
    """

    _tied_weights_keys = {"core.norm.weight": "core.coda.backbone.norm.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^score\."]  # noqa: RUF012

    def __init__(self, config: DeqseqConfig) -> None:
        super().__init__(config)
        self.core, self.embed_tokens = config.build()
        self.take_solves()
        blocks = {part for part in self.core.modules() if isinstance(part, nn.ModuleList)}
        self._no_split_modules = {type(block).__name__ for part in blocks for block in part}
        for part in self.core.modules():  # tells transformers to keep our own initialisation
            if not list(
                part.buffers(recurse=False)
            ):  # which are in no checkpoint: it has to compute them again
                part._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Shaped[Tensor, "..."] | None = None,
        attention_mask: Shaped[Tensor, "..."] | None = None,
        position_ids: Int64[Tensor, "..."] | None = None,
        cache: Any = None,
        inputs_embeds: Float[Tensor, "..."] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        solve: SolveChange | None = None,
        **kwargs: Any,
    ) -> ImplicitModelOutput | tuple[Any, ...]:
        """Solve for the states of these tokens.

        Args:
            input_ids: ``(batch, length)``.
            attention_mask: 0 at padding, on either side of a row, ``(batch, committed + length)``,
                where committed counts the tokens of the cache. Default: no padding.
            position_ids: the model's own, ``(batch, length)``: real tokens counted from 0. Where
                they begin again a sequence begins, which is solved on its own, without a cache and
                ``explain()``.
            cache: an :class:`ImplicitCache`, which is advanced by these tokens. Default: no tokens
                before.
            inputs_embeds: what ``embed_tokens`` gives, ``(batch, length, hidden_size)``, instead of
                ``input_ids``.
            use_cache: whether to advance ``cache``, or a new cache. Default: as in the
                configuration, but in training only if a cache is given.
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
        gather_once(self.core)  # the Trainer and accelerate shard a model after it was built
        options: dict[str, Any] = {} if solve is None else {"solve": self.solve_config(solve)}
        told = {
            "position_ids": position_ids,
            "output_attentions": self.config.output_attentions or None,
        }
        check_keywords(told | kwargs)
        check_tensors(position_ids=position_ids)
        given, cache = cache is not None, ImplicitCache() if cache is None else cache
        embedded, mask = self.embedded(input_ids, attention_mask, cache, inputs_embeds)
        new = None if mask is None else mask[:, cache.length :]
        shape = (len(embedded), embedded.shape[1])
        packing = Packing.of(position_ids, new, shape)
        if packing is None:
            check_positions(position_ids, mask, cache.length, shape)
        elif given:
            raise ValueError("cache must be left out where sequences are packed into a row")
        if use_cache is None or packing is not None:
            use_cache = given or (self.config.use_cache and not self.training and packing is None)
        x = F.dropout(embedded, self.config.embedding_dropout, self.training)
        if packing is not None:
            x, new = packing.apart(x), packing.mask
        want_states = (
            self.config.output_hidden_states
            if output_hidden_states is None
            else output_hidden_states
        )
        output = self.core(x, mask=new, cache=cache.value, return_cache=use_cache, **options)
        if use_cache:
            cache.commit(output, new)
        if packing is not None:
            output = packing.output(output)
        solved = ImplicitModelOutput(
            last_hidden_state=output.value,
            cache=cache if use_cache else None,
            hidden_states=(embedded, output.value) if want_states else None,
            stats=output.stats,
            status=output.status,
        )
        solved.call = output.call
        return solved

    def solve_config(self, change: SolveChange, base: SolveConfig | None = None) -> SolveConfig:
        """``base``, by default that of the mode, with ``change`` in it; ValueError for an explicit
        model.
        """
        if self.solved is None:
            raise ValueError(
                f"leave out solve: this {type(self).__name__} is explicit (solve=None)"
            )
        return from_json("solve", change, "solve", base or self.solved.solve_config)

    @property
    def solved(self) -> ImplicitModel | None:
        """The part that is solved: ``core``, or that of a :class:`deqseq.RecurrentDepth`; None: an
        explicit model.
        """
        return solved_part(self.core)

    def take_solves(self) -> None:
        """Let the core read and write its solves in the configuration, which also names its
        attention.
        """
        watch(self.core)
        choose_attention(self.core, self.config)
        if self.solved is not None:
            self.solved.solves = ConfigSettings(self.config)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """As in transformers, but a norm that two parts share is tied whether or not the head is
        the embedding.
        """
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return {} if self.config.norm is None else dict(self._tied_weights_keys)

    def embedded(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: ImplicitCache,
        inputs_embeds: Tensor | None,
    ) -> tuple[Sequence, Mask | None]:
        """Embedded tokens without dropout, and the mask of all tokens, those of ``cache`` included;
        as in a call.

        ValueError: ``input_ids`` ``(batch, length)``, or ``inputs_embeds`` ``(batch, length,
        hidden_size)``, and ``attention_mask`` ``(batch, committed + length)`` do not fit.
        """
        check_tensors(
            input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is not None:
            if input_ids.ndim != 2:
                raise ValueError(
                    f"input_ids must have shape (batch, length), got {tuple(input_ids.shape)}"
                )
            ids = input_ids.to(torch.int64) if input_ids.dtype == torch.int32 else input_ids
            if not torch.compiler.is_compiling():  # a graph cannot depend on the ids
                check_ids("input_ids", ids, self.config.vocab_size)
            inputs_embeds = self.embed_tokens(ids)
        x = cast("Sequence", inputs_embeds)
        if x.ndim != 3:
            raise ValueError(
                f"inputs_embeds must have shape (batch, length, hidden_size), got {tuple(x.shape)}"
            )
        check_cache(cache, len(x))
        mask = joined_mask(attention_mask, len(x), x.shape[1], cache)
        return scaled(x, self.config.embedding_scale), mask


class DeqseqForSequenceClassification(GenericForSequenceClassification, DeqseqPreTrainedModel):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A model of this library that classifies sequences by the state of their last token.

    Batches need ``pad_token_id``.

    Args:
        config: a :class:`DeqseqConfig`, with ``num_labels``.

    Attributes:
        model: embedding and backbone.
        score: the head.

    Example:
        >>> from transformers import AutoModelForSequenceClassification
        >>> from deqseq.integrations.huggingface import DeqseqConfig
        >>> sizes = {
        ...     "vocab_size": 9,
        ...     "backbone": {"name": "LlamaConfig", "d_model": 16, "n_heads": 2},
        ... }
        >>> config = DeqseqConfig(num_labels=2, pad_token_id=0, **sizes)
        >>> model = AutoModelForSequenceClassification.from_config(config)
        >>> model(torch.tensor([[1, 2, 3], [4, 0, 0]])).logits.shape
        torch.Size([2, 2])
    """

    accepts_loss_kwargs = False
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012
