"""The state-space-dual scan in pure PyTorch: the CPU path, and the oracle of faster kernels."""

import math
from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from deqseq.arguments import Wanted, Within
from deqseq.types import Counts, float32_at_least

CHUNK = 64  # what suits a CPU's caches
UNLIMITED = (0.0, float("inf"))
LOG2_E = 1 / math.log(2)  # decays are powers of two, which PyTorch computes faster than those of e
# the exponent of a decay that makes no difference: numbers that underflow are many times slower
FORGOTTEN = -58.0

ScanState = Float[Tensor, "batch heads headdim d_state"]


class Bounds(Wanted):
    """Two ordered numbers from 0 on; the second may be infinite."""

    kind = (tuple, list)

    def __str__(self) -> str:
        return "two ordered bounds, such as (0.0, 0.1)"

    def in_range(self, value: Any) -> bool:
        """Whether these are the two bounds."""
        numbers = all(Within("[0, inf]").is_kind(bound) for bound in value)
        return numbers and len(value) == 2 and 0 <= value[0] <= value[1]


StepBounds = Annotated[tuple[float, float], Bounds()]
"""The smallest and the largest step."""


class StepSizes(NamedTuple):
    r"""Step sizes from what was projected, :math:`\mathrm{clamp}(\mathrm{softplus}(dt + b))`."""

    bias: Float[Tensor, " heads"] | None = None
    softplus: bool = True
    limit: tuple[float, float] = UNLIMITED

    def of(self, dt: Tensor) -> Tensor:
        """The step sizes for ``dt``, ``(..., heads)``, in its dtype."""
        if self.bias is not None:
            dt = dt + self.bias.to(dt.dtype)
        if self.softplus:
            dt = F.softplus(dt)
        return dt if self.softplus and self.limit == UNLIMITED else dt.clamp(*self.limit)


