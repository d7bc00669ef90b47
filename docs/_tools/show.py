"""Figures and tables for the pages."""

import io
from collections.abc import Iterable, Sequence

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

COLOURS = ("#31688e", "#d1495b", "#66a182", "#edae49", "#7b5ea7")
INK = "#010203"  # stands for the colour of the page's text
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
plt.rcParams.update({"figure.constrained_layout.use": True, "svg.fonttype": "none", "font.family": "sans-serif"})
plt.rcParams.update({"savefig.transparent": True} | dict.fromkeys(INKED, INK))


def svg(figure: Figure, alt: str) -> str:
    """A figure as inline SVG, in the colours of the page: those of a scheme are in ``assets/site.css``."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    plt.close(figure)
    drawing = target.getvalue().replace(INK, "currentColor")
    for number, colour in enumerate(COLOURS, 1):
        drawing = drawing.replace(colour, f"var(--plot-{number}, {colour})")
    return f'<figure class="plot" role="img" aria-label="{alt}">{drawing[drawing.index("<svg") :]}</figure>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
