"""The pictures of a retrofit, for the pages that show them."""

from functools import cache

from matplotlib.figure import Figure
from results import Row, chosen, lines, load

from deqseq.diagnostics import Depth, ExtrapolationReport

ROWS = load("retrofit")
SEEDS = sorted({row["seed"] for row in ROWS})
WAYS = {f"looped, {n} iteration{'s' * (n > 1)}": ("looped", n) for n in (16, 4, 1)}
WAYS |= {"unlooped": ("unlooped", None), "pretrained": ("pretrained", None)}
DEPTHS = (1, 2, 4, 7, 14, 28, 56)
"""Iterations at which the models of :func:`parts` were measured; they were trained with about 7."""


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


@cache
def parts() -> list[Row]:
    """What was measured with one part changed at a time."""
    return load("retrofit_parts")


def of_part(change: str, metric: str) -> float:
    """What was measured of a model with one part changed."""
    (row,) = chosen(parts(), case=change, metric=metric)
    return row["ours"]


def extrapolated(change: str) -> ExtrapolationReport:
    """What that model does beyond its trained depth."""
    names = ("loss", "residual", "difference")
    depths = [
        Depth(n, *(of_part(change, f"{name} after {n} iterations") for name in names))
        for n in DEPTHS
    ]
    return ExtrapolationReport(7, tuple(depths))


def beyond(changes: dict[str, str]) -> Figure:
    """Loss against iterations, for some changes, by their labels."""
    curves = {
        label: [(depth.iterations, depth.loss) for depth in extrapolated(change).depths]
        for label, change in changes.items()
    }
    return lines({"": curves}, "iterations", "loss, nats", xscale="log")
