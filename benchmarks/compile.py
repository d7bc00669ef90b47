"""What ``model.compile()`` gains: the same model eager and compiled, in turns.

Both backbones with d_model 256 and 2 blocks: a simultaneous solve of 8 sequences of 256 tokens, a
sliding solve of the same, a training step through 4 phantom steps, and generation of 16 tokens at
batch 1. Solves run 8 iterations (the sliding one 8 a commit, and not on a GPU). The seconds of the
first call, which compiles, are reported beside each.
"""

from collections.abc import Iterator
from functools import partial

import torch
from harness import Row, Work, benchmark, on_gpu, seconds, time_row, value_row
from models import KINDS, language_model, random_ids

import deqseq as dq


def works_of(lm: dq.CausalLM, quick: bool) -> dict[str, Work]:
    """What is timed."""
    ids = random_ids(2, 16) if quick else random_ids(8, 256)

    @torch.no_grad()
    def solve(sweep: dq.Sweep, tokens: int) -> object:
        return lm(ids[:, :tokens], sweep=sweep)

    def train() -> None:
        loss = lm(ids, labels=ids).loss
        assert loss is not None
        loss.backward()
        lm.zero_grad()

    return {
        "8 iterations, 8 x 256 tokens": partial(solve, dq.Simultaneous(), 256),
        "Sliding(8), 8 x 32 tokens": partial(solve, dq.Sliding(8), 32),
        "training step (8 + 4), 8 x 256 tokens": train,
        "16 new tokens, batch 1, prompt 32": partial(lm.generate, ids[:1, :32], max_new_tokens=16),
    }


def rows(quick: bool) -> Iterator[Row]:
    """Every work of both backbones, eager beside compiled; a quick run compiles one."""
    for kind in ("Llama",) if quick else KINDS:
        solve = dq.SolveConfig(stop=dq.Stop(rtol=0.0, max_steps=8))
        eager, compiled = (language_model(kind, 64 if quick else 256, solve) for _ in range(2))
        compiled.compile()
        theirs, ours = (works_of(lm, quick) for lm in (eager, compiled))
        for name, work in list(ours.items())[: 1 if quick else None]:
            if on_gpu() and "Sliding" in name:
                continue
            case = f"{kind}, {name}"
            yield value_row(case, "s, first call", seconds(work))
            work()  # kinds of call that only a second run meets
            yield time_row(case, work, "eager", theirs[name], runs=3 if quick else 15)


main = benchmark(__doc__, rows, device=True)

if __name__ == "__main__":
    main()
