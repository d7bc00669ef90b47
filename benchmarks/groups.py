"""Word problems by one recipe: what `examples/state_tracking.py` learns of each group, with several seeds.

The recipe may be tuned on Z2, Z5, Z60, S3, S4, S5, D4, D5, Q8, A4 and A5 with seeds 0 to 2: the part ``tuning``. The
part ``held-out`` are the same groups with seeds 3 to 5, and the groups Z7, D7 and S3xZ2; each is run once, with
nothing changed afterwards. All elements are inputs, for A5 and S5 two generators. The goals of every run: an accuracy
of .99 at 128 tokens, four times the longest in training, with every sweep; every row converged; at most 45 CPU
minutes. The part ``changes`` is S5 with seed 0, each time with one option of the recipe changed, and at most 4,000
steps instead of 8,000.

Each run is a process of one thread, ``--jobs`` at a time. A run that has ended stays in ``--folder``; the same command
goes on with the others, and an interrupted run with its last checkpoint. ``--only S5:0 Z5:1`` runs those alone. The
file of ``--json`` keeps the rows of other runs that it has already.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentTypeError
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from harness import command_line, machine

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from common.run import Progress, check_owner, write_json
from state_tracking_parts import read_options

ROOT = Path(__file__).parents[1]
FREE = ("output", "device", "checkpoint_every", "fresh")  # options that may differ from those of a finished run
GROUPS = ("Z2", "Z5", "Z60", "S3", "S4", "S5", "D4", "D5", "Q8", "A4", "A5")
UNSEEN = ("Z7", "D7", "S3xZ2")
JUDGED = 128  # tokens
TWO_GENERATORS = ("A5", "S5")
CHANGES = {
    "no-dropout": ("--dropout", "0"),
    "from-zero": ("--start", "1e-6"),
    "one-length": ("--lengths", "32", "--free-lengths", "32"),
    "sooner": ("--learned", "0.9"),
}
QUICK = tuple(f"--steps 30 --lengths 2 --free-lengths 4 --eval-lengths 8 {JUDGED} --baselines 1".split())


class Run(NamedTuple):
    """A group, a seed, and what is changed of the recipe."""

    group: str
    seed: int
    change: str = ""

    @property
    def part(self) -> str:
        """Whether the recipe may be tuned on it."""
        if self.change:
            return "changes"
        return "tuning" if self.group in GROUPS and self.seed < 3 else "held-out"

    def record(self, folder: Path, quick: bool) -> dict[str, Any]:
        """Train and evaluate, or read what is there."""
        name = f"{self.group}_{self.seed}{self.change and '_'}{self.change}"
        output, generators = folder / name, 2 if self.group in TWO_GENERATORS else 0
        options = ["--group", self.group, "--seed", str(self.seed), "--generators", str(generators)]
        options += [*CHANGES[self.change], "--steps", "4000", "--baselines"] if self.change else []
        options += QUICK if quick else ()
        if (output / "results.json").exists():
            check_owner(output, "state_tracking", asdict(read_options(options)), free=FREE)
        else:
            command = [sys.executable, str(ROOT / "examples" / "state_tracking.py"), "--output", str(output), *options]
            one = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=one)
            if done.returncode:
                raise RuntimeError(f"{self.group}, seed {self.seed}: {done.stderr[-2000:]}")
        mine = {"part": self.part, "group": self.group, "generators": generators, "seed": self.seed}
        mine |= {"change": self.change} if self.change else {}
        return mine | summary(json.loads((output / "results.json").read_text()))


RUNS = [Run(group, seed) for seed in range(6) for group in GROUPS]
RUNS += [Run(group, seed) for seed in range(3) for group in UNSEEN]
RUNS += [Run("S5", 0, change) for change in CHANGES]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of ``results.json`` as lists over the lengths, by sweep, and by explicit model."""
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    implicit = [row for row in rows if row["model"] == "implicit"]
    found: dict[str, Any] = {name: implicit[0][name] for name in ("steps", "trained_to", "cpu_minutes")}
    found |= {"lengths": lengths, "accuracy": {}, "converged": {}, "token_updates": {}, "explicit": {}}
    for row in rows:
        if row in implicit:
            for name in ("accuracy", "converged", "token_updates"):
                found[name].setdefault(row["sweep"], []).append(round(row[name], 4))
        else:
            found["explicit"].setdefault(row["model"], []).append(round(row["accuracy"], 4))
    return found


