"""Mamba2 on a GPU: kernels beside the reference, the cost of an iteration and a training step, the physical limit.

First it checks mamba_ssm's kernels against the plain PyTorch code on the device: forward, gradients and one-token
steps, in float32 and bfloat16. Then, in bfloat16 under autocast, for one block of d_model 768 and 2048 at length 2048:

- one iteration of a solve beside the bare block, called as often by hand;
- a (4+1) and a (24+4) training step, beside 5 and 28 bare block calls, of which 1 and 4 are differentiated;
- peak memory of the solve without a gradient at 24 iterations beside 4;
- generation with 8 iterations a token, in tokens a second, at batch 1 and 32;
- the share of the physical limit: the floating-point operations of an iteration over the rate of a large matrix
  product, and its bytes over the rate of a large copy, both measured in this run; the limit is the longer of the two.

``--device cpu`` runs all of it at toy size on whatever backend there is: it shows that the script works, no more.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import MEBIBYTE, Row, command_line, interleave, peak_memory, report, time_row, value_row

import deqseq as dq
from deqseq.layers import with_weights
from deqseq.ops.backend import Backend, resolved
from deqseq.ops.ssd import ssd

VOCABULARY = 512
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 3e-2}  # a GPU multiplies float32 in TF32 inside kernels


@dataclass(frozen=True)
class Sizes:
    """How large everything is, and how often it runs."""

    widths: tuple[int, ...] = (768, 2048)
    length: int = 2048
    d_state: int = 128
    headdim: int = 64
    batch: int = 8
    new_tokens: int = 128
    prompt: int = 256
    matrix: int = 8192
    runs: int = 15


TOY = Sizes((32,), 24, 16, 16, 2, 3, 5, 64, 2)


@dataclass(frozen=True)
class Bench:
    """The device and what runs on it."""

    device: torch.device
    sizes: Sizes
    backend: Backend

    def run(self, work: Callable[[], object]) -> Callable[[], None]:
        """``work``, waited for."""

        def done() -> None:
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return done

    def peak(self, work: Callable[[], object]) -> float:
        """MiB at the peak above what was held before."""
        if self.device.type != "cuda":
            return peak_memory(work) / MEBIBYTE
        work()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / MEBIBYTE

    def half(self) -> torch.autocast:
        """bfloat16 as training uses it."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def checks(bench: Bench) -> list[Row]:
    """Largest relative difference of the kernels from the reference in float32: outputs, gradients, a step."""
    if bench.backend == "reference":
        print("mamba_ssm's kernels cannot run here: there is nothing to check")
        return []
    rows = []
    for dtype, tolerance in TOLERANCES.items():
        if bench.device.type == "cpu" and dtype != torch.float32:
            continue  # Triton's interpreter has no bfloat16
        expected, found = scanned(bench, "reference", torch.float32), scanned(bench, bench.backend, dtype)
        for name, wanted in expected.items():
            pairs = zip(found[name], wanted, strict=True)
            worst = max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
            metric = f"{name}: relative difference"
            goal = f"ours <= {tolerance}"
            rows.append(value_row(f"kernels, {dtype}", metric, worst, "reference", None, goal=goal))
    return rows


def scanned(bench: Bench, backend: Backend, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, ...]]:
    """What one backend makes of the same random inputs in ``dtype``."""
    generator, heads, sizes = torch.Generator().manual_seed(0), 4, bench.sizes

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    shape = (2, min(sizes.length, 500) - 3)  # no multiple of a chunk
    many = [randn(*shape, heads, sizes.headdim), randn(*shape, heads)]
    many += [randn(*shape, 1, sizes.d_state) for _ in range(2)]
    rates, state = -randn(heads).exp().to(bench.device), randn(2, heads, sizes.headdim, sizes.d_state).to(bench.device)
    x, dt, B, C = (m.to(bench.device, dtype).requires_grad_() for m in many)
    y, after = ssd(x, dt, rates, B, C, initial_state=state, return_state=True, backend=backend)
    assert after is not None
    gradients = torch.autograd.grad(y.float().square().sum() + after.sum(), [x, dt, B, C])
    with torch.no_grad():
        token = (x[:, :1], dt[:, :1], rates, B[:, :1], C[:, :1])
        step = ssd(*token, initial_state=state, return_state=True, backend=backend)
    assert step.state is not None
    return {"forward": (y, after), "gradients": gradients, "step": (step.y, step.state)}


def block(bench: Bench, width: int, stop: dq.Stop, phantom: int) -> dq.CausalLM:
    """A language model of one block."""
    torch.manual_seed(0)
    config = dq.Mamba2Config(width, d_state=bench.sizes.d_state, headdim=bench.sizes.headdim, backend=bench.backend)
    model = dq.ImplicitModel(dq.Mamba2(config), dq.SolveConfig(stop=stop, gradient=dq.Phantom(phantom)))
    return dq.CausalLM(VOCABULARY, model).to(bench.device)


