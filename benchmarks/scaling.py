"""How cost grows with the length, the batch, the width and the number of blocks.

From 512 tokens of one sequence, width 64 and one block, one size is changed at a time. The blocks have random weights
with which the iteration contracts. What is measured:

- a training step: 8 iterations of all tokens together and 4 phantom steps, with the backward pass; beside it the same
  evaluations by hand, and the step of the explicit model, which has the same blocks and makes one evaluation;
- a solve of all tokens with each sweep to a relative tolerance of 1e-3, and 8 evaluations of the block by hand;
- 16 new tokens after a prompt of that length, and as many evaluations of one token by hand.

The exponent is the slope of log(cost) against log(size), fitted to all sizes; its spread is that of single turns. It
depends on the range: at small sizes every cost is flat. So ours is compared with the exponent of the block by hand: no
part of a solve may grow faster than the block. The memory of a solve is its peak without what it returns and the
projected inputs. A Llama is measured up to 4,096 tokens: attention grows with the square, in the block itself. Tokens
solved one by one, or in a window, have their memory measured up to 2,048 tokens: the profiler keeps every allocation.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from harness import (
    MEBIBYTE,
    Row,
    arguments,
    judge,
    paired,
    paired_row,
    peak_memory,
    report,
    take_turns,
    value_row,
    write,
)
from torch import Tensor

import deqseq as dq
from deqseq.layers import apply_weight_norm, with_weights

ITERATIONS, PHANTOM, NEW, VOCABULARY = 8, 4, 16, 64
SWEEPS: dict[str, dq.Sweep] = {
    "Simultaneous": dq.Simultaneous(),
    "Sliding": dq.Sliding(8),
    "Sequential": dq.Sequential(),
}
LENGTHS = (128, 512, 2048, 4096, 8192, 16384)
AXES = {"length": LENGTHS, "batch": (1, 4, 16, 64, 256), "width": (64, 128, 256, 512), "blocks": (1, 2, 4, 8)}
QUICK = {"length": (16, 64), "batch": (1, 4)}
LONGEST = {"Mamba2": LENGTHS[-1], "Llama": 4096}
PROFILED = 2048  # tokens, where a solve makes many small evaluations
SCALES = {"in_proj": 0.1, "out_proj": 4.0, "q_proj": 0.2, "k_proj": 0.2, "v_proj": 0.2, "o_proj": 4.0, "gate_proj": 0.2}
BY_HAND, EXPLICIT = "the block by hand", "explicit, one evaluation"


@dataclass(frozen=True)
class Size:
    """One case."""

    length: int = 512
    batch: int = 1
    width: int = 64
    blocks: int = 1


def contracting(kind: str, size: Size) -> dq.Backbone[Any]:
    """Random blocks in which the injection outweighs the state."""
    torch.manual_seed(0)
    shared = {"d_model": size.width, "n_layers": size.blocks, "weight_norm": False}
    if kind == "Mamba2":
        backbone = dq.Mamba2(dq.Mamba2Config(**shared, d_state=16, headdim=32))
    else:
        backbone = dq.Llama(dq.LlamaConfig(**shared, n_heads=4))
    with torch.no_grad():
        for name, part in backbone.named_modules():
            if isinstance(part, torch.nn.Linear):
                part.weight.mul_(SCALES.get(name.rpartition(".")[2], 1.0))
    apply_weight_norm(backbone)
    return backbone


class Case:
    """A model of one size, and what is timed."""

    def __init__(self, kind: str, size: Size) -> None:
        self.size, self.backbone = size, contracting(kind, size)
        solve = dq.SolveConfig(dq.Naive(), dq.Stop.exactly(ITERATIONS), dq.Phantom(PHANTOM))
        self.lm = dq.CausalLM(VOCABULARY, dq.ImplicitModel(self.backbone, solve))
        self.explicit = dq.CausalLM(VOCABULARY, dq.ExplicitModel(self.backbone))
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, VOCABULARY, (size.batch, size.length), generator=generator)
        self.x = self.lm.embedding(self.ids).detach()
        self.stop = dq.Stop(rtol=1e-3, max_steps=64)

    def step(self, lm: dq.CausalLM) -> None:
        """A training step without the optimiser's."""
        loss = lm.train()(self.ids, labels=self.ids).loss
        assert loss is not None
        loss.backward()
        lm.zero_grad()

    def step_by_hand(self) -> None:
        """The evaluations of a training step, without a head."""
        backbone = with_weights(self.backbone)
        inputs, z = backbone.prepare(self.x), torch.zeros_like(self.x)
        with torch.no_grad():
            for _ in range(ITERATIONS):
                z = backbone(z, inputs)[0]
        for _ in range(PHANTOM):
            z = backbone(z, inputs)[0]
        z.sum().backward()
        self.lm.zero_grad()

    @torch.no_grad()
    def solve(self, sweep: dq.Sweep) -> dq.ModelOutput:
        """All tokens, to the tolerance."""
        assert isinstance(self.lm.model, dq.ImplicitModel)
        return self.lm.eval().model(self.x, stop=self.stop, sweep=sweep)

    def solver_memory(self, sweep: dq.Sweep) -> int:
        """Bytes of a solve at its peak, without what it returns and the projected inputs."""
        kept = held(self.solve(sweep)) + held(self.backbone.prepare(self.x))
        return peak_memory(partial(self.solve, sweep)) - kept

    @torch.no_grad()
    def evaluations(self) -> None:
        """The block on all tokens."""
        backbone = with_weights(self.backbone)
        inputs, z = backbone.prepare(self.x), torch.zeros_like(self.x)
        for _ in range(ITERATIONS):
            z = backbone(z, inputs)[0]

    def prompted(self) -> Any:
        """The cache that the prompt leaves."""
        with torch.no_grad():
            return self.lm.eval()(self.ids, stop=self.stop, return_cache=True).cache

    @torch.no_grad()
    def decode(self, cache: Any) -> None:
        """New tokens one by one, each the first of the vocabulary."""
        token = self.ids[:, :1]
        for _ in range(NEW):
            cache = self.lm.eval()(token, cache=cache, return_cache=True, stop=dq.Stop.exactly(ITERATIONS)).cache

    @torch.no_grad()
    def decode_by_hand(self, cache: Any) -> None:
        """As many evaluations of one token, the cache growing alike."""
        x = self.x[:, :1]
        backbone = with_weights(self.backbone)
        for _ in range(NEW):
            inputs, z, aux = backbone.prepare(x, cache), torch.zeros_like(x), None
            for number in range(ITERATIONS):
                z, aux = backbone(z, inputs, cache, need_aux=number == ITERATIONS - 1)
            cache = backbone.advance(cache, aux, 1)

    def works(self) -> dict[str, Mapping[str, Callable[[], object]]]:
        """What takes turns: by the name of the work, ours and its peers."""
        train = {"ours": partial(self.step, self.lm), BY_HAND: self.step_by_hand}
        found: dict[str, Mapping[str, Callable[[], object]]] = {
            "training step": {**train, EXPLICIT: partial(self.step, self.explicit)}
        }
        for name, sweep in SWEEPS.items():
            found[name] = {"ours": partial(self.solve, sweep), BY_HAND: self.evaluations}
        cache = self.prompted()
        found["decoding"] = {"ours": partial(self.decode, cache), BY_HAND: partial(self.decode_by_hand, cache)}
        return found


