"""Other benchmarks on a GPU, in bfloat16 under autocast, with Mamba2's kernels where they are installed.

The bookkeeping of a solve beside TorchDEQ's; training steps of two blocks of width 768 and 2048 at length 2048, beside
loops by hand and unrolled; generation beside the bare blocks. The sizes are larger than those on a CPU, the cases and
goals are the same.
"""

from collections.abc import Iterator

import torch
from harness import Row, benchmark
from models import KINDS
from solver_overhead import SHAPES, bookkeeping, decoding
from training_step import language_models


def rows(quick: bool) -> Iterator[Row]:
    """The cases of other benchmarks at a GPU's sizes, on the default device."""
    runs = 2 if quick else 15
    with torch.no_grad():
        yield from bookkeeping((2, 4, 8) if quick else SHAPES[1], runs)
    for width in (64,) if quick else (768, 2048):
        with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
            yield from language_models(width, *((2, 8) if quick else (8, 2048)), turns=runs)
            for kind in KINDS:
                for batch in (1,) if quick else (1, 32):
                    yield from decoding(kind, batch, width, *((8, 4) if quick else (256, 128)), runs=runs)


main = benchmark(__doc__, rows, device=True)

if __name__ == "__main__":
    main()
