"""Makes the models of deqseq.load_example: ``python docs/_tools/weights.py
parity|parity-unrolled|text [FILE]``.

The models of parity are trained as in tutorials/parity.md, the one of text on a file, in the
library all works of examples/corpus.py that are not held out, joined by line breaks. A5 is kept
from an earlier recipe: some of its rows do not settle at damping 0.8, which pages use.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import trange

import deqseq as dq
from deqseq.models.examples import EXAMPLES, WEIGHTS
from deqseq.tasks import WordProblem, parse_group
from deqseq.training import Curriculum, bounded, check_finite, free, unrolled

PLAIN, DAMPED = dq.SolveConfig(dq.Naive()), dq.SolveConfig(dq.Relaxed(0.8))
PHASES = {
    "parity": (unrolled(8, until=0.4, base=PLAIN), free(32, rtol=0.03, base=PLAIN)),
    "parity-unrolled": (unrolled(4, until=None, base=PLAIN),),
    "text": (bounded(4, 1, until=0.8, base=DAMPED), free(24, 4, rtol=0.03, base=DAMPED)),
}


def text_batches(path: str) -> Iterator[dict[str, torch.Tensor]]:
    """Random rows of 128 characters."""
    data, drawn = (
        torch.tensor(list(Path(path).read_text().encode("ascii", "ignore"))),
        torch.Generator().manual_seed(0),
    )
    while True:
        ids = data[torch.randint(len(data) - 128, (24, 1), generator=drawn) + torch.arange(128)]
        yield {"input_ids": ids, "labels": ids}


def main(name: str, *file: str) -> None:
    """Train one model and write its weights."""
    torch.manual_seed(0)
    lm, curriculum = EXAMPLES[name].build(), Curriculum(PHASES[name])
    if name == "text":
        batches = text_batches(*file)
        steps, lr, warm_up, fall, last, decay, clip = 2400, 3e-3, 100, 3, 0.02, 0.1, 1.0
    else:
        words = WordProblem(parse_group("Z2")).batches(32, 16, seed=0)
        batches = ({"input_ids": batch.inputs, "targets": batch.targets} for batch in words)
        steps, lr, warm_up, fall, last, decay, clip = 400, 1e-3, 50, 5, 0.0, 0.0, 0.25
    optimizer = torch.optim.AdamW(lm.parameters(), betas=(0.9, 0.95), weight_decay=decay)
    for step in trange(steps, mininterval=5):
        progress = step / steps
        curriculum.at(progress).apply(lm.train())
        optimizer.param_groups[0]["lr"] = lr * min(
            1.0, (step + 1) / warm_up, last + fall * (1 - progress)
        )
        loss = lm(**next(batches)).loss
        check_finite(loss, step=step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), clip)
        optimizer.step()
    weights = {key: tensor.contiguous() for key, tensor in lm.state_dict().items()}
    path = WEIGHTS / f"{name}.safetensors"
    save_file(weights, path, {"made_by": f"docs/_tools/weights.py {name}: {steps} steps, seed 0"})
    path.chmod(0o644)


if __name__ == "__main__":
    main(*sys.argv[1:])
