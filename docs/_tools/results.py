"""Committed results as Markdown: tables, goals met and missed, figures, sections."""

import ast
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from show import svg, table

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
RESULTS = SCRIPTS / "results"
KEYS = {"case", "metric", "ours", "peer", "theirs", "ratio", "runs", "spread", "goal", "holds"}
SIGNS: dict[str, str] = {"<=": "≤", ">=": "≥", "==": "="}
COLOURS = ("#31688e", "#d1495b", "#66a182", "#edae49", "#7b5ea7")
VERDICTS = {None: ("no goal", COLOURS[0]), True: ("goal holds", COLOURS[2]), False: ("goal missed", COLOURS[1])}
NOT_RUN = "No full run is committed yet."
STALE: dict[str, str] = {}
"""Results that are older than the code, and what came after them; take a name out when its file is written anew."""

Row = dict[str, Any]
Rows = Sequence[Row]


# rows


def load(name: str, folder: Path = RESULTS) -> list[Row]:
    """The rows of a committed result."""
    return json.loads((folder / f"{name}.json").read_text())


def benchmarks(folder: Path = RESULTS) -> dict[str, list[Row]]:
    """Every committed result of a benchmark by its name: lists of rows with the keys that all benchmarks write."""
    found = {path.stem: load(path.stem, folder) for path in sorted(folder.glob("*.json"))}
    lists = {name: rows for name, rows in found.items() if rows and isinstance(rows, list)}
    return {name: rows for name, rows in lists.items() if all(row.keys() >= KEYS for row in rows)}


def current(folder: Path = RESULTS) -> dict[str, list[Row]]:
    """The committed results of benchmarks that are not older than the code."""
    return {name: rows for name, rows in benchmarks(folder).items() if name not in STALE}


def scripts(folder: Path = SCRIPTS) -> dict[str, str]:
    """The docstring of each benchmark script, by name; files that are only imported are left out."""
    sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    return {name: described(source) for name, source in sources.items() if "__main__" in source}


def described(source: str) -> str:
    """The docstring of a file, as Markdown."""
    return (ast.get_docstring(ast.parse(source)) or "").replace("``", "`")


def chosen(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


# cells


def number(value: float | None) -> str:
    """A number with three significant digits; None is an empty cell."""
    if value is None:
        return ""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}"


def share(value: float | None) -> str:
    """A ratio, in two decimals, or three where it is small."""
    return "" if value is None else f"{value:.{3 if abs(value) < 0.1 else 2}f}"


def percent(value: float) -> str:
    """A share of rows in per cent, never rounded up."""
    return f"{math.floor(1000 * value) / 10:g}\N{NO-BREAK SPACE}%"


def ratio(row: Row) -> str:
    """Ours over theirs, with the quartiles of the pairs of runs."""
    spread = row["spread"] if row["runs"] > 1 else None
    quartiles = "" if spread is None else f" [{share(spread[0])},\N{NO-BREAK SPACE}{share(spread[1])}]"
    return share(row["ratio"]) + quartiles


def goal(row: Row) -> str:
    """``ratio <= 1.03`` with a sign instead of the operator."""
    return "" if row["goal"] is None else " ".join(SIGNS.get(word, word) for word in str(row["goal"]).split())


def judged(row: Row, value: str) -> str:
    """A value, with its goal below it and whether the goal holds."""
    if row["goal"] is None:
        return value
    limit = goal(row).split(" ", 1)[1].replace(" ", "\N{NO-BREAK SPACE}")
    return f"{value}<br>" + (f"{limit} holds" if row["holds"] else f"**{limit} missed**")


def compared(rows: Rows) -> str:
    """The cell of one comparison: its ratio, and the goal."""
    return judged(rows[0], ratio(rows[0]))


def measured(rows: Rows) -> str:
    """The cell of one measurement: our number, and the goal."""
    return judged(rows[0], number(rows[0]["ours"]))


def both(rows: Rows) -> str:
    """The cell of two measurements, ours and theirs, and the goal."""
    return judged(rows[0], f"{number(rows[0]['ours'])} / {number(rows[0]['theirs'])}")


def displayed(text: str) -> str:
    """A case or a peer as printed: short calls, and no character that would end a cell."""
    return re.sub(r"\b(size|window)=", "", text).replace("()", "").replace("|", r"\|")


# tables


