"""In words: an implicit model learns to follow balls or programs, next to explicit models and RNNs.

A story comes in, and each of its questions is to be answered; the answers do not stand in the text:

    swap 1 and 3 . swap 3 and 5 . where is 5 ?                        1
    x = 3 ; y = x + 9 ; repeat 2 : x = x + y ; print x ;              7

One block is trained on stories of up to 12 sentences, which get longer as it learns them, and
tested on up to 96. Baselines are trained with three learning rates each, and the best is shown.
Interrupt it and run it again: it goes on from its last checkpoint.

    python examples/reasoning.py                                     # balls
    python examples/reasoning.py --quick                             # seconds: does it run?
    python examples/reasoning.py --task programs                     # with options of its own
    python examples/reasoning.py --backbone llama --baselines 1 4    # Transformer blocks
"""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from comparison import Rows, compare, draw, report, right_by, solve_numbers
from recipe import WINDOW, Recipe, with_start
from run_folder import claimed_folder, markdown
from run_folder import read_options as parse
from torch import Tensor
from training_loop import one_process

import deqseq as dq
from deqseq.tasks import Balls, Programs, Story, WordBatch

TASKS: dict[str, Story] = {"balls": Balls(), "programs": Programs()}
STORIES = 256  # of each test length
# defaults of --task programs, whose values depend on each other
PROGRAMS: dict[str, Any] = {"mlp_width": 128, "embedding_std": 0.1, "dropout": 0.0}
PROGRAMS |= {"unrolled_start": 0.5, "phantom_steps": 8, "label_smoothing": 0.1}
PROGRAMS |= {"batch": 64, "batch_tokens": 384, "full_share": 0.7, "learned": 0.98}
PROGRAMS |= {"lengths": (1, 2, 3, 4, 5), "free_lengths": (5, 6, 8, 12), "lr_factor": 0.2}
PROGRAMS |= {"steps": 16000, "falling": 600}
QUICK: dict[str, Any] = {"steps": 40, "d_model": 32, "lengths": (1,), "free_lengths": (2,)}
QUICK |= {"eval_lengths": (2, 4), "baselines": ("1", "lstm"), "baseline_lrs": ()}


@dataclass(frozen=True)
class Options(Recipe):
    """An implicit model learns to follow stories, next to explicit models and RNNs."""

    task: Literal["balls", "programs"] = "balls"  # what is followed
    lengths: tuple[int, ...] = (1, 2, 3, 4)  # sentences of the first phase, unrolled
    free_lengths: tuple[int, ...] = (4, 5, 6, 8, 10, 12)  # sentences when solved
    eval_lengths: tuple[int, ...] = (12, 24, 48, 96)  # sentences of the tests
    baselines: tuple[str, ...] = ("1", "4", "lstm", "gru")  # what it is compared with
    baseline_lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2)  # theirs, of which the best is shown


def read_options(arguments: Sequence[str]) -> Options:
    """Read the command line."""
    programs = re.search(r"--task[ =]programs", " ".join(arguments))
    return parse(Options, arguments, QUICK, PROGRAMS if programs else None)


def accuracy(output: dq.CausalLMOutput, batch: WordBatch) -> float:
    """Share of the right answers."""
    asked = batch.targets != -100
    return (output.logits.argmax(-1) == batch.targets)[asked].float().mean().item()


@torch.no_grad()
def evaluate(lm: dq.CausalLM, options: Options) -> Iterator[dict[str, Any]]:
    """Accuracy of the last answers, of all, and by hops; and what the solves took."""
    task, how = TASKS[options.task], {}
    if isinstance(lm.model, dq.ImplicitModel):
        stop = dq.Stop(rtol=0.01, max_steps=64)
        how = {"sweep": dq.Sliding(WINDOW), "stop": stop, "solver": dq.Adaptive()}
    for length in options.eval_lengths:
        stories = task.fixed(STORIES, length, seed=1000 + length)
        hops = task.answers(stories.inputs).hops
        batch, begun = with_start(stories, task, options), time.perf_counter()
        output = lm(batch.inputs.to(options.device), **how)
        seconds = time.perf_counter() - begun
        guesses = output.logits.argmax(-1)[:, -hops.shape[1] :].cpu()  # without a start token
        right = guesses == stories.targets
        yield {
            "task": options.task,
            "length": length,
            "sweep": "sliding" if how else "single pass",
            "accuracy": right[:, -1].float().mean().item(),
            "answers": right[hops >= 0].float().mean().item(),
            "by_hops": right_by(hops, right),
            **solve_numbers(output),
            "sequences": STORIES,
            "seconds": round(seconds, 3),
        }


def hops_table(rows: Rows) -> str:
    """Accuracy by hops, all tested lengths together, as Markdown."""
    counts: dict[str, dict[str, Tensor]] = {}
    for row in rows:
        sums = counts.setdefault(row["model"], {})
        for hops, numbers in row["by_hops"].items():
            sums[hops] = sums.get(hops, torch.zeros(2)) + torch.tensor(numbers)
    columns = sorted({hops for sums in counts.values() for hops in sums}, key=int)
    lines = [
        [model, *(f"{sums[hops][0] / sums[hops][1]:.3f}" for hops in columns)]
        for model, sums in counts.items()
    ]
    return markdown(["hops, from", *columns], lines)


def main(arguments: Sequence[str]) -> None:
    """Train, evaluate, and write the numbers and the figure."""
    one_process("reasoning.py")
    options = read_options(arguments)
    suffix = "_llama" * (options.backbone == "llama") + "_quick" * options.quick
    folder = Path(options.output or f"runs/reasoning_{options.task}_{options.seed}{suffix}")
    with claimed_folder("reasoning.py", options, folder):
        rows, _ = compare(options, [TASKS[options.task]], accuracy, evaluate, folder)
        draw(folder / "reasoning.png", rows)
        report(folder, rows)
        print(f"\nall answers, by the number of sentences behind them:\n\n{hops_table(rows)}")


if __name__ == "__main__":
    main(sys.argv[1:])