def scan(
    x,
    dt,
    A,
    B,
    C,
    D,
    steps: StepSizes,
    initial_state: Tensor | None,
    want_state: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:
    """The scan, chunk by chunk in matrix products, in float32 at least; see ``ssd``."""
    size, dtype = chunk_size or CHUNK, float32_at_least(x)
    # autocast would take the matrix products to half precision
    with torch.autocast(x.device.type, enabled=False):
        step = steps.of(dt.to(dtype)).transpose(1, 2).contiguous()
        inner, B, C = (m.to(dtype).transpose(1, 2) for m in (x, B, C))
        tokens = (inner, step, step * A.to(dtype)[:, None], B, C)
        initial_state = None if initial_state is None else initial_state.to(dtype)
        if x.shape[1] == 1 and initial_state is not None:
            y, state = _one_token(*tokens, initial_state)
        elif x.shape[1] <= size:
            y, state = _chunk(*tokens, initial_state, want_state)
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling():
            y, *_, state = _Chunks.apply(*tokens, initial_state, want_state, size)
        else:
            y, *_, state = _chunks_in_turn(*tokens, initial_state, want_state, size, keep=False)
        if D is not None:
            y = torch.addcmul(y, inner, D.to(dtype)[:, None, None])
    return y.transpose(1, 2).to(x.dtype), state


def state_after(
    x: Tensor,
    dt,
    A,
    B,
    steps: StepSizes,
    initial_state: Tensor | None,
    counts: Counts | None,
) -> ScanState:
    """The state after the last token, or after the first so many of each row."""
    dtype = float32_at_least(x)
    with torch.autocast(x.device.type, enabled=False):
        step = steps.of(dt.to(dtype))
        if counts is not None:
            beyond = torch.arange(x.shape[1], device=x.device) >= counts[:, None]
            step = step.masked_fill(beyond[..., None], 0)
        step = step.transpose(1, 2)
        rates = (step * A.to(dtype)[:, None]).double() * LOG2_E
        # summed from the end, so that the decay of the latest tokens is a sum of few numbers
        left = rates.flip(2).cumsum(2).flip(2) - rates
        x, B = (m.to(dtype).transpose(1, 2) for m in (x, B))
        gained = _gained(x * (step * _decay(left, dtype))[..., None], B)
        if initial_state is None:
            return gained
        remaining = _decay(rates.sum(2), dtype)[..., None, None]
        return torch.addcmul(gained, initial_state.to(dtype), remaining)


def _one_token(x, dt, rates, B, C, state: ScanState) -> tuple[Tensor, ScanState]:
    """The recurrence for one token: its output and the state after it."""
    state = torch.addcmul(_gained(x * dt[..., None], B), state, rates.exp()[..., None])
    return _read(C, state), state


class _Chunks(torch.autograd.Function):
    """A loop over chunks whose backward pass computes each chunk again from the state before it.

    It is made of differentiable operations on the inputs and outputs, so that there are second
    derivatives.
    """

    @staticmethod
    def forward(x, dt, rates, B, C, state, want_state, size):
        """``y`` and the state after each chunk; None after the last if it is not wanted."""
        return _chunks_in_turn(x, dt, rates, B, C, state, want_state, size, keep=True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs and the states between chunks."""
        ctx.save_for_backward(*inputs[:6], *output[1:-1])
        ctx.size = inputs[7]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *gradients):
        """From the last chunk to the first."""
        x, dt, rates, B, C, *states = ctx.saved_tensors
        dy, *dstates = gradients
        tokens = (x, dt, rates, B, C, torch.zeros_like(x) if dy is None else dy)
        dx, dstate, others = torch.empty_like(x), None, []
        for index, before in reversed(list(enumerate(states))):
            span = slice(index * ctx.size, (index + 1) * ctx.size)
            dafter = dstates[index]
            if dafter is not None:  # a state between chunks has one only in a second derivative
                dstate = dafter if dstate is None else dstate + dafter
            piece = (t[:, :, span] for t in tokens)
            dx[:, :, span], *rest, dstate = _chunk_gradients(before, dstate, *piece)
            others.insert(0, rest)
        joined = (torch.cat(t, dim=2) for t in zip(*others, strict=True))
        return dx, *joined, dstate, None, None


def _chunks_in_turn(x, dt, rates, B, C, state, want_state, size, keep: bool) -> tuple[Any, ...]:
    """The loop over chunks: ``y``, and the state after each, or after the last only.

    ``torch.compile`` takes it as it is; it cannot trace ``_Chunks`` with dynamic shapes (2.13).
    """
    pieces = list(zip(*(t.split(size, dim=2) for t in (x, dt, rates, B, C)), strict=True))
    outputs, states = [], []
    for index, piece in enumerate(pieces, start=1):
        y, state = _chunk(*piece, state=state, want_state=want_state or index < len(pieces))
        outputs.append(y)
        states = [*states, state] if keep else [state]
    return torch.cat(outputs, dim=2), *states


def _chunk(x, dt, rates, B, C, state: ScanState | None, want_state: bool):
    """The dual form: one masked matrix product for what the chunk's tokens take from each other."""
    u = x * dt[..., None]
    start, decay, mixing = _weights(rates, B, C)
    y = mixing @ u
    if state is not None:
        y = torch.addcmul(y, _read(C, state), start[..., None])
    if not want_state:
        return y, None
    gained = _gained(u * decay[:, :, -1, :, None], B)
    return y, gained if state is None else torch.addcmul(gained, state, start[:, :, -1:, None])


def _chunk_gradients(before, dafter, x, dt, rates, B, C, dy):
    """Gradients of the inputs and the state before, from those of y and the state after."""
    u, dy = (x * dt[..., None]).contiguous(), dy.contiguous()
    start, decay, mixing = _weights(rates, B, C)
    dmixing = dy @ u.mT
    # The gradient of a token's rate is a sum over pairs of a token before it and one from it on. It
    # is a difference of sums over all pairs, in float64 so that the other pairs cancel: a remainder
    # would be multiplied by A.
    passing = (dmixing * mixing).double()
    dtotal, end = passing.sum(3) - passing.sum(2), 0
    dscores = (dmixing * decay).unflatten(1, (B.shape[1], -1)).sum(2).tril_()
    dB, dC = dscores.mT @ C, dscores @ B
    du = mixing.mT @ dy
    dbefore = None
    if before is not None:
        dread = dy * start[..., None]
        by_head = (dread @ before).unflatten(1, (B.shape[1], -1))
        dtotal = dtotal + (by_head * C[:, :, None]).sum(-1).flatten(1, 2)
        dC, dbefore = dC + by_head.sum(2), _gained(dread, C)
    if dafter is not None:
        until = decay[:, :, -1, :, None]
        read = _read(B, dafter)
        du = torch.addcmul(du, read, until)
        dB = dB + _per_group(u * until, dafter, B)
        gained = ((u * read).sum(-1) * until[..., 0]).double()
        dtotal, end = dtotal - gained, gained.sum(2, keepdim=True)
        if dbefore is not None:
            left = start[:, :, -1:, None]
            dbefore = torch.addcmul(dbefore, dafter, left)
            end = end + ((dafter * before).sum((2, 3)) * left[..., 0, 0])[..., None]
    drates = (dtotal.flip(2).cumsum(2).flip(2) + end).to(rates.dtype)
    return du * dt[..., None], (du * x).sum(-1), drates, dB, dC, dbefore


def _weights(rates: Float[Tensor, "batch heads size"], B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
    """What is left at each token t of the state before the chunk, ``(batch, heads, size)``; what is
    left of what each token s <= t adds; and that times ``C_t B_s^T``.

    The last two have shape ``(batch, heads, size, size)``. A product is computed once per group,
    then spread over its heads.
    """
    total = rates.double().cumsum(2) * LOG2_E  # float64: differences of large sums can be small
    start = _decay(total.clone(), rates.dtype)
    decay = _decay(total[..., :, None] - total[..., None, :], rates.dtype)
    products = (C @ B.mT).tril_()[:, :, None]
    mixing = decay.unflatten(1, (B.shape[1], -1)) * products
    return start, decay, mixing.flatten(1, 2)


def _decay(log: Tensor, dtype: torch.dtype) -> Tensor:
    """Two to the power of ``log``; entries above 0 are not used, and could overflow."""
    return log.to(dtype).clamp_(FORGOTTEN, 0).exp2_()


def _gained(u: Float[Tensor, "batch heads size headdim"], B: Tensor) -> ScanState:
    """``u^T B`` over the tokens; here and below, all heads of a group are in one product."""
    merged = u.unflatten(1, (B.shape[1], -1)).transpose(3, 4).flatten(2, 3)
    return (merged @ B).reshape(*u.shape[:2], u.shape[3], -1)


def _read(C: Tensor, state: ScanState) -> Float[Tensor, "batch heads size headdim"]:
    """``C h^T`` for each token."""
    read = C @ state.unflatten(1, (C.shape[1], -1)).flatten(2, 3).mT
    return read.unflatten(3, (-1, state.shape[2])).transpose(2, 3).flatten(1, 2)


def _per_group(u: Tensor, state: Tensor, B: Tensor) -> Float[Tensor, "batch groups size d_state"]:
    """``u h``, summed over the heads of a group."""
    u, state = (m.unflatten(1, (B.shape[1], -1)) for m in (u, state))
    return u.transpose(2, 3).flatten(3) @ state.flatten(2, 3)
