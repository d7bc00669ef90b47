"""What the examples on synthetic tasks share: a model beside its baselines, a table, a figure."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from recipe import RNNS, Accuracy, LengthSchedule, make_curriculum, make_model, size
from run_folder import markdown, write_rows
from torch import Tensor
from training_loop import train

import deqseq as dq
from deqseq.tasks import Task

Rows = list[dict[str, Any]]
Curves = dict[int, list[tuple[int, float]]]

NAMES = {"1": "explicit 1 block", "lstm": "LSTM", "gru": "GRU"}
COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # from so many on, to the next
BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128)  # iterations of the figure's right panel


def solve_numbers(output: dq.CausalLMOutput) -> dict[str, Any]:
    """Mean iterations, share of converged rows, mean updates of a token, evaluations of the map."""
    tokens = {"tokens": output.logits.shape[1]}
    if (stats := output.stats) is None:
        unsolved = dict.fromkeys(("self_iterations", "converged", "token_updates"))
        return tokens | unsolved | {"evaluations": 1}
    values = {
        "self_iterations": stats.iterations,
        "converged": output.converged,
        "token_updates": stats.updates,
    }
    means = {name: value.float().mean().item() for name, value in values.items()}
    return tokens | means | {"evaluations": stats.evaluations}


def right_by(counts: Tensor, right: Tensor) -> dict[str, list[int]]:
    """Right and all answers, by a count that each has: hops, or tokens before it; below 0: none."""
    shares = {}
    for least, beyond in zip(COUNTS, (*COUNTS[1:], 10**9), strict=True):
        chosen = (counts >= least) & (counts < beyond)
        if asked := int(chosen.sum()):
            shares[str(least)] = [int(right[chosen].sum()), asked]
    return shares


def compare(
    options: Any,
    tasks: Sequence[Task],
    accuracy: Accuracy,
    evaluate: Callable[..., Iterator[dict]],
    folder: Path,
) -> tuple[Rows, dq.CausalLM]:
    """Train and evaluate the implicit model, then the baselines; the first model is returned.

    Explicit models see its batches. An RNN has lessons of its own, which end when it has learned
    them: its steps take less time, and it needs more of them. Of a baseline's learning rates the
    rows have the one with the best mean accuracy in these tests.
    """
    kinds = [(None, options.lr)] if options.implicit else []
    kinds += itertools.product(options.baselines, options.baseline_lrs or (options.lr,))
    plan, models, best = None, [], dict[str, Rows]()
    for kind, lr in kinds:
        label = "implicit" if kind is None else NAMES.get(kind, f"explicit {kind} blocks")
        name = label if kind is None or not options.baseline_lrs else f"{label} lr {lr:g}"
        lm = make_model(options, tasks[0].vocab_size, kind).to(options.device)
        trained = replace(options, lr=lr)
        batches = LengthSchedule(tasks, trained, accuracy, None if kind in RNNS else plan)
        train(name, lm, batches, make_curriculum(options), folder, trained)
        evaluations = batches.tokens if kind in RNNS else batches.evaluations
        about = {
            "model": label,
            "backbone": kind if kind in RNNS else options.backbone,
            "parameters": size(lm),
            "lr": lr,
            "seed": options.seed,
            "steps": batches.step,
            "evaluations_a_step": round(evaluations / batches.step, 1),
            "trained_to": batches.reached,
            "cpu_minutes": round(batches.cpu_seconds / 60, 2),
        }
        found = []
        with torch.no_grad():
            for row in evaluate(lm.eval(), options):
                length = f"length {row['length']}: {row['accuracy']:.3f}"
                print(f"{name}, {row['sweep']}, {length}", flush=True)
                one_by_one = {"evaluations": row["tokens"]} if kind in RNNS else {}
                found.append(about | row | one_by_one)
        plan = plan or batches.plan
        models.append(lm)
        if mean(found) > mean(best.get(label, [])):
            best[label] = found
    return [row for rows in best.values() for row in rows], models[0]


def mean(rows: Rows) -> float:
    """Mean accuracy of some rows."""
    return sum(row["accuracy"] for row in rows) / len(rows) if rows else -math.inf


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
}
GREY = {"color": "#7a8ca0", "linewidth": 1.2}


def draw(path: Path, rows: Rows, budgets: Curves | None = None) -> None:
    """Accuracy against length, and against iterations where ``budgets`` has it."""
    figure = Figure(figsize=(5.25 * (2 if budgets else 1), 4), layout="constrained")
    axes = figure.subplots(1, 2 if budgets else 1, squeeze=False)[0]
    markers = itertools.cycle("D^vX*")  # of the baselines
    for key in dict.fromkeys((row["model"], row["sweep"]) for row in rows):
        chosen = [row for row in rows if (row["model"], row["sweep"]) == key]
        points = [(row["length"], row["accuracy"]) for row in chosen]
        style = STYLES.get(key[1]) or GREY | {"marker": next(markers)}
        axes[0].plot(*zip(*points, strict=True), label=", ".join(key), **style)
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
    steps = dict.fromkeys(f"{row['model']} {row['steps']}" for row in rows if "steps" in row)
    length = rows[0]["trained_to"]
    print(f"\naccuracy (mean iterations); lengths up to {length}; steps: {', '.join(steps)}\n")
    print(table(rows))
    fewer = {row["length"]: row["sequences"] for row in rows if row["sequences"] < 256}
    print(
        "\n256 sequences of each length"
        + "".join(f"; {n} of length {length}" for length, n in fewer.items())
    )
    print(f"\nnumbers and figure: {folder}/")
