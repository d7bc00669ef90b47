"""Cached generation: tokens a second, and what an iteration costs beside the bare block's one-token step.

Both backbones with d_model 256 and 2 blocks continue a prompt of 256 tokens by 128, at batch 1 and 8, with 8
iterations a token. The peer is the loop that a careful user writes by hand: the blocks called on one token
with the cache that the same prompt left, as often as ``generate`` called them for the new tokens, the cache growing
alike. Ours is all that ``generate`` does after the first new token: solving, committing, head, choice. Both sides do
the same number of evaluations: the tolerance is zero, so that each solve spends its budget. The residual is looked at
in every iteration, or, in rows that say so, at the last one alone. The solver is the default, ``Adaptive()``; rows of a
constant damping show what it adds.
"""

import time
from dataclasses import dataclass
from statistics import median, quantiles

import torch
from harness import Row, arguments, judge, report

import deqseq as dq
from deqseq.layers import with_weights

ITERATIONS = 8
VOCABULARY = 1000


@dataclass(frozen=True)
class Sizes:
    """How much is generated, and how often."""

    prompt: int = 256
    new: int = 128
    runs: int = 7


def language_model(kind: str) -> dq.CausalLM:
    """An implicit language model of the benchmark's sizes, with random weights."""
    torch.manual_seed(0)
    if kind == "Mamba2":
        backbone = dq.Mamba2(dq.Mamba2Config(d_model=256, n_layers=2, d_state=64, headdim=64))
    else:
        backbone = dq.Llama(dq.LlamaConfig(d_model=256, n_layers=2, n_heads=4))
    return dq.CausalLM(VOCABULARY, dq.ImplicitModel(backbone)).eval()


class Decoding:
    """Generation after a prompt, and the bare steps beside it."""

    def __init__(self, lm: dq.CausalLM, batch: int, sizes: Sizes, solver: dq.Solver, stop: dq.Stop) -> None:
        self.lm, self.sizes, self.solver, self.stop = lm, sizes, solver, stop
        generator = torch.Generator().manual_seed(1)
        self.prompt = torch.randint(0, VOCABULARY, (batch, sizes.prompt), generator=generator)
        with torch.no_grad():
            self.cache = lm(self.prompt, return_cache=True, stop=stop).cache
            self.token = lm.embedding(self.prompt[:, :1])
        self.evaluations = ITERATIONS * (sizes.new - 1)

    def ours(self) -> float:
        """Seconds from the first new token to the last."""
        stamps: list[float] = []
        self.lm.generate(
            self.prompt,
            max_new_tokens=self.sizes.new,
            solver=self.solver,
            stop=self.stop,
            sweep=dq.Simultaneous(),  # the prompt is not timed
            callback=lambda _: stamps.append(time.perf_counter()),
        )
        return stamps[-1] - stamps[0]

    @torch.no_grad()
    def bare(self) -> float:
        """Seconds of as many one-token evaluations of the blocks, the cache growing as in generation."""
        assert not isinstance(self.lm.model, dq.RecurrentDepth)
        backbone, cache, z = self.lm.model.backbone, self.cache, torch.zeros_like(self.token)
        begun = time.perf_counter()
        backbone = with_weights(backbone)
        for _ in range(self.sizes.new - 1):
            assert cache is not None
            cache = cache.reserve(1)
            inputs = backbone.prepare(self.token, cache)
            for _ in range(ITERATIONS - 1):
                backbone(z, inputs, cache)
            _, aux = backbone(z, inputs, cache, need_aux=True)
            cache = backbone.advance(cache, aux, 1)
        return time.perf_counter() - begun


def rows(kind: str, batch: int, sizes: Sizes) -> list[Row]:
    """Time per iteration and tokens a second, with the residual measured every iteration, and once per token."""
    lm, found, seldom = language_model(kind), [], dq.Stop.exactly(ITERATIONS)
    settings: dict[str, tuple[dq.Solver, dq.Stop]] = {
        "the residual every iteration": (dq.Adaptive(), dq.Stop(rtol=0.0, max_steps=ITERATIONS)),
        "the residual once per token": (dq.Adaptive(), seldom),
        "Relaxed(0.8), the residual once per token": (dq.Relaxed(0.8), seldom),
    }
    for label, (solver, stop) in settings.items():
        decoding, times = Decoding(lm, batch, sizes, solver, stop), []
        for _ in range(sizes.runs + 1):
            times.append((decoding.ours(), decoding.bare()))
        ratios = [ours / bare for ours, bare in times[1:]]  # the first warms up
        ours, bare = (median(side) for side in zip(*times[1:], strict=True))
        low, _, high = quantiles(ratios, n=4)
        case, each = f"{kind}, batch {batch}, {label}", 1e3 / decoding.evaluations
        goal = "ratio <= 1.25" if isinstance(solver, dq.Adaptive) else None
        mine, theirs, ratio = ours * each, bare * each, median(ratios)
        timed = (sizes.runs, (low, high), goal, judge(goal, mine, ratio))
        found.append(Row(case, "ms per iteration", mine, "bare blocks, one token", theirs, ratio, *timed))
        speed = [batch * (sizes.new - 1) / seconds for seconds in (ours, bare)]
        per_second = ("tokens a second", speed[0], "bare blocks, one token", speed[1], None)
        found.append(Row(case, *per_second, sizes.runs, None, None, None))
    return found


def main() -> None:
    """Measure both backbones at both batch sizes."""
    options = arguments(__doc__ or "")
    sizes = Sizes(new=24, runs=4) if options.quick else Sizes()
    report([row for kind in ("Mamba2", "Llama") for batch in (1, 8) for row in rows(kind, batch, sizes)], options)


if __name__ == "__main__":
    main()
