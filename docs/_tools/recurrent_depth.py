"""The figure, the table and the numbers of guides/recurrent_depth.md, from benchmarks/results/depth.json."""

import re
import statistics

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from results import COLOURS, Rows, load, percent
from show import table

KINDS, DEPTHS = ("from scratch", "retrofitted"), {"drawn": "ours", "fixed": "theirs"}
TRAINED = 8  # iterations, the mean
CASE = re.compile(r"(?P<kind>.+), seed (?P<seed>\d+), (?P<run>.+)")

Values = dict[tuple[str, str, str, str], dict[str, float]]


def values(rows: Rows | None = None) -> Values:
    """The numbers by seed, of each kind of model, way of training, run and metric."""
    found: Values = {}
    for row in load("depth") if rows is None else rows:
        if (case := CASE.fullmatch(row["case"])) is None:
            raise ValueError(f"depth.json must have cases of a kind, a seed and a run, got {row['case']!r}")
        for depth, key in DEPTHS.items():
            place = (case["kind"], depth, case["run"], row["metric"])
            found.setdefault(place, {})[case["seed"]] = row[key]
    return found


def budgets(found: Values) -> list[int]:
    """The numbers of iterations that were scored."""
    runs = dict.fromkeys(run for _, _, run, _ in found)
    return [int(run.split()[0]) for run in runs if run.endswith("iterations")]


def figure(found: Values) -> Figure:
    """A panel for each kind of model: thin lines are seeds, thick lines their means."""
    drawn, axes = plt.subplots(1, len(KINDS), figsize=(7, 3.4), sharey=True)
    steps = budgets(found)
    for axis, kind in zip(axes, KINDS, strict=True):
        axis.axvline(TRAINED, color="grey", lw=1, ls="--")
        for depth, colour, mark, size in zip(DEPTHS, COLOURS, "os", (4, 7), strict=False):
            seeds = [found[kind, depth, f"{n} iterations", "bits per byte"] for n in steps]
            for seed in seeds[0]:
                axis.plot(steps, [scores[seed] for scores in seeds], color=colour, lw=0.8, alpha=0.5)
            means = [statistics.mean(scores.values()) for scores in seeds]
            label, order = f"{depth} depth", 3 - size / 10  # smaller ones on top, so that equal curves are both seen
            axis.plot(steps, means, marker=mark, ms=size, lw=size / 2.5, color=colour, label=label, zorder=order)
        axis.set_title(kind, fontsize=11)
        axis.set(xscale="log", xlabel="iterations (dashed: mean in training)")
        axis.set_xticks(steps, steps)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("held-out bits per byte")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    return drawn


def spread(scores: dict[str, float], sign: str = "") -> str:
    """The mean over the seeds, and the largest distance from it."""
    mean = statistics.mean(scores.values())
    far = max(abs(score - mean) for score in scores.values())
    return f"{round(mean, 3) + 0.0:{sign}.3f} ± {far:.3f}"  # not -0.000


def scores(found: Values) -> str:
    """Bits per byte, and what the solves took: runs down, models across."""
    models = [(kind, depth) for kind in KINDS for depth in DEPTHS]
    runs = dict.fromkeys(run for _, _, run, metric in found if metric == "bits per byte")
    lines = [
        [run.removesuffix(" iterations"), *(spread(found[*model, run, "bits per byte"]) for model in models)]
        for run in runs
    ]
    (solved,) = (run for run in runs if run.startswith("solved"))

    def means(metric: str) -> list[float]:
        return [statistics.mean(found[*model, solved, metric].values()) for model in models]

    lines.append(["rows that converged", *(percent(share) for share in means("converged"))])
    lines.append(["iterations of the solve", *(f"{mean:.0f}" for mean in means("iterations"))])
    return table(["iterations", *(f"{kind}, {depth}" for kind, depth in models)], lines)


def change(found: Values, kind: str, depth: str) -> dict[str, float]:
    """Bits per byte at the largest budget less those at the training depth, by seed."""
    last, trained = (found[kind, depth, f"{n} iterations", "bits per byte"] for n in (budgets(found)[-1], TRAINED))
    return {seed: last[seed] - trained[seed] for seed in last}


def minutes(found: Values) -> float:
    """CPU minutes of all trainings."""
    return sum(sum(each.values()) for (*_, metric), each in found.items() if metric == "CPU minutes")
