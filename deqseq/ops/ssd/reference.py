"""The state-space-dual scan in pure PyTorch: the CPU path, and the oracle of faster kernels."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

UNLIMITED = (0.0, float("inf"))


class SSDOutput(NamedTuple):
    """Outputs of a scan, and the state after its last token (None if it was not asked for)."""

    y: Float[Tensor, "batch length heads headdim"]
    state: Float[Tensor, "batch heads headdim d_state"] | None


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
    dt_limit: tuple[float, float] = UNLIMITED,
    initial_state: Float[Tensor, "batch heads headdim d_state"] | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
) -> SSDOutput:
    r"""Selective state-space scan, chunk by chunk in matrix products.

    .. math:: h_t = e^{\Delta_t A} h_{t-1} + \Delta_t x_t B_t^\top, \qquad y_t = h_t C_t + D x_t, \qquad
              \Delta_t = \mathrm{clamp}(\mathrm{softplus}(dt_t + dt_\mathrm{bias}))

    Within a chunk the recurrence is one masked matrix product (its dual form); between chunks the state is carried.
    Half-precision inputs are computed in float32, and the state is float32.

    Args:
        x: inputs, ``(batch, length, heads, headdim)``, any length from 1.
        dt: step sizes before bias and softplus, ``(batch, length, heads)``.
        A: decay rates, negative, ``(heads,)``.
        B: input maps, ``(batch, length, groups, d_state)``; ``groups`` divides ``heads``.
        C: output maps, the same shape.
        D: skip weights, ``(heads,)``.
        dt_bias: ``(heads,)``.
        dt_softplus: whether step sizes pass a softplus.
        dt_limit: lower and upper bound of the step sizes.
        initial_state: the state before the first token; None is zero.
        return_state: whether the state after the last token is wanted.
        chunk_size: tokens a chunk; but for rounding (decays come from differences of sums over a chunk), only speed
            depends on it.

    Returns:
        ``y`` in the dtype of ``x``, and the final state, if asked for, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: an empty sequence, heads that the groups do not divide, or a chunk size below 1.

    References:
        Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
        Duality, ICML 2024, arXiv 2405.21060.

    Example:
        >>> x, dt = torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1)
        >>> B = C = torch.ones(1, 3, 1, 1)
        >>> ssd(x, dt, torch.zeros(1), B, C, dt_softplus=False).y.flatten()    # no decay: a running sum
        tensor([1., 2., 3.])
    """
    _check(x, dt, A, B, C, chunk_size)
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):  # it would take the matrix products to half precision
        step = _step_sizes(dt.to(dtype), dt_bias, dt_softplus, dt_limit)
        if x.shape[1] == 1 and initial_state is not None:
            y, state = _advance(x[:, 0].to(dtype), step[:, 0], A, B[:, 0].to(dtype), C[:, 0].to(dtype), initial_state)
            y = y[:, None]
        else:
            y, state = _scan(x.to(dtype), step, A, B.to(dtype), C.to(dtype), initial_state, return_state, chunk_size)
        if D is not None:
            y = torch.addcmul(y, x.to(dtype), D.to(dtype)[:, None])
    return SSDOutput(y.to(x.dtype), state if return_state else None)


def ssd_state(
    x: Float[Tensor, "batch length heads headdim"],
    dt: Float[Tensor, "batch length heads"],
    A: Float[Tensor, " heads"],
    B: Float[Tensor, "batch length groups d_state"],
    *,
    dt_bias: Float[Tensor, " heads"] | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = UNLIMITED,
    initial_state: Float[Tensor, "batch heads headdim d_state"] | None = None,
    counts: Int64[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch heads headdim d_state"]:
    r"""The state of :func:`ssd` after its last token, without the outputs: one matrix product.

    .. math:: h_T = e^{\sum_s \Delta_s A} h_0 + \sum_t e^{\sum_{s > t} \Delta_s A} \Delta_t x_t B_t^\top

    Args:
        x: inputs, ``(batch, length, heads, headdim)``.
        dt: step sizes before bias and softplus, ``(batch, length, heads)``.
        A: decay rates, negative, ``(heads,)``.
        B: input maps, ``(batch, length, groups, d_state)``.
        dt_bias: ``(heads,)``.
        dt_softplus: whether step sizes pass a softplus.
        dt_limit: lower and upper bound of the step sizes.
        initial_state: the state before the first token; None is zero.
        counts: how many tokens of each row count, ``(batch,)``: the state after those; None: all.

    Returns:
        The state, in float32 (float64 for float64 inputs).

    Example:
        >>> one = torch.ones(1, 3, 1, 1)
        >>> ssd_state(one, one[..., 0], torch.zeros(1), one, dt_softplus=False, counts=torch.tensor([2])).item()
        2.0
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        step = _step_sizes(dt.to(dtype), dt_bias, dt_softplus, dt_limit)
        if counts is not None:
            beyond = torch.arange(x.shape[1], device=x.device) >= counts[:, None]
            step = step.masked_fill(beyond[..., None], 0)
        rates = step * A.to(dtype)
        # summed from the end: what matters most, the decay of the latest tokens, is a sum of few small numbers
        left = rates.flip(1).cumsum(1).flip(1) - rates
        late = (x.to(dtype) * (step * left.exp())[..., None]).permute(0, 2, 3, 1)  # batch heads headdim length
        heads_a_group = x.shape[2] // B.shape[2]
        gained = late.unflatten(1, (-1, heads_a_group)) @ B.to(dtype).transpose(1, 2)[:, :, None]
        gained = gained.flatten(1, 2)
        if initial_state is None:
            return gained
        return torch.addcmul(gained, initial_state.to(dtype), rates.sum(1).exp()[..., None, None])


