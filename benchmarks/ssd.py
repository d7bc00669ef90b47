"""The SSD scan beside mamba_ssm's ``ssd_minimal_discrete``, transformers' torch path and the matmul peak.

Both peers are called as installed, in float32, on the same inputs, with one group of B and C. Each comparison first
checks that outputs and gradients agree. Forward runs without gradients; the backward pass yields the gradient of every
input for a random gradient of y. Goals are for chunks of 64 tokens on both sides: ``ssd_minimal_discrete``'s choice
in its own test, and two to three times as fast for transformers as its default of 256. Chunks of 32 suit the peers
better where the state is small: rows without a goal.

- ``ssd_minimal_discrete`` is given ``x * dt`` and ``A * dt``, as in its own test, which counts as its time: step sizes
  are positive (no softplus), and there is no D.
- transformers' ``mamba2_chunk_scan`` is what its Mamba2 layer calls between convolution and norm. It and ours are
  given dt before bias and softplus, the bias, and D.
- The matmul peak is the rate of a square matmul, run in turns with ours. Operations of the scan are counted as
  ``2 Q n`` per token for scores and ``2 Q p + 4 n p`` per token and head for the rest (Q the chunk, n the state, p the
  head), and twice that for the backward pass; what it computes again does not count.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from harness import Row, arguments, interleave, memory_row, report, time_row, value_row
from torch import Tensor
from torch.nn import functional as F

from deqseq.ops.ssd import ssd

CHUNK = 64
MATMUL, REPEATS = 2048, 5
INSTALL_MAMBA = (
    "pip install setuptools wheel packaging ninja && MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE "
    "pip install --no-build-isolation --no-deps mamba-ssm==2.3.2.post1"
)
INSTALL_TRANSFORMERS = "pip install 'transformers>=5.23'"
Scan = Callable[..., Tensor]


class Size(NamedTuple):
    """A problem."""

    name: str
    batch: int
    length: int
    heads: int
    headdim: int
    d_state: int

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self[1:]))}"

    def operations(self) -> int:
        """Floating-point operations of a forward pass."""
        per_head = 2 * CHUNK * self.headdim + 4 * self.d_state * self.headdim
        return self.batch * self.length * (2 * CHUNK * self.d_state + self.heads * per_head)


SIZES = (
    Size("small", 8, 256, 4, 32, 16),
    Size("medium", 4, 1024, 8, 64, 64),
    Size("large", 1, 2048, 24, 64, 128),
)


class Peer(NamedTuple):
    """Whom we compare with: the scan with chunks of a size (None: not installed), and the goals."""

    name: str
    find: Callable[[int], Scan | None]
    install: str
    time_goal: str
    memory_goal: str | None


class Problem(NamedTuple):
    """Inputs of a scan, all of which want a gradient, and a gradient of its output."""

    inputs: tuple[Tensor, ...]
    dy: Tensor

    def forward(self, scan: Scan) -> Tensor:
        """The output alone."""
        with torch.no_grad():
            return scan(*self.inputs)

    def both(self, scan: Scan) -> tuple[Tensor, ...]:
        """The output, and the gradient of every input."""
        y = scan(*self.inputs)
        return y.detach(), *torch.autograd.grad(y, self.inputs, self.dy)


def problem(size: Size, with_bias_and_skip: bool) -> Problem:
    """Random inputs with the step sizes and decay rates of a fresh Mamba2 layer; the last two are dt_bias and D."""
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, generator=generator)
    x, dt = randn(size.batch, size.length, size.heads, size.headdim), randn(size.batch, size.length, size.heads)
    B, C = randn(2, size.batch, size.length, 1, size.d_state)
    A = -torch.linspace(1, 16, size.heads)
    bias = torch.linspace(-6.9, -2.3, size.heads)  # softplus: 0.001 to 0.1
    plain = (x, F.softplus(dt + bias), A, B, C)
    inputs = (x, dt, A, B, C, bias, randn(size.heads)) if with_bias_and_skip else plain
    return Problem(tuple(t.clone().requires_grad_() for t in inputs), randn(x.shape))


def ours(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Our scan of step sizes as they are."""
    return ssd(x, dt, A, B, C, dt_softplus=False, chunk_size=CHUNK).y


def ours_whole(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor, D: Tensor) -> Tensor:
    """Our scan with bias, softplus and skip."""
    return ssd(x, dt, A, B, C, dt_bias=bias, D=D, chunk_size=CHUNK).y


