"""The tables of guides/choosing.md, from benchmarks/results/choosing.json."""

import json
from collections.abc import Sequence
from pathlib import Path

from show import table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "choosing.json"

NAMES = {"max_token": "token", "frobenius": "row"}
"""What the committed run calls the norms of today."""

Numbers = dict[str, float]


def answers(question: str, model: str, length: int) -> dict[str, Numbers]:
    """The numbers, by metric, of every setting that was tried for a question."""
    found: dict[str, Numbers] = {}
    for row in json.loads(RESULTS.read_text()):
        *asked, setting = row["case"].split(", ", 3)
        for old, new in NAMES.items():
            setting = setting.replace(old, new)
        if asked == [question, model, str(length)]:
            found.setdefault(setting, {})[row["metric"]] = row["ours"]
            if row["ratio"] is not None:
                found[setting][f"{row['metric']}, ratio"] = row["ratio"]
    if not found:
        raise KeyError(f"{RESULTS.name} has no rows of {question!r} for {model} at length {length}")
    return found


def share(number: float) -> str:
    """A share of one in per cent."""
    return f"{100 * number:.3g}"


def count(number: float) -> str:
    """A count, or a mean of counts."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


MODELS = ("parity", "A5")
SHARES = ("converged", "accuracy, last token", "accuracy, all tokens", "forced")
HEADERS = {
    "converged": "% converged",
    "accuracy, last token": "% right at the last token",
    "accuracy, all tokens": "% right at all tokens",
    "forced": "% forced",
    "updates per token": "updates",
}


def compared(question: str, columns: Sequence[tuple[int, str]], first: str, settings: Sequence[str] = ()) -> str:
    """A table: settings down, lengths and metrics across, parity and A5 in each cell.

    Args:
        question: what was varied.
        columns: length and metric of each column.
        first: header of the settings' column.
        settings: which ones, in this order. Default: all.
    """
    found = {(model, length): answers(question, model, length) for model in MODELS for length, _ in columns}
    names = settings or tuple(found[MODELS[0], columns[0][0]])
    rows = []
    for name in names:
        cells = []
        for length, metric in columns:
            write = share if metric in SHARES else count
            cells.append(" / ".join(write(found[model, length][name][metric]) for model in MODELS))
        rows.append([f"`{name.removesuffix(', Simultaneous()')}`", *cells])
    return table([first, *(f"{HEADERS.get(metric, metric)}, {length}" for length, metric in columns)], rows)


def estimators(length: int, settings: Sequence[str] = ()) -> str:
    """The table of gradient estimators, or of some: bias at the fixed point, bias as trained, and work."""
    found = {model: answers("gradient", model, length) for model in MODELS}
    work = ("evaluations without a graph", "evaluations with a graph", "backward passes", "peak MiB")
    rows = []
    for name in settings or found[MODELS[0]]:
        numbers = [found[model][name] for model in MODELS]
        cells = [
            " / ".join(f"{one[f'{part}, {where}']:.3g}" for one in numbers)
            for part, where in (
                ("cosine", "fixed point"),
                ("norm", "fixed point, ratio"),
                ("cosine", "training's stop"),
                ("norm", "training's stop, ratio"),
            )
        ]
        rows.append([f"`{name}`", *cells, *(" / ".join(count(one[metric]) for one in numbers) for metric in work)])
    bias = ("cosine", "norm", "cosine as trained", "norm as trained")
    header = ("estimator", *bias, "without graph", "with graph", "backward", "peak MiB")
    return table(header, rows)


def training_budgets() -> str:
    """What the budget of training solves does to the trained model, from benchmarks/results/training_sweeps.json."""
    found: dict[str, Numbers] = {}
    for row in json.loads((RESULTS.parent / "training_sweeps.json").read_text()):
        found.setdefault(row["case"], {})[row["metric"]] = row["ours"]
    rows = [
        [f"`{case}`", count(numbers["updates per token"]), f"{numbers['accuracy, Simultaneous()']:.3f}"]
        for case, numbers in found.items()
    ]
    return table(("sweep and budget of training", "updates a step", "right at the last token"), rows)
