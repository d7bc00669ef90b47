"""The state-space-dual scan of Mamba2, with checks; layers call the implementations directly."""

from jaxtyping import Float
from torch import Tensor

from deqseq.arguments import PositiveInt, checked
from deqseq.ops import fused, reference
from deqseq.ops.fused import Backend, resolved
from deqseq.ops.reference import UNLIMITED, ScanState, StepBounds, StepSizes


@checked
def ssd(
    x: Float[Tensor, "batch length heads headdim"],
    dt: Float[Tensor, "batch length heads"],
    A: Float[Tensor, " heads"],
    B: Float[Tensor, "batch length groups d_state"],
    C: Float[Tensor, "batch length groups d_state"],
    *,
    D: Float[Tensor, " heads"] | None = None,
    dt_bias: Float[Tensor, " heads"] | None = None,
    dt_softplus: bool = True,
    dt_limit: StepBounds = UNLIMITED,
    initial_state: ScanState | None = None,
    return_state: bool = False,
    chunk_size: PositiveInt | None = None,
    backend: Backend = "auto",
) -> tuple[Float[Tensor, "batch length heads headdim"], ScanState | None]:
    r"""Selective state-space scan, chunk by chunk in matrix products.

    .. math:: h_t = e^{\Delta_t A} h_{t-1} + \Delta_t x_t B_t^\top, \qquad y_t = h_t C_t + D x_t,
    \qquad
              \Delta_t = \mathrm{clamp}(\mathrm{softplus}(dt_t + dt_\mathrm{bias}))

    Args:
        x: inputs, ``(batch, length, heads, headdim)``, any length from 1.
        dt: step sizes before bias and softplus, ``(batch, length, heads)``.
        A: decay rates, at most 0 (not checked), ``(heads,)``.
        B: input maps, ``(batch, length, groups, d_state)``; ``groups`` divides ``heads``.
        C: output maps, ``(batch, length, groups, d_state)``.
        D: skip weights, ``(heads,)``.
        dt_bias: added to ``dt``, ``(heads,)``.
        dt_softplus: whether step sizes pass a softplus.
        dt_limit: lower and upper bound of the step sizes.
        initial_state: the state before the first token, ``(batch, heads, headdim, d_state)``; None
            is zero.
        return_state: whether to return the state after the last token.
        chunk_size: tokens per chunk. Affects speed, and the rounding of the kernels: their decays
            are differences of float32 sums over a chunk, with few digits under strong decay. The
            reference takes differences in float64. Default: 64 in the reference, 256 in the
            kernels.
        backend: a :data:`deqseq.ops.Backend`; in compiled functions ``"auto"`` is the reference.

    Returns:
        ``y``, of the shape and dtype of ``x``; the state after the last token, of the shape of
        ``initial_state``, in float32 (float64 for float64 inputs), None without ``return_state``.
        The reference computes in float32 at least; the kernels multiply in the dtype of ``x``, sum
        in float32, and have no second derivatives.

    Raises:
        TypeError, ValueError: an argument of the wrong type or shape, or out of its range.
        BackendError: ``backend="mamba_ssm"`` where its kernels cannot run; it says what is missing.

    References:
        Dao and Gu, Transformers are SSMs, ICML 2024, arXiv 2405.21060.

    Example:
        >>> from deqseq.ops.ssd import ssd
        >>> import torch
        >>> x, dt = torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1)
        >>> B = C = torch.ones(1, 3, 1, 1)
        >>> y, _ = ssd(x, dt, torch.zeros(1), B, C, dt_softplus=False)
        >>> y.flatten()  # without decay, a running sum
        tensor([1., 2., 3.])
    """
    _check_shapes(x, B, dt=dt, A=A, C=C, D=D, dt_bias=dt_bias, initial_state=initial_state)
    steps = StepSizes(dt_bias, dt_softplus, (dt_limit[0], dt_limit[1]))
    scan = fused.scan if resolved(backend, x) == "mamba_ssm" else reference.scan
    y, state = scan(x, dt, A, B, C, D, steps, initial_state, return_state, chunk_size)
    return y, state if return_state else None


def _check_shapes(x: Tensor, B: Tensor, **others: Tensor | None) -> None:
    """Refuse shapes that do not fit; a dimension of one would broadcast silently."""
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating-point tensor, got {x.dtype}")
    if x.ndim != 4 or B.ndim != 4 or x.shape[1] == 0:
        raise ValueError(
            "x must be (batch, length, heads, headdim), with at least one token, and B (batch, "
            f"length, groups, d_state), got x {tuple(x.shape)} and B {tuple(B.shape)}"
        )
    rows, length, heads, headdim = x.shape
    groups, d_state = B.shape[2:]
    shapes = {
        "dt": (rows, length, heads),
        "B": (rows, length, groups, d_state),
        "C": (rows, length, groups, d_state),
        "initial_state": (rows, heads, headdim, d_state),
    }
    for name, tensor in {"B": B, **others}.items():
        wanted = shapes.get(name, (heads,))
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(tensor.shape)}")
    if heads % groups:
        raise ValueError(
            f"B must have groups that divide the heads, got {groups} groups and {heads} heads"
        )
