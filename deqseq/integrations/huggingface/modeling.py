"""The models of this library as models of transformers; one implementation for all backbones."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from os import PathLike
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init

from deqseq.config import SolveConfig
from deqseq.gradients import Phantom, Unrolled
from deqseq.integrations.huggingface.cache import ImplicitCache, check_cache, check_positions, joined_mask
from deqseq.integrations.huggingface.configuration import ImplicitConfig
from deqseq.integrations.huggingface.objects import from_json, to_json
from deqseq.integrations.huggingface.outputs import ImplicitModelOutput
from deqseq.integrations.reference_fields import check_known
from deqseq.models import ImplicitModel
from deqseq.models.causal_lm import check_ids

SolveChange = SolveConfig | Mapping[str, Any]
"""How a call is solved: a whole configuration, or the fields to replace in the model's own, as objects or JSON."""


class ImplicitPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation of all implicit models.

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
        for name in unknown:  # keywords of from_pretrained() that transformers does not know
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
        _check_weights(report, pretrained_model_name_or_path or "the given state dict", extra=not output_loading_info)
        return (model, report) if output_loading_info else model

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in transformers, but a generation configuration that could not be read again is refused first.

        Args:
            save_directory: made if missing.
            *args: of transformers.
            **kwargs: of transformers.

        Raises:
            ValueError: an unknown name or field in ``generation_config.solve``.
            TypeError: an object there, where JSON should be.
        """
        if self.can_generate():
            check_generation(self.generation_config)
            self.generation_config._from_model_config = False  # or ``solve`` would be dropped when the file is read
        super().save_pretrained(save_directory, *args, **kwargs)

    def compile(self, **options: Any) -> None:
        """Compile the blocks with ``torch.compile``; the code around them stays as it is.

        Args:
            **options: of ``torch.compile``.
        """
        base: Any = self.base_model
        base.core.compile(**options)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw an embedding or a head; a backbone has initialised itself."""
        if isinstance(module, nn.Embedding | nn.Linear):
            init.normal_(module.weight, std=self.config.initializer_range)