def pivot(
    rows: Iterable[Row],
    index: Callable[[Row], Sequence[object]],
    column: Callable[[Row], object],
    cell: Callable[[Rows], str],
    heads: Sequence[str],
) -> str:
    """A table: a line for each ``index``, a column for each ``column``; ``cell`` formats the rows of a cell."""
    cells: dict[tuple[object, ...], dict[object, list[Row]]] = {}
    for row in rows:
        cells.setdefault(tuple(index(row)), {}).setdefault(column(row), []).append(row)
    columns = list(dict.fromkeys(name for line in cells.values() for name in line))
    lines = [[*key, *(cell(line[name]) if name in line else "" for name in columns)] for key, line in cells.items()]
    return table([*heads, *map(str, columns)], lines)


def all_rows(rows: Rows) -> str:
    """One line per row of results."""
    head = ["case", "measured", "ours", "compared with", "theirs", "ratio", "runs", "goal"]
    lines = [
        [
            displayed(row["case"]),
            displayed(row["metric"]),
            number(row["ours"]),
            displayed(row["peer"]),
            number(row["theirs"]),
            ratio(row),
            row["runs"],
            goal(row) + {None: "", True: " holds", False: " **missed**"}[row["holds"]],
        ]
        for row in rows
    ]
    return table(head, lines)


def by_goal(results: Mapping[str, Rows]) -> dict[tuple[str, str, str, str], list[Row]]:
    """The rows of each kind of goal: benchmark, what is measured, what it is compared with, the goal."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for name, rows in results.items():
        for row in rows:
            if row["goal"] is not None:
                groups.setdefault((name, displayed(row["metric"]), displayed(row["peer"]), goal(row)), []).append(row)
    return groups


def goals(results: Mapping[str, Rows]) -> str:
    """One line per kind of goal: in how many cases it is met, and the range of the results."""
    lines = []
    for (name, metric, peer, limit), rows in by_goal(results).items():
        met = sum(bool(row["holds"]) for row in rows)
        key, shown = ("ratio", share) if limit.startswith("ratio") else ("ours", number)
        found = " to ".join(dict.fromkeys(shown(pick(row[key] for row in rows)) for pick in (min, max)))
        verdict = f"{met} of {len(rows)}" if met == len(rows) else f"**{met} of {len(rows)}**"
        lines.append([name, metric, peer, limit, verdict, found])
    return table(["benchmark", "measured", "compared with", "goal", "met", "found"], lines)


def reasons(results: Mapping[str, Rows], why: Mapping[tuple[str, str, str], str]) -> str:
    """One line per kind of goal that is missed in some case: why, by benchmark, what is measured and the peer.

    Raises:
        KeyError: a goal is missed, and ``why`` says nothing about it.
    """
    groups = {key[:3]: rows for key, rows in by_goal(results).items() if not all(row["holds"] for row in rows)}
    lines = [[name, f"{metric}, {peer}" if peer else metric, why[name, metric, peer]] for name, metric, peer in groups]
    return table(["benchmark", "measured, compared with", "why it is missed"], lines)


def value(rows: Rows, case: str, metric: str, peer: str = "", key: str = "ours") -> float:
    """One number of a result, found by its case, what is measured, and the beginning of the peer's name."""
    return next(row[key] for row in chosen(rows, case=case, metric=metric) if row["peer"].startswith(peer))


def tally(rows: Rows) -> str:
    """How many goals there are, and how many hold."""
    held = [row["holds"] for row in rows if row["goal"] is not None]
    return f"{sum(held)} of {len(held)} goals hold." if held else "There are no goals."


# parts of a page


def folded(title: str, body: str) -> str:
    """A collapsed part of the page."""
    return f'??? note "{title}"\n\n' + "".join(f"    {line}".rstrip() + "\n" for line in body.splitlines())


def about(name: str, results: Mapping[str, Rows]) -> str:
    """The command of a benchmark, the machine that it ran on, and how many goals hold."""
    command = f"```bash\npython benchmarks/{name}.py \\\n    --json benchmarks/results/{name}.json\n```"
    if name not in results:
        reason = f"Not shown: the committed run is older than {STALE[name]}." if name in STALE else NOT_RUN
        return f"{command}\n\n{reason}"
    machines = dict.fromkeys(row.get("machine", "a machine that the file does not name") for row in results[name])
    return f"{command}\n\n{tally(results[name])} Measured on: {'; '.join(machines)}."


def details(name: str, rows: Rows, folder: Path = SCRIPTS) -> str:
    """Collapsed: how it was measured (the script's docstring), and all rows."""
    how = scripts(folder).get(name)
    first = f"{folded('How it was measured', how)}\n" if how else ""
    return first + folded(f"All {len(rows)} rows of benchmarks/results/{name}.json", all_rows(rows))


