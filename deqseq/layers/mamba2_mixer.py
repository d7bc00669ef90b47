"""The Mamba2 sequence mixer, with an injection."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from deqseq.arguments import PositiveFloat, PositiveInt, checked
from deqseq.layers.causal_conv import CausalConv1d, Channels, ConvState
from deqseq.layers.rms_norm import GatedRMSNorm
from deqseq.layers.weight_norm import with_weights
from deqseq.ops import Backend, fused, reference
from deqseq.ops.reference import ScanState, StepBounds, StepSizes
from deqseq.types import Counts, Sequence, float32_at_least


class MixerState(NamedTuple):
    """The last inputs of the convolution, and the state of the scan, in float32 at least."""

    conv: ConvState
    ssm: ScanState


class MixerAux(NamedTuple):
    """Inputs of convolution and scan, from which the state after any of the tokens follows."""

    xBC: Channels
    x: Float[Tensor, "batch length heads headdim"]
    dt: Float[Tensor, "batch length heads"]
    B: Float[Tensor, "batch length groups d_state"]


class Mamba2Mixer(nn.Module):
    r"""Project, convolve, scan, gate, project; parameters are named as in the public Mamba2 code.

    .. math:: [g, x, B, C, \Delta] = W_\mathrm{in} u + \text{injection}, \qquad
              y = W_\mathrm{out}\, \mathrm{RMSNorm}(\mathrm{SSD}(\mathrm{silu}(\mathrm{conv}(x, B,
              C)), \Delta) \odot \mathrm{silu}(g))

    Args:
        d_model: width of the input and output.
        d_state: size of the state of each channel.
        headdim: channels per head; divides ``expand * d_model``.
        expand: inner width over ``d_model``.
        n_groups: groups of heads that share B and C, and are normalised together.
        d_conv: filter length of the convolution.
        chunk_size: tokens per chunk of the scan. Default: 64 in plain PyTorch, 256 in kernels.
        norm_eps: epsilon of the gated norm.
        dt_limit: bounds of the step sizes.

    Raises:
        ValueError: heads or groups of unequal size, or bounds that are not ordered.

    References:
        Dao and Gu, Transformers are SSMs, ICML 2024, arXiv 2405.21060. Injection: Schöne et al.,
        2025, arXiv 2502.07827.

    Example:
        >>> import torch
        >>> from deqseq.layers import Mamba2Mixer
        >>> mixer = Mamba2Mixer(d_model=8, d_state=4, headdim=4)
        >>> y, aux = mixer(torch.zeros(2, 5, 8), need_aux=True)
        >>> y.shape, mixer.state_after(aux, None, 5).ssm.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 4, 4, 4]))
    """

    @checked
    def __init__(
        self,
        d_model: PositiveInt,
        d_state: PositiveInt = 128,
        headdim: PositiveInt = 64,
        expand: PositiveInt = 2,
        n_groups: PositiveInt = 1,
        d_conv: PositiveInt = 4,
        chunk_size: PositiveInt | None = None,
        norm_eps: PositiveFloat = 1e-5,
        dt_limit: StepBounds = (0.0, math.inf),
    ) -> None:
        super().__init__()
        check_groups("Mamba2Mixer", expand * d_model, headdim, n_groups)
        d_inner = expand * d_model
        heads = d_inner // headdim
        self.headdim, self.d_state, self.n_groups = headdim, d_state, n_groups
        self.chunk_size = chunk_size
        self.dt_limit = (dt_limit[0], dt_limit[1])
        self.convolved = (d_inner, n_groups * d_state, n_groups * d_state)  # widths of x, B and C
        self.channels = sum(self.convolved)
        self.parts = (d_inner, self.channels, heads)
        self.in_proj = nn.Linear(d_model, sum(self.parts), bias=False)
        self.conv1d = CausalConv1d(self.channels, d_conv)
        step = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # its softplus is step
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedRMSNorm(d_inner, norm_eps, n_groups)
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)

    @property
    def injected_width(self) -> int:
        """Width of the injection, equal to that of ``in_proj``'s output."""
        return sum(self.parts)

    @property
    def state_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of a row's :class:`MixerState`."""
        heads = self.parts[2]
        return [(self.conv1d.past, self.channels), (heads, self.headdim, self.d_state)]

    def forward(
        self,
        u: Sequence,
        injection: Float[Tensor, "batch length injected"] | None = None,
        state: MixerState | None = None,
        need_aux: bool = False,
        backend: Backend = "auto",
    ) -> tuple[Sequence, MixerAux | None]:
        """Outputs of the shape of ``u``, and with ``need_aux`` what :meth:`state_after` needs.

        Args:
            u: inputs, ``(batch, length, d_model)``.
            injection: added to ``in_proj``'s output, ``(batch, length, injected_width)``. Default:
                nothing.
            state: the state after the tokens before, not checked. Default: there are none.
            need_aux: whether :meth:`state_after` will be called.
            backend: implementation of the convolution and the scan, as in
                :func:`deqseq.ops.ssd.ssd`.
        """
        projected = self.in_proj(u)
        if injection is not None:
            projected = projected + injection
        kernels = fused.resolved(backend, projected) == "mamba_ssm"
        rates, steps = self._dynamics()
        no_state, width = state is None and not need_aux, self.conv1d.past + 1
        if kernels and no_state and fused.joins_everything(u.shape[1], self.channels, width):
            conv = with_weights(self.conv1d)
            sizes = self.headdim, self.n_groups, self.chunk_size
            y = fused.convolved_and_scanned(
                projected, conv, rates, self.D, steps, self.norm, *sizes
            )
            return self.out_proj(y), None
        gate, xBC, dt = projected.split(self.parts, dim=-1)
        conv_state, ssm_state = (None, None) if state is None else state
        x, B, C = self.conv1d(xBC, conv_state, backend).split(self.convolved, dim=-1)
        x = x.unflatten(2, (-1, self.headdim))
        B, C = (m.unflatten(2, (self.n_groups, -1)) for m in (B, C))
        scan = fused.scan if kernels else reference.scan
        y, _ = scan(x, dt, rates, B, C, self.D, steps, ssm_state, False, self.chunk_size)
        aux = MixerAux(xBC, x, dt, B) if need_aux else None
        return self.out_proj(self.norm(y.flatten(2), gate)), aux

    def state_after(
        self,
        aux: MixerAux,
        before: MixerState | None,
        tokens: int,
        counts: Counts | None = None,
    ) -> MixerState:
        """The state after the first tokens of a call, without a graph.

        Args:
            aux: what the call returned.
            before: the state that the call was given. Default: none.
            tokens: how many of its tokens, at least 1.
            counts: how many of those are real, per row, ``(batch,)``. Default: all.
        """
        with torch.no_grad():
            xBC, x, dt, B = (part[:, :tokens] for part in aux)
            conv_state, ssm_state = (None, None) if before is None else before
            rates, steps = self._dynamics()
            ssm_state = reference.state_after(x, dt, rates, B, steps, ssm_state, counts)
            return MixerState(self.conv1d.state_after(xBC, conv_state, counts), ssm_state)

    def _dynamics(self) -> tuple[Float[Tensor, " heads"], StepSizes]:
        """The decay rates, in float32 at least, and how step sizes follow from projections."""
        A_log = self.A_log.to(float32_at_least(self.A_log))
        return -torch.exp(A_log), StepSizes(self.dt_bias, limit=self.dt_limit)


def check_groups(name: str, d_inner: int, headdim: int, n_groups: int) -> None:
    """Refuse heads or groups of unequal size; ``name`` is whose arguments they are."""
    if d_inner % headdim:
        raise ValueError(
            f"{name}.headdim must divide expand * d_model = {d_inner}, got headdim {headdim}"
        )
    if d_inner // headdim % n_groups:
        raise ValueError(
            f"{name}.n_groups must divide the {d_inner // headdim} heads, got n_groups {n_groups}"
        )