class Work:
    """What is timed for one model: a solve, a training step, and the bare block beside each."""

    def __init__(self, bench: Bench, width: int, steps: int, phantom: int) -> None:
        self.bench, self.steps, self.phantom = bench, steps, phantom
        self.lm = block(bench, width, dq.Stop.exactly(steps), phantom)
        assert isinstance(self.lm.model, dq.ImplicitModel)
        self.backbone = self.lm.model.backbone
        self.ids = torch.randint(0, VOCABULARY, (bench.sizes.batch, bench.sizes.length), device=bench.device)
        self.x = self.lm.embedding(self.ids).detach()

    def solve(self) -> None:
        """A solve without a gradient."""
        with torch.no_grad(), self.bench.half():
            self.lm.model(self.x)

    def bare(self) -> None:
        """The block, called as often."""
        with torch.no_grad(), self.bench.half():
            self._iterated(self.steps)

    def train(self) -> None:
        """A training step without the optimiser's."""
        with self.bench.half():
            loss = self.lm(self.ids, labels=self.ids).loss
        assert loss is not None
        loss.backward()

    def bare_training(self) -> None:
        """The block, called as often and differentiated as often, without a head."""
        self.bare()
        with self.bench.half():
            self._iterated(self.phantom).sum().backward()

    def _iterated(self, times: int) -> torch.Tensor:
        backbone = with_weights(self.backbone)
        z, inputs = torch.zeros_like(self.x), backbone.prepare(self.x)
        for _ in range(times):
            z = backbone(z, inputs)[0].to(self.x.dtype)
        return z


def costs(bench: Bench, width: int) -> list[Row]:
    """An iteration, training steps and memory of one width."""
    case, runs, rows, memory = f"d_model {width}, length {bench.sizes.length}", bench.sizes.runs, [], {}
    for steps, phantom in ((4, 1), (24, 4)):
        work = Work(bench, width, steps, phantom)
        solve, bare = bench.run(work.solve), bench.run(work.bare)
        solved = time_row(f"{case}, {steps} iterations", solve, "bare block", bare, runs=runs, per=steps)
        train, bare = bench.run(work.train), bench.run(work.bare_training)
        rows += [solved, time_row(f"{case}, ({steps}+{phantom}) step", train, "bare blocks", bare, runs=runs)]
        limit, reason = physical_limit(bench, work.backbone, width)
        share = f"share of the limit ({reason}), {steps} iterations"
        rows.append(value_row(case, share, 1e3 * limit / solved.ours, "limit in ms", 1e3 * limit))
        memory[steps] = bench.peak(work.solve)
    metric, goal = "peak MiB of a solve of 24 iterations", "ratio <= 1.02"
    return [*rows, value_row(case, metric, memory[24], "4 of them", memory[4], goal=goal)]


def physical_limit(bench: Bench, backbone: torch.nn.Module, width: int) -> tuple[float, str]:
    """Seconds that one iteration takes at least, and what sets them.

    The two projections and the scan are counted, with chunks of 256; of the bytes, the weights and what must pass
    between kernels: the state in and out, the projection's output, the injection.
    """
    sizes = bench.sizes
    tokens, inner, chunk = sizes.batch * sizes.length, 2 * width, min(256, sizes.length)
    heads, n = inner // sizes.headdim, sizes.d_state
    projected = 2 * inner + 2 * n + heads
    scan = tokens * (2 * chunk * n + heads * (2 * chunk * sizes.headdim + 4 * n * sizes.headdim))
    operations = 2 * tokens * width * (projected + inner) + scan
    weights = sum(parameter.numel() for parameter in backbone.parameters())
    moved = 2 * (weights + tokens * (2 * width + 2 * projected + 2 * inner)) + 4 * tokens * 2 * width
    rate, bandwidth = rates(bench)
    return max((operations / rate, "arithmetic"), (moved / bandwidth, "memory"))


def rates(bench: Bench) -> tuple[float, float]:
    """Operations a second of a large bfloat16 matrix product, and bytes a second of a large copy."""
    n = bench.sizes.matrix
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)
    copy = torch.empty_like(a)
    pairs = interleave(bench.run(lambda: a @ a), bench.run(lambda: copy.copy_(a)), max(3, bench.sizes.runs))
    return 2 * n**3 / pairs.ours, 2 * 2 * n**2 / pairs.theirs


def generation(bench: Bench, width: int, batch: int) -> Row:
    """Tokens a second, beside the same generation on the reference."""
    stop, sizes = dq.Stop.exactly(8), bench.sizes
    prompt = torch.randint(0, VOCABULARY, (batch, sizes.prompt), device=bench.device)
    backends: tuple[Backend, Backend] = (bench.backend, "reference")
    work = []
    for backend in backends:
        lm = block(Bench(bench.device, sizes, backend), width, stop, 1).eval()

        def generate(lm: dq.CausalLM = lm) -> None:
            with bench.half():
                lm.generate(prompt, max_new_tokens=sizes.new_tokens, sweep=dq.Simultaneous())

        work.append(bench.run(generate))
    pairs = interleave(work[0], work[1], max(2, sizes.runs // 3))
    mine, theirs = (batch * sizes.new_tokens / time for time in (pairs.ours, pairs.theirs))
    spread = (1 / pairs.spread[1], 1 / pairs.spread[0])
    case = f"d_model {width}, batch {batch}, 8 iterations a token"
    return Row(case, "tokens/s", mine, "reference", theirs, 1 / pairs.ratio, pairs.runs, spread, None, None)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cuda, cuda:N or cpu, got {name!r}")
    return device


def main() -> None:
    """Run everything, and write it down under the device's name."""
    parser = command_line(__doc__ or "")
    parser.add_argument("--device", default="cuda", type=_device, help="cuda, or cpu at toy size")
    parser.add_argument("--backend", default="auto", choices=("auto", "reference", "mamba_ssm"))
    options = parser.parse_args()
    device = options.device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --device cpu runs the same code at toy size")
    sizes = TOY if device.type == "cpu" else Sizes(runs=3 if options.quick else 15)
    bench = Bench(device, sizes, resolved(options.backend, torch.empty(1, device=device)))
    print(f"backend: {bench.backend}, on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'}")
    rows = checks(bench)
    for width in sizes.widths:
        rows += costs(bench, width)
        rows += [generation(bench, width, batch) for batch in (1, 32)]
    report(rows, options)


if __name__ == "__main__":
    main()