def section(name: str, results: Mapping[str, Rows], folder: Path = SCRIPTS) -> str:
    """The section of one benchmark: description, command, a figure of few ratios, and all rows, folded."""
    title = scripts(folder).get(name, "").partition("\n")[0]
    parts = [f"## {name}", title, about(name, results)]
    rows = results.get(name, [])
    timed = [row for row in rows if row["spread"] is not None and row["runs"] > 1 and row["ratio"]]
    if 0 < len(timed) <= 40:
        parts.append(svg(ratios(timed), f"Ratios of {name} with their quartiles"))
    return "\n\n".join([*filter(None, parts), *([details(name, rows, folder)] if rows else [])]) + "\n"


# figures


def ratios(rows: Rows, label: Callable[[Row], str] | None = None) -> Figure:
    """Ratios with their quartiles on a logarithmic axis, one line per row; goals are ticks."""
    height = 0.9 + 0.24 * len(rows)
    figure, axis = plt.subplots(figsize=(7, height))
    judged_at_all = any(row["goal"] for row in rows)
    for holds, (verdict, colour) in VERDICTS.items():
        shown = [(-at, row) for at, row in enumerate(rows) if row["holds"] is holds]
        if shown:
            middles = [row["ratio"] for _, row in shown]
            ends = [row["spread"] or (row["ratio"],) * 2 for _, row in shown]
            sides = [[max(0.0, x - low), max(0.0, high - x)] for x, (low, high) in zip(middles, ends, strict=True)]
            name = verdict if judged_at_all else None
            bars = {"xerr": list(zip(*sides, strict=True)), "fmt": "o", "ms": 5, "color": colour, "label": name}
            axis.errorbar(middles, [y for y, _ in shown], **bars)
    limits = [(float(row["goal"].split()[2]), -at) for at, row in enumerate(rows) if "ratio" in (row["goal"] or "")]
    if limits:
        axis.plot(*zip(*limits, strict=True), "|", color="black", ms=12, mew=1.5, label="goal")
    names = [label(row) if label else f"{displayed(row['case'])}; {displayed(row['peer'])}" for row in rows]
    axis.set_yticks([-at for at in range(len(rows))], names, fontsize=8)
    axis.set(xscale="log", xlabel="ours / theirs, logarithmic; bars: quartiles", ylim=(-len(rows) + 0.4, 0.6))
    ticks = ticks_of(*axis.get_xlim())
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.axvline(1, color="grey", lw=1)
    axis.grid(alpha=0.25)
    if judged_at_all:
        figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def ticks_of(low: float, high: float) -> list[float]:
    """Round ticks of a logarithmic axis, closer on a short axis."""
    fine = high < 2.5 * low
    marks = (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.8) if fine else (1, 1.2, 1.5, 2, 3, 5, 7)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return sorted({round(mark * 10.0**n, 9) for n in decades for mark in marks if low <= mark * 10.0**n <= high})


def curves(
    rows: Iterable[Row], pattern: str, labels: Sequence[str] = ()
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Our numbers as :func:`lines` takes them: a pattern of the case has the groups ``panel``, ``label`` and ``x``."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        found = re.fullmatch(pattern, displayed(row["case"]))
        if found and (not labels or found["label"] in labels):
            panels.setdefault(found["panel"], {}).setdefault(found["label"], {})[int(found["x"])] = row["ours"]
    return {panel: {label: sorted(line.items()) for label, line in found.items()} for panel, found in panels.items()}


def lines(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], x: str, y: str, **axes: Any) -> Figure:
    """Curves side by side: a panel for each name, a curve for each label, points as (x, y); ``axes`` sets the axes."""
    figure, all_axes = plt.subplots(1, len(panels), figsize=(7, 3.2), sharey=True, squeeze=False)
    for axis, (title, curves) in zip(all_axes[0], panels.items(), strict=True):
        for (label, points), colour, mark in zip(curves.items(), cycle(COLOURS), cycle("osD^v"), strict=False):
            axis.plot(*zip(*points, strict=True), marker=mark, ms=5, color=colour, label=label)
        axis.set_title(title, fontsize=10)
        axis.set(xlabel=x, **axes)
        ticks = sorted({point[0] for points in curves.values() for point in points})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    all_axes[0][0].set_ylabel(y)
    figure.legend(
        *all_axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False, fontsize=8
    )
    return figure
