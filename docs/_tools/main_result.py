"""The main result of the README and the home page: a table, and a figure in light and dark colours.

python docs/_tools/main_result.py    # draws docs/images/parity.svg and parity-dark.svg, prints the table
"""

import json
from math import log2
from pathlib import Path

ROOT = Path(__file__).parents[2]
LENGTHS = (16, 32, 64, 128, 256, 512)
NAMES = {
    ("implicit", "simultaneous"): "implicit, 1 block, all tokens together",
    ("implicit", "sequential"): "implicit, 1 block, token by token",
    ("explicit 4 blocks", "single pass"): "explicit, 4 blocks",
}
LIGHT = {"ink": "#1f2328", "soft": "#59636e", "line": "#d1d9e0", "band": "#eef0f3", "good": "#1a7f5a", "bad": "#8c959f"}
DARK = {"ink": "#e6edf3", "soft": "#a3acb8", "line": "#3d444d", "band": "#262c36", "good": "#6fd0a8", "bad": "#8b949e"}


def scores() -> dict[str, list[float]]:
    """Accuracy at the last token, by model and length."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "state_tracking.json").read_text())
    parity = [row for row in rows if row["group"] == "Z2" and row["seed"] == 0]
    found = {(row["model"], row["sweep"], row["length"]): row["accuracy"] for row in parity}
    return {name: [found[*key, length] for length in LENGTHS] for key, name in NAMES.items()}


def table() -> str:
    """The scores in Markdown."""
    head = ["tokens", *map(str, LENGTHS)]
    lines = [head, ["---", *["---:"] * len(LENGTHS)]]
    lines += [[name, *(f"{score:.1%}".replace("100.0%", "100%") for score in row)] for name, row in scores().items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def x(length: int) -> float:
    """The place of a length on its logarithmic axis."""
    return 92 + 93 * (log2(length) - 4)


def y(score: float) -> float:
    """The place of an accuracy."""
    return 40 + 400 * (1 - score)


def curve(kind: str, row: list[float]) -> str:
    """A line with a dot at each length."""
    points = [(x(length), y(score)) for length, score in zip(LENGTHS, row, strict=True)]
    path = "M" + "L".join(f"{a:.0f} {b:.1f}" for a, b in points)
    dots = "".join(f'<circle class="{kind} dot" cx="{a:.0f}" cy="{b:.1f}" r="6"/>' for a, b in points)
    return f'  <path class="{kind}" d="{path}"/>{dots}'


def drawing(colours: dict[str, str]) -> str:
    """The figure as SVG: large letters, so that a phone shows them, and no legend."""
    curves = [curve(name.partition(",")[0], row) for name, row in scores().items()]
    ticks = [f'  <text x="{x(n):.0f}" y="316">{n}</text>' for n in LENGTHS]
    ticks += [f'  <text class="left" x="56" y="{y(s) + 6:.0f}">{s:.0%}</text>' for s in (0.5, 0.75, 1.0)]
    grid = [f'  <path class="grid" d="M66 {y(s):.0f}H584"/>' for s in (0.75, 1.0)]
    style = f"""  <style>
    text {{ font: 18px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; text-anchor: middle }}
    text {{ fill: {colours["soft"]} }}
    .name {{ fill: {colours["ink"]}; font-weight: 600 }}
    .left {{ text-anchor: end }}
    .right {{ text-anchor: start }}
    .grid {{ stroke: {colours["line"]}; stroke-width: 1 }}
    .chance {{ stroke: {colours["soft"]}; stroke-width: 1.5; stroke-dasharray: 3 4 }}
    .implicit {{ fill: none; stroke: {colours["good"]}; stroke-width: 4 }}
    .explicit {{ fill: none; stroke: {colours["bad"]}; stroke-width: 2.5 }}
    .implicit.dot {{ fill: {colours["good"]} }}
    .explicit.dot {{ fill: {colours["bad"]} }}
  </style>"""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 356" width="600" height="356" role="img">',
        "  <title>Accuracy against length: the implicit model is right at every length, others are not.</title>",
        style,
        f'  <rect fill="{colours["band"]}" x="72" y="26" width="134" height="264"/>',
        *grid,
        f'  <path class="chance" d="M66 {y(0.5):.0f}H584"/>',
        *reversed(curves),  # the implicit model on top
        *ticks,
        '  <text class="right" x="66" y="18">accuracy at the last token</text>',
        '  <text x="325" y="346">length of the sequence; trained up to 32</text>',
        '  <text class="name" x="370" y="74">implicit: one block, iterated</text>',
        '  <text class="name" x="370" y="196">explicit: 4 blocks</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    for name, colours in (("parity", LIGHT), ("parity-dark", DARK)):
        (ROOT / "docs" / "images" / f"{name}.svg").write_text(drawing(colours))
    print(table())
