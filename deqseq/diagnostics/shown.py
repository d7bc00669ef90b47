"""How reports print and draw themselves."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 8
"""How many rows of a batch a report prints."""
COLOURS = ("#31688e", "#d1495b", "#66a182", "#edae49", "#7b5ea7")
"""Distinguishable by colour-blind readers too."""


def text_table(header: SequenceOf[str], lines: Iterable[SequenceOf[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    columns = list(zip(header, *lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    left, *right = zip(columns, widths, strict=True)
    aligned = [[text.ljust(left[1]) for text in left[0]]]
    aligned += [[text.rjust(width) for text in column] for column, width in right]
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def remaining(rows: int) -> str:
    """What is printed instead of further rows."""
    return f"\n... and {rows - SHOWN} more rows" if rows > SHOWN else ""


def new_figure(x: str, y: str) -> "tuple[Figure, Axes]":
    """A new figure with an empty axis, 7 by 3.2 inches, that is not shown in a window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots of reports need matplotlib: pip install "deqseq[examples]"') from error
    figure = Figure(figsize=(7.0, 3.2), layout="constrained")
    axis = figure.add_subplot()
    axis.set(xlabel=x, ylabel=y)
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    return figure, axis
