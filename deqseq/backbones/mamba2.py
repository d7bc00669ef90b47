"""A stack of Mamba2 blocks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast, get_args

from jaxtyping import Int64
from torch import Tensor, nn

from deqseq.backbones.base import Backbone, Cache, Inputs, check_cache, check_sequence
from deqseq.check import check_bounds, check_choice, check_flag, check_integer, check_number, check_type
from deqseq.layers import (
    Mamba2Block,
    Mamba2Mixer,
    MixerAux,
    MixerState,
    RMSNorm,
    apply_weight_norm,
    dropout_mask,
    has_weight_norm,
)
from deqseq.ops import Backend
from deqseq.ops.backend import resolved
from deqseq.types import Mask, Sequence


@dataclass(frozen=True)
class Mamba2Config:
    """Sizes and switches of a :class:`Mamba2` backbone.

    Args:
        d_model: width.
        n_layers: blocks.
        d_state: state size of each channel.
        headdim: channels per head; divides ``expand * d_model``.
        expand: inner width over ``d_model``.
        n_groups: groups of heads that share B and C, and are normalised together; divides the number of heads.
        d_conv: filter length of the causal convolution.
        mlp_width: hidden width of a feed-forward layer after each mixer. Default: 0, no such layer.
        chunk_size: tokens per chunk of the scan. Default: 64 in plain PyTorch, 256 in kernels.
        norm_eps: epsilon of all norms.
        dt_limit: bounds of the scan's step sizes.
        dropout: probability, in [0, 1); one mask per solve.
        weight_norm: whether linear maps and convolutions are weight-normalised, as in the paper.
        injection: whether the input enters every layer; without, it serves explicit models, ``start="input"``, and
            :class:`Injected`, which adds the input to the state.
        backend: implementation of convolutions and scans: ``"reference"``, plain PyTorch; ``"mamba_ssm"``, kernels of
            that package; ``"auto"``, the kernels for CUDA tensors where they can be imported, else the reference.

    Raises:
        TypeError, ValueError: names the field, what it got and what it wants.

    Example:
        >>> Mamba2Config(d_model=64, d_state=16, headdim=32).n_layers
        1
    """

    d_model: int
    n_layers: int = 1
    d_state: int = 128
    headdim: int = 64
    expand: int = 2
    n_groups: int = 1
    d_conv: int = 4
    mlp_width: int = 0
    chunk_size: int | None = None
    norm_eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)
    dropout: float = 0.0
    weight_norm: bool = True
    injection: bool = True
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "d_state", "headdim", "expand", "n_groups", "d_conv"):
            check_integer(f"Mamba2Config.{name}", getattr(self, name), 1)
        check_integer("Mamba2Config.mlp_width", self.mlp_width, 0)
        if self.chunk_size is not None:
            check_integer("Mamba2Config.chunk_size", self.chunk_size, 1)
        check_number("Mamba2Config.norm_eps", self.norm_eps, "(0, inf)")
        check_bounds("Mamba2Config.dt_limit", self.dt_limit)
        object.__setattr__(self, "dt_limit", tuple(self.dt_limit))  # hashable, where JSON had a list
        check_number("Mamba2Config.dropout", self.dropout, "[0, 1)")
        check_flag("Mamba2Config.weight_norm", self.weight_norm)
        check_flag("Mamba2Config.injection", self.injection)
        check_choice("Mamba2Config.backend", self.backend, get_args(Backend))
        heads, rest = divmod(self.expand * self.d_model, self.headdim)
        if rest:
            raise ValueError(
                f"Mamba2Config.headdim must divide expand * d_model = {self.expand * self.d_model}, got {self.headdim}"
            )
        if heads % self.n_groups:
            raise ValueError(f"Mamba2Config.n_groups must divide the {heads} heads, got {self.n_groups}")


@dataclass(frozen=True)
class Mamba2Cache(Cache):
    """Convolution and scan states after the committed tokens.

    Attributes:
        layers: one :class:`~deqseq.layers.MixerState` per block.
    """

    layers: tuple[MixerState, ...]


class Mamba2(Backbone[Mamba2Cache]):
    r"""Mamba2 blocks and a final norm; the injection enters every mixer at ``in_proj``'s output.

    .. math:: u = W_u\, \mathrm{RMSNorm}(x) + b_u, \qquad
              f(z) = \mathrm{RMSNorm}(\mathrm{block}_n(\ldots \mathrm{block}_1(z, u) \ldots, u))

    Args:
        config: sizes and switches.

    References:
        Dao and Gu, Transformers are SSMs, ICML 2024, arXiv 2405.21060. Schöne et al., Implicit Language Models are
        RNNs, ICML 2025, arXiv 2502.07827, section 3.

    Example:
        >>> import torch
        >>> backbone = Mamba2(Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> x = torch.randn(2, 5, 16)
        >>> z, _ = backbone(torch.zeros(2, 5, 16), backbone.prepare(x))
        >>> z.shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        check_type("config", config, Mamba2Config, "Mamba2Config(d_model=64)")
        self.config = config
        self.d_model = config.d_model
        blocks = [_block(config) for _ in range(config.n_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm_f = RMSNorm(config.d_model, config.norm_eps)
        width = blocks[0].mixer.injected_width
        self.injection_norm = RMSNorm(config.d_model, config.norm_eps) if config.injection else None
        self.injection = nn.Linear(config.d_model, width) if config.injection else None
        if config.weight_norm:
            apply_weight_norm(self)

    @property
    def blocks(self) -> Iterable[Mamba2Block]:
        """The layers, by their type."""
        return cast(Iterable[Mamba2Block], self.layers)

    def prepare(self, x: Sequence, cache: Mamba2Cache | None = None, mask: Mask | None = None) -> Inputs:
        check_sequence(x, self.d_model)
        if cache is not None:
            state = next(iter(self.blocks)).mixer.init_state(0)
            check_cache(cache, Mamba2Cache, x, [tuple(part.shape[1:]) for part in state] * len(self.layers))
        drops = self.training and self.config.dropout > 0
        return Inputs(
            injection=self._injected(x),
            dropout=tuple(dropout_mask(x, self.config.dropout) for _ in self.layers if drops),
        )

    def _injected(self, x: Sequence) -> Tensor | None:
        if self.injection is None or self.injection_norm is None:
            return None
        return self.injection(self.injection_norm(x))

    def forward(
        self, z: Sequence, inputs: Inputs, cache: Mamba2Cache | None = None, *, need_aux: bool = False
    ) -> tuple[Sequence, tuple[MixerAux, ...] | None]:
        states = None if cache is None else cache.layers
        backend = resolved(self.config.backend, z)  # chosen here: compiled code cannot look for kernels or log
        z, aux = self.run(z, inputs.injection, states, inputs.dropout, need_aux, backend)
        return z, aux if need_aux else None

    def advance(
        self,
        cache: Mamba2Cache | None,
        aux: tuple[MixerAux, ...],
        tokens: int,
        counts: Int64[Tensor, " batch"] | None = None,
    ) -> Mamba2Cache:
        before = [None] * len(aux) if cache is None else cache.layers
        parts = zip(self.blocks, before, aux, strict=True)
        return Mamba2Cache(tuple(block.mixer.state_after(own, state, tokens, counts) for block, state, own in parts))

    def sizes(self) -> Mamba2Config:
        return replace(self.config, weight_norm=has_weight_norm(self))

    def _stack(
        self,
        z: Tensor,
        injected: Tensor | None,
        states: tuple[MixerState, ...] | None,
        dropout: tuple[Tensor, ...],
        need_aux: bool,
        backend: Backend,
    ) -> tuple[Tensor, tuple[MixerAux, ...]]:
        """All blocks and the final norm, from tensors to tensors."""
        kept: list[MixerAux] = []
        for i, block in enumerate(self.blocks):
            state, mask = states[i] if states else None, dropout[i] if dropout else None
            z, aux = self.run_block(block, z, injected, state, mask, need_aux, backend)
            if aux is not None:
                kept.append(aux)
        return self.norm_f(z), tuple(kept)


def _block(config: Mamba2Config) -> Mamba2Block:
    mixer = Mamba2Mixer(
        config.d_model,
        d_state=config.d_state,
        headdim=config.headdim,
        expand=config.expand,
        n_groups=config.n_groups,
        d_conv=config.d_conv,
        chunk_size=config.chunk_size,
        norm_eps=config.norm_eps,
        dt_limit=config.dt_limit,
    )
    return Mamba2Block(mixer, config.d_model, config.mlp_width, config.norm_eps)
