"""State tracking: the table and the figure of its results."""

from pathlib import Path

from common.tables import BLUE, GREEN, GREY, ORANGE, PURPLE, SHADED, cell, figure, markdown


def table(rows: list[dict]) -> str:
    """Accuracy and mean iterations, models down, lengths across, as Markdown."""
    lengths, lines = sorted({row["length"] for row in rows}), {}
    for row in rows:
        text = cell(row["accuracy"], row["self_iterations"], row["converged"])
        lines.setdefault((row["model"], row["sweep"]), []).append(text)
    return markdown(["model", "solved", *map(str, lengths)], [[*names, *cells] for names, cells in lines.items()])


def draw(rows: list[dict], compute: list[dict], trained: int, chance: float, path: Path) -> None:
    """Two panels: accuracy against length, accuracy against iterations."""
    styles = {
        "simultaneous": {"color": GREEN, "marker": "o", "linewidth": 2.5},
        "sequential": {"color": ORANGE, "marker": "o", "linestyle": "--", "markersize": 10, "mfc": "none"},
        "sliding": {"color": PURPLE, "marker": "s", "linestyle": ":", "markersize": 14, "mfc": "none"},
    }
    markers, lengths = iter("sDv^Px*" * 9), sorted({row["length"] for row in rows})
    with figure(path, 2, 10.5) as (left, right):
        for model, sweep in dict.fromkeys((row["model"], row["sweep"]) for row in rows):
            chosen = [row for row in rows if (row["model"], row["sweep"]) == (model, sweep)]
            style = styles.get(sweep) or {"color": GREY, "marker": next(markers), "linewidth": 1.2}
            label = f"{model}, {sweep}" if sweep in styles else model
            left.plot([row["length"] for row in chosen], [row["accuracy"] for row in chosen], label=label, **style)
        left.axvspan(lengths[0] / 1.3, trained * 1.15, color=SHADED, zorder=0, label="trained lengths")
        for length, colour in zip(dict.fromkeys(row["length"] for row in compute), (GREEN, BLUE), strict=False):
            chosen = [row for row in compute if row["length"] == length]
            x, y = ([row[key] for row in chosen] for key in ("self_iterations", "accuracy"))
            right.plot(x, y, color=colour, marker="o", linewidth=2, label=f"implicit, length {length}")
        budgets = sorted({row["self_iterations"] for row in compute})
        labels = {left: "sequence length (tokens)", right: "iterations, all tokens together"}
        for axis, ticks in ((left, lengths), (right, budgets)):
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.axhline(chance, color="#999999", linewidth=1, linestyle=":", label="chance")
            axis.set(ylim=(-0.03, 1.05), xlabel=labels[axis], ylabel="last-token accuracy")
            axis.legend(fontsize=8, labelspacing=0.9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        left.set_xlim(lengths[0] / 1.3, None)
