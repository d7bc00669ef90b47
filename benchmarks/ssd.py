"""The SSD scan beside transformers' torch path.

``mamba2_chunk_scan`` is what transformers' Mamba2 layer calls between convolution and norm. Both sides get the same
inputs in float32, with one group of B and C and chunks of 64 tokens: dt before bias and softplus, the bias, and D. Each
comparison first checks that outputs and gradients agree. Forward runs without gradients; the backward pass yields the
gradient of every input for a random gradient of y.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import Row, benchmark, memory_row, time_row
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from deqseq.ops.ssd import ssd

CHUNK = 64
Scan = Callable[..., Tensor]
SIZES = {  # batch, length, heads, headdim, d_state
    "small": (8, 256, 4, 32, 16),
    "medium": (4, 1024, 8, 64, 64),
    "large": (1, 2048, 24, 64, 128),
}


def ours(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor, D: Tensor) -> Tensor:
    """Our scan."""
    return ssd(x, dt, A, B, C, dt_bias=bias, D=D, chunk_size=CHUNK).y


def theirs(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor, D: Tensor) -> Tensor:
    """The torch function under transformers' dispatch to kernels."""
    scan = inspect.unwrap(mamba2_chunk_scan)
    return scan(x, dt, A, B, C, chunk_size=CHUNK, D=D, dt_bias=bias, dt_softplus=True)


def problem(batch: int, length: int, heads: int, headdim: int, d_state: int) -> tuple[Tensor, ...]:
    """Random inputs with the step sizes and decay rates of a fresh Mamba2 layer."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, dt = randn(batch, length, heads, headdim), randn(batch, length, heads)
    B, C = randn(2, batch, length, 1, d_state)
    A, bias = -torch.linspace(1, 16, heads), torch.linspace(-6.9, -2.3, heads)  # softplus of the bias: 0.001 to 0.1
    return tuple(t.clone().requires_grad_() for t in (x, dt, A, B, C, bias, randn(heads)))


def both(scan: Scan, inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradient of every input."""
    y = scan(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def rows(quick: bool) -> Iterator[Row]:
    """Agreement, times and peak memory."""
    runs, peer, goal = 2 if quick else 25, "transformers, torch path", "ratio <= 0.667"
    for name, size in list(SIZES.items())[: 1 if quick else None]:
        inputs, case = problem(*size), f"{name} {'x'.join(map(str, size))}"
        dy = torch.randn(inputs[0].shape)
        pairs = zip(both(ours, inputs, dy), both(theirs, inputs, dy), strict=True)
        worst = max(float((y - other).norm() / other.norm()) for y, other in pairs)
        assert worst <= 1e-3, f"{peer} and ours differ by {worst:.1e} at size {size}"
        forward = [torch.no_grad()(partial(scan, *inputs)) for scan in (ours, theirs)]
        yield time_row(f"forward, {case}", forward[0], peer, forward[1], runs=runs, goal=goal)
        mine, other = (partial(both, scan, inputs, dy) for scan in (ours, theirs))
        yield time_row(f"forward + backward, {case}", mine, peer, other, runs=runs, goal=goal)
        yield memory_row(f"forward + backward, {case}", mine, peer, other)


main = benchmark(__doc__, rows)

if __name__ == "__main__":
    main()
