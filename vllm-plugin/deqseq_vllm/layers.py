"""Transformer layers made of vLLM's parts, and how the input of a solve enters them."""

from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaMLP
from vllm.v1.attention.selector import get_attn_backend

from deqseq_vllm.plan import NORMS, Layers
from deqseq_vllm.requests import remembering


class Stack(nn.Module):
    """Layers, the norm after them, and an injection before or inside them.

    Args:
        layers: their shape.
        config: of the engine.
        numbers: of the layers of the whole model; vLLM's cache asks for one per slot.
        steps: key-value slots of a token in each layer.
        injection: how the input enters before the first layer, a key of ``INJECTIONS``. Default: it
            does not.
    """

    def __init__(
        self,
        layers: Layers,
        config: VllmConfig,
        numbers: count,
        steps: int = 1,
        injection: str | None = None,
    ) -> None:
        super().__init__()
        blocks = [Block(layers, config, numbers, steps) for _ in range(layers.n_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(layers.d_model, layers.norm_eps) if layers.final_norm else nn.Identity()
        self.inside, self.skip_scale = layers.injection, layers.skip_scale
        self.injection: Any = None
        if self.inside:
            self.injection_norm: Any = RMSNorm(layers.d_model, layers.norm_eps)
            self.injection = projection(layers, config, bias=True)
        elif injection is not None:
            self.injection = INJECTIONS[injection](layers.d_model)

    def prepare(self, x: Tensor) -> Tensor | None:
        """What each iteration needs of the input, ``(tokens, width)``."""
        if self.injection is None:
            return None
        if self.inside:
            return self.injection(self.injection_norm(x))[0]
        return self.injection.prepare(x)

    def forward(
        self, positions: Tensor, z: Tensor, prepared: Tensor | None = None, step: int = 0
    ) -> Tensor:
        """The layers once; keys and values are written to the slot of this step."""
        injected = prepared if self.inside else None
        if prepared is not None and not self.inside:
            z = self.injection.enter(z, prepared)
        z = z * self.skip_scale
        for layer in self.layers:
            z = layer(positions, z, injected, step)
        return self.norm(z)


class Block(nn.Module):
    """Attention and a feed-forward layer, each with up to two norms."""

    def __init__(self, layers: Layers, config: VllmConfig, numbers: count, steps: int) -> None:
        super().__init__()
        before, after = NORMS[layers.norms]

        def norm(used: bool) -> nn.Module:
            return RMSNorm(layers.d_model, layers.norm_eps) if used else nn.Identity()

        self.input_layernorm, self.input_layernorm_2 = norm(before), norm(after)
        self.post_attention_layernorm, self.post_attention_layernorm_2 = norm(before), norm(after)
        self.closed = layers.norms in ("closed", "outer")
        self.self_attn = SelfAttention(layers, config, numbers, steps)
        self.mlp = LlamaMLP(layers.d_model, layers.mlp_width, "silu", config.quant_config)

    def forward(self, positions: Tensor, z: Tensor, injected: Tensor | None, step: int) -> Tensor:
        mixed = self.self_attn(positions, self.input_layernorm(z), injected, step)
        z = self._added(z, mixed, self.input_layernorm_2)
        mixed = self.mlp(self.post_attention_layernorm(z))
        return self._added(z, mixed, self.post_attention_layernorm_2)

    def _added(self, z: Tensor, mixed: Tensor, norm: nn.Module) -> Tensor:
        return norm(z + mixed) if self.closed else z + norm(mixed)


class SelfAttention(nn.Module):
    """Causal attention to the paged cache: one slot per token, or one for each step."""

    def __init__(self, layers: Layers, config: VllmConfig, numbers: count, steps: int) -> None:
        super().__init__()
        heads, width, quantization = layers.n_heads, layers.headdim, config.quant_config
        self.qkv_proj = projection(layers, config, "q" in layers.biases)
        self.o_proj = RowParallelLinear(
            heads * width, layers.d_model, bias="o" in layers.biases, quant_config=quantization
        )
        q_heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.parts = (q_heads * width, kv_heads * width, kv_heads * width)
        self.q_norm = self.k_norm = None
        if layers.qk_norm is not None:
            sizes = {"head": (width, width), "all": self.parts[:2]}[layers.qk_norm]
            self.q_norm, self.k_norm = (RMSNorm(size, layers.norm_eps) for size in sizes)
        longest = config.model_config.max_model_len
        dtype, cache = config.model_config.dtype, config.cache_config.cache_dtype
        backend = remembering(get_attn_backend(width, dtype, cache))
        self.rotary_emb = get_rope(width, longest, rope_parameters=dict(layers.rope))
        self.attn = nn.ModuleList(
            Attention(
                q_heads,
                width,
                width**-0.5,
                num_kv_heads=kv_heads,
                cache_config=config.cache_config,
                quant_config=quantization,
                prefix=f"model.layers.{next(numbers)}.self_attn.attn",
                attn_backend=backend,
            )
            for _ in range(steps)
        )

    def forward(self, positions: Tensor, x: Tensor, injected: Tensor | None, step: int) -> Tensor:
        qkv, _ = self.qkv_proj(x)
        if injected is not None:
            qkv = qkv + injected
        q, k, v = qkv.split(self.parts, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn[step](q, k, v))
        return output


def projection(layers: Layers, config: VllmConfig, bias: bool) -> QKVParallelLinear:
    """To queries, keys and values; a bias that is not in the checkpoint is zero."""
    heads = (layers.headdim, layers.n_heads, layers.n_kv_heads)
    linear = QKVParallelLinear(layers.d_model, *heads, bias=bias, quant_config=config.quant_config)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """Each head by itself, or all of them together, as wide as the norm is."""
    heads = x.unflatten(-1, (-1, len(norm.weight)))
    return norm(heads.contiguous()).flatten(-2)


class AddInjection(nn.Module):
    """The input is added to the state."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def enter(self, z: Tensor, prepared: Tensor) -> Tensor:
        return z + prepared


class ConcatInjection(nn.Module):
    """State and input are concatenated and projected; the input's part is computed once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 2 * width))

    def prepare(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[:, x.shape[-1] :])

    def enter(self, z: Tensor, prepared: Tensor) -> Tensor:
        return F.linear(z, self.weight[:, : z.shape[-1]]) + prepared


class DecayInjection(nn.Module):
    """The state decays, and the projected input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_rate, self.step = (nn.Parameter(torch.empty(width)) for _ in range(2))
        self.projection = nn.Linear(width, width, bias=False)

    def prepare(self, x: Tensor) -> Tensor:
        return F.softplus(self.step) * self.projection(x)

    def enter(self, z: Tensor, prepared: Tensor) -> Tensor:
        return torch.exp(-F.softplus(self.step) * self.log_rate.exp()) * z + prepared


INJECTIONS = {"add": AddInjection, "concat": ConcatInjection, "decay": DecayInjection}
