"""The models of this library as models of transformers; one implementation for all backbones."""

from dataclasses import fields, replace
from os import PathLike
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init

from deqseq.gradients import Phantom, Unrolled
from deqseq.integrations.huggingface.cache import ImplicitCache
from deqseq.integrations.huggingface.configuration import ImplicitConfig
from deqseq.integrations.huggingface.generation import check_fields
from deqseq.integrations.huggingface.inputs import (
    all_real,
    check_cache,
    check_positions,
    refuse_solve_options,
)
from deqseq.integrations.huggingface.loading import refuse_misfit
from deqseq.integrations.huggingface.names import check_known
from deqseq.integrations.huggingface.output import ImplicitModelOutput
from deqseq.models import ImplicitModel
from deqseq.models.causal_lm import check_ids
from deqseq.solvers import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Sweep


class ImplicitPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation that all models of ours share.

    Args:
        config: of a model type.
        **unknown: refused, with the nearest known name.

    Raises:
        TypeError: a keyword that belongs into the configuration.
        ValueError: an unknown keyword.

    Example:
        >>> import tempfile
        >>> from transformers import AutoModelForCausalLM
        >>> from deqseq.integrations.huggingface import ImplicitMamba2Config, ImplicitMamba2ForCausalLM
        >>> config = ImplicitMamba2Config(vocab_size=9, hidden_size=16, head_dim=8, num_hidden_layers=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ImplicitMamba2ForCausalLM(config).save_pretrained(folder)
        ...     type(AutoModelForCausalLM.from_pretrained(folder)).__name__
        'ImplicitMamba2ForCausalLM'
    """

    config_class = ImplicitConfig
    config: ImplicitConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _is_stateful = True  # a cache cannot be cropped, so there is no assisted decoding
    _no_split_modules = ["LlamaBlock", "Mamba2Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: ImplicitConfig, **unknown: Any) -> None:
        for name in unknown:  # what from_pretrained() was given and nobody took
            check_known(f"{type(self).__name__} keyword", name, [field.name for field in fields(config)])
            raise TypeError(f"{name} belongs to the configuration, which was given too: set it there")
        super().__init__(config)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike[str] | None,
        *model_args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, but a checkpoint that does not fit is an error.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the hub.
            *model_args: of transformers.
            output_loading_info: whether to return the report too; unexpected weights are then no error.
            **kwargs: of transformers.

        Returns:
            The model in eval mode, and the report if it was asked for.

        Raises:
            ValueError: missing or unexpected weights, or some of another shape.
        """
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        model, report = loaded
        source = pretrained_model_name_or_path or "the given state dict"
        refuse_misfit(report, source, extra=not output_loading_info)
        return (model, report) if output_loading_info else model

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in transformers, but a generation configuration that could not be read again is refused first.

        Args:
            save_directory: made if missing.
            *args: of transformers.
            **kwargs: of transformers.

        Raises:
            ValueError: an unknown field of ours in the generation configuration.
            TypeError: an object there, where JSON should be.
        """
        if self.can_generate():
            check_fields(self.generation_config)
            self.generation_config._from_model_config = False  # such a file's own fields would be dropped when read
        super().save_pretrained(save_directory, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw an embedding or a head; what a backbone consists of has initialised itself and is never asked."""
        if isinstance(module, nn.Embedding | nn.Linear):
            init.normal_(module.weight, std=self.config.initializer_range)


class ImplicitBaseModel(ImplicitPreTrainedModel):
    """An embedding and a model of this library: tokens in, states out.

    Abstract: take the class of a model type, or ``AutoModel``.

    Args:
        config: of a model type.
        **unknown: refused, with the nearest known name.

    Attributes:
        core: the :class:`deqseq.ImplicitModel` or :class:`deqseq.ExplicitModel`.
        embed_tokens: the embedding.

    Example:
        >>> from deqseq.integrations.huggingface import ImplicitMamba2Config, ImplicitMamba2Model
        >>> config = ImplicitMamba2Config(vocab_size=9, hidden_size=16, head_dim=8, num_hidden_layers=1)
        >>> model = ImplicitMamba2Model(config).eval()
        >>> cache = model(torch.tensor([[1, 2]])).past_key_values
        >>> model(torch.tensor([[3]]), past_key_values=cache).last_hidden_state.shape, cache.length
        (torch.Size([1, 1, 16]), 3)
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: ImplicitConfig, **unknown: Any) -> None:
        super().__init__(config, **unknown)
        self.core = config.specification().build_model()
        for part in self.core.modules():  # tells transformers to leave our own initialisation alone
            part._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: Shaped[Tensor, "..."] | None = None,
        attention_mask: Shaped[Tensor, "..."] | None = None,
        position_ids: Int64[Tensor, "..."] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "..."] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        sweep: Sweep | None = None,
        solver: Solver | OutsideSolver | None = None,
        stop: Stop | None = None,
    ) -> ImplicitModelOutput | tuple[Any, ...]:
        """Solve for the states of these tokens.

        Args:
            input_ids: ``(batch, length)``.
            attention_mask: 0 at padding, on either side of a row, ``(batch, settled + length)``, settled being the
                tokens of the cache. None: no padding.
            position_ids: none but the model's own are accepted, ``(batch, length)``: real tokens counted from 0.
            past_key_values: an :class:`ImplicitCache`, which goes on to what follows these tokens; None: nothing came
                before.
            inputs_embeds: embedded tokens ``(batch, length, hidden_size)``, instead of ``input_ids``.
            use_cache: whether to commit to ``past_key_values``, or to a new cache; None: as the configuration says, but
                in training only to one that is given.
            output_attentions: not available.
            output_hidden_states: whether embedded tokens and states are returned as ``hidden_states``.
            return_dict: False returns a tuple.
            sweep: which tokens are solved together; None: all.
            solver: instead of the configuration's.
            stop: instead of the configuration's.

        Returns:
            States, cache, and the numbers of the solve.

        Raises:
            ValueError: a bad shape, ids outside the vocabulary, a cache of other rows, other positions than the
                model's own, solve options of an explicit model.
            TypeError: a cache of another library.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions is not available: no attention weights are computed")
        x = F.dropout(self._embedded(input_ids, inputs_embeds), self.config.embedding_dropout, self.training)
        batch, length = x.shape[:2]
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        if past_key_values is not None:
            check_cache(past_key_values, batch)
        cache = past_key_values if past_key_values is not None else ImplicitCache() if use_cache else None
        real, settled = all_real(attention_mask, batch, length, cache), 0 if cache is None else cache.length
        check_positions(position_ids, real, settled, length)
        new = None if real is None else real[:, settled:]
        output = self.core(
            x,
            mask=new,
            cache=None if cache is None else cache.value,
            return_cache=use_cache,
            **self._solve_options({"sweep": sweep, "solver": solver, "stop": stop}),
        )
        if cache is not None and use_cache:
            cache.commit(output, new)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        result = ImplicitModelOutput(
            last_hidden_state=output.value,
            past_key_values=cache if use_cache else None,
            hidden_states=(x, output.value) if wants_states else None,
            stats=output.stats,
            status=output.status,
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the gradient estimator computes activations again in the backward pass."""
        return isinstance(self.core, ImplicitModel) and self.core.gradient.recomputes

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        core = self.core
        if isinstance(core, ImplicitModel) and isinstance(core.gradient, Phantom | Unrolled):
            core.gradient = replace(core.gradient, checkpoint=enable)
        elif enable:
            found = f"the gradient {core.gradient}" if isinstance(core, ImplicitModel) else "an explicit model"
            raise ValueError(f"gradient checkpointing is for the gradients Phantom and Unrolled, got {found}")

    @property
    def stop(self) -> Stop | None:
        """The stopping rule in the present mode; None: explicit."""
        if not isinstance(self.core, ImplicitModel):
            return None
        return (None if self.training else self.core.eval_stop) or self.core.stop

    def compile(self, **options: Any) -> None:
        """Compile the blocks with ``torch.compile``; what is around them stays as it is.

        Args:
            **options: of ``torch.compile``.
        """
        self.core.compile(**options)

    def _embedded(self, ids: Tensor | None, embedded: Tensor | None) -> Tensor:
        if (ids is None) == (embedded is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if embedded is not None:
            return embedded
        assert ids is not None
        ids = ids.to(torch.int64) if ids.dtype == torch.int32 else ids
        check_ids("input_ids", ids, self.embed_tokens.num_embeddings)
        return self.embed_tokens(ids)

    def _solve_options(self, options: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(self.core, ImplicitModel):
            refuse_solve_options(options, type(self).__name__)
            return {}
        return {name: value for name, value in options.items() if value is not None}
