"""Puzzles: a block that sees all cells is iterated until the cells agree.

One small Transformer block, not causal, is trained on Sudokus or mazes for some CPU minutes, and
tested on held-out ones with more and more iterations. ``--model trm`` is the recurrence of Tiny
Recursive Models, ``explicit`` an ordinary Transformer of ``--layers`` blocks. Interrupt it and run
it again: it goes on from its last checkpoint.

    python examples/puzzles.py                                       # Sudoku, 6 x 6: 6 minutes
    python examples/puzzles.py --quick                               # seconds: does it run?
    python examples/puzzles.py --puzzle sudoku9 --givens 36 --width 128 --minutes 60
    python examples/puzzles.py --puzzle maze --mixer convolution --test-others 15 21
    python examples/puzzles.py --model trm --solver naive --gradient one_step
"""

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from comparison import table
from matplotlib.figure import Figure
from puzzle_models import SUPERVISIONS, make_layers, make_model
from puzzle_tasks import Maze, Puzzles, Sudoku
from run_folder import claimed_folder, naming, write_rows
from run_folder import read_options as parse
from torch import Tensor
from torch.optim.swa_utils import AveragedModel
from training_loop import RunOptions, check_options, one_process

import deqseq as dq
from deqseq.training import check_finite

WARMUP, SAVED_EVERY = 200, 30.0  # updates; seconds
SHOWN = (1, 2, 4, 8, 16, 32)  # iterations of the picture
QUICK: dict[str, Any] = {"puzzle": "sudoku4", "givens": 6, "minutes": 0.1, "width": 32}
QUICK |= {"train_puzzles": 64, "test_puzzles": 16, "test_iterations": (4, 16)}


@dataclass(frozen=True)
class Options(RunOptions):
    """A block that sees all cells learns to solve puzzles."""

    puzzle: Literal["sudoku4", "sudoku6", "sudoku9", "maze"] = "sudoku6"  # what is solved
    givens: int = 14  # Sudoku: digits that are given
    side: int = 11  # maze: cells of a side, in training
    hints: float = 0.0  # Sudoku: share of a batch in which more digits are given
    csv: str = ""  # Sudoku: a file of puzzles and solutions; default: own ones
    model: Literal["deq", "trm", "explicit"] = "deq"  # which recurrence
    mixer: Literal["attention", "convolution"] = "attention"  # how cells see others
    width: int = 96  # of the states
    layers: int = 1  # blocks, each with its own weights
    solver: Literal["naive", "relaxed", "adaptive", "anderson"] = "adaptive"  # of all solves
    gradient: Literal["phantom", "one_step", "implicit", "unrolled"] = "phantom"  # in training
    iterations: int = 16  # in training, at most; deq only
    train_puzzles: int = 10_000  # puzzles that are trained on, each under many names
    test_puzzles: int = 1000  # held-out puzzles
    test_iterations: tuple[int, ...] = (4, 16, 64, 256)  # budgets of the test
    test_others: tuple[int, ...] = ()  # more tests: sides of mazes, givens of 9 x 9
    batch: int = 64  # puzzles of an update
    lr: float = 1e-3  # learning rate, after 200 updates of warm-up
    minutes: float = 6.0  # of CPU time in training

    INTERVALS: ClassVar = {"hints": "[0, 1]"}
    FREE: ClassVar = (*RunOptions.FREE, "test_iterations", "test_others")

    def __post_init__(self) -> None:
        check_options(self)
        if self.test_others and self.puzzle in ("sudoku4", "sudoku6"):
            raise ValueError(f"--test-others must be empty: too few solutions of {self.puzzle}")
        for side in (self.side, *self.test_others) if self.puzzle == "maze" else ():
            if side % 2 == 0 or side < 5:
                raise ValueError(f"sides of mazes must be odd, 5 or more, got {side}")
        if self.csv and (self.puzzle == "maze" or not Path(self.csv).is_file()):
            raise ValueError(f"--csv must be a file of Sudokus, got {self.csv!r} for {self.puzzle}")
        with naming("--width, --layers"):
            make_layers(self)


