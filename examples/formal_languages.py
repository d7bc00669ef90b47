"""Formal languages: an implicit model learns a task of the Chomsky hierarchy, next to an explicit model of more blocks.

A string comes in, then a blank for each symbol of the answer. One Mamba2 block is trained on strings of up to 40
symbols, which get longer as it learns them: first through a few unrolled iterations, then at its fixed point. It is
tested on strings of 40 to 256. The explicit model sees the same batches, in as many steps. Accuracy is that of the
answer's symbols, scaled so that chance is 0. Interrupt it and run it again: it goes on from its last checkpoint.

    python examples/formal_languages.py                                      # parity check
    python examples/formal_languages.py --quick                              # seconds: does it run?
    python examples/formal_languages.py --task modular_arithmetic_brackets
    python examples/formal_languages.py --task dyck_2 --layers 2
"""

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from common import options as opt
from common.processes import make_accelerator, one_process
from common.run import Progress, curve_rows, log_to, write_json, write_text
from common.tables import BLUE, GREEN, GREY, SHADED, cell, figure, markdown, smooth
from common.words import WordOptions, Words, claim, fit, solve_numbers

import deqseq as dq
from deqseq.check import check_choice
from deqseq.tasks import WordBatch, scaled_accuracy
from deqseq.tasks.formal import TASKS

log = logging.getLogger("formal_languages")

QUICK: dict[str, Any] = {"steps": 40, "d_model": 32, "lengths": (4,), "free_lengths": (8,)}
QUICK |= {"eval_lengths": (8, 16), "baselines": (1,)}


def check_task(name: str, value: str) -> None:
    """Refuse what is no task's name."""
    check_choice(name, value, TASKS)


@dataclass(frozen=True)
class Options(WordOptions):
    """An implicit model learns a formal language, next to explicit models of the same blocks."""

    task: Annotated[str, opt.Rule(check_task)] = "parity_check"
    """one of deqseq.tasks.formal.TASKS"""
    free_lengths: Annotated[tuple[opt.Size, ...], opt.Ascending] = (8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40)
    """lengths of the second phase"""
    eval_lengths: Annotated[tuple[opt.Size, ...], opt.Ascending] = (40, 64, 96, 128, 192, 256)
    """test lengths"""
    strings: opt.Size = 256
    """strings of each test length"""
    baselines: Annotated[tuple[opt.Blocks, ...], opt.Distinct] = (4,)
    """blocks of the explicit models"""
    checkpoint_every: opt.Count = 100
    """steps between checkpoints"""
    output: opt.Output | None = None
    """folder of the results; default: runs/formal_languages_TASK_SEED[_quick]"""
    quick: bool = False
    """small models and short strings, for seconds"""

    def __post_init__(self) -> None:
        opt.check_options(self)
        for name, length in (("free-lengths", max(self.free_lengths)), ("eval-lengths", min(self.eval_lengths))):
            if length < TASKS[self.task].shortest:
                raise ValueError(f"--{name} must be at least {TASKS[self.task].shortest} for {self.task}, got {length}")
        with torch.device("meta"):  # sizes that the library itself refuses
            make_model(self, None)

    @property
    def folder(self) -> str:
        """The folder of the results."""
        return self.output or f"runs/formal_languages_{self.task}_{self.seed}{'_quick' * self.quick}"


def read_options(arguments: list[str]) -> Options:
    """Read the command line; --quick changes the defaults."""
    return opt.parse(Options, arguments, quick=QUICK)


def make_model(options: Options, blocks: int | None) -> dq.CausalLM:
    """The implicit model, or an explicit one of ``blocks`` blocks."""
    torch.manual_seed(options.seed)
    sizes = {name: getattr(options, name) for name in ("d_model", "d_state", "headdim", "dropout")}
    backbone = dq.Mamba2(dq.Mamba2Config(n_layers=blocks or options.layers, injection=blocks is None, **sizes))
    inner = dq.ImplicitModel(backbone) if blocks is None else dq.ExplicitModel(backbone)
    return dq.CausalLM(TASKS[options.task].vocab_size, inner)


def train(name: str, lm: dq.CausalLM, options: Options, accelerator: Accelerator, plan: dict | None) -> Words:
    """Train to the end; a ``plan`` of another model's run is repeated."""
    task = TASKS[options.task]
    words = Words([task], options, plan, device=accelerator.device)

    def accuracy(output: dq.CausalLMOutput, batch: WordBatch) -> float:
        return scaled_accuracy(output.logits, batch.targets, task.chance)

    fit(accelerator, name, lm, words, Path(options.folder) / name.replace(" ", "-"), accuracy)
    return words