@dataclass
class Curve:
    """The cost of one work at all sizes: seconds of each turn by name, MiB, updates per token."""

    seconds: list[Mapping[str, Sequence[float]]]
    memory: list[float]
    updates: list[float]


def held(output: object) -> int:
    """Bytes of the tensors in nested records."""
    if isinstance(output, Tensor):
        return output.nbytes
    if is_dataclass(output):
        return sum(held(getattr(output, field.name)) for field in fields(output) if field.name != "again")
    return sum(map(held, output)) if isinstance(output, list | tuple) else 0


def slope(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Of the line through the logarithms, by least squares."""
    x, y = ([math.log(max(number, 1e-9)) for number in numbers] for numbers in (sizes, costs))
    return statistics.linear_regression(x, y).slope


def measure(kind: str, base: Size, axis: str, values: Sequence[int], turns: int) -> Iterator[tuple[str, str, Curve]]:
    """Rows of every size as they come, then the curve of each work."""
    curves: dict[str, Curve] = {}
    for value in values:
        case = Case(kind, replace(base, **{axis: value}))
        for work, runs in case.works().items():
            curve = curves.setdefault(work, Curve([], [], []))
            curve.seconds.append(take_turns(runs, turns))
            if work in SWEEPS:
                output = case.solve(SWEEPS[work])
                assert output.stats is not None
                curve.updates.append(output.stats.updates.double().mean().item())
                if work == "Simultaneous" or case.size.length <= PROFILED:
                    curve.memory.append(case.solver_memory(SWEEPS[work]) / MEBIBYTE)
            elif work == "training step":
                curve.memory.append(peak_memory(runs["ours"]) / MEBIBYTE)
        print(f"{kind}, {axis} {value}: measured", flush=True)
    for work, curve in curves.items():
        yield work, axis, curve


def rows(kind: str, base: Size, axis: str, values: Sequence[int], turns: int) -> Iterator[Row]:
    """Seconds at every size beside the peers, then the exponents."""
    for work, name, curve in measure(kind, base, axis, values, turns):
        case = f"{kind}, {work}"
        for place, (value, times) in enumerate(zip(values, curve.seconds, strict=True)):
            for peer in [key for key in times if key != "ours"]:
                pairs = paired(times["ours"], times[peer])
                yield paired_row(f"{case}, {name} {value}", "s", pairs, peer, scale=1)
            for metric, numbers in (("peak MiB", curve.memory), ("updates per token", curve.updates)):
                if place < len(numbers):
                    yield value_row(f"{case}, {name} {value}", metric, numbers[place], "", None)
        yield from exponents(f"{case}, {name}", work, name, values, curve)


def exponents(case: str, work: str, axis: str, values: Sequence[int], curve: Curve) -> Iterator[Row]:
    """How fast the cost of a work grows, and that of the block."""
    turns = len(curve.seconds[0]["ours"])
    fitted = {
        name: [slope(values, [times[name][turn] for times in curve.seconds]) for turn in range(turns)]
        for name in curve.seconds[0]
    }
    ours, theirs = (statistics.median(fitted[name]) for name in ("ours", BY_HAND))
    spread = (min(fitted["ours"]), max(fitted["ours"]))
    linear = axis == "length" and work in ("Sliding", "Sequential") and case.startswith("Mamba2")
    goal = "ours <= 1.05" if linear else None
    judged = (goal, judge(goal, ours, None))
    yield Row(case, "exponent of seconds", ours, BY_HAND, theirs, None, turns, spread, *judged)
    if not linear:
        yield value_row(case, "exponent above the block's", ours - theirs, "", None, goal="ours <= 0.1")
    for metric, numbers in (("peak MiB", curve.memory), ("updates", curve.updates)):
        if len(numbers) > 1:
            flat = linear or metric == "updates"
            goal = "ours <= 0.1" if flat and axis == "length" and work != "Simultaneous" else None
            yield value_row(case, f"exponent of {metric}", slope(values[: len(numbers)], numbers), "", None, goal=goal)


def axes(kind: str, quick: bool) -> dict[str, Sequence[int]]:
    """The sizes of a backbone."""
    if quick:
        return dict(QUICK)
    return {axis: [size for size in sizes if axis != "length" or size <= LONGEST[kind]] for axis, sizes in AXES.items()}


def main() -> None:
    """Measure both backbones along every axis."""
    options, found = arguments(__doc__ or ""), []
    base, turns = (Size(length=32), 2) if options.quick else (Size(), 3)
    for kind in LONGEST:
        for axis, values in axes(kind, options.quick).items():
            found += rows(kind, base, axis, values, turns)
            write(found, options)  # an hour's work: what is measured is not lost with the rest
    report(found, options)


if __name__ == "__main__":
    main()
