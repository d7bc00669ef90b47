"""The table and the figure of examples/evaluate.py."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from common.tables import figure, markdown, plt


def describe(row: dict[str, Any]) -> str:
    """How the model of a row was solved."""
    return "-" if row["sweep"] is None else f"{row['sweep']}, ≤ {row['max_steps']}, rtol {row['rtol']:g}"


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with a line per model, task and way to solve."""
    cases: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[row["model"], row["task"], describe(row)].append(row)
    lines = []
    for (model, task, way), case in cases.items():
        spread = [f" ± {row['stderr']:.3f}" if row["stderr"] is not None else "" for row in case]
        result = ", ".join(f"{row['metric']} {row['value']:.3f}{text}" for row, text in zip(case, spread, strict=True))
        iterations = case[0]["self_iterations"]
        iterations = "-" if iterations is None else f"{iterations:.1f}"
        lines.append((model, task, case[0]["questions"], way, result, iterations, converged(case[0])))
    return markdown(("model", "task", "questions", "solved", "result", "self-iterations", "converged"), lines)


def converged(row: dict[str, Any]) -> str:
    """The shares of the rows that converged (and of their tokens, if counted) and diverged."""
    if row["converged"] is None:
        return "-"
    tokens = "" if row["converged_tokens"] is None else f" ({percent(row['converged_tokens'])} of the tokens)"
    return percent(row["converged"]) + tokens + f", {percent(row['diverged'])} diverged" * (row["diverged"] > 0)


def percent(share: float) -> str:
    """A share in per cent; only exact shares become 0.0% and 100.0%."""
    return f"{share if share in (0, 1) else min(max(share, 0.001), 0.999):.1%}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars with standard errors: a panel per metric, tasks across, models side by side; dotted lines: chance."""
    drawn: dict[str, str] = {}
    for row in rows:  # the first metric of each task: the accuracy, if there is one
        drawn.setdefault(row["task"], row["metric"])
    panels = {metric: [task for task in drawn if drawn[task] == metric] for metric in drawn.values()}
    bars = list(dict.fromkeys((row["model"], describe(row)) for row in rows))
    width, height = max(6.0, 2.0 + (0.45 * len(bars) + 0.5) * len(drawn)), 3.6 + 0.2 * len(bars)
    with figure(path, len(panels), width, height) as axes:
        for axis, (metric, tasks) in zip(axes, panels.items(), strict=True):
            shown = [row for row in rows if row["metric"] == metric and row["task"] in tasks]
            for number, bar in enumerate(bars):
                chosen = [row for row in shown if (row["model"], describe(row)) == bar]
                doubt = any(row["converged"] is not None and row["converged"] < 1 for row in chosen)
                axis.bar(
                    [tasks.index(row["task"]) + (number + 0.5) / len(bars) * 0.8 - 0.4 for row in chosen],
                    [row["value"] for row in chosen],
                    0.76 / len(bars),
                    yerr=[row["stderr"] or 0.0 for row in chosen],
                    color=plt.get_cmap("tab20" if len(bars) > 10 else "tab10")(number % 20),
                    hatch="//" if doubt else None,
                    edgecolor="white",
                    capsize=3,
                    label=bar[0] + f", {bar[1]}" * (bar[1] != "-") + " (hatched: not all rows converged)" * doubt,
                )
            chances = {tasks.index(row["task"]): row["chance"] for row in shown if row["chance"] is not None}
            for place, chance in chances.items():
                label = "chance" if place == min(chances) else ""
                axis.hlines(chance, place - 0.45, place + 0.45, colors="#333333", linestyles=":", label=label)
            axis.set_xticks(range(len(tasks)), tasks, rotation=20 if len(drawn) > 3 else 0)
            axis.set(ylabel=metric, axisbelow=True)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", fontsize=8)