def parse_run(text: str) -> Run:
    """``S5:0``, or a name of ``CHANGES``."""
    group, _, seed = text.partition(":")
    if text in CHANGES:
        return Run("S5", 0, text)
    if not seed.isdecimal() or Run(group, int(seed)) not in RUNS:
        known = f"GROUP:SEED with seeds 0 to 5 of {GROUPS} or 0 to 2 of {UNSEEN}, or one of {tuple(CHANGES)}"
        raise ArgumentTypeError(f"must be {known}, got {text!r}")
    return Run(group, int(seed))


def parse_jobs(text: str) -> int:
    """A positive number."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def main() -> None:
    """Run what is not there yet, report, and write the rows."""
    parser = command_line(__doc__ or "")
    parser.add_argument("--part", choices=("tuning", "held-out", "changes"), default="tuning", help="which runs")
    parser.add_argument("--only", type=parse_run, nargs="+", metavar="RUN", help="these alone: GROUP:SEED or a change")
    parser.add_argument("--jobs", type=parse_jobs, default=os.cpu_count() or 1, help="processes of one thread each")
    parser.add_argument("--folder", type=Path, help="finished runs; default: runs/groups, or runs/groups_quick")
    options = parser.parse_args()
    folder = options.folder or Path("runs", "groups_quick" if options.quick else "groups")
    runs = options.only or [run for run in RUNS if run.part == options.part]
    rows = written(options.json)
    progress = Progress("groups", len(runs))
    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for record in pool.map(lambda run: run.record(folder, options.quick), runs):
            found.append(record)
            progress.to(len(found))
            print(line(record), flush=True)
            if options.json is not None:
                rows = merged(rows, record | {"machine": machine(threads=1)})
                write_json(options.json, rows)
    progress.close()


def written(path: Path | None) -> list[dict[str, Any]]:
    """The rows that a file has already; read before anything runs, for a run is minutes of work."""
    if path is None or not path.exists():
        return []
    try:
        rows = json.loads(path.read_text())
        return sorted(rows, key=_of)
    except (ValueError, TypeError, KeyError):
        raise SystemExit(f"--json must be a new file or one of this script, got {str(path)!r}: move it") from None


def merged(rows: list[dict[str, Any]], record: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file, with the one of a run added or replaced."""
    return sorted([*(row for row in rows if _of(row) != _of(record)), record], key=_of)


def _of(row: dict[str, Any]) -> tuple[str, int, str, str]:
    return row["part"], row["seed"], row["group"], row.get("change", "")


def line(record: dict[str, Any]) -> str:
    """A run's numbers at the judged length: accuracy and share of converged rows with each sweep, CPU minutes."""
    at = record["lengths"].index(JUDGED)
    pairs = {sweep: (row[at], record["converged"][sweep][at]) for sweep, row in record["accuracy"].items()}
    shown = ", ".join(f"{sweep} {accuracy:.3f} ({share:.0%})" for sweep, (accuracy, share) in pairs.items())
    holds = all(accuracy >= 0.99 and share == 1 for accuracy, share in pairs.values()) and record["cpu_minutes"] <= 45
    took = f"{record['steps']} steps, {record['cpu_minutes']:.0f} CPU minutes"
    name = f"{record['group']}, seed {record['seed']}{', ' * ('change' in record)}{record.get('change', '')}"
    return f"{name}: {shown}; {took}: {'holds' if holds else 'MISSED'}"


if __name__ == "__main__":
    main()
