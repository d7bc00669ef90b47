"""Figures and tables for the pages."""

import io
from collections.abc import Iterable, Sequence

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

plt.rcParams.update({"figure.constrained_layout.use": True, "svg.fonttype": "none", "font.family": "sans-serif"})


def svg(figure: Figure, alt: str) -> str:
    """A figure as inline SVG, on a white card in both colour schemes."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    plt.close(figure)
    drawing = target.getvalue()
    return f'<figure class="plot" role="img" aria-label="{alt}">{drawing[drawing.index("<svg") :]}</figure>'


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
