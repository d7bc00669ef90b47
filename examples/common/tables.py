"""Markdown tables, and what the figures of the examples share."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

GREEN, ORANGE, PURPLE, BLUE, GREY = "#0b6e4f", "#e4572e", "#5b2a86", "#3a7ca5", "#7a8ca0"
SHADED = "#f2efe6"  # of trained lengths
STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table.

    Args:
        header: names of the columns.
        rows: cells, as many as columns.
    """
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def cell(value: float, iterations: float | None, converged: float | None, *, digits: int = 0) -> str:
    """A number with the mean iterations of its solves, and the share that converged where that is not all.

    Args:
        value: the number.
        iterations: mean over rows or tokens; None: an explicit model.
        converged: share of the rows; None: an explicit model.
        digits: of ``iterations``.
    """
    solves = "" if iterations is None else f" ({iterations:.{digits}f})"
    doubt = "" if converged in (None, 1.0) else f", {converged:.1%} converged"
    return f"{value:.3f}{solves}{doubt}"


@contextmanager
def figure(path: Path, panels: int, width: float, height: float = 4.0) -> Iterator[list[Axes]]:
    """A figure with some panels side by side, in the style of the examples, written as PNG when the block ends.

    Args:
        path: of the file.
        panels: how many.
        width: in inches.
        height: in inches.

    Yields:
        The panels.
    """
    with plt.rc_context(STYLE):
        drawn, axes = plt.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False)
        try:
            yield list(axes[0])
            for axis in axes[0]:
                axis.grid(alpha=0.25)
            drawn.savefig(path, dpi=150)
        finally:
            plt.close(drawn)


def smooth(values: Sequence[float], window: int = 20) -> list[float]:
    """Means over the ``window`` values that end at each place; values that are not finite are left out."""
    parts = ([v for v in values[max(0, n - window + 1) : n + 1] if math.isfinite(v)] for n in range(len(values)))
    return [sum(part) / len(part) if part else math.nan for part in parts]
