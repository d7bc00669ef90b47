"""A stack of Mamba2 blocks."""

import math
from dataclasses import dataclass

from torch import nn

from deqseq.arguments import NonNegativeInt, PositiveFloat, PositiveInt, Probability, checked
from deqseq.backbones.base import BlockStack, Cache, Inputs, SkipScale, check_cache
from deqseq.layers import Mamba2Block, Mamba2Mixer, RMSNorm
from deqseq.layers.mamba2_mixer import MixerAux, MixerState, check_groups
from deqseq.ops import Backend, fused
from deqseq.ops.reference import StepBounds
from deqseq.types import Counts, Mask, Sequence


@checked
@dataclass(frozen=True)
class Mamba2Config:
    """Sizes and switches of a :class:`Mamba2` backbone.

    Args:
        d_model: width.
        n_layers: number of blocks.
        d_state: state size of each channel.
        headdim: channels per head; divides ``expand * d_model``.
        expand: inner width over ``d_model``.
        n_groups: groups of heads that share B and C, and are normalised together; divides the
            number of heads.
        d_conv: filter length of the causal convolution.
        mlp_width: hidden width of a feed-forward layer after each mixer. Default: 0, no layer.
        chunk_size: tokens per chunk of the scan. Default: 64 in plain PyTorch, 256 in kernels.
        norm_eps: epsilon of all norms.
        dt_limit: bounds of the scan's step sizes.
        dropout: probability, at least 0 and below 1; one mask per block and solve, of the mixer's
            output.
        weight_norm: whether linear maps and convolutions are weight-normalised, as in the paper.
        injection: whether the input enters every layer. Set it to False for an explicit model, for
            ``start="input"``, and inside of :class:`deqseq.Injected`, which gives the input to the
            first layer instead.
        skip_scale: float above 0 and at most 1, by which the state is multiplied before the first
            block. The norms inside the blocks undo it, but the residual path carries less of the
            state, so the iteration converges faster. The paper has 1.
        backend: implementation of convolutions and scans, a :data:`deqseq.ops.Backend`.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of its range; sizes that do not fit.

    Example:
        >>> from deqseq import Mamba2Config
        >>> Mamba2Config(d_model=64, d_state=16, headdim=32).n_layers
        1
    """

    d_model: PositiveInt
    n_layers: PositiveInt = 1
    d_state: PositiveInt = 128
    headdim: PositiveInt = 64
    expand: PositiveInt = 2
    n_groups: PositiveInt = 1
    d_conv: PositiveInt = 4
    mlp_width: NonNegativeInt = 0
    chunk_size: PositiveInt | None = None
    norm_eps: PositiveFloat = 1e-5
    dt_limit: StepBounds = (0.0, math.inf)
    dropout: Probability = 0.0
    weight_norm: bool = True
    injection: bool = True
    skip_scale: SkipScale = 1.0
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        # hashable, where JSON had a list
        object.__setattr__(self, "dt_limit", tuple(self.dt_limit))
        check_groups("Mamba2Config", self.expand * self.d_model, self.headdim, self.n_groups)


@dataclass(frozen=True)
class Mamba2Cache(Cache):
    """Convolution and scan states after the committed tokens.

    Attributes:
        layers: one pair per block: the last inputs of its convolution, ``(batch, d_conv - 1,
            channels)``, and the state of its scan, ``(batch, heads, headdim, d_state)``.
    """

    layers: tuple[MixerState, ...]


class Mamba2(BlockStack[Mamba2Cache]):
    r"""Mamba2 blocks and a final norm; the injection enters every mixer at ``in_proj``'s output.

    .. math:: u = W_u\, \mathrm{RMSNorm}(x) + b_u, \qquad
              f(z) = \mathrm{RMSNorm}(\mathrm{block}_n(\ldots \mathrm{block}_1(\alpha z, u) \ldots,
              u))

    with :math:`\alpha` = ``skip_scale``.

    Args:
        config: sizes and switches.

    References:
        Dao and Gu, Transformers are SSMs, ICML 2024, arXiv 2405.21060. Schöne et al., Implicit
        Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 3.

    Example:
        >>> import torch, deqseq as dq
        >>> backbone = dq.Mamba2(dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> dq.ImplicitModel(backbone)(torch.randn(2, 5, 16)).value.shape
        torch.Size([2, 5, 16])
    """

    @checked
    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.config, self.d_model = config, config.d_model
        self.layers = nn.ModuleList(_block(config) for _ in range(config.n_layers))
        self.norm_f = RMSNorm(config.d_model, config.norm_eps)
        self.add_injection(self.layers[0].mixer.injected_width)

    def prepare(
        self, x: Sequence, cache: Mamba2Cache | None = None, mask: Mask | None = None
    ) -> Inputs:
        shapes = [shape for block in self.layers for shape in block.mixer.state_shapes]
        check_cache(cache, Mamba2Cache, x, shapes)
        return self.prepared(x)

    def forward(
        self,
        z: Sequence,
        inputs: Inputs,
        cache: Mamba2Cache | None = None,
        *,
        need_aux: bool = False,
    ) -> tuple[Sequence, tuple[MixerAux, ...] | None]:
        states = None if cache is None else cache.layers
        # chosen here, because compiled code cannot look for kernels or log
        backend = fused.resolved(self.config.backend, z)
        z, aux = self.run(z, inputs.injection, states, inputs.dropout, need_aux, backend)
        return z, aux if need_aux else None

    def advance(
        self,
        cache: Mamba2Cache | None,
        aux: tuple[MixerAux, ...],
        tokens: int,
        counts: Counts | None = None,
    ) -> Mamba2Cache:
        states = []
        for i, block in enumerate(self.layers):
            state = None if cache is None else cache.layers[i]
            states.append(block.mixer.state_after(aux[i], state, tokens, counts))
        return Mamba2Cache(tuple(states))

    def _stack(self, z, injected, states, dropout, need_aux: bool, backend: Backend):
        """All blocks and the final norm, from tensors to tensors."""
        z = self.entering(z)
        auxes = []
        for i, block in enumerate(self.layers):
            state = states[i] if states else None
            mask = dropout[i] if dropout else None
            z, aux = self.run_block(block, z, injected, state, mask, need_aux, backend)
            auxes.append(aux)
        return self.norm_f(z), tuple(auxes)


def _block(config: Mamba2Config) -> Mamba2Block:
    mixer = Mamba2Mixer(
        config.d_model,
        config.d_state,
        config.headdim,
        config.expand,
        config.n_groups,
        config.d_conv,
        config.chunk_size,
        config.norm_eps,
        config.dt_limit,
    )
    return Mamba2Block(mixer, config.d_model, config.mlp_width, config.norm_eps)
