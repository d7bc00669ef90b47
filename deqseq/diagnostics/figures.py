"""What the figures of all reports share. Matplotlib is imported when one is drawn."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

COLOURS = ("#31688e", "#d1495b", "#66a182", "#edae49", "#7b5ea7")
"""Distinguishable by colour-blind readers too."""
GREY = "#777777"


class Drawable(ABC):
    """A report that draws itself: alone, or on an axis of a larger figure.

    Example:
        >>> import torch
        >>> from deqseq.diagnostics import spectral_radius
        >>> figure = spectral_radius(lambda z: 0.5 * z, torch.zeros(1, 2)).plot()
        >>> figure.axes[0].get_ylabel()
        'imaginary part'
    """

    @abstractmethod
    def draw(self, axis: "matplotlib.axes.Axes") -> None:
        """Draw the report on an empty ``axis``."""

    def plot(self) -> "matplotlib.figure.Figure":
        """The report as a figure, 7 by 3.2 inches; ``figure.savefig(path)`` saves it.

        Returns:
            A figure that is not shown in a window.

        Raises:
            ImportError: matplotlib is missing.
        """
        figure = new_figure(7.0, 3.2)
        self.draw(figure.add_subplot())
        return figure


def new_figure(width: float, height: float) -> "matplotlib.figure.Figure":
    """An empty figure, sized in inches, that arranges its axes by itself."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots of reports need matplotlib: pip install "deqseq[examples]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def colour(index: int) -> str:
    """A colour for a row or a line; they repeat."""
    return COLOURS[index % len(COLOURS)]


def row_label(row: int, rows: int) -> str:
    """A row's name in the legend; hidden where there are more rows than colours."""
    return f"row {row}" if rows <= len(COLOURS) else f"_row {row}"


def reference_line(axis: "matplotlib.axes.Axes", y: float, label: str | None = None) -> None:
    """A dashed grey line at a height that the reader compares with."""
    axis.axhline(y, color=GREY, linewidth=1, linestyle="--", label=label)


def finish(axis: "matplotlib.axes.Axes", x: str, y: str, *, legend: bool = False) -> None:
    """Name the axes and draw a light grid."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    if legend:
        axis.legend(frameon=False, fontsize=8, ncols=2)
