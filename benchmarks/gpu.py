"""Other benchmarks on a GPU, in bfloat16 under autocast, with Mamba2's kernels if installed.

The bookkeeping of a solve beside TorchDEQ's; training steps of two blocks of width 768 and 2048
with 4 x 2048 tokens, beside loops by hand and unrolled; generation beside the bare blocks. The
sizes are larger than those on a CPU, the goals are the same.
"""

from collections.abc import Iterator

import torch
from harness import Row, benchmark
from models import KINDS, language_model, random_ids
from solver_overhead import SHAPES, bookkeeping, decoding
from training_step import compared

import deqseq as dq
from deqseq.tasks import WordBatch

PHASES = {"bounded (4+1)": (4, 1), "free (24+4)": (24, 4)}


def training(kind: str, width: int, batch: int, length: int, turns: int) -> Iterator[Row]:
    """Steps of two blocks with random weights, all tokens together."""
    data = WordBatch(random_ids(batch, length), random_ids(batch, length, seed=1))
    solves = {
        name: iter([dq.SolveConfig(stop=dq.Stop.exactly(steps), gradient=dq.Phantom(phantom))])
        for name, (steps, phantom) in PHASES.items()
    }
    yield from compared(f"{kind} {width} x 2", language_model(kind, width), data, solves, turns)


def rows(quick: bool) -> Iterator[Row]:
    """The cases of other benchmarks at a GPU's sizes, on the default device."""
    turns = 2 if quick else 5
    with torch.no_grad():
        yield from bookkeeping((2, 4, 8) if quick else SHAPES[1], 5 * turns)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        for kind in KINDS:
            for width in (64,) if quick else (768, 2048):
                yield from training(kind, width, *((2, 8) if quick else (4, 2048)), turns=turns)
            for batch in (1,) if quick else (1, 32):
                width, prompt, new = (64, 8, 4) if quick else (2048, 256, 16)
                yield from decoding(kind, batch, width, prompt, new, runs=turns)


main = benchmark(__doc__, rows, device=True)

if __name__ == "__main__":
    main()