def find_minimal(chunk: int) -> Scan | None:
    """``ssd_minimal_discrete`` from the installed file; None if there is none.

    The package itself cannot be imported without its CUDA extension; of its kernels, the file wants one for a test.
    """
    package = importlib.util.find_spec("mamba_ssm")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "modules" / "ssd_minimal.py"
    spec = importlib.util.spec_from_file_location("ssd_minimal", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    kernels = SimpleNamespace(mamba_chunk_scan_combined=None)
    with patch.dict(sys.modules, {"mamba_ssm.ops.triton.ssd_combined": kernels}):
        spec.loader.exec_module(module)

    def minimal(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return module.ssd_minimal_discrete(x * dt[..., None], A * dt, B, C, chunk)[0]

    return minimal


def find_transformers(chunk: int) -> Scan | None:
    """The torch function under transformers' dispatch to kernels; None if it is not installed or too old."""
    try:
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    except ImportError:
        return None
    chunk_scan = inspect.unwrap(mamba2_chunk_scan)

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor, D: Tensor) -> Tensor:
        return chunk_scan(x, dt, A, B, C, chunk_size=chunk, D=D, dt_bias=bias, dt_softplus=True)

    return scan


def against(size: Size, given: Problem, mine: Scan, peer: Peer, runs: int) -> Iterator[Row]:
    """Agreement, times and peak memory beside one peer."""
    for chunk in (CHUNK, CHUNK // 2):
        theirs = peer.find(chunk)
        if theirs is None:
            return
        name = peer.name if chunk == CHUNK else f"{peer.name}, chunks of {chunk}"
        time_goal, memory_goal = (peer.time_goal, peer.memory_goal) if chunk == CHUNK else (None, None)
        difference = max(map(relative, given.both(mine), given.both(theirs)))
        assert difference <= 1e-3, f"{name} and ours differ by {difference:.1e} at size {size}"
        yield value_row(f"y and gradients, {size}", "relative difference", difference, name, None, goal="ours <= 1e-3")
        forward = partial(given.forward, mine), name, partial(given.forward, theirs)
        both = partial(given.both, mine), name, partial(given.both, theirs)
        yield time_row(f"forward, {size}", *forward, runs=runs, goal=time_goal)
        yield time_row(f"forward + backward, {size}", *both, runs=runs, goal=time_goal)
        yield memory_row(f"forward + backward, {size}", *both, goal=memory_goal)


def relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over that of the second."""
    return float((a - b).norm() / b.norm())


def of_the_peak(size: Size, given: Problem, runs: int) -> Iterator[Row]:
    """Our rate over that of a matmul on as many threads; several runs of ours a turn: matmul empties the cache."""
    a, b = torch.randn(2, MATMUL, MATMUL)
    for name, run, passes in (("forward", given.forward, 1), ("forward + backward", given.both, 3)):
        pairs = interleave(lambda run=run: [run(ours) for _ in range(REPEATS)], partial(torch.mm, a, b), runs)
        share = REPEATS * passes * size.operations() / (2 * MATMUL**3) / pairs.ratio
        peer = f"matmul {MATMUL}x{MATMUL}"
        yield value_row(f"{name}, {size}", "share of FLOP/s", share, peer, None, goal="ours >= 0.35")


MINIMAL = Peer("mamba_ssm ssd_minimal", find_minimal, INSTALL_MAMBA, "ratio <= 0.476", "ratio <= 0.45")
TRANSFORMERS = Peer("transformers, torch path", find_transformers, INSTALL_TRANSFORMERS, "ratio <= 0.667", None)


def main() -> None:
    """Measure, print and write."""
    chosen = arguments("the SSD scan beside its pure-torch peers")
    runs = 3 if chosen.quick else 25
    for peer in (MINIMAL, TRANSFORMERS):
        if peer.find(CHUNK) is None:
            print(f"SKIPPED: {peer.name}, not installed or too old. To have its rows: {peer.install}")
    rows: list[Row] = []
    for size in SIZES:
        plain, whole = problem(size, with_bias_and_skip=False), problem(size, with_bias_and_skip=True)
        rows += against(size, plain, ours, MINIMAL, runs)
        rows += against(size, whole, ours_whole, TRANSFORMERS, runs)
        rows += of_the_peak(size, plain, runs)
    report(rows, chosen)


if __name__ == "__main__":
    main()
