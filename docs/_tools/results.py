"""Figures and tables for the pages, and committed results in them. Run as a script it prints
which goals the benchmarks meet: ``python docs/_tools/results.py``.
"""

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

COLOURS = ("#31688e", "#d1495b", "#66a182", "#edae49", "#7b5ea7")
INK = "#010203"  # stands for the colour of the page's text
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
plt.rcParams.update(
    {"figure.constrained_layout.use": True, "svg.fonttype": "none", "font.family": "sans-serif"}
)
plt.rcParams.update({"savefig.transparent": True} | dict.fromkeys(INKED, INK))
plt.rcParams["axes.prop_cycle"] = plt.cycler(color=COLOURS)
SCRIPTS = Path(__file__).parents[2] / "benchmarks"
Row = dict[str, Any]
Rows = Sequence[Row]
Panels = dict[str, dict[str, list[tuple[float, float]]]]


def svg(figure: Figure, alt: str) -> str:
    """A figure as inline SVG, in the colours of the page: those of a scheme are in
    ``assets/site.css``.
    """
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    plt.close(figure)
    drawing = target.getvalue().replace(INK, "currentColor")
    for number, colour in enumerate(COLOURS, 1):
        drawing = drawing.replace(colour, f"var(--plot-{number}, {colour})")
    return (
        '<figure class="plot" role="img" '
        f'aria-label="{alt}">{drawing[drawing.index("<svg") :]}</figure>'
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def load(name: str) -> list[Row]:
    """The rows of a committed result."""
    return json.loads((SCRIPTS / "results" / f"{name}.json").read_text())


def benchmarks() -> dict[str, list[Row]]:
    """The committed result of every benchmark that compares numbers with goals; no rows if it has
    not been run.
    """
    names = [
        path.stem
        for path in sorted(SCRIPTS.glob("*.py"))
        if "benchmark(__doc__" in path.read_text()
    ]
    return {
        name: load(name) if (SCRIPTS / "results" / f"{name}.json").exists() else []
        for name in names
    }


def chosen(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float) -> str:
    """A share of rows in per cent, never rounded up."""
    return f"{math.floor(1000 * value) / 10:g}\N{NO-BREAK SPACE}%"


def span(numbers: Iterable[float], digits: int = 3) -> str:
    """The lowest and the highest number, or the one that there is."""
    least, *_, most = sorted([*numbers] * 2)
    return " to ".join(dict.fromkeys(f"{number:.{digits}f}" for number in (least, most)))


def lowest(record: Row, length: int, name: str = "accuracy") -> float:
    """A number of a run of ``benchmarks/groups.py`` at a length, the lowest of its sweeps."""
    at = record["lengths"].index(length)
    return min(numbers[at] for numbers in record[name].values())


def displayed(text: str) -> str:
    """A case or a peer as printed: short calls, and no character that would end a cell."""
    return re.sub(r"\b(size|window)=", "", text).replace("()", "").replace("|", r"\|")


def pivot(
    rows: Iterable[Row],
    index: Callable[[Row], Sequence[object]],
    column: Callable[[Row], object],
    cell: Callable[[Rows], str],
    heads: Sequence[str],
) -> str:
    """A table: a line for each ``index``, a column for each ``column``; ``cell`` formats the rows
    of a cell.
    """
    cells: dict[tuple[object, ...], dict[object, list[Row]]] = {}
    for row in rows:
        cells.setdefault(tuple(index(row)), {}).setdefault(column(row), []).append(row)
    columns = list(dict.fromkeys(name for line in cells.values() for name in line))
    lines = [
        [*key, *(cell(line[name]) if name in line else "" for name in columns)]
        for key, line in cells.items()
    ]
    return table([*heads, *map(str, columns)], lines)


def goals(rows: Rows) -> str:
    """One line per kind of goal: in how many cases it is met, and the range of the results."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in (row for row in rows if row["goal"] is not None):
        groups.setdefault((row["metric"], displayed(row["peer"]), row["goal"]), []).append(row)
    lines = []
    for (metric, peer, goal), found in groups.items():
        met, values = sum(row["holds"] for row in found), [row[goal.split()[0]] for row in found]
        span = " to ".join(dict.fromkeys(number(pick(values)) for pick in (min, max)))
        count = f"{met} of {len(found)}" if met == len(found) else f"**{met} of {len(found)}**"
        lines.append([metric, peer, goal.replace("<=", "≤").replace(">=", "≥"), count, span])
    return table(["measured", "compared with", "goal", "met", "found"], lines)


def ratios(
    rows: Rows, label: Callable[[Row], str] = lambda row: displayed(f"{row['case']}; {row['peer']}")
) -> Figure:
    """Ratios with their quartiles on a logarithmic axis, a labelled line for each row; the side on
    which we are faster is shaded. A ``; `` breaks a label.
    """
    figure, axis = plt.subplots(figsize=(4.6, 0.9 + 0.38 * len(rows)))
    for at, row in enumerate(rows):
        low, high = row["spread"] or (row["ratio"],) * 2
        axis.plot([low, high], [-at, -at], color="grey", lw=1)
        axis.plot(row["ratio"], -at, "o", ms=5, color=COLOURS[0])
    names = [label(row).replace("; ", "\n") for row in rows]
    axis.set_yticks([-at for at in range(len(rows))], names, fontsize=9)
    axis.set(xscale="log", ylim=(-len(rows) + 0.4, 0.6))
    axis.set_xlabel("ours / theirs (shaded: faster)")
    left, right = axis.get_xlim()
    limits = min(left, 0.8), max(right, 1.25)
    axis.axvspan(limits[0], 1, color=COLOURS[2], alpha=0.15, lw=0)
    axis.set_xlim(limits)
    plain_ticks(axis.xaxis, limits)
    axis.axvline(1, color="grey", lw=1)
    axis.grid(alpha=0.25, axis="x")
    return figure


def plain_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Numbers such as 2, 5, 10, 20 on a logarithmic axis; fewer of them where it is long."""
    decades = math.log10(limits[1] / limits[0])
    digits = (1, 1.5, 2, 3, 5, 7) if decades < 0.8 else (1, 2, 5) if decades < 2 else (1, 3)
    powers = range(math.floor(math.log10(limits[0])), math.ceil(math.log10(limits[1])) + 1)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
    ticks = [tick for tick in ticks if limits[0] <= tick <= limits[1]]
    axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def curves(rows: Iterable[Row], pattern: str, labels: Sequence[str] = ()) -> Panels:
    """Our numbers as :func:`lines` takes them: a pattern of the case has the groups ``panel``,
    ``label`` and ``x``.
    """
    panels: Panels = {}
    for row in rows:
        found = re.fullmatch(pattern, displayed(row["case"]))
        if found and (not labels or found["label"] in labels):
            points = panels.setdefault(found["panel"], {}).setdefault(found["label"], [])
            points.append((int(found["x"]), row["ours"]))
    return {
        panel: {label: sorted(dict(one).items()) for label, one in of.items()}
        for panel, of in panels.items()
    }


def lines(panels: Panels, x: str, y: str, **axes: Any) -> Figure:
    """Curves side by side: a panel for each name, a curve for each label, points as (x, y);
    ``axes`` sets the axes.
    """
    figure, all_axes = plt.subplots(1, len(panels), figsize=(5.2, 3.1), sharey=True, squeeze=False)
    for axis, (title, curves) in zip(all_axes[0], panels.items(), strict=True):
        for (label, points), colour, mark in zip(curves.items(), COLOURS, "osD^v", strict=False):
            axis.plot(*zip(*points, strict=True), marker=mark, ms=5, color=colour, label=label)
        axis.set_title(title, fontsize=10)
        axis.set(xlabel=x, **axes)
        ticks = sorted({point[0] for points in curves.values() for point in points})
        ticks = ticks[-1 :: -1 if len(ticks) < 6 else -2]  # more would overlap
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=9)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.25)
    first = all_axes[0][0]
    if first.get_yscale() == "log":
        plain_ticks(first.yaxis, first.get_ylim())
    first.set_ylabel(y)
    legend = first.get_legend_handles_labels()
    figure.legend(*legend, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    for name, rows in benchmarks().items():
        if any(row["goal"] is not None for row in rows):
            print(f"\n{name}\n\n{goals(rows)}")
