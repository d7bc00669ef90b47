"""How cost grows with the length, the batch, the width and the number of blocks.

From 512 tokens of one sequence, width 64 and one block, one size is changed at a time. The blocks
have random weights with which the iteration contracts. What is measured:

- a training step: 8 iterations of all tokens together and 4 phantom steps, with the backward pass;
  beside it the same evaluations by hand;
- a solve of all tokens with each sweep to a relative tolerance of 1e-3, and 8 evaluations of the
  block by hand;
- 16 new tokens after a prompt of that length, and as many evaluations of one token by hand.

The exponent is the slope of log(cost) against log(size), fitted to all sizes, the median of the
turns. It depends on the range: at small sizes every cost is flat. So ours is compared with the
exponent of the block by hand: no part of a solve may grow faster than the block. The memory of a
solve is its peak without what it returns and the projected inputs. A Llama is measured up to 4,096
tokens: attention grows with the square, in the block itself. Tokens solved one by one, or in a
window, have their memory measured up to 2,048 tokens: the profiler keeps every allocation. On a GPU
the length alone is varied, up to 131,072 tokens (Llama 32,768), and all tokens are solved together.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from harness import (
    MEBIBYTE,
    Row,
    Work,
    benchmark,
    on_gpu,
    paired_row,
    peak_memory,
    take_turns,
    value_row,
)
from models import KINDS, iterated, one_by_one, random_ids

import deqseq as dq
from deqseq.layers import apply_weight_norm
from deqseq.rows import tensors_of

ITERATIONS, PHANTOM, NEW, VOCABULARY = 8, 4, 16, 64
SWEEPS = {
    "Simultaneous": dq.Simultaneous(),
    "Sliding": dq.Sliding(8),
    "Sequential": dq.Sequential(),
}
AXES = {
    "length": (128, 512, 2048, 4096, 8192, 16384),
    "batch": (1, 4, 16, 64, 256),
    "width": (64, 128, 256, 512),
    "blocks": (1, 2, 4, 8),
}
BASE = {"length": 512, "batch": 1, "width": 64, "blocks": 1}
LONGEST_LLAMA, PROFILED = 4096, 2048  # tokens
ON_A_GPU = (2048, 8192, 32768, 131072)  # tokens, the last for Mamba2 alone
SCALES = {
    "in_proj": 0.1,
    "out_proj": 4.0,
    "q_proj": 0.2,
    "k_proj": 0.2,
    "v_proj": 0.2,
    "o_proj": 4.0,
    "gate_proj": 0.2,
}
BY_HAND = "the block by hand"


def contracting(kind: str, width: int, blocks: int) -> dq.Backbone[Any]:
    """Random blocks in which the injection outweighs the state."""
    torch.manual_seed(0)
    shared: dict[str, Any] = {"d_model": width, "n_layers": blocks, "weight_norm": False}
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

    def __init__(self, kind: str, length: int, batch: int, width: int, blocks: int) -> None:
        self.backbone = contracting(kind, width, blocks)
        solve = dq.SolveConfig(dq.Naive(), dq.Stop.exactly(ITERATIONS), dq.Phantom(PHANTOM))
        self.model = dq.ImplicitModel(self.backbone, solve)
        self.lm = dq.CausalLM(VOCABULARY, self.model)
        self.ids = random_ids(batch, length, seed=1, vocabulary=VOCABULARY)
        self.x = self.lm.embedding(self.ids).detach()
        self.stop = dq.Stop(rtol=1e-3, max_steps=64)

    def step(self) -> None:
        """A training step without the optimiser's."""
        loss = self.lm.train()(self.ids, labels=self.ids).loss
        assert loss is not None
        loss.backward()
        self.lm.zero_grad()

    def step_by_hand(self) -> None:
        """The evaluations of a training step, without a head."""
        iterated(self.backbone, self.x, ITERATIONS, PHANTOM).sum().backward()
        self.lm.zero_grad()

    @torch.no_grad()
    def solve(self, sweep: dq.Sweep) -> dq.ModelOutput:
        """All tokens, to the tolerance."""
        return self.model.eval()(self.x, stop=self.stop, sweep=sweep)

    def solver_memory(self, sweep: dq.Sweep) -> float:
        """MiB of a solve at its peak, without what it returns and the projected inputs."""
        output, inputs = self.solve(sweep), self.backbone.prepare(self.x)
        kept = tensors_of((output.value, output.status, output.stats, inputs))
        return (
            peak_memory(partial(self.solve, sweep))
            - sum(tensor.nbytes for tensor in kept) / MEBIBYTE
        )

    @torch.no_grad()
    def decode(self, cache: Any) -> None:
        """New tokens one by one, each the first of the sequence."""
        for _ in range(NEW):
            cache = self.lm.eval()(self.ids[:, :1], cache=cache, return_cache=True).cache

    @torch.no_grad()
    def works(self) -> dict[str, tuple[Work, Work]]:
        """By the name of the work, ours and the block by hand."""
        cache = self.lm.eval()(self.ids, stop=self.stop, return_cache=True).cache
        evaluations = torch.no_grad()(partial(iterated, self.backbone, self.x, ITERATIONS))
        tokens = partial(one_by_one, self.backbone, self.x[:, :1], cache, NEW, ITERATIONS)
        sweeps = {"Simultaneous": SWEEPS["Simultaneous"]} if on_gpu() else SWEEPS
        solves = {name: (partial(self.solve, sweep), evaluations) for name, sweep in sweeps.items()}
        return {
            "training step": (self.step, self.step_by_hand),
            **solves,
            "decoding": (partial(self.decode, cache), tokens),
        }


