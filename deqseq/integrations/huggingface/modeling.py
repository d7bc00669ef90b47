"""The models of this library as models of transformers; one implementation for all backbones."""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils.generic import can_return_tuple

from deqseq.backbones import Llama, Mamba2
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface.arguments import (
    check_cache,
    check_inputs,
    check_keywords,
    check_positions,
    joined_mask,
)
from deqseq.integrations.huggingface.blocks import (
    blocks_are_checkpointed,
    checkpoint_blocks,
    checkpointed,
    is_normalised,
    recorded_states,
)
from deqseq.integrations.huggingface.cache import ImplicitCache
from deqseq.integrations.huggingface.configuration import ImplicitConfig
from deqseq.integrations.huggingface.objects import from_json
from deqseq.integrations.huggingface.outputs import ImplicitModelOutput
from deqseq.integrations.huggingface.pretrained_model import ImplicitPreTrainedModel
from deqseq.models import ExplicitModel, ImplicitModel, RecurrentDepth
from deqseq.models.causal_lm import check_ids
from deqseq.models.padding import Padding
from deqseq.models.recurrent_depth import solved_part
from deqseq.models.scaling import scaled
from deqseq.training import gather_once

SolveChange = SolveConfig | Mapping[str, Any]
"""How a call is solved: a whole configuration, or the fields to replace in the model's own, as objects or JSON."""