@torch.no_grad()
def evaluate(label: str, lm: dq.CausalLM, options: Options, words: Words) -> list[dict]:
    """Scaled accuracy at each length, and what the solves took."""
    task, device, rows = TASKS[options.task], lm.embedding.weight.device, []
    progress = Progress(f"evaluate {label}", len(options.eval_lengths))
    lm.eval()
    for length in progress.over(options.eval_lengths):
        batch = task.fixed(options.strings, length, seed=1000 + length, device=device)
        how, begun = {}, time.perf_counter()
        if isinstance(lm.model, dq.ImplicitModel):
            how = {"stop": dq.Stop(rtol=options.eval_rtol, max_steps=max(64, 4 * batch.inputs.shape[1]))}
        output = lm(batch.inputs, **how)
        accuracy = scaled_accuracy(output.logits, batch.targets, task.chance)
        row = {"task": options.task, "model": label, "length": length, "accuracy": accuracy} | solve_numbers(output)
        row |= {"strings": options.strings, "rtol": options.eval_rtol, "seed": options.seed}
        row |= {"seconds": round(time.perf_counter() - begun, 3)} | words.numbers
        rows.append(row)
        log.info("%s", row)
    progress.close()
    return rows


def most_frequent(options: Options) -> list[dict]:
    """The scores of a model that always gives the most frequent answer: what is learned lies above them."""
    task, rows = TASKS[options.task], []
    for length in options.eval_lengths:
        targets = task.fixed(options.strings, length, seed=1000 + length).targets
        answer = targets[targets >= 0].mode().values
        logits = torch.zeros(*targets.shape, task.vocab_size).index_fill(2, answer, 1.0)
        row = {"task": options.task, "model": "most frequent answer", "length": length}
        row["accuracy"] = scaled_accuracy(logits, targets, task.chance)
        rows.append(row | dict.fromkeys(("self_iterations", "converged")) | {"seed": options.seed})
    return rows


def table(rows: list[dict]) -> str:
    """Scaled accuracy and mean iterations, models down, lengths across, as Markdown; last the mean over the lengths."""
    lines: dict[str, list[dict]] = {}
    for row in rows:
        lines.setdefault(row["model"], []).append(row)
    cells = [
        [model, *(cell(row["accuracy"], row["self_iterations"], row["converged"]) for row in line), f"{mean(line):.3f}"]
        for model, line in lines.items()
    ]
    return markdown(["model", *dict.fromkeys(str(row["length"]) for row in rows), "mean"], cells)


def mean(rows: list[dict]) -> float:
    """The mean accuracy of some rows."""
    return sum(row["accuracy"] for row in rows) / len(rows)


def draw(rows: list[dict], curves: dict[str, list[dict]], longest: int, path: Path) -> None:
    """Two panels: accuracy in training, accuracy against length."""
    models = dict.fromkeys(row["model"] for row in rows)
    with figure(path, 2, 10.5) as (left, right):
        for model, colour in zip(models, (GREEN, BLUE, *[GREY] * len(models)), strict=False):
            chosen = [row for row in rows if row["model"] == model]
            x, y = ([row[name] for row in chosen] for name in ("length", "accuracy"))
            right.plot(x, y, color=colour, marker="o" if model in curves else "", label=model)
            curve = curves.get(model, [])
            left.plot([row["step"] for row in curve], smooth([row["accuracy"] for row in curve], 5), color=colour)
        right.axvspan(0, longest, color=SHADED, zorder=0, label="trained lengths")
        left.set(xlabel="training step", ylabel="scaled accuracy, strings of training", ylim=(-0.1, 1.05))
        right.set(xlabel="length of the string", ylabel="scaled accuracy", ylim=(-0.1, 1.05), xlim=(0, None))
        right.legend(fontsize=8)


def main(arguments: list[str]) -> None:
    """Train, evaluate, and write the table, the figure and the numbers."""
    one_process("formal_languages.py")
    options = read_options(arguments)
    accelerator = make_accelerator(options.device)
    output = claim("formal_languages", options, options.folder)
    log_to(output / "log.txt")
    print(f"{options.task}: {TASKS[options.task].vocab_size} symbols; results in {output}/")
    rows, curves, words = [], {}, None
    for blocks in (None, *options.baselines):
        label = "implicit" if blocks is None else f"explicit {blocks} block{'s' * (blocks > 1)}"
        lm = make_model(options, blocks).to(accelerator.device)
        words = train(label, lm, options, accelerator, words and words.plan)
        curves[label] = curve_rows(output / label.replace(" ", "-") / "curve.jsonl")
        rows += evaluate(label, lm, options, words)
    rows += most_frequent(options)
    write_json(output / "results.json", rows)
    write_text(output / "table.md", table(rows) + "\n")
    assert words is not None
    draw(rows, curves, words.reached, output / "formal_languages.png")
    print(f"\nscaled accuracy (mean iterations); {words.step} steps at lengths up to {words.reached}:\n")
    print(table(rows))
    print(f"\nfigure: {output}/formal_languages.png   numbers: {output}/results.json   log: {output}/log.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
