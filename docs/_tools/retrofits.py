"""The picture of a retrofit, for the pages that show it."""

from matplotlib.figure import Figure
from results import Row, chosen, lines, load

ROWS = load("retrofit")
SEEDS = sorted({row["seed"] for row in ROWS})
WAYS = {f"looped, {n} iteration{'s' * (n > 1)}": ("looped", n) for n in (16, 4, 1)}
WAYS |= {"unlooped": ("unlooped", None), "pretrained": ("pretrained", None)}


def row_of(way: str, seed: int) -> Row:
    """The row of a model run in one way: a key of ``WAYS``, or what ends the loop."""
    model, budget = WAYS.get(way, ("looped", way))
    (row,) = chosen(ROWS, model=model, budget=budget, seed=seed)
    return row


def picture() -> Figure:
    """Accuracy of the last answers against swaps, a panel for each seed."""
    panels = {}
    for seed in SEEDS:
        curves = {way: row_of(way, seed)["accuracy"] for way in WAYS}
        panels[f"seed {seed}"] = {
            way: [(int(swaps), share) for swaps, share in shares.items()]
            for way, shares in curves.items()
        }
    return lines(panels, "swaps", "right last answers", xscale="log", ylim=(0, 1.05))
