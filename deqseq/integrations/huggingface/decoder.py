"""The decoder layers of a transformers model as a backbone, and the attention of transformers."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deqseq.arguments import check_type, checked
from deqseq.backbones import Backbone, Inputs, LlamaCache
from deqseq.backbones.base import check_cache, check_sequence
from deqseq.backbones.llama import commit, opened
from deqseq.layers import Attention
from deqseq.layers.attention import KeyValues, Past
from deqseq.models.base import Model
from deqseq.models.recurrent_depth import solved_part
from deqseq.models.specification import DecoderLayers
from deqseq.types import Mask, Sequence, float32_at_least

NAMES = (
    "arcee gemma gemma2 gemma3_text glm glm4 helium llama ministral mistral nemotron olmo olmo2 "
    "olmo3 phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2"
)
FAMILIES = dict.fromkeys(NAMES.split(), "norm") | {"gpt_neox": "final_layer_norm"}
"""The families that are tested against transformers, with the name of their final norm."""


class DecoderBackbone(Backbone[LlamaCache]):
    r"""The decoder layers of a transformers model, or some of them, run as they are.

    .. math:: f(z) = \mathrm{norm}(\mathrm{layer}_n(\ldots \mathrm{layer}_1(z)))

    Modules are shared with the model, not copied. These families are checked against transformers,
    and others are refused: Arcee, Gemma 1 to 3 (text), GLM, GLM-4, GPT-NeoX, Helium, Llama,
    Ministral, Mistral, Nemotron, OLMo 1 to 3, Phi-3, Qwen2, Qwen3, Seed-OSS, SmolLM3, StableLM and
    Starcoder2. Models whose rotary frequencies change with the length of the text (``"longrope"``,
    ``"dynamic"``) refuse sequences longer than their original context.

    The input of a solve does not enter the layers. So an implicit model needs ``start="input"``, or
    an injection: ``deqseq.Injected(DecoderBackbone(model), injection)``.

    Args:
        model: a model of transformers, without dropout. Its attention implementation is read at
            each call.
        layers: which of its layers to run, a contiguous part. Default: all.
        final_norm: whether the model's final norm follows.

    Raises:
        TypeError: not a transformers model.
        ValueError: a family or a model that does not fit, and why; or a slice that selects no part
            of the layers.

    Example:
        >>> import torch
        >>> from deqseq.integrations.huggingface import DecoderBackbone
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
        >>> model = Qwen3ForCausalLM(Qwen3Config(vocab_size=10, **heads, **sizes))
        >>> core = DecoderBackbone(model, slice(1, 3), final_norm=False)
        >>> x = torch.randn(2, 5, 16)
        >>> z, _ = core(x, core.prepare(x))
        >>> z.shape, core.layers[0] is model.model.layers[1]
        (torch.Size([2, 5, 16]), True)
    """

    @checked
    def __init__(
        self, model: PreTrainedModel, layers: slice | None = None, final_norm: bool = True
    ) -> None:
        super().__init__()
        decoder: Any = model.base_model
        config = self.config = decoder.config
        self.generation_config = getattr(model, "generation_config", None)
        if config.model_type not in FAMILIES:
            raise ValueError(
                f"model must be of one of the families {', '.join(sorted(FAMILIES))}, got a "
                f"{type(model).__name__}: layers without rotary attention and mixtures of experts "
                "are not run; to add another family, see CONTRIBUTING.md"
            )
        self.numbers = _numbers(len(decoder.layers), layers or slice(None))
        self.layers = nn.ModuleList(decoder.layers[i] for i in self.numbers)
        _check(config, self.layers)
        self.d_model = config.hidden_size
        self.norm = nn.Identity()
        if final_norm:
            self.norm = getattr(decoder, FAMILIES[config.model_type])
        window = getattr(config, "sliding_window", None)
        kind = "full_attention" if window is None else "sliding_attention"
        kinds = getattr(config, "layer_types", None) or [kind] * len(decoder.layers)
        self.kinds = [kinds[i] for i in self.numbers]
        self.windows = dict.fromkeys(sorted(set(self.kinds)))
        if "sliding_attention" in self.windows:
            self.windows["sliding_attention"] = window
        self.rotary = decoder.rotary_emb
        self.rotary_per_kind = "layer_type" in _parameters(self.rotary)
        self.cache_name = "layer_past" if "layer_past" in _parameters(self.layers[0]) else "cache"
        for layer in self.layers:  # the cache of a call is not changed when it is computed again
            layer._can_checkpoint_with_cache = True  # pyright: ignore[reportArgumentType]

    def prepare(
        self, x: Sequence, cache: LlamaCache | None = None, mask: Mask | None = None
    ) -> Inputs:
        """The rotary tables; ValueError for more tokens than the frequencies are for."""
        check_sequence(x, self.d_model)
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        width = getattr(self.config, "head_dim", None) or self.d_model // heads
        check_cache(cache, LlamaCache, x, [(kv_heads, None, width)] * (2 * len(self.layers)))
        total = x.shape[1]
        positions = torch.arange(total, device=x.device)[None]
        if cache is not None:
            positions = cache.positions(total)
            total += cache.length
        longest = _context(self.config)
        if longest is not None and total > longest:
            raise ValueError(
                f"x and the cache must have at most {longest} tokens, got {total}: beyond them "
                "this model has other rotary frequencies, with which the cached keys would be wrong"
            )
        tables: list[Tensor] = []
        for kind in self.windows:
            options = {"layer_type": kind} if self.rotary_per_kind else {}
            tables += self.rotary(x, positions, **options)
        return Inputs(rotary=tuple(tables))

    def forward(
        self,
        z: Sequence,
        inputs: Inputs,
        cache: LlamaCache | None = None,
        *,
        need_aux: bool = False,
    ) -> tuple[Sequence, tuple[KeyValues, ...] | None]:
        cache, past = opened(cache, z.shape[1])
        masks = {
            kind: attention_mask(self.config, z, cache, window)
            for kind, window in self.windows.items()
        }
        pairs = zip(inputs.rotary[::2], inputs.rotary[1::2], strict=True)
        tables = dict(zip(self.windows, pairs, strict=True))
        return self.run(z, tables, masks, past, need_aux)

    def advance(
        self,
        cache: LlamaCache | None,
        aux: tuple[KeyValues, ...],
        tokens: int,
        counts: Int64[Tensor, " batch"] | None = None,
    ) -> LlamaCache:
        return commit(cache, aux, tokens, counts)

    def sizes(self) -> DecoderLayers:
        final_norm = not isinstance(self.norm, nn.Identity)
        return DecoderLayers(self.d_model, self.numbers.start, self.numbers.stop, final_norm)

    def _stack(
        self,
        z: Tensor,
        tables: dict[str, tuple[Tensor, Tensor]],
        masks: dict[str, Any],
        past: tuple[Past, ...],
        need_aux: bool,
    ) -> tuple[Tensor, tuple[KeyValues, ...] | None]:
        """All layers and the norm, from tensors to tensors."""
        new = []
        for i, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            options: dict[str, Any] = {}
            if past or need_aux:
                options[self.cache_name] = _LayerCache(past[i] if past else None)
            z = layer(z, attention_mask=masks[kind], position_embeddings=tables[kind], **options)
            if need_aux:
                new.append(options[self.cache_name].new)
        return self.norm(z), tuple(new) if need_aux else None


class _LayerCache:
    """What a layer takes for transformers' cache: joins committed and new keys and values."""

    new: KeyValues

    def __init__(self, past: Past | None) -> None:
        self.past = past

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values so far; called again when a checkpointed layer is computed again."""
        self.new = KeyValues(keys, values)
        return self.new if self.past is None else self.past.joined(self.new)


def _parameters(module: nn.Module) -> Any:
    return inspect.signature(module.forward).parameters


def _numbers(count: int, layers: slice) -> range:
    """The numbers of the chosen layers."""
    numbers = range(count)[layers]
    ends = {layers.start, layers.stop} - {None}
    if not numbers or numbers.step != 1 or not all(-count <= end <= count for end in ends):
        raise ValueError(
            f"layers must be a contiguous part of the model's {count} layers, got {layers}"
        )
    return numbers


def _context(config: Any) -> int | None:
    """The longest sequence whose rotary frequencies do not depend on its length; None: any."""
    rope = config.rope_parameters
    scalings: list[Any] = [rope] if "rope_type" in rope else list(rope.values())
    longest = [
        scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        for scaling in scalings
        if scaling and scaling["rope_type"] in ("dynamic", "longrope")
    ]
    return min(longest, default=None)


def _check(config: Any, layers: nn.ModuleList) -> None:
    """Refuse dropout, with which layers have no fixed point, and attention that is not causal."""
    drops = _dropouts(layers.named_modules())
    for name, p in config.to_dict().items():
        if "drop" in name and "classifier" not in name and p:
            drops[name] = p
    if drops:
        raise ValueError(
            "model must have no dropout, which would be drawn anew in every iteration, got "
            f"{drops}: load it with these set to 0, as from_pretrained(name, attention_dropout=0.0)"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError("model must be causal, got use_bidirectional_attention=True")


def _dropouts(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, float]:
    """The probabilities of dropout above zero in some modules, by name."""
    drops: dict[str, float] = {}
    for name, module in modules:
        if "Dropout" in type(module).__name__:  # PEFT's OFT has a class of its own
            drops[name] = getattr(module, "p", 0.0)
        for kind in ("rank_dropout", "module_dropout"):  # PEFT's LoHa and LoKr draw by themselves
            for adapter, p in getattr(module, kind, {}).items():
                drops[f"{name}.{kind}.{adapter}"] = p
    return {name: p for name, p in drops.items() if p}


def watch(core: Model) -> None:
    """Refuse in each call adapters with dropout: values would be wrong."""
    if _check_dropout not in core._forward_pre_hooks.values():
        core.register_forward_pre_hook(_check_dropout)


def _check_dropout(core: Model, *_: Any) -> None:
    solved = solved_part(core)
    if solved is None or not solved.training:
        return
    modules = solved.backbone.named_modules()
    drops = _dropouts((name, module) for name, module in modules if module.training)
    if drops:
        raise ValueError(
            "a map that is solved must have no dropout, which would be drawn anew in every "
            f"iteration, got {drops}: set it to 0, as LoraConfig(lora_dropout=0.0)"
        )


class ChosenAttention:
    """The attention function that ``config._attn_implementation`` names, read at each call."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def mask(self, z: Tensor, cache: Any) -> Any:
        """What the function takes as its mask."""
        return attention_mask(self.config, z, cache)

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Tensor:
        """Mixed values, ``(batch, new, heads, headdim)``."""
        name = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, _eager)
        pair = attend(layer, q, k, v, mask, dropout=0.0, scaling=layer.headdim**-0.5)
        check_type(f"what the attention function {name!r} returns", pair, tuple)
        return pair[0]


