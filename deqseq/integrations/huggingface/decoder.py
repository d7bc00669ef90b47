"""The decoder layers of a transformers model as a backbone: modules are shared, and their code is
not copied.
"""

import inspect
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from deqseq.arguments import checked
from deqseq.backbones import Backbone, Inputs, LlamaCache
from deqseq.backbones.base import check_cache, check_sequence
from deqseq.backbones.llama import commit
from deqseq.integrations.huggingface.attention import attention_mask
from deqseq.layers.attention import KeyValues, Past
from deqseq.models import CausalLM, ExplicitModel, RecurrentDepth
from deqseq.models.specification import DecoderLayers
from deqseq.types import Mask, Sequence

_SAME = (
    "arcee gemma gemma2 gemma3_text glm glm4 helium llama ministral mistral "
    "nemotron olmo olmo2 olmo3"
)
_SAME += " phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2"
FAMILIES = dict.fromkeys(_SAME.split(), "norm") | {"gpt_neox": "final_layer_norm"}
"""What is checked against transformers: families by ``model_type``, with the name of their final
norm.
"""


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
        model: without dropout. Its attention implementation is read at each call.
        layers: which of its layers to run, a contiguous part. Default: all.
        final_norm: whether the model's final norm follows.

    Raises:
        TypeError: not a transformers model.
        ValueError: a family or a model that does not fit, and why; or a slice that selects no part
            of the layers.

    Example:
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> sizes = {
        ...     "hidden_size": 16,
        ...     "intermediate_size": 32,
        ...     "num_attention_heads": 2,
        ...     "num_key_value_heads": 1,
        ... }
        >>> model = Qwen3ForCausalLM(
        ...     Qwen3Config(vocab_size=10, num_hidden_layers=4, head_dim=8, **sizes)
        ... )
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
        self.config: Any = decoder.config
        if self.config.model_type not in FAMILIES:
            raise ValueError(
                f"model must be of one of the families {', '.join(sorted(FAMILIES))}, got a "
                f"{type(model).__name__}: "
                f"{_misfit(decoder)}"
            )
        self.part = part = _part(len(decoder.layers), layers)
        kinds: Any = getattr(self.config, "layer_types", None)
        if kinds is None:
            windowed = getattr(self.config, "sliding_window", None) is not None
            kinds = ["sliding_attention" if windowed else "full_attention"] * len(decoder.layers)
        self.kinds = tuple(kinds[i] for i in part)
        self.d_model = self.config.hidden_size
        self.layers = nn.ModuleList(decoder.layers[i] for i in part)
        self.norm = (
            getattr(decoder, FAMILIES[self.config.model_type]) if final_norm else nn.Identity()
        )
        self.rotary = decoder.rotary_emb
        per_kind = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self.rotations = tuple(sorted(set(self.kinds))) if per_kind else (None,)
        self._takes = inspect.signature(self.layers[0].forward).parameters.keys() & {
            "cache",
            "layer_past",
        }
        for layer in self.layers:  # the cache of a call is not changed when it is computed again
            layer._can_checkpoint_with_cache = True  # pyright: ignore[reportArgumentType]
        self._context = _context(self.config)
        _check(self.config, self.layers)

    def prepare(
        self, x: Sequence, cache: LlamaCache | None = None, mask: Mask | None = None
    ) -> Inputs:
        """The rotary tables; ValueError for more tokens than the frequencies are for."""
        check_sequence(x, self.d_model)
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        width = getattr(self.config, "head_dim", None) or self.d_model // heads
        check_cache(cache, LlamaCache, x, [(kv_heads, None, width)] * (2 * len(self.layers)))
        tokens = x.shape[1]
        positions = (
            torch.arange(tokens, device=x.device)[None]
            if cache is None
            else cache.positions(tokens)
        )
        total = tokens + (0 if cache is None else cache.length)
        if self._context is not None and total > self._context:
            raise ValueError(
                f"x and the cache must have at most {self._context} tokens, got {total}: beyond "
                "them this model has "
                "other rotary frequencies, with which the cached keys would be wrong"
            )
        options = [{} if kind is None else {"layer_type": kind} for kind in self.rotations]
        return Inputs(
            rotary=tuple(
                table for option in options for table in self.rotary(x, positions, **option)
            )
        )

    def forward(
        self,
        z: Sequence,
        inputs: Inputs,
        cache: LlamaCache | None = None,
        *,
        need_aux: bool = False,
    ) -> tuple[Sequence, tuple[KeyValues, ...] | None]:
        past: tuple[Past, ...] = ()
        if cache is not None:
            cache = cache.reserve(z.shape[1])  # does nothing if the solve has reserved already
            past = tuple(Past(layer, cache.length) for layer in cache.layers)
        masks = {}
        for kind in set(self.kinds):
            window = self.config.sliding_window if kind == "sliding_attention" else None
            masks[kind] = attention_mask(self.config, z, cache, window)
        tables = dict(
            zip(
                self.rotations,
                zip(inputs.rotary[::2], inputs.rotary[1::2], strict=True),
                strict=True,
            )
        )
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
        return DecoderLayers(
            self.d_model, self.part.start, self.part.stop, not isinstance(self.norm, nn.Identity)
        )

    def _stack(
        self,
        z: Tensor,
        tables: dict[str | None, tuple[Tensor, Tensor]],
        masks: dict[Any, Any],
        past: tuple[Past, ...],
        need_aux: bool,
    ) -> tuple[Tensor, tuple[KeyValues, ...] | None]:
        """All layers and the norm, from tensors to tensors."""
        kept = []
        for i, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            cache = _LayerCache(past[i] if past else None) if past or need_aux else None
            given: dict[str, Any] = dict.fromkeys(self._takes, cache)
            given["position_embeddings"] = tables[kind if kind in tables else None]
            z = layer(z, attention_mask=masks[kind], **given)
            if need_aux and cache is not None:
                kept.append(cache.own)
        return self.norm(z), tuple(kept) if need_aux else None