def along(
    kind: str, base: Mapping[str, int], axis: str, values: Sequence[int], turns: int
) -> Iterator[Row]:
    """Time, updates and memory at every size, then their exponents."""
    costs: dict[
        tuple[str, str], list[Any]
    ] = {}  # by work and metric: a number, or the seconds of each turn, per size
    for value in values:
        case = Case(kind, **{**base, axis: value})
        for work, (ours, theirs) in case.works().items():
            name, times = (
                f"{kind}, {work}, {axis} {value}",
                take_turns({"ours": ours, BY_HAND: theirs}, turns),
            )
            yield paired_row(name, times["ours"], BY_HAND, times[BY_HAND], metric="s", scale=1)
            measured: dict[str, Any] = dict(times)
            if work in SWEEPS:
                stats = case.solve(SWEEPS[work]).stats
                assert stats is not None
                measured["updates per token"] = stats.updates.double().mean().item()
            if work == "training step":
                measured["peak MiB"] = peak_memory(ours)
            elif work == "Simultaneous" or (work in SWEEPS and case.ids.shape[1] <= PROFILED):
                measured["peak MiB"] = case.solver_memory(SWEEPS[work])
            for metric, cost in measured.items():
                costs.setdefault((work, metric), []).append(cost)
                if metric not in times:
                    yield value_row(name, metric, cost)
    for work in dict.fromkeys(work for work, _ in costs):
        found = {metric: cost for (of, metric), cost in costs.items() if of == work}
        yield from exponents(kind, work, axis, values, found)


def slope(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Of the line through the logarithms, by least squares."""
    x, y = ([math.log(max(number, 1e-9)) for number in numbers] for numbers in (sizes, costs))
    return statistics.linear_regression(x, y).slope


def exponents(
    kind: str, work: str, axis: str, values: Sequence[int], costs: Mapping[str, list[Any]]
) -> Iterator[Row]:
    """How fast the costs of a work grow, and the time of the block."""
    case = f"{kind}, {work}, {axis}"
    mine, other = (
        [slope(values, turn) for turn in zip(*costs[who], strict=True)] for who in ("ours", BY_HAND)
    )
    ours, theirs = statistics.median(mine), statistics.median(other)
    linear = axis == "length" and work in ("Sliding", "Sequential") and kind == "Mamba2"
    goal = "ours <= 1.05" if linear else None
    yield value_row(case, "exponent of seconds", ours, BY_HAND, theirs, goal=goal)
    if not linear:
        yield value_row(case, "exponent above the block's", ours - theirs, goal="ours <= 0.1")
    for metric in ("peak MiB", "updates per token"):
        numbers = costs.get(metric, [])
        if len(numbers) > 1:
            flat = axis == "length" and work != "Simultaneous" and (linear or metric != "peak MiB")
            growth = slope(values[: len(numbers)], numbers)
            yield value_row(
                case, f"exponent of {metric}", growth, goal="ours <= 0.1" if flat else None
            )


def rows(quick: bool) -> Iterator[Row]:
    """Both backbones along every axis."""
    base, turns = ({**BASE, "length": 8, "width": 32}, 2) if quick else (BASE, 3)
    axes = {"length": (8, 16)} if quick else {"length": ON_A_GPU} if on_gpu() else AXES
    longest = ON_A_GPU[-2] if on_gpu() else LONGEST_LLAMA
    for kind in KINDS:
        for axis, values in axes.items():
            if kind == "Llama" and axis == "length":
                values = tuple(value for value in values if value <= longest)
            yield from along(kind, base, axis, values, turns)


main = benchmark(__doc__, rows, device=True)

if __name__ == "__main__":
    main()