def choose_attention(core: nn.Module, config: Any) -> None:
    """Let the attention layers of ``core`` follow ``config``."""
    layers: Any = [module for module in core.modules() if isinstance(module, Attention)]
    for index, layer in enumerate(layers):
        layer.attend = ChosenAttention(config)
        # what the functions ask of a layer
        layer.config = config
        layer.layer_idx = index
        layer.is_causal = True
        layer.num_key_value_groups = layer.groups


def attention_mask(
    config: Any, z: Tensor, cache: LlamaCache | None, window: int | None = None
) -> Any:
    """The mask for new tokens ``(batch, new, d_model)`` that see the last ``window``.

    Transformers makes it. ValueError: rows of unequal length, for a function whose masks it cannot
    make.
    """
    name = config._attn_implementation
    rows, new = z.shape[:2]
    length = 0 if cache is None else cache.length
    if window is not None and length + new <= window:
        window = None
    if name == "sdpa" and window is None:
        return None if cache is None else cache.visible
    function = causal_mask_function
    if window is not None:
        function = sliding_window_causal_mask_function(window)
    real = None
    if cache is not None and cache.visible is not None and cache.counts is not None:
        # rows of unequal length have gaps before the new tokens, which do not count in a window
        real = cache.visible[:, 0, -1].expand(rows, -1)  # the last token sees all real ones
        if window is not None:
            committed = torch.arange(length, device=real.device).expand(rows, -1)
            positions = torch.cat([committed, cache.positions(new)], dim=1)

            def near(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                """Whether a window reaches from a query back to a key."""
                return positions[row, query] - positions[row, key] < window

            function = and_masks(causal_mask_function, near)
    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        return ALL_MASK_ATTENTION_FUNCTIONS[name](
            batch_size=rows,
            q_length=new,
            kv_length=length + new,
            q_offset=length,
            kv_offset=0,
            mask_function=function,
            attention_mask=real,
            local_size=window,
            dtype=z.dtype,
            device=z.device,
            config=config,
        )
    if real is None:
        return None
    raise ValueError(
        f'the attention implementation "{name}" has no masks, and rows of unequal length need one: '
        f'call transformers.AttentionMaskInterface.register("{name}", function)'
    )


def _eager(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Softmax written out, in float32 at least, as in each model of transformers."""
    k, v = (heads.repeat_interleave(layer.num_key_value_groups, dim=1) for heads in (k, v))
    scores = q @ k.mT * scaling
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=float32_at_least(q)).to(q.dtype)
    return (weights @ v).transpose(1, 2), weights
