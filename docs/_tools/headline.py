"""Draws the README's figure from committed results: ``python docs/_tools/headline.py``."""

from pathlib import Path

from results import chosen, load, number

IMAGES = Path(__file__).parents[1] / "images"
SCHEMES = {  # text, less important text, ours, others
    "headline.svg": ("#1f2328", "#59636e", "#1a7f5a", "#8c959f"),
    "headline-dark.svg": ("#f0f6fc", "#9198a1", "#4ac28e", "#6e7681"),
}
COLUMN, TOP, BOTTOM = 190, 132, 252  # pixels: narrow, so that a phone need not shrink them much
TITLE = (
    "Right answers at many times the trained length; Sudokus that are right after so many "
    "iterations; cache entries per token."
)


def headline(text: str, note: str, ours: str, others: str) -> str:
    """The figure: three numbers, with a small drawing below each."""
    style = (
        f'text {{ font: 15px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; '
        f"fill: {note}; "
        f"text-anchor: middle }} .big {{ font-size: 36px; font-weight: 700; fill: {ours} "
        f"}} .name {{ fill: {text} }} "
        f".axis {{ font-size: 13.5px }} .end {{ text-anchor: end }} "
        f".ours {{ fill: {ours} }} .others {{ fill: {others} }} "
        ".curve { fill: none; stroke-width: 3 }"
    )
    columns = (tracking(ours, others), puzzles(), cache())
    drawn = "".join(
        f'<g transform="translate({COLUMN * at} 0)">{column}</g>\n'
        for at, column in enumerate(columns)
    )
    size = f'viewBox="0 0 {3 * COLUMN} 284" width="{3 * COLUMN}" height="284"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return f"{opening}\n<title>{TITLE}</title>\n<style>{style}</style>\n{drawn}</svg>\n"


def tracking(ours: str, others: str) -> str:
    """Accuracy on S5 against the length, beside explicit blocks."""
    rows = chosen(load("state_tracking"), group="S5")
    implicit, explicit = (
        chosen(rows, model="implicit", sweep="sliding"),
        chosen(rows, sweep="single pass"),
    )
    (right,) = (row["accuracy"] for row in implicit if row["length"] == 128)
    parts = [words(f"{right:.0%}", "right at 128 tokens,", "trained up to 32")]
    places = [46 + at * (COLUMN - 64) / (len(implicit) - 1) for at in range(len(implicit))]
    for rows, colour in ((explicit, others), (implicit, ours)):
        points = (
            f"{x:.1f} {BOTTOM - (BOTTOM - TOP) * row['accuracy']:.1f}"
            for x, row in zip(places, rows, strict=True)
        )
        parts.append(f'<path class="curve" stroke="{colour}" d="M{"L".join(points)}"/>')
    middle = (TOP + BOTTOM) / 2
    parts.append(f'<text class="axis ours" x="122" y="{TOP + 20}">1 block, iterated</text>')
    parts.append(f'<text class="axis" x="134" y="{middle + 30:.0f}">4 blocks, once</text>')
    for share, y in (("100%", TOP), ("0%", BOTTOM)):
        parts.append(f'<text class="axis end" x="40" y="{y + 5}">{share}</text>')
    for x, row in list(zip(places, implicit, strict=True))[1::2]:
        parts.append(f'<text class="axis" x="{x:.0f}" y="{BOTTOM + 24}">{row["length"]}</text>')
    return "".join(parts)


def puzzles() -> str:
    """Held-out Sudokus that are right, the lowest share of the seeds, by iterations."""
    rows = chosen(load("puzzles"), part="held out", model="deq")
    shares = {
        budget: min(row["exact"] for row in chosen(rows, budget=budget)) for budget in (4, 64)
    }
    said = words(f"{shares[64]:.1%}", "of unseen Sudokus right", "after 64 iterations")
    return said + bars({f"after {n}": 100 * share for n, share in shares.items()}, "%")


def cache() -> str:
    """Cache entries per token and layer, beside a slot for every loop."""
    (row,) = chosen(load("vllm"), metric="cache entries / token and layer")
    said = words(number(row["ours"]), "cache entry per token", "and layer, in vLLM")
    return said + bars({row["peer"]: row["theirs"], "fixed point": row["ours"]})


def words(big: str, *notes: str) -> str:
    """The number, and what it is."""
    lines = "".join(
        f'<text x="{COLUMN / 2:.0f}" y="{70 + 20 * at}">{note}</text>'
        for at, note in enumerate(notes)
    )
    return f'<text class="big" x="{COLUMN / 2:.0f}" y="40">{big}</text>{lines}'


def bars(values: dict[str, float], unit: str = "") -> str:
    """One bar per value, the last is ours."""
    most, parts = max(values.values()), []
    for at, (name, value) in enumerate(values.items()):
        x, high = 20 + 86 * at, (BOTTOM - TOP - 22) * value / most
        kind = "ours" if at == len(values) - 1 else "others"
        parts.append(
            f'<rect class="{kind}" x="{x}" y="{BOTTOM - high:.1f}" width="64" '
            f'height="{high:.1f}" rx="3"/>'
        )
        parts.append(
            f'<text class="name" x="{x + 32}" '
            f'y="{BOTTOM - high - 6:.1f}">{number(round(value, 1))}{unit}</text>'
        )
        parts.append(f'<text class="axis" x="{x + 32}" y="{BOTTOM + 24}">{name}</text>')
    return "".join(parts)


if __name__ == "__main__":
    for name, colours in SCHEMES.items():
        (IMAGES / name).write_text(headline(*colours), encoding="utf-8")
