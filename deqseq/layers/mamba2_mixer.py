"""The Mamba2 sequence mixer, with an injection."""

import math
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from deqseq.arguments import AtLeast, Within, check_bounds, checked
from deqseq.layers.causal_conv import CausalConv1d
from deqseq.layers.rms_norm import GatedRMSNorm
from deqseq.layers.weight_norm import with_weights
from deqseq.ops import Backend, fused, reference
from deqseq.ops.backend import resolved
from deqseq.ops.reference import StepSizes


class MixerState(NamedTuple):
    """What a mixer remembers: the convolution's last inputs, and the scan's state, in float32 at
    least.
    """

    conv: Float[Tensor, "batch past channels"]
    ssm: Float[Tensor, "batch heads headdim d_state"]


class MixerAux(NamedTuple):
    """Inputs of the convolution and the scan in one call, from which the state after any of its
    tokens follows.
    """

    xBC: Float[Tensor, "batch length channels"]
    x: Float[Tensor, "batch length heads headdim"]
    dt: Float[Tensor, "batch length heads"]
    B: Float[Tensor, "batch length groups d_state"]


class Mamba2Mixer(nn.Module):
    r"""Project, convolve, scan, gate, project; parameters are named as in Mamba2's public
    implementations.

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
        >>> mixer = Mamba2Mixer(d_model=8, d_state=4, headdim=4)
        >>> y, state = mixer(torch.zeros(2, 5, 8))
        >>> y.shape, mixer.in_proj.weight.shape
        (torch.Size([2, 5, 8]), torch.Size([44, 8]))
    """

    @checked
    def __init__(
        self,
        d_model: Annotated[int, AtLeast(1)],
        d_state: Annotated[int, AtLeast(1)] = 128,
        headdim: Annotated[int, AtLeast(1)] = 64,
        expand: Annotated[int, AtLeast(1)] = 2,
        n_groups: Annotated[int, AtLeast(1)] = 1,
        d_conv: Annotated[int, AtLeast(1)] = 4,
        chunk_size: Annotated[int, AtLeast(1)] | None = None,
        norm_eps: Annotated[float, Within("(0, inf)")] = 1e-5,
        dt_limit: Annotated[tuple[float, float], check_bounds] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        d_inner = expand * d_model
        heads, rest = divmod(d_inner, headdim)
        if rest or heads % n_groups:
            raise ValueError(
                "Mamba2Mixer needs heads of equal size in groups of equal size, got expand * "
                f"d_model = {d_inner}, "
                f"headdim {headdim}, n_groups {n_groups}"
            )
        self.headdim, self.chunk_size, self.dt_limit = (
            headdim,
            chunk_size,
            (dt_limit[0], dt_limit[1]),
        )
        self.maps = (n_groups, d_state)
        self.convolved = (d_inner, n_groups * d_state, n_groups * d_state)  # widths of x, B and C
        self.filters = (sum(self.convolved), d_conv)
        self.parts = (d_inner, self.filters[0], heads)
        self.in_proj = nn.Linear(d_model, sum(self.parts), bias=False)
        self.conv1d = CausalConv1d(*self.filters)
        step = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(
            step + torch.log(-torch.expm1(-step))
        )  # whose softplus is the step
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
        return [(self.conv1d.past, self.filters[0]), (self.parts[2], self.headdim, self.maps[1])]

    def forward(
        self,
        u: Float[Tensor, "batch length d_model"],
        injection: Float[Tensor, "batch length injected"] | None = None,
        state: MixerState | None = None,
        need_aux: bool = False,
        backend: Backend = "auto",
    ) -> tuple[Float[Tensor, "batch length d_model"], MixerAux | None]:
        """Outputs of the shape of ``u``, and what :meth:`state_after` needs (None without
        ``need_aux``).

        Args:
            u: inputs, ``(batch, length, d_model)``.
            injection: added to ``in_proj``'s output, ``(batch, length, injected_width)``. Default:
                nothing.
            state: the state after the tokens before, whose shapes are not checked. Default: there
                are none.
            need_aux: whether :meth:`state_after` will be called.
            backend: implementation of the convolution and the scan, as in
                :func:`deqseq.ops.ssd.ssd`.
        """
        projected = self.in_proj(u)
        if injection is not None:
            projected = projected + injection
        backend = resolved(backend, projected)
        rates, steps = self._dynamics()
        needs_parts = state is not None or need_aux
        if (
            backend == "mamba_ssm"
            and not needs_parts
            and fused.joins_everything(u.shape[1], *self.filters)
        ):
            conv, norm = (
                (with_weights(self.conv1d).weight, self.conv1d.bias),
                (self.norm.weight, self.norm.eps),
            )
            sizes = (self.headdim, self.maps[0], self.chunk_size)
            y = fused.convolved_and_scanned(projected, conv, rates, self.D, steps, norm, *sizes)
            return self.out_proj(y), None
        gate, xBC, dt = projected.split(self.parts, dim=-1)
        conv, before = (None, None) if state is None else state
        x, B, C = self.conv1d(xBC, conv, backend).split(self.convolved, dim=-1)
        x = x.unflatten(2, (-1, self.headdim))
        B, C = B.unflatten(2, (self.maps[0], -1)), C.unflatten(2, (self.maps[0], -1))
        scan = fused.scan if backend == "mamba_ssm" else reference.scan
        y, _ = scan(x, dt, rates, B, C, self.D, steps, before, False, self.chunk_size)
        return self.out_proj(self.norm(y.flatten(2), gate)), MixerAux(
            xBC, x, dt, B
        ) if need_aux else None

    def state_after(
        self,
        aux: MixerAux,
        before: MixerState | None,
        tokens: int,
        counts: Int64[Tensor, " batch"] | None = None,
    ) -> MixerState:
        """The state after the first tokens of a call, without a graph; nothing is projected or
        convolved again.

        Args:
            aux: what the call returned.
            before: the state that the call was given. Default: none.
            tokens: how many of its tokens, at least 1.
            counts: how many of those are real, per row, ``(batch,)``. Default: all.
        """
        with torch.no_grad():
            xBC, x, dt, B = (part[:, :tokens] for part in aux)
            conv, ssm = (None, None) if before is None else before
            rates, steps = self._dynamics()
            ssm = reference.state_after(x, dt, rates, B, steps, ssm, counts)
            return MixerState(self.conv1d.state_after(xBC, conv, counts), ssm)

    def _dynamics(self) -> tuple[Float[Tensor, " heads"], StepSizes]:
        """The decay rates, in float32 at least, and how step sizes follow from what is
        projected.
        """
        A_log = self.A_log.to(torch.promote_types(self.A_log.dtype, torch.float32))
        return -torch.exp(A_log), StepSizes(self.dt_bias, limit=self.dt_limit)
