"""The SSD scan in plain PyTorch beside transformers', and on a GPU beside mamba_ssm's kernel.

``mamba2_chunk_scan`` is what transformers' Mamba2 layer calls between convolution and norm. Both
sides get the same inputs in float32, with one group of B and C and chunks of 64 tokens: dt before
bias and softplus, the bias, and D. Each comparison first checks that outputs and gradients agree.
Forward runs without gradients; the backward pass yields the gradient of every input for a random
gradient of y.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from harness import Row, benchmark, memory_row, on_gpu, time_row
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
    return ssd(x, dt, A, B, C, dt_bias=bias, D=D, chunk_size=CHUNK, backend="reference")[0]


def kernel(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor, D: Tensor
) -> Tensor:
    """mamba_ssm's kernel, with chunks of its own size."""
    return ssd(x, dt, A, B, C, dt_bias=bias, D=D, backend="mamba_ssm")[0]


def theirs(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor, D: Tensor
) -> Tensor:
    """The torch function under transformers' dispatch to kernels."""
    scan = inspect.unwrap(mamba2_chunk_scan)
    return scan(x, dt, A, B, C, chunk_size=CHUNK, D=D, dt_bias=bias, dt_softplus=True)


def problem(batch: int, length: int, heads: int, headdim: int, d_state: int) -> tuple[Tensor, ...]:
    """Random inputs with the step sizes and decay rates of a fresh Mamba2 layer."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    x, dt = randn(batch, length, heads, headdim), randn(batch, length, heads)
    B, C = randn(2, batch, length, 1, d_state)
    A = -torch.linspace(1, 16, heads)
    bias = torch.linspace(-6.9, -2.3, heads)  # its softplus is 0.001 to 0.1
    device = torch.get_default_device()
    return tuple(
        t.to(device).clone().requires_grad_() for t in (x, dt, A, B, C, bias, randn(heads))
    )


def both(scan: Scan, inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradient of every input."""
    y = scan(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def rows(quick: bool) -> Iterator[Row]:
    """Agreement, times and peak memory."""
    runs = 2 if quick else 25
    peers: dict[str, tuple[Scan, str | None]] = {
        "transformers, torch path": (theirs, "ratio <= 0.667")
    }
    if on_gpu() and find_spec("mamba_ssm"):
        peers["mamba_ssm's kernel"] = (kernel, None)
    sizes = list(SIZES.items())[: 1 if quick else None]
    for (name, size), (peer, (other_scan, goal)) in itertools.product(sizes, peers.items()):
        inputs, case = problem(*size), f"{name} {'x'.join(map(str, size))}"
        dy = torch.randn(inputs[0].shape)
        pairs = zip(both(ours, inputs, dy), both(other_scan, inputs, dy), strict=True)
        worst = max(float((y - other).norm() / other.norm()) for y, other in pairs)
        assert worst <= 1e-3, f"{peer} and ours differ by {worst:.1e} at size {size}"
        forward = [torch.no_grad()(partial(scan, *inputs)) for scan in (ours, other_scan)]
        yield time_row(f"forward, {case}", forward[0], peer, forward[1], runs=runs, goal=goal)
        mine, other = (partial(both, scan, inputs, dy) for scan in (ours, other_scan))
        yield time_row(f"forward + backward, {case}", mine, peer, other, runs=runs, goal=goal)
        yield memory_row(f"forward + backward, {case}", mine, peer, other)


main = benchmark(__doc__, rows, device=True)

if __name__ == "__main__":
    main()