def ssd_step(
    x: Float[Tensor, "batch heads headdim"],
    dt: Float[Tensor, "batch heads"],
    A: Float[Tensor, " heads"],
    B: Float[Tensor, "batch groups d_state"],
    C: Float[Tensor, "batch groups d_state"],
    state: Float[Tensor, "batch heads headdim d_state"],
    *,
    D: Float[Tensor, " heads"] | None = None,
    dt_bias: Float[Tensor, " heads"] | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = UNLIMITED,
) -> tuple[Float[Tensor, "batch heads headdim"], Float[Tensor, "batch heads headdim d_state"]]:
    """One token of :func:`ssd`: its output and the state after it; ``state`` itself is left as it is.

    Args:
        x: input of the token, ``(batch, heads, headdim)``.
        dt: step size before bias and softplus, ``(batch, heads)``.
        A: decay rates, negative, ``(heads,)``.
        B: input map, ``(batch, groups, d_state)``.
        C: output map, the same shape.
        state: the state before the token.
        D: skip weights, ``(heads,)``.
        dt_bias: ``(heads,)``.
        dt_softplus: whether step sizes pass a softplus.
        dt_limit: lower and upper bound of the step sizes.

    Returns:
        ``y`` in the dtype of ``x``, and the new state.

    Example:
        >>> one = torch.ones(1, 1, 1)
        >>> y, state = ssd_step(one, one[0], torch.zeros(1), one, one, 2 * one[None], dt_softplus=False)
        >>> y.item(), state.item()
        (3.0, 3.0)
    """
    many = (x[:, None], dt[:, None], A, B[:, None], C[:, None])
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    y, after = ssd(*many, **options, initial_state=state, return_state=True)
    assert after is not None
    return y[:, 0], after


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> None:
    if x.shape[1] == 0:
        raise ValueError(f"ssd needs at least one token, got x of shape {tuple(x.shape)}")
    # a dimension of one would broadcast, and nobody would notice
    if dt.shape != x.shape[:3] or A.shape != x.shape[2:3] or B.shape != C.shape or B.shape[:2] != x.shape[:2]:
        shapes = ", ".join(
            f"{name} {tuple(t.shape)}" for name, t in (("x", x), ("dt", dt), ("A", A), ("B", B), ("C", C))
        )
        raise ValueError(f"ssd needs shapes that agree on batch, length and heads, got {shapes}")
    if x.shape[2] % B.shape[2]:
        raise ValueError(f"ssd needs groups that divide the heads, got {B.shape[2]} groups and {x.shape[2]} heads")
    if chunk_size < 1:
        raise ValueError(f"ssd needs chunk_size >= 1, got {chunk_size}")


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if softplus else dt
    return dt if limit == UNLIMITED and softplus else dt.clamp(*limit)


def _advance(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Float[Tensor, "batch heads headdim"], Float[Tensor, "batch heads headdim d_state"]]:
    """The recurrence for one token."""
    decay = torch.exp(dt * A.to(dt.dtype))
    B, C = (_per_head(m, x.shape[1]) for m in (B, C))
    state = torch.addcmul(state.to(x.dtype) * decay[..., None, None], (x * dt[..., None])[..., None], B[:, :, None, :])
    return torch.matmul(state, C[..., None])[..., 0], state


def _per_head(m: Float[Tensor, "batch groups d_state"], heads: int) -> Float[Tensor, "batch heads d_state"]:
    """Repeat each group's vector for its heads."""
    return m if m.shape[1] == heads else m.repeat_interleave(heads // m.shape[1], dim=1)


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, want_state: bool, chunk: int
) -> tuple[Tensor, Tensor | None]:
    """The whole sequence, a loop over chunks of matrix products; heads stand before tokens inside."""
    batch, length, heads, headdim = x.shape
    groups, d_state = B.shape[2:]
    weighted = (x * dt[..., None]).transpose(1, 2)  # batch heads length headdim
    rates = (dt * A.to(dt.dtype)).transpose(1, 2)  # batch heads length
    B, C = B.transpose(1, 2), C.transpose(1, 2)  # batch groups length d_state
    pieces = zip(*(m.split(chunk, dim=2) for m in (weighted, rates, B, C)), strict=True)
    outputs, left = [], length
    for u, rate, B_piece, C_piece in pieces:
        size = u.shape[2]
        left -= size
        total = rate.cumsum(dim=2)  # log of the decay since the chunk's start
        decay = _decay_between(total)
        scores = (C_piece @ B_piece.transpose(2, 3))[:, :, None]  # once a group, then spread over its heads
        mixing = (scores * decay.unflatten(1, (groups, -1))).flatten(1, 2)
        y = mixing @ u
        if state is not None:
            seen = C_piece[:, :, None] @ state.to(x.dtype).unflatten(1, (groups, -1)).transpose(3, 4)
            y = torch.addcmul(y, seen.flatten(1, 2), total.exp()[..., None])
        if left or want_state:
            late = decay[:, :, -1, :, None] * u  # decayed to the chunk's end
            gained = late.unflatten(1, (groups, -1)).transpose(3, 4) @ B_piece[:, :, None]
            gained = gained.reshape(batch, heads, headdim, d_state)
            end = total[:, :, -1].exp()[..., None, None]
            state = gained if state is None else torch.addcmul(gained, state.to(x.dtype), end)
        outputs.append(y.transpose(1, 2))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), state


def _decay_between(total: Float[Tensor, "batch heads size"]) -> Float[Tensor, "batch heads size size"]:
    """How much of token s is left at token t: ``exp(total_t - total_s)`` for s <= t, else zero."""
    size = total.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()
