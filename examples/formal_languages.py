"""Formal languages: an implicit model learns a task next to an explicit model of more blocks.

A string comes in, then a blank for each symbol of the answer. One Mamba2 block is trained on
strings of up to 40 symbols, which get longer as it learns them: first through a few unrolled
iterations, then at its fixed point. It is tested on strings of 40 to 256. The explicit model sees
the same batches, in as many steps. Accuracy is that of the answer's symbols, scaled so that chance
is 0. Interrupt it and run it again: it goes on from its last checkpoint.

    python examples/formal_languages.py                                      # parity check
    python examples/formal_languages.py --quick                              # seconds: does it run?
    python examples/formal_languages.py --task modular_arithmetic_brackets
    python examples/formal_languages.py --task bucket_sort --layers 2
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparison import Rows, compare, draw, report, solve_numbers
from formal_tasks import TASKS
from recipe import Recipe, with_start
from run_folder import claimed_folder
from run_folder import read_options as parse
from torch import Tensor
from training_loop import one_process

import deqseq as dq

RTOL = 0.01  # relative tolerance of the evaluation
STRINGS = 256  # of each test length
QUICK: dict[str, Any] = {"steps": 40, "d_model": 32, "lengths": (4,), "free_lengths": (8,)}
QUICK |= {"eval_lengths": (8, 16), "baselines": ("1",)}


@dataclass(frozen=True)
class Options(Recipe):
    """An implicit model learns a formal language, next to explicit models of the same blocks."""

    task: str = "parity_check"  # one of TASKS in formal_tasks.py
    free_lengths: tuple[int, ...] = (8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40)  # trained lengths
    eval_lengths: tuple[int, ...] = (40, 64, 96, 128, 192, 256)  # test lengths

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in TASKS:
            raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {self.task!r}")


def read_options(arguments: Sequence[str]) -> Options:
    """Read the command line."""
    return parse(Options, arguments, QUICK)


def scaled_accuracy(logits: Tensor, targets: Tensor, chance: float) -> float:
    r"""Share of right answers, scaled so that chance is 0 and all right is 1.

    .. math:: (\text{accuracy} - \text{chance}) / (1 - \text{chance})
    """
    scored = targets != -100
    accuracy = (logits[scored].argmax(-1) == targets[scored]).double().mean().item()
    return (accuracy - chance) / (1 - chance)


@torch.no_grad()
def evaluate(lm: dq.CausalLM, options: Options) -> Iterator[dict[str, Any]]:
    """Scaled accuracy at each length, and what the solves took."""
    task, implicit = TASKS[options.task], isinstance(lm.model, dq.ImplicitModel)
    for length in options.eval_lengths:
        batch = task.fixed(STRINGS, length, seed=1000 + length, device=options.device)
        batch, begun = with_start(batch, task, options), time.perf_counter()
        stop = dq.Stop(rtol=RTOL, max_steps=max(64, 4 * batch.inputs.shape[1]))
        output = lm(batch.inputs, **({"stop": stop} if implicit else {}))
        row = {
            "task": options.task,
            "length": length,
            "sweep": "simultaneous" if implicit else "single pass",
        }
        row |= {
            "accuracy": scaled_accuracy(output.logits, batch.targets, task.chance)
        } | solve_numbers(output)
        yield row | {"sequences": STRINGS, "seconds": round(time.perf_counter() - begun, 3)}


def most_frequent(options: Options) -> Rows:
    """The scores of a model that always gives the most frequent answer, to compare with."""
    task, rows = TASKS[options.task], []
    for length in options.eval_lengths:
        targets = task.fixed(STRINGS, length, seed=1000 + length).targets
        logits = torch.zeros(*targets.shape, task.vocab_size)
        logits[:, :, targets[targets >= 0].mode().values] = 1.0
        row = {
            "task": options.task,
            "model": "most frequent answer",
            "length": length,
            "sweep": "single pass",
        }
        row |= {
            "accuracy": scaled_accuracy(logits, targets, task.chance),
            "sequences": STRINGS,
            "seed": options.seed,
        }
        rows.append(row | dict.fromkeys(("self_iterations", "converged")))
    return rows


def main(arguments: Sequence[str]) -> None:
    """Train, evaluate, and write the numbers and the figure."""
    one_process("formal_languages.py")
    options = read_options(arguments)
    task = TASKS[options.task]
    name = f"formal_languages_{options.task}_{options.seed}{'_quick' * options.quick}"
    folder = Path(options.output or f"runs/{name}")

    def accuracy(output: dq.CausalLMOutput, batch: Any) -> float:
        return scaled_accuracy(output.logits, batch.targets, task.chance)

    with claimed_folder("formal_languages.py", options, folder):
        rows, _ = compare(options, [task], accuracy, evaluate, folder)
        rows += most_frequent(options)
        draw(folder / "formal_languages.png", rows)
        report(folder, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