@checked
def from_decoder(model: PreTrainedModel) -> CausalLM:
    """A transformers language model as an explicit :class:`deqseq.CausalLM`; modules are shared,
    not copied.

    Args:
        model: of a family that :class:`DecoderBackbone` runs, with its head.

    Raises:
        TypeError: not a transformers model.
        ValueError: a family or a model that does not fit, and why; or a model without a head.

    Example:
        >>> from transformers import Gemma2Config, Gemma2ForCausalLM
        >>> sizes = {
        ...     "hidden_size": 16,
        ...     "intermediate_size": 32,
        ...     "num_attention_heads": 2,
        ...     "num_key_value_heads": 1,
        ... }
        >>> theirs = Gemma2ForCausalLM(
        ...     Gemma2Config(vocab_size=10, num_hidden_layers=2, head_dim=8, **sizes)
        ... ).eval()
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> torch.allclose(from_decoder(theirs)(ids).logits, theirs(ids).logits, atol=1e-5)
        True
    """
    return with_head(model, ExplicitModel(DecoderBackbone(model)))


def with_head(model: PreTrainedModel, layers: ExplicitModel | RecurrentDepth) -> CausalLM:
    """A language model of ``layers`` and the embedding and the head of ``model``; ValueError if
    none fits.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ValueError(
            "model must have a language model's head, as a ...ForCausalLM, got "
            f"{type(model).__name__}"
        )
    if head.bias is not None:
        raise ValueError("model's head must have no bias, which a CausalLM would not add, got one")
    own_head = None if head.weight is embedding.weight else head
    lm = language_model(
        layers,
        embedding,
        own_head,
        logit_softcap=getattr(model.config, "final_logit_softcapping", None),
    )
    return lm.train(model.training)


def language_model(
    layers: Any, embedding: nn.Embedding, head: nn.Linear | None, **numbers: Any
) -> CausalLM:
    """A language model made of these modules; without a head it is the embedding, which may scale
    by itself.
    """
    with torch.device("meta"):  # its own weights would be drawn for nothing
        lm = CausalLM(embedding.num_embeddings, layers, tied=head is None, **numbers)
    lm.embedding, lm.head = embedding, head
    return lm


class _LayerCache:
    """What a layer takes for the cache of transformers: joins committed and new keys and values,
    keeps the new ones.
    """

    own: KeyValues

    def __init__(self, past: Past | None) -> None:
        self.past = past

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values so far; called again when a checkpointed layer is computed again."""
        self.own = KeyValues(keys, values)
        return self.own if self.past is None else self.past.joined(self.own)


def _part(count: int, layers: slice | None) -> range:
    """The numbers of the chosen layers."""
    layers = slice(None) if layers is None else layers
    part = range(count)[layers]
    ends = [end for end in (layers.start, layers.stop) if end is not None]
    if not part or part.step != 1 or not all(-count <= end <= count for end in ends):
        raise ValueError(
            f"layers must be a contiguous part of the model's {count} layers, got {layers}"
        )
    return part


def _misfit(decoder: Any) -> str:
    """Why a family is not run."""
    config = decoder.config
    if any(
        getattr(config, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        return (
            "its layers are mixtures of experts, and a map that switches between "
            "experts is not continuous"
        )
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or not hasattr(
        decoder, "rotary_emb"
    ):
        return "its layers are not the attention layers with rotary positions that are run here"
    return "it has not been checked against transformers: to add a family, see CONTRIBUTING.md"


def _context(config: Any) -> int | None:
    """The longest sequence whose rotary frequencies do not depend on its length; None: any."""
    given = config.rope_parameters
    scalings: list[Any] = [given] if "rope_type" in given else list(given.values())
    changing = [one for one in scalings if one and one["rope_type"] in ("dynamic", "longrope")]
    longest = [
        one.get("original_max_position_embeddings") or config.max_position_embeddings
        for one in changing
    ]
    return min(longest, default=None)


def _check(config: Any, layers: nn.ModuleList) -> None:
    """Refuse what would leave the layers without a fixed point, or what their masks are not made
    for.
    """
    drops = {
        name: p
        for name, p in config.to_dict().items()
        if "drop" in name and "classifier" not in name and p
    }
    drops |= {
        name: part.p
        for name, part in layers.named_modules()
        if isinstance(part, nn.Dropout) and part.p > 0
    }
    if drops:
        raise ValueError(
            "model must have no dropout, which would be drawn anew in every iteration, got "
            f"{drops}: load it with "
            "these set to 0, as from_pretrained(name, attention_dropout=0.0)"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError("model must be causal, got use_bidirectional_attention=True")