def read_options(arguments: Sequence[str]) -> Options:
    """Read the command line."""
    return parse(Options, arguments, QUICK)


def make_task(options: Options, other: int = 0) -> Sudoku | Maze:
    """The task, or one with mazes of another side, with Sudokus of other givens."""
    if options.puzzle == "maze":
        return Maze(other or options.side)
    side, csv = int(options.puzzle[-1]), "" if other else options.csv
    return Sudoku(side, other or options.givens, csv, options.hints)


def moving_mean(mean: Tensor, weight: Tensor, updates: Tensor | int) -> Tensor:
    """The exponential moving mean of about 1,000 updates, or of nearly all if they are fewer."""
    return mean + (weight - mean) * max(0.001, 9 / (10 + int(updates)))


class Run:
    """A model in training: its weights and their mean, its optimizer, and how long it has taken."""

    def __init__(self, options: Options, task: Sudoku | Maze, path: Path) -> None:
        self.options, self.task, self.path = options, task, path
        self.lm = make_model(options, task).to(options.device)
        self.mean = AveragedModel(self.lm, avg_fn=moving_mean)
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.parts = {"model": self.lm, "mean": self.mean, "optimizer": self.optimizer}
        self.step, self.seconds, self.saved = 0, 0.0, 0.0
        if path.exists():
            found = torch.load(path, weights_only=True, map_location=options.device)
            for name, part in self.parts.items():
                part.load_state_dict(found[name])
            self.step, self.seconds = found["step"], found["seconds"]
            print(f"going on from step {self.step}")

    def train(self, puzzles: Puzzles) -> None:
        """Train until the time is over."""
        shown = time.monotonic()
        while self.seconds < 60 * self.options.minutes:
            begun = time.process_time()
            drawn = torch.Generator().manual_seed(self.options.seed * 2**32 + self.step)
            rows = torch.randint(len(puzzles.inputs), (self.options.batch,), generator=drawn)
            batch = self.task.varied(Puzzles(*(part[rows] for part in puzzles)), drawn)
            inputs, targets = (part.to(self.options.device) for part in batch)
            torch.manual_seed(self.options.seed * 2**32 + self.step)
            loss = self.update(inputs, targets)
            self.seconds += time.process_time() - begun
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                minutes = f"{self.seconds / 60:.1f} of {self.options.minutes:g} CPU minutes"
                print(f"{minutes}, step {self.step}, loss {loss:.4f}", flush=True)
            if self.seconds - self.saved > SAVED_EVERY:
                self.save()
        self.save()

    def update(self, inputs: Tensor, targets: Tensor) -> float:
        """One update; with two states several, each from the states of the one before."""
        self.lm.train()
        states: dict[str, Any] = {}
        loss = 0.0
        for _ in range(SUPERVISIONS if self.options.model == "trm" else 1):
            output = self.lm(inputs, targets=targets, **states)
            loss = check_finite(output.loss, step=self.step)
            self.optimizer.zero_grad()
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = self.options.lr * min(1.0, (self.step + 1) / WARMUP)
            self.optimizer.step()
            self.mean.update_parameters(self.lm)
            self.step += 1
            states = {"start": output.states.detach()}
        return loss

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        unfinished = self.path.with_suffix(".unfinished")
        numbers = {"step": self.step, "seconds": self.seconds}
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        torch.save(numbers | parts, unfinished)
        unfinished.replace(self.path)
        self.saved = self.seconds


