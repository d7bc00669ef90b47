"""State tracking: an implicit model learns a word problem next to a deeper explicit model.

A sequence of group elements comes in, the product of each prefix is to come out (for Z2: the parity
of the ones so far). The implicit model is trained on short sequences, which get longer as it learns
them: first through a few unrolled iterations, then at its fixed point with phantom gradients. It is
evaluated on longer ones, solved simultaneously, sequentially and with a sliding window. An explicit
model of 4 blocks sees the same batches, in as many steps. Interrupt it and run it again: it goes on
from its last checkpoint. parity.py is a shorter script, to copy.

    python examples/state_tracking.py                                # parity
    python examples/state_tracking.py --quick                        # seconds: does it run?
    python examples/state_tracking.py --group S4                     # any group, the same recipe
    python examples/state_tracking.py --group A5 --generators 2      # the smallest unsolvable one
    python examples/state_tracking.py --backbone llama               # Transformer blocks
"""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparison import BUDGETS, NAMES, Curves, compare, draw, report, right_by, solve_numbers
from recipe import WINDOW, Recipe, with_start
from run_folder import claimed_folder, naming
from run_folder import read_options as parse
from torch import Tensor
from training_loop import one_process

import deqseq as dq
from deqseq.tasks import WordBatch, WordProblem, generators, parse_group

RTOL = 0.01  # relative tolerance of the evaluation
QUICK: dict[str, Any] = {"free_lengths": (8, 10, 12, 14, 16), "steps": 600}
QUICK |= {"baselines": (), "eval_lengths": (16, 32, 64)}


@dataclass(frozen=True)
class Options(Recipe):
    """An implicit model learns a word problem, next to explicit models of the same blocks."""

    group: str = "Z2"  # a group or product: Z2, S3, A5, D5, Q8, Z2xZ3, A5xM
    generators: int = 0  # inputs: a generating subset of this size; 0: every element
    # probability that a token's group element is the identity, in training; of several the first
    # one in unrolled lessons, one drawn for each batch in the others
    identity_probability: tuple[float, ...] = (0.0,)
    # the same at evaluation; default: the last one of training
    eval_identity_probability: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        make_tasks(self)


def read_options(arguments: Sequence[str]) -> Options:
    """Read the command line."""
    return parse(Options, arguments, QUICK)


def make_tasks(options: Options) -> tuple[list[WordProblem], WordProblem]:
    """The word problems of training, by identity probability, and that of the evaluation."""
    with naming("--group"):
        group = parse_group(options.group)
    with naming("--generators"):
        inputs = generators(group, options.generators) if options.generators else None
    with naming("--identity-probability"):
        training = [
            WordProblem(group, inputs, identity_probability=p) for p in options.identity_probability
        ]
    with naming("--eval-identity-probability"):
        probability = options.eval_identity_probability
        if probability is None:
            return training, training[-1]
        return training, WordProblem(group, inputs, identity_probability=probability)


def last_token_accuracy(output: dq.CausalLMOutput, batch: WordBatch) -> float:
    """Share of the sequences whose whole product is right."""
    return (output.logits[:, -1].argmax(-1) == batch.targets[:, -1]).float().mean().item()


def prefix_numbers(right: Tensor, hard: Tensor) -> dict[str, Any]:
    """Shares of the last ten products and of the whole sequences that are ``right``; right and all
    products by the number of ``hard`` tokens so far; of the first errors, how many are at a hard
    token, and how many there are. Both are masks over batch and length.
    """
    at, wrong = right.int().argmin(1, keepdim=True), ~right.all(1)
    return {
        "last_ten": right[:, -10:].float().mean().item(),
        "whole": right.all(-1).float().mean().item(),
        "by_hard": right_by(hard.cumsum(1), right),
        "first_errors": [int(hard.gather(1, at)[wrong].sum()), int(wrong.sum())],
    }


def evaluate(lm: dq.CausalLM, options: Options) -> Iterator[dict[str, Any]]:
    """Accuracies at each length, of an implicit model with each sweep, and its solves."""
    sweeps: dict[str, dq.Sweep | None] = {"single pass": None}
    if isinstance(lm.model, dq.ImplicitModel):
        sweeps = {
            "simultaneous": dq.Simultaneous(),
            "sequential": dq.Sequential(),
            "sliding": dq.Sliding(WINDOW),
        }
    _, task = make_tasks(options)
    for (name, sweep), length in itertools.product(sweeps.items(), options.eval_lengths):
        # iterations of all tokens together grow with the length: give the longer ones fewer
        # sequences
        count = min(256, max(16, 8192 // length)) if name == "simultaneous" else 256
        words = task.fixed(count, length, seed=1000 + length, device=options.device)
        batch = with_start(words, task, options)
        how: dict[str, Any] = {}
        if sweep is not None:
            stop = dq.Stop(
                rtol=RTOL, max_steps=max(64, 4 * length) if name == "simultaneous" else 64
            )
            how = {"sweep": sweep, "stop": stop, "solver": dq.Adaptive()}
        begun = time.perf_counter()
        output = lm(batch.inputs, **how)
        row = {
            "group": options.group,
            "length": length,
            "sweep": name,
            "accuracy": last_token_accuracy(output, batch),
        }
        guesses = output.logits[:, -length:].argmax(-1)  # without a start token
        row |= prefix_numbers(guesses == words.targets, task.hard(words.inputs))
        row |= solve_numbers(output) | {
            "sequences": count,
            "seconds": round(time.perf_counter() - begun, 3),
        }
        yield row | {"identity_probability": task.identity_probability}


@torch.no_grad()
def accuracy_by_budget(lm: dq.CausalLM, options: Options) -> Curves:
    """Accuracy after a number of iterations, at half and at twice the longest trained length."""
    (_, task), longest, curves = (
        make_tasks(options),
        max(*options.lengths, *options.free_lengths),
        {},
    )
    for length in (max(1, longest // 2), 2 * longest):
        batch = with_start(
            task.fixed(64, length, seed=2000 + length, device=options.device), task, options
        )
        outputs = ((n, lm(batch.inputs, stop=dq.Stop.exactly(n))) for n in BUDGETS)
        curves[length] = [(n, last_token_accuracy(output, batch)) for n, output in outputs]
    return curves


def main(arguments: Sequence[str]) -> None:
    """Train, evaluate, and write the numbers and the figure."""
    one_process("state_tracking.py")
    options = read_options(arguments)
    suffix = "_llama" * (options.backbone == "llama") + "_quick" * options.quick
    folder = Path(options.output or f"runs/state_tracking_{options.group}_{options.seed}{suffix}")
    with claimed_folder("state_tracking.py", options, folder):
        others = [NAMES.get(kind, f"explicit {kind} blocks") for kind in options.baselines]
        models = ", then ".join(["implicit", *others])
        print(f"models: {models}, each in at most {options.steps} steps; results: {folder}/")
        rows, lm = compare(options, make_tasks(options)[0], last_token_accuracy, evaluate, folder)
        budgets = accuracy_by_budget(lm, options) if options.implicit else None
        draw(folder / "state_tracking.png", rows, budgets)
        report(folder, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
