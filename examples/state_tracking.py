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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from recipe import WINDOW, Accuracy, LengthSchedule, Recipe, make_curriculum, make_model, with_start
from run_folder import claimed_folder, markdown, naming, write_rows
from run_folder import read_options as parse
from training_loop import one_process, train

import deqseq as dq
from deqseq.tasks import Task, WordBatch, WordProblem, generators, parse_group

Rows = list[dict[str, Any]]
Curves = dict[int, list[tuple[int, float]]]

RTOL = 0.01  # relative tolerance of the evaluation
BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128)  # iterations of the figure's right panel
QUICK: dict[str, Any] = {"free_lengths": (8, 10, 12, 14, 16), "steps": 600}
QUICK |= {"baselines": (), "eval_lengths": (16, 32, 64)}


@dataclass(frozen=True)
class Options(Recipe):
    """An implicit model learns a word problem, next to explicit models of the same blocks."""

    group: str = "Z2"  # a group or product: Z2, S3, A5, D5, Q8, Z2xZ3, A5xM
    generators: int = 0  # inputs: a generating subset of this size; 0: every element
    # probability that a token's group element is the identity, in training; of several, one is
    # drawn for each batch
    identity_probability: tuple[float, ...] = (0.0,)
    eval_identity_probability: float | None = (
        None  # the same at evaluation; default: the last one of training
    )

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


def solve_numbers(output: dq.CausalLMOutput) -> dict[str, Any]:
    """Mean iterations, share of converged rows, mean updates of a token, evaluations of the map."""
    if (stats := output.stats) is None:
        return dict.fromkeys(("self_iterations", "converged", "token_updates", "evaluations"))
    values = {
        "self_iterations": stats.iterations,
        "converged": output.converged,
        "token_updates": stats.updates,
    }
    means = {name: value.float().mean().item() for name, value in values.items()}
    return means | {"evaluations": stats.evaluations}


def last_token_accuracy(output: dq.CausalLMOutput, batch: WordBatch) -> float:
    """Share of the sequences whose whole product is right."""
    return (output.logits[:, -1].argmax(-1) == batch.targets[:, -1]).float().mean().item()


def whole_sequence_accuracy(output: dq.CausalLMOutput, batch: WordBatch) -> float:
    """Share of the sequences in which the product of every prefix is right."""
    right = (output.logits.argmax(-1) == batch.targets) | (batch.targets == -100)
    return right.all(-1).float().mean().item()


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
        batch = with_start(
            task.fixed(count, length, seed=1000 + length, device=options.device), task, options
        )
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
        row |= {"whole": whole_sequence_accuracy(output, batch)}
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


def compare(
    options: Any,
    tasks: Sequence[Task],
    accuracy: Accuracy,
    evaluate: Callable[..., Iterator[dict]],
    folder: Path,
) -> tuple[Rows, dq.CausalLM]:
    """Train and evaluate the implicit model, then explicit ones on the same batches."""
    rows, plan, models = [], None, []
    for blocks in (None, *options.baselines):
        label = "implicit" if blocks is None else f"explicit {blocks} block{'s' * (blocks > 1)}"
        lm = make_model(options, tasks[0].vocab_size, blocks).to(options.device)
        batches = LengthSchedule(tasks, options, accuracy, plan)
        train(label, lm, batches, make_curriculum(options), folder, options)
        about = {
            "model": label,
            "backbone": options.backbone,
            "seed": options.seed,
            "steps": batches.step,
        }
        about |= {"trained_to": batches.reached, "cpu_minutes": round(batches.cpu_seconds / 60, 2)}
        with torch.no_grad():
            for row in evaluate(lm.eval(), options):
                print(
                    f"{label}, {row['sweep']}, length {row['length']}: {row['accuracy']:.3f}",
                    flush=True,
                )
                rows.append(about | row)
        plan = batches.plan
        models.append(lm)
    return rows, models[0]