class ImplicitBaseModel(ImplicitPreTrainedModel):
    """An embedding and a model: tokens in, states out. Abstract: use the class of a model type, or ``AutoModel``.

    Args:
        config: of a model type.

    Attributes:
        core: the :class:`deqseq.ImplicitModel`, :class:`deqseq.ExplicitModel` or :class:`deqseq.RecurrentDepth`.
        embed_tokens: the embedding.

    Example:
        >>> from deqseq.integrations.huggingface import ImplicitMamba2Config, ImplicitMamba2Model
        >>> config = ImplicitMamba2Config(vocab_size=9, hidden_size=16, head_dim=8, num_hidden_layers=1)
        >>> model = ImplicitMamba2Model(config).eval()
        >>> cache = model(torch.tensor([[1, 2]])).cache
        >>> model(torch.tensor([[3]]), cache=cache).last_hidden_state.shape, cache.length
        (torch.Size([1, 1, 16]), 3)
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^score\."]  # noqa: RUF012

    def __init__(self, config: ImplicitConfig, **unknown: Any) -> None:
        super().__init__(config, **unknown)
        self.core, self.embed_tokens = config.build()
        for part in self.core.modules():  # tells transformers to keep our own initialisation
            if not list(part.buffers(recurse=False)):  # which are in no checkpoint: it has to compute them again
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
            attention_mask: 0 at padding, on either side of a row, ``(batch, committed + length)``, where committed
                counts the tokens of the cache. Default: no padding.
            position_ids: the model's own and no others, ``(batch, length)``: real tokens counted from 0.
            cache: an :class:`ImplicitCache`, which is advanced by these tokens. Default: there were no tokens
                before.
            inputs_embeds: embedded tokens ``(batch, length, hidden_size)``, as ``embed_tokens`` gives them, instead of
                ``input_ids``.
            use_cache: whether to advance ``cache``, or a new cache. Default: as in the configuration, but in
                training only if a cache is given.
            output_hidden_states: whether ``hidden_states`` are returned: the embedded tokens and the fixed point; of an
                explicit model the embedded tokens and the state after each block.
            solve: how this call is solved: a :class:`deqseq.SolveConfig`, or a mapping of the fields to replace, as
                ``{"sweep": deqseq.Sliding(8), "stop": {"max_steps": 8}}``.
            **kwargs: ``return_dict=False`` returns a tuple. What transformers passes to all models and does not matter
                here, such as ``token_type_ids``, is ignored.

        Returns:
            States, cache, and the numbers of the solve.

        Raises:
            ValueError: a bad shape, ids outside the vocabulary, a cache of other rows, positions other than the
                model's own, packed sequences, attention weights, or ``solve`` for an explicit model.
            TypeError: no tensor, a cache of another library, or an unknown keyword.
        """
        gather_once(self.core)  # the Trainer and accelerate shard a model after it was built
        check_keywords({"output_attentions": self.config.output_attentions or None} | kwargs)
        check_inputs(input_ids, inputs_embeds, attention_mask=attention_mask, position_ids=position_ids)
        x = scaled(self._embedded(input_ids, inputs_embeds), self.config.embedding_scale)
        x = F.dropout(x, self.config.embedding_dropout, self.training)
        batch, length = x.shape[:2]
        if use_cache is None:
            use_cache = cache is not None or (self.config.use_cache and not self.training)
        cache = ImplicitCache() if cache is None else cache
        check_cache(cache, batch)
        mask, committed = joined_mask(attention_mask, batch, length, cache), cache.length
        check_positions(position_ids, mask, committed, (batch, length))
        new = None if mask is None else mask[:, committed:]
        options: dict[str, Any] = {} if solve is None else {"solve": self.solve_config(solve)}
        want_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        record = want_states and self.solved is None
        with recorded_states(self.core.backbone) if record else nullcontext([]) as between:
            output = self.core(x, mask=new, cache=cache.value, return_cache=use_cache, **options)
        if use_cache:
            cache.commit(output, new)
        inner = [Padding.of(x, new).back(state) for state in between[:-1]]  # the final norm follows the last one
        solved = ImplicitModelOutput(
            last_hidden_state=output.value,
            cache=cache if use_cache else None,
            hidden_states=(x, *inner, output.value) if want_states else None,
            stats=output.stats,
            status=output.status,
        )
        solved.again = output.again
        return solved

    def solve_config(self, change: SolveChange, base: SolveConfig | None = None) -> SolveConfig:
        """``base``, by default that of the mode, with ``change`` in it; ValueError for an explicit model."""
        if self.solved is None:
            raise ValueError(f"leave out solve: this {type(self).__name__} is explicit (implicit=False)")
        return from_json("solve", change, "solve", base or self.solved.solve_config)

    @property
    def solved(self) -> ImplicitModel | None:
        """The part that is solved: ``core``, or that of a :class:`deqseq.RecurrentDepth`; None: an explicit model."""
        return solved_part(self.core)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether activations are recomputed in the backward pass."""
        if self.solved is not None:
            return self.solved.solve.gradient.checkpoint
        return blocks_are_checkpointed(self.core.backbone)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        part = self.solved
        if part is not None:
            part.solve = checkpointed(part.solve, enable)
            part.eval_solve = part.eval_solve and checkpointed(part.eval_solve, enable)
        once = [one.backbone for one in self.core.modules() if isinstance(one, ExplicitModel)]
        for backbone in once:  # the layers of a decoder are transformers' to recompute
            if isinstance(backbone, Llama | Mamba2) and not is_normalised(backbone):
                checkpoint_blocks(backbone, enable)
        if enable and not self.gradient_checkpointing and not isinstance(self.core, RecurrentDepth):
            kind = "weight normalisation" if part is None else f"the gradient {part.solve.gradient}"
            warnings.warn(f"gradient checkpointing has no effect: with {kind} nothing is recomputed", stacklevel=2)

    def _embedded(self, ids: Tensor | None, embedded: Tensor | None) -> Tensor:
        if (ids is None) == (embedded is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if embedded is not None:
            return embedded
        assert ids is not None
        ids = ids.to(torch.int64) if ids.dtype == torch.int32 else ids
        if not torch.compiler.is_compiling():  # a graph cannot depend on the ids
            check_ids("input_ids", ids, self.config.vocab_size)
        return self.embed_tokens(ids)


class ImplicitClassifier(GenericForSequenceClassification, ImplicitPreTrainedModel):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A model of this library that classifies sequences by the state of their last token.

    Abstract: use the class of a model type, or ``AutoModelForSequenceClassification``. Batches need ``pad_token_id``.

    Args:
        config: of a model type, with ``num_labels``.
        **unknown: refused, with the nearest known name.

    Attributes:
        model: embedding and backbone.
        score: the head.

    Example:
        >>> from transformers import AutoModelForSequenceClassification
        >>> from deqseq.integrations.huggingface import ImplicitMamba2Config
        >>> sizes = {"vocab_size": 9, "hidden_size": 16, "head_dim": 8, "num_hidden_layers": 1}
        >>> config = ImplicitMamba2Config(num_labels=2, pad_token_id=0, **sizes)
        >>> model = AutoModelForSequenceClassification.from_config(config)
        >>> model(torch.tensor([[1, 2, 3], [4, 0, 0]])).logits.shape
        torch.Size([2, 2])
    """

    accepts_loss_kwargs = False
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: ImplicitConfig, **unknown: Any) -> None:
        self._refuse(config, unknown)  # which the class of transformers would not pass on
        super().__init__(config)