class ImplicitBaseModel(ImplicitPreTrainedModel):
    """An embedding and a model: tokens in, states out. Abstract: use the class of a model type, or ``AutoModel``.

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
        for part in self.core.modules():  # tells transformers to keep our own initialisation
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
        solve: SolveChange | None = None,
    ) -> ImplicitModelOutput | tuple[Any, ...]:
        """Solve for the states of these tokens.

        Args:
            input_ids: ``(batch, length)``.
            attention_mask: 0 at padding, on either side of a row, ``(batch, committed + length)``, where committed
                counts the tokens of the cache. Default: no padding.
            position_ids: the model's own and no others, ``(batch, length)``: real tokens counted from 0.
            past_key_values: an :class:`ImplicitCache`, which is advanced by these tokens. Default: there were no tokens
                before.
            inputs_embeds: embedded tokens ``(batch, length, hidden_size)``, instead of ``input_ids``.
            use_cache: whether to advance ``past_key_values``, or a new cache. Default: as in the configuration, but in
                training only if a cache is given.
            output_attentions: not available.
            output_hidden_states: whether embedded tokens and states are returned as ``hidden_states``.
            return_dict: False returns a tuple.
            solve: how this call is solved: a :class:`deqseq.SolveConfig`, or a mapping of the fields to replace, as
                ``{"sweep": deqseq.Sliding(8), "stop": {"max_steps": 8}}``.

        Returns:
            States, cache, and the numbers of the solve.

        Raises:
            ValueError: a bad shape, ids outside the vocabulary, a cache of other rows, positions other than the
                model's own, or ``solve`` for an explicit model.
            TypeError: a cache of another library.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions is not available: no attention weights are computed")
        x = F.dropout(self._embedded(input_ids, inputs_embeds), self.config.embedding_dropout, self.training)
        batch, length = x.shape[:2]
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training)
        cache = ImplicitCache() if past_key_values is None else past_key_values
        check_cache(cache, batch)
        mask, committed = joined_mask(attention_mask, batch, length, cache), cache.length
        check_positions(position_ids, mask, committed, length)
        new = None if mask is None else mask[:, committed:]
        options = {} if solve is None else {"solve": self.solve_config(solve)}
        output = self.core(x, mask=new, cache=cache.value, return_cache=use_cache, **options)
        if use_cache:
            cache.commit(output, new)
        want_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        result = ImplicitModelOutput(
            last_hidden_state=output.value,
            past_key_values=cache if use_cache else None,
            hidden_states=(x, output.value) if want_states else None,
            stats=output.stats,
            status=output.status,
        )
        return result if (self.config.return_dict if return_dict is None else return_dict) else result.to_tuple()

    def solve_config(self, change: SolveChange, where: str = "solve", base: SolveConfig | None = None) -> SolveConfig:
        """``base``, by default that of the current mode, with the fields of ``change`` replaced; errors name ``where``.

        Raises:
            ValueError: an explicit model, or an unknown name or field.
        """
        if not isinstance(self.core, ImplicitModel):
            raise ValueError(f"leave out {where}: this {type(self).__name__} is explicit (implicit=False)")
        return from_json("solve", change, where, base or self.core.solve_config)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the gradient estimator recomputes activations in the backward pass."""
        return isinstance(self.core, ImplicitModel) and self.core.solve.gradient.recomputes

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        core = self.core
        if isinstance(core, ImplicitModel) and isinstance(core.solve.gradient, Phantom | Unrolled):
            core.solve = checkpointed(core.solve, enable)
            core.eval_solve = core.eval_solve and checkpointed(core.eval_solve, enable)
        elif enable:
            found = f"the gradient {core.solve.gradient}" if isinstance(core, ImplicitModel) else "an explicit model"
            raise ValueError(f"gradient checkpointing needs the gradient Phantom or Unrolled, got {found}")

    def _embedded(self, ids: Tensor | None, embedded: Tensor | None) -> Tensor:
        if (ids is None) == (embedded is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if embedded is not None:
            return embedded
        assert ids is not None
        ids = ids.to(torch.int64) if ids.dtype == torch.int32 else ids
        check_ids("input_ids", ids, self.embed_tokens.num_embeddings)
        return self.embed_tokens(ids)


def checkpointed(solve: SolveConfig, enable: bool = True) -> SolveConfig:
    """The configuration with activation checkpointing on or off, if its gradient has any."""
    if not isinstance(solve.gradient, Phantom | Unrolled):
        return solve
    return replace(solve, gradient=replace(solve.gradient, checkpoint=enable))


def check_generation(config: GenerationConfig) -> None:
    """Refuse a generation configuration whose ``solve`` is misspelt, or is no JSON."""
    for name in vars(config):
        if name.startswith("solv"):
            check_known("generation configuration: field", name, ("solve",))
    if (solve := getattr(config, "solve", None)) is not None:
        parsed = from_json("solve", solve, "generation configuration: solve")
        try:
            json.dumps(solve)
        except TypeError:  # transformers would write null for an object
            text = f"solve in a generation configuration must be JSON, such as {to_json(parsed)}, got {solve!r}"
            raise TypeError(text) from None


def _check_weights(report: dict[str, Any], source: object, *, extra: bool) -> None:
    """Refuse weights that do not fit: transformers would draw missing ones, and other fixed points would be found."""
    redrawn = ("embed_tokens.weight", "lm_head.weight")  # new ones are drawn for a vocabulary of another size
    found = {
        "missing": report.get("missing_keys", ()),
        "of another shape": [key for key, *_ in report.get("mismatched_keys", ()) if not key.endswith(redrawn)],
        "unexpected": report.get("unexpected_keys", ()) if extra else (),
    }
    if "word_emb.emb.weight" in report.get("unexpected_keys", ()):
        raise ValueError(
            f"the weights in {source} have the names of the paper's reference code: load them with "
            "deqseq.integrations.huggingface.from_reference_folder"
        )
    faults = "; ".join(f"{fault} {_listed(names)}" for fault, names in found.items() if names)
    if faults:
        raise ValueError(f"the weights in {source} do not fit: {faults}. Does its config.json describe them?")


def _listed(keys: Iterable[str]) -> str:
    known = sorted(keys)
    return ", ".join(known[:8]) + f" and {len(known) - 8} more" * (len(known) > 8)
