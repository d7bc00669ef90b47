"""Draws the picture of the README with two shipped models: ``python docs/_tools/picture.py``."""

from itertools import groupby
from pathlib import Path

import torch

import deqseq as dq
from deqseq.tasks import Balls

IMAGES = Path(__file__).parents[1] / "images"
SCHEMES = {  # text, less important text, then the shades, from far away to converged
    "convergence.svg": (
        *("#1f2328", "#59636e"),
        *("#d1495b", "#f09c72", "#f7dc9c", "#cfe6c6", "#8fcbaa"),
    ),
    "convergence-dark.svg": (
        *("#f0f6fc", "#9198a1"),
        *("#b5394c", "#b5653a", "#8f7430", "#3d6b4a", "#1f4d3a"),
    ),
}
ALT = (
    "Left, the words of a story: their states stop changing from left to right. "
    "Right, a Sudoku: some digits are right after two iterations, others after ten."
)
SWAPS = ((1, 3), (3, 5), (2, 5), (4, 2), (1, 5))
STORY = " ".join(f"swap {one} and {other} ." for one, other in SWAPS) + " where is 5 ?"
PUZZLE = "5.36...1.3....2..1...2...4..5...1.3."
CHANGES = (0.3, 0.1, 0.03, 0.01)  # a relative residual below the last has converged
FOUND = (2, 3, 5, 7)  # the last iterations of all shades but the first
PANEL, TOP, WORD, ITERATION, CELL = 290, 64, 8, 13, 36  # pixels


def shades(scheme: tuple[str, ...]) -> str:
    """The style of the figure in the colours of a scheme."""
    text, note, *fills = scheme
    fonts = 'system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif'
    style = f"text {{ font: 16px {fonts}; fill: {note}; text-anchor: middle }}"
    style += f" .title {{ font-weight: 700; fill: {text} }} .digit {{ font-size: 20px }}"
    style += f" .digit, .given {{ fill: {text} }} .given {{ font-size: 20px; font-weight: 700 }}"
    style += f" .line {{ fill: none; stroke: {note} }} .end {{ text-anchor: end }}"
    style += " rect { shape-rendering: crispEdges }"
    return style + "".join(f" .s{at} {{ fill: {fill} }}" for at, fill in enumerate(fills))


@torch.no_grad()
def story() -> tuple[list[list[int]], str]:
    """The shade of each word at each iteration, all words together, and the answer."""
    lm, balls = dq.load_example("balls"), Balls()
    checks: list[dq.Progress] = []
    ids = balls.encode(STORY)[None]
    output = lm(ids, sweep=dq.Simultaneous(), callback=checks.append)
    residuals = torch.stack([check.residual[0] for check in checks])
    rows = sum((residuals < change).long() for change in CHANGES)
    return rows.tolist(), balls.decode(output.logits[0, -1:].argmax(-1))


@torch.no_grad()
def sudoku() -> tuple[list[int], list[int]]:
    """The digits, and the iteration from which on each is right."""
    lm, cells = dq.load_example("sudoku"), torch.tensor([[*map(int, PUZZLE.replace(".", "0"))]])
    last = lm(cells)
    digits = last.logits[0].argmax(-1)
    most = int(last.stats.iterations.max())
    guesses = [lm(cells, stop=dq.Stop.exactly(n)).logits[0].argmax(-1) for n in range(1, most)]
    wrong = torch.stack([guess != digits for guess in guesses])
    numbers = torch.arange(1, most)[:, None]
    found = 1 + (wrong * numbers).amax(0)
    return (digits + 1).tolist(), found.tolist()


def text(x: float, y: float, words: object, kind: str = "") -> str:
    """One line of text, in the middle of ``x`` or, of the kind ``end``, before it."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def box(x: float, y: float, wide: float, high: float, shade: int) -> str:
    """A filled rectangle."""
    return f'<rect class="s{shade}" x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}"/>'


def legend(x: float, name: str, wide: float, labels: list[str], between: bool) -> str:
    """The five shades with a label below each, or below each of their borders."""
    y, step = TOP + 17 * ITERATION + 48, wide / 5
    parts = [text(x + wide / 2, y, name)]
    parts += [box(x + at * step, y + 10, step, 14, at) for at in range(5)]
    shift = 1.0 if between else 0.5
    parts += [text(x + (at + shift) * step, y + 42, label) for at, label in enumerate(labels)]
    return "".join(parts)


def words() -> str:
    """A heat map: a column for each word, a row for each iteration."""
    rows, answer = story()
    left, wide, high = 30, WORD * len(rows[0]), ITERATION * len(rows)
    parts = [
        text(left + wide / 2, 18, f"Where is ball 5? In cup {answer}", "title"),
        text(left + wide / 2, 40, "a story, a word per column"),
    ]
    for x, column in enumerate(zip(*rows, strict=True)):
        y = TOP
        for shade, run in groupby(column):
            length = ITERATION * len(list(run))
            parts.append(box(left + x * WORD, y, WORD, length, shade))
            y += length
    for number in (1, 5, 10, 15):
        parts.append(text(left - 5, TOP + number * ITERATION - 1, number, "end"))
    names = [f"{one}↔{other}" for one, other in SWAPS]
    parts += [
        text(left + (5 * at + 2.5) * WORD, TOP + high + 19, name) for at, name in enumerate(names)
    ]
    parts.append(text(left + (len(rows[0]) - 2) * WORD, TOP + high + 19, "5?"))
    percent = [f"{change:.0%}" for change in CHANGES]
    parts.append(legend(left, "a state changes by", wide, percent, between=True))
    return "".join(parts)


def puzzle() -> str:
    """The board: givens are bold, the others have the shade of when they were found."""
    digits, found = sudoku()
    left, wide = 42, 6 * CELL
    parts = [
        text(left + wide / 2, 18, "A Sudoku", "title"),
        text(left + wide / 2, 40, "all cells together"),
    ]
    numbers = [number for number, given in zip(found, PUZZLE, strict=True) if given == "."]
    lines = [f"M{left} {TOP}h{wide}v{wide}h-{wide}z"]
    for cell, (digit, number) in enumerate(zip(digits, found, strict=True)):
        row, column = divmod(cell, 6)
        x, y, given = left + column * CELL, TOP + row * CELL, PUZZLE[cell] != "."
        if not given:
            shade = 4 - sum(number > last for last in FOUND)
            parts.append(box(x + 1, y + 1, CELL - 2, CELL - 2, shade))
        parts.append(text(x + CELL / 2, y + 25, digit, "given" if given else "digit"))
    lines += [f"M{left} {TOP + 2 * CELL * at}h{wide}" for at in (1, 2)]
    lines.append(f"M{left + wide / 2:g} {TOP}v{wide}")
    parts.append(f'<path class="line" d="{"".join(lines)}"/>')
    starts = (min(numbers), *(last + 1 for last in FOUND))
    ends = (*FOUND, max(numbers))
    spans = [f"{a}" if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True)][::-1]
    parts.append(legend(left, "right after iteration", wide, spans, between=False))
    return "".join(parts)


def drawing() -> str:
    """The picture without its colours."""
    right = f'<g transform="translate({PANEL} 0)">{puzzle()}</g>'
    return f"<title>{ALT}</title>\n{words()}\n{right}\n"


if __name__ == "__main__":
    drawn, size = drawing(), f'viewBox="0 0 {2 * PANEL} 384" width="{2 * PANEL}" height="384"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    for name, scheme in SCHEMES.items():
        style = f"<style>{shades(scheme)}</style>"
        (IMAGES / name).write_text(f"{opening}\n{style}\n{drawn}</svg>\n", encoding="utf-8")
