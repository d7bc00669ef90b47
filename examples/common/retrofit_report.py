"""The table and the figure of examples/retrofit.py."""

from pathlib import Path
from typing import Any

from common.tables import GREEN, GREY, ORANGE, SHADED, cell, figure, markdown


def table(rows: list[dict[str, Any]], rtol: float) -> str:
    """Bits per byte of held-out text, as Markdown."""
    lines = []
    for row in rows:
        solved = row["self_iterations"] is not None
        way = f"iterations: {row['budget']}" if row["budget"] else f"solved to {rtol:g}" if solved else "one pass"
        numbers = (row["self_iterations"], row["converged"]) if solved and not row["budget"] else (None, None)
        lines.append((row["model"], way, cell(row["bits_per_byte"], *numbers, digits=1)))
    return markdown(["model", "run", "bits per byte"], lines)


def draw(path: Path, rows: list[dict[str, Any]], mean: int) -> None:
    """The looped model's score against the budget, beside the two models that run once."""
    with figure(path, 1, 6) as (axis,):
        for (name, colour), dash in zip((("pretrained", GREY), ("unlooped", GREEN)), ("-", "--"), strict=True):
            (value,) = [row["bits_per_byte"] for row in rows if row["model"] == name]
            axis.axhline(value, color=colour, linestyle=dash, label=name)
        scores = {row["budget"]: row["bits_per_byte"] for row in rows if row["budget"]}
        axis.plot(list(scores), list(scores.values()), "o-", color=ORANGE, label="looped")
        axis.axvspan(1, mean, color=SHADED, zorder=0)
        axis.set(xscale="log", xticks=list(scores), xticklabels=list(scores), ylabel="held-out bits per byte")
        axis.set_xlabel("iterations at test time; shaded: up to the mean in training")
        axis.minorticks_off()
        axis.legend()
