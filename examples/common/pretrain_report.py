"""The table and the figure of examples/pretrain.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.run import curve_rows
from common.tables import GREEN, ORANGE, SHADED, cell, figure, markdown, smooth

Numbers = Sequence[Mapping[str, Any]]
COLOURS, DASHES = {"llama": GREEN, "mamba2": ORANGE}, {"implicit": "-", "bounded": "--", "explicit": ":"}


def table(rows: Numbers) -> str:
    """Bits per byte, models down, lengths across, with the mean iterations in brackets, as Markdown."""
    lengths, lines = sorted({row["length"] for row in rows}), []
    for model, sweep in dict.fromkeys((row["model"], row["sweep"]) for row in rows):
        scored = {row["length"]: row for row in rows if (row["model"], row["sweep"]) == (model, sweep)}
        cells = [_cell(scored[length]) if length in scored else "" for length in lengths]
        lines.append([model, f"{next(iter(scored.values()))['parameters']:,}", sweep, *cells])
    return markdown(["model", "parameters", "solved", *map(str, lengths)], lines)


def _cell(row: Mapping[str, Any]) -> str:
    return cell(row["bits_per_byte"], row["self_iterations"], row["converged"], digits=1)


def updates(folder: Path, row: Mapping[str, Any]) -> Numbers:
    """The numbers of all updates of a trained model, those of the part that it shares with another one first."""
    names = (row["model"], f"trunk-{row['family']}")
    own, trunk = (curve_rows(folder / "curves" / f"{name}.jsonl") for name in names)
    return [update for update in trunk if row["kind"] != "explicit" and update["step"] < own[0]["step"]] + own


def draw(folder: Path, rows: Numbers, step_tokens: int, length: int) -> None:
    """Write ``pretrain.png``: training loss, held-out loss by position, and iterations in training.

    Args:
        folder: of the run.
        rows: of ``results.json``.
        step_tokens: tokens of an update.
        length: trained length.
    """
    longest = max(row["length"] for row in rows)
    with figure(folder / "pretrain.png", 3, 13) as (loss, by_position, iterations):
        for row in rows:
            if row["length"] != longest or row["sweep"] == "sequential":
                continue
            curve = updates(folder, row)
            style: dict[str, Any] = {"color": COLOURS[row["family"]], "linestyle": DASHES[row["kind"]]}
            style |= {"label": row["model"], "linewidth": 1.6}
            seen = [update["step"] * step_tokens for update in curve]
            loss.plot(seen, smooth([update["loss"] for update in curve]), **style)
            by_position.plot(range(1, longest + 1), smooth(row["by_position"], max(1, longest // 24)), **style)
            if row["kind"] != "explicit":
                iterations.plot(seen, smooth([update["iterations"] for update in curve]), **style)
        by_position.axvspan(1, length, color=SHADED, zorder=0)
        loss.set(xlabel="training tokens", ylabel="training loss (nats per token)")
        by_position.set(xlabel="position in the sequence; shaded: trained", ylabel="held-out loss (nats per token)")
        iterations.set(xlabel="training tokens", ylabel="iterations in training")
        for axis in (loss, by_position, iterations):
            if axis.lines:
                axis.legend(fontsize=8)
