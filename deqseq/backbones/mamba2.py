"""A stack of Mamba2 blocks."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import Tensor, nn

from deqseq.arguments import AtLeast, Within, check_bounds, checked
from deqseq.backbones.base import Backbone, Cache, Inputs, check_cache, check_sequence
from deqseq.layers import (
    Mamba2Block,
    Mamba2Mixer,
    RMSNorm,
    apply_weight_norm,
    dropout_mask,
)
from deqseq.layers.mamba2_mixer import MixerAux, MixerState
from deqseq.layers.weight_norm import has_weight_norm
from deqseq.ops import Backend
from deqseq.ops.backend import resolved
from deqseq.types import Counts, Mask, Sequence


@checked
@dataclass(frozen=True)
class Mamba2Config:
    """Sizes and switches of a :class:`Mamba2` backbone.

    Args:
        d_model: width.
        n_layers: blocks.
        d_state: state size of each channel.
        headdim: channels per head; divides ``expand * d_model``.
        expand: inner width over ``d_model``.
        n_groups: groups of heads that share B and C, and are normalised together; divides the
            number of heads.
        d_conv: filter length of the causal convolution.
        mlp_width: hidden width of a feed-forward layer after each mixer. Default: 0, no such layer.
        chunk_size: tokens per chunk of the scan. Default: 64 in plain PyTorch, 256 in kernels.
        norm_eps: epsilon of all norms.
        dt_limit: bounds of the scan's step sizes.
        dropout: probability, in [0, 1); one mask per solve.
        weight_norm: whether linear maps and convolutions are weight-normalised, as in the paper.
        injection: whether the input enters every layer; without, it serves explicit models,
            ``start="input"``, and :class:`Injected`, which adds the input to the state.
        backend: implementation of convolutions and scans, a :data:`deqseq.ops.Backend`.

    Raises:
        TypeError, ValueError: names the field, what it got and what it wants.

    Example:
        >>> Mamba2Config(d_model=64, d_state=16, headdim=32).n_layers
        1
    """

    d_model: Annotated[int, AtLeast(1)]
    n_layers: Annotated[int, AtLeast(1)] = 1
    d_state: Annotated[int, AtLeast(1)] = 128
    headdim: Annotated[int, AtLeast(1)] = 64
    expand: Annotated[int, AtLeast(1)] = 2
    n_groups: Annotated[int, AtLeast(1)] = 1
    d_conv: Annotated[int, AtLeast(1)] = 4
    mlp_width: Annotated[int, AtLeast(0)] = 0
    chunk_size: Annotated[int, AtLeast(1)] | None = None
    norm_eps: Annotated[float, Within("(0, inf)")] = 1e-5
    dt_limit: Annotated[tuple[float, float], check_bounds] = (0.0, math.inf)
    dropout: Annotated[float, Within("[0, 1)")] = 0.0
    weight_norm: bool = True
    injection: bool = True
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "dt_limit", tuple(self.dt_limit)
        )  # hashable, where JSON had a list
        heads, rest = divmod(self.expand * self.d_model, self.headdim)
        if rest:
            raise ValueError(
                "Mamba2Config.headdim must divide expand * d_model = "
                f"{self.expand * self.d_model}, got {self.headdim}"
            )
        if heads % self.n_groups:
            raise ValueError(
                f"Mamba2Config.n_groups must divide the {heads} heads, got {self.n_groups}"
            )


@dataclass(frozen=True)
class Mamba2Cache(Cache):
    """Convolution and scan states after the committed tokens.

    Attributes:
        layers: of each block, the last inputs of its convolution, ``(batch, d_conv - 1,
            channels)``, and the state of its scan, ``(batch, heads, headdim, d_state)``.
    """

    layers: tuple[MixerState, ...]


class Mamba2(Backbone[Mamba2Cache]):
    r"""Mamba2 blocks and a final norm; the injection enters every mixer at ``in_proj``'s output.

    .. math:: u = W_u\, \mathrm{RMSNorm}(x) + b_u, \qquad
              f(z) = \mathrm{RMSNorm}(\mathrm{block}_n(\ldots \mathrm{block}_1(z, u) \ldots, u))

    Args:
        config: sizes and switches.

    References:
        Dao and Gu, Transformers are SSMs, ICML 2024, arXiv 2405.21060. Schöne et al., Implicit
        Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 3.

    Example:
        >>> import torch
        >>> backbone = Mamba2(Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> x = torch.randn(2, 5, 16)
        >>> z, _ = backbone(torch.zeros(2, 5, 16), backbone.prepare(x))
        >>> z.shape
        torch.Size([2, 5, 16])
    """

    @checked
    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.config, self.d_model, eps = config, config.d_model, config.norm_eps
        blocks = [_block(config) for _ in range(config.n_layers)]
        self.layers: Any = nn.ModuleList(blocks)
        self.norm_f = RMSNorm(self.d_model, eps)
        width = blocks[0].mixer.injected_width
        self.injection_norm: Any = RMSNorm(self.d_model, eps) if config.injection else None
        self.injection = nn.Linear(self.d_model, width) if config.injection else None
        if config.weight_norm:
            apply_weight_norm(self)

    def prepare(
        self, x: Sequence, cache: Mamba2Cache | None = None, mask: Mask | None = None
    ) -> Inputs:
        check_sequence(x, self.d_model)
        check_cache(cache, Mamba2Cache, x, self.layers[0].mixer.state_shapes * len(self.layers))
        injection = None if self.injection is None else self.injection(self.injection_norm(x))
        drops = self.training and self.config.dropout > 0
        return Inputs(
            injection, tuple(dropout_mask(x, self.config.dropout) for _ in self.layers if drops)
        )

    def forward(
        self,
        z: Sequence,
        inputs: Inputs,
        cache: Mamba2Cache | None = None,
        *,
        need_aux: bool = False,
    ) -> tuple[Sequence, tuple[MixerAux, ...] | None]:
        states = None if cache is None else cache.layers
        backend = resolved(
            self.config.backend, z
        )  # chosen here: compiled code cannot look for kernels or log
        z, aux = self.run(z, inputs.injection, states, inputs.dropout, need_aux, backend)
        return z, aux if need_aux else None

    def advance(
        self,
        cache: Mamba2Cache | None,
        aux: tuple[MixerAux, ...],
        tokens: int,
        counts: Counts | None = None,
    ) -> Mamba2Cache:
        before = [None] * len(aux) if cache is None else cache.layers
        parts = zip(self.layers, before, aux, strict=True)
        return Mamba2Cache(
            tuple(
                block.mixer.state_after(own, state, tokens, counts) for block, state, own in parts
            )
        )

    def sizes(self) -> Mamba2Config:
        return replace(self.config, weight_norm=has_weight_norm(self))

    def _stack(
        self,
        z: Tensor,
        injected: Tensor | None,
        states: Any,
        dropout: tuple[Tensor, ...],
        need_aux: bool,
        backend: Backend,
    ) -> tuple[Tensor, tuple[MixerAux, ...]]:
        """All blocks and the final norm, from tensors to tensors."""
        kept: list[MixerAux] = []
        for i, block in enumerate(self.layers):
            state, mask = states[i] if states else None, dropout[i] if dropout else None
            z, aux = self.run_block(block, z, injected, state, mask, need_aux, backend)
            if aux is not None:
                kept.append(aux)
        return self.norm_f(z), tuple(kept)


def _block(config: Mamba2Config) -> Mamba2Block:
    sizes = (
        config.d_model,
        config.d_state,
        config.headdim,
        config.expand,
        config.n_groups,
        config.d_conv,
    )
    mixer = Mamba2Mixer(*sizes, config.chunk_size, config.norm_eps, config.dt_limit)
    return Mamba2Block(mixer, config.d_model, config.mlp_width, config.norm_eps)