@torch.no_grad()
def test(lm: dq.TokenClassifier, puzzles: Puzzles, options: Options) -> Iterator[dict[str, Any]]:
    """Shares of right puzzles and cells after so many iterations."""
    warnings.simplefilter("ignore", dq.ConvergenceWarning)  # of small budgets
    device, explicit = options.device, options.model == "explicit"
    for budget in (1,) if explicit else options.test_iterations:
        stop = {} if explicit else {"stop": dq.Stop(rtol=0.01, max_steps=budget)}
        parts: dict[str, list[Tensor]] = {}
        for inputs, targets in zip(*(part.split(250) for part in puzzles), strict=True):
            output = lm(inputs.to(device), **stop)
            right = output.logits.argmax(-1).cpu() == targets
            numbers = {"exact": right.all(dim=1), "cells": right}
            if output.stats is not None:
                steps = output.stats.iterations.amax(dim=1)
                numbers |= {"converged": output.converged.cpu(), "taken": steps.cpu()}
            for name, values in numbers.items():
                parts.setdefault(name, []).append(values.double())
        means = {name: round(torch.cat(found).mean().item(), 4) for name, found in parts.items()}
        yield {"budget": budget} | means


def draw(path: Path, lm: dq.TokenClassifier, puzzles: Puzzles, side: int) -> None:
    """One puzzle being solved: what is read off after so many iterations, cells by residual."""
    inputs = puzzles.inputs[:1].to(next(lm.parameters()).device)
    given, maze = puzzles.inputs[0], lm.n_classes == 2
    figure = Figure(figsize=(11, 2.4), layout="constrained")
    panels: Any = figure.subplots(1, len(SHOWN))
    image: Any = None
    for axis, budget in zip(panels, SHOWN, strict=True):
        output = lm(inputs, stop=dq.Stop.exactly(budget))
        guess, residual = output.logits[0].argmax(-1).cpu(), output.stats.residual[0].cpu()
        shown = residual.clamp(0.003, 1).log10().masked_fill(maze & (given == 0), torch.nan)
        image = axis.imshow(shown.unflatten(0, (side, side)).numpy(), "YlOrRd", vmin=-2.5, vmax=0)
        for cell, known in enumerate(given.tolist()):
            text = str(known or int(guess[cell]) + 1)
            if maze:
                text = "" if known == 0 else "o" if known == 2 else "·" if guess[cell] else ""
            place = {"ha": "center", "va": "center", "weight": "bold" if known else "normal"}
            axis.text(cell % side, cell // side, text, **place)
        axis.set(title=f"{budget} iteration{'s' * (budget > 1)}", xticks=[], yticks=[])
    bar = figure.colorbar(image, ax=panels, label="residual of a cell", ticks=[-2, -1, 0])
    bar.ax.set_yticklabels([".01", ".1", "1"])
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str]) -> None:
    """Train, test, and write the numbers and the picture."""
    one_process("puzzles.py")
    options = read_options(arguments)
    folder = Path(options.output or f"runs/puzzles_{options.puzzle}_{options.model}_{options.seed}")
    with claimed_folder("puzzles.py", options, folder):
        task, number = make_task(options), options.train_puzzles
        count = number + options.test_puzzles
        with naming("--train-puzzles, --test-puzzles, --csv", SystemExit):
            every = task.make(count, options.seed)
        run = Run(options, task, folder / "checkpoint.pt")
        run.train(Puzzles(*(part[:number] for part in every)))
        lm: Any = run.mean.module.eval()
        size = sum(parameter.numel() for parameter in lm.parameters())
        about = vars(options) | {"updates": run.step, "parameters": size}
        about["cpu_minutes"] = round(run.seconds / 60, 2)
        held_out = Puzzles(*(part[number:] for part in every))
        rows, maze = [], options.puzzle == "maze"
        for other in (0, *options.test_others):
            puzzles, tested = held_out, other or (options.side if maze else options.givens)
            if other:
                puzzles = make_task(options, other).make(options.test_puzzles, options.seed + 1)
            rows += [about | {"tested": tested} | row for row in test(lm, puzzles, options)]
        write_rows(folder, rows)
        if options.model != "explicit":
            draw(folder / "puzzles.png", lm, held_out, task.side)
        print(f"\nshare of the puzzles that are solved whole; {run.step} updates:\n")
        shown = [
            {"accuracy": row["exact"], "self_iterations": row.get("taken"), "converged": None} | row
            for row in rows
        ]
        print(f"{table(shown, ['tested'], 'budget')}\n\nnumbers and picture: {folder}/")


if __name__ == "__main__":
    main(sys.argv[1:])