def table(rows: Rows, labels: Sequence[str] = ("model", "sweep"), column: str = "length") -> str:
    """Accuracy and mean iterations, models down, lengths across, as Markdown."""
    columns, lines = list(dict.fromkeys(row[column] for row in rows)), {}
    for row in rows:
        solves = "" if row["self_iterations"] is None else f" ({row['self_iterations']:.0f})"
        doubt = "" if row["converged"] in (None, 1.0) else f", {row['converged']:.1%} converged"
        cells = lines.setdefault(tuple(row[label] for label in labels), dict.fromkeys(columns, ""))
        cells[row[column]] = f"{row['accuracy']:.3f}{solves}{doubt}"
    return markdown(
        [*labels, *map(str, columns)], [[*key, *cells.values()] for key, cells in lines.items()]
    )


STYLES: dict[str, dict[str, Any]] = {
    "simultaneous": {"color": "#0b6e4f", "marker": "o", "linewidth": 2.5},
    "sequential": {
        "color": "#e4572e",
        "marker": "o",
        "linestyle": "--",
        "markersize": 10,
        "mfc": "none",
    },
    "sliding": {
        "color": "#5b2a86",
        "marker": "s",
        "linestyle": ":",
        "markersize": 14,
        "mfc": "none",
    },
    "single pass": {"color": "#7a8ca0", "marker": "D", "linewidth": 1.2},
}


def draw(path: Path, rows: Rows, budgets: Curves | None = None) -> None:
    """Accuracy against length, and against iterations where ``budgets`` has it."""
    figure = Figure(figsize=(5.25 * (2 if budgets else 1), 4), layout="constrained")
    axes = figure.subplots(1, 2 if budgets else 1, squeeze=False)[0]
    for key in dict.fromkeys((row["model"], row["sweep"]) for row in rows):
        points = [
            (row["length"], row["accuracy"]) for row in rows if (row["model"], row["sweep"]) == key
        ]
        axes[0].plot(*zip(*points, strict=True), label=", ".join(key), **STYLES[key[1]])
    for length, curve in (budgets or {}).items():
        axes[1].plot(*zip(*curve, strict=True), marker="o", label=f"implicit, length {length}")
    lengths, counts = sorted({row["length"] for row in rows}), BUDGETS
    axes[0].axvspan(
        lengths[0] / 1.3, rows[0]["trained_to"], color="#f2efe6", zorder=0, label="trained lengths"
    )
    for axis, ticks, label in zip(
        axes, (lengths, counts), ("length", "iterations, all tokens together"), strict=False
    ):
        axis.set(xlabel=label, ylabel="accuracy", xscale="log", ylim=(-0.05, 1.05))
        axis.set_xticks(ticks, list(map(str, ticks)))
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.legend(
            fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False
        )
    axes[0].set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    figure.savefig(path, dpi=150)


def report(folder: Path, rows: Rows) -> None:
    """Write the numbers and print the table."""
    write_rows(folder, rows)
    print(
        f"\naccuracy (mean iterations); {rows[0]['steps']} steps at lengths up to "
        f"{rows[0]['trained_to']}:\n"
    )
    print(table(rows))
    fewer = {row["length"]: row["sequences"] for row in rows if row["sequences"] < 256}
    print(
        "\n256 sequences of each length"
        + "".join(f"; {n} of length {length}" for length, n in fewer.items())
    )
    print(f"\nnumbers and figure: {folder}/")


def main(arguments: Sequence[str]) -> None:
    """Train, evaluate, and write the numbers and the figure."""
    one_process("state_tracking.py")
    options = read_options(arguments)
    suffix = "_llama" * (options.backbone == "llama") + "_quick" * options.quick
    folder = Path(options.output or f"runs/state_tracking_{options.group}_{options.seed}{suffix}")
    with claimed_folder("state_tracking.py", options, folder):
        rows, lm = compare(options, make_tasks(options)[0], last_token_accuracy, evaluate, folder)
        draw(folder / "state_tracking.png", rows, accuracy_by_budget(lm, options))
        report(folder, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
