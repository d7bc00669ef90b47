"""Word problems by one recipe: what `examples/state_tracking.py` learns of each group.

The recipe may be tuned on Z2, Z5, Z60, S3, S4, S5, D4, D5, Q8, A4 and A5 with seeds 0 to 2: the
part ``tuning``. The part ``held-out`` are the same groups with seeds 3 to 5, and the groups Z7, D7
and S3xZ2; each is run once, with nothing changed afterwards. All elements are inputs, in these
parts for A5 and S5 two generators. The goals of every run: an accuracy of .99 at 128 tokens, four
times the longest in training, with every sweep; every row converged; at most 45 CPU minutes.

The part ``all-elements`` is the paper's word problem: all elements of S5 and A5 are inputs, seeds 1
to 3, by a wider model, whose width, dropout and steps were chosen on seed 0 of S5. Its goal is that
S5's whole sequences are right in .95 at 128 tokens.

Each run is a process of one thread, ``--jobs`` at a time. A run that has ended stays in
``--folder``; the same command goes on with the others. The file of ``--json`` keeps the rows of
other runs that it has already.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from harness import command_line, machine

SCRIPT = Path(__file__).parents[1] / "examples" / "state_tracking.py"
GROUPS = ("Z2", "Z5", "Z60", "S3", "S4", "S5", "D4", "D5", "Q8", "A4", "A5")
UNSEEN = ("Z7", "D7", "S3xZ2")
TWO_GENERATORS = ("A5", "S5")
QUICK = ("--quick", "--steps", "10", "--free-lengths", "8", "--eval-lengths", "8", "16")
FULL = ("--eval-lengths", "16", "32", "64", "128", "256", "512")
WIDE = (
    "--d-model",
    "128",
    "--dropout",
    "0.1",
    "--steps",
    "12000",
    "--eval-lengths",
    "32",
    "64",
    "128",
    "256",
)

Run = tuple[str, str, int]  # part, group, seed
RUNS: list[Run] = [
    ("tuning" if seed < 3 else "held-out", group, seed) for seed in range(6) for group in GROUPS
]
RUNS += [("held-out", group, seed) for seed in range(3) for group in UNSEEN]
RUNS += [("all-elements", group, seed) for seed in (1, 2, 3) for group in TWO_GENERATORS]


def record(run: Run, folder: Path, quick: bool) -> dict[str, Any]:
    """Train and evaluate, or read an earlier run: numbers as lists over lengths, by sweep."""
    part, group, seed = run
    every = part == "all-elements"
    generators = 2 if group in TWO_GENERATORS and not every else 0
    output = folder / (f"{group}_all_{seed}" if every else f"{group}_{seed}")
    if not (output / "results.json").exists():
        command = [
            sys.executable,
            str(SCRIPT),
            "--group",
            group,
            "--seed",
            str(seed),
            "--output",
            str(output),
        ]
        command += ["--generators", str(generators), *(QUICK if quick else WIDE if every else FULL)]
        one = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=one)
        if done.returncode:
            raise RuntimeError(f"{group}, seed {seed}: {done.stderr[-2000:]}")
    mine = {"part": part, "group": group, "generators": generators, "seed": seed}
    return mine | summary(json.loads((output / "results.json").read_text()))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of ``results.json`` as lists over the lengths, by sweep, and by explicit model."""
    first = next(row for row in rows if row["model"] == "implicit")
    found: dict[str, Any] = {name: first[name] for name in ("steps", "trained_to", "cpu_minutes")}
    found |= {"lengths": list(dict.fromkeys(row["length"] for row in rows))}
    names = ("accuracy", "whole", "converged", "token_updates")
    found |= {name: {} for name in names} | {"explicit": {}, "explicit_whole": {}}
    for row in rows:
        if row["model"] == "implicit":
            for name in names:
                found[name].setdefault(row["sweep"], []).append(round(row[name], 4))
        else:
            found["explicit"].setdefault(row["model"], []).append(round(row["accuracy"], 4))
            found["explicit_whole"].setdefault(row["model"], []).append(round(row["whole"], 4))
    return found


def line(found: dict[str, Any]) -> str:
    """A run's accuracy and converged share at each length, lowest over sweeps; CPU minutes."""
    worst = {
        name: map(min, zip(*found[name].values(), strict=True))
        for name in ("accuracy", "converged")
    }
    cells = zip(found["lengths"], worst["accuracy"], worst["converged"], strict=True)
    shown = ", ".join(
        f"{length}: {accuracy:.3f} ({share:.0%})" for length, accuracy, share in cells
    )
    took = f"{found['steps']} steps, {found['cpu_minutes']:.0f} CPU minutes"
    return f"{found['group']}, seed {found['seed']}: {shown}; {took}"


def main() -> None:
    """Run what is not there yet, print a line for each run, and write the records."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--part",
        choices=("tuning", "held-out", "all-elements"),
        default="tuning",
        help="which runs",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        choices=range(1, 257),
        metavar="N",
        default=os.cpu_count() or 1,
        help="processes of one thread each",
    )
    parser.add_argument(
        "--folder", type=Path, help="finished runs; default: runs/groups, or runs/groups_quick"
    )
    options = parser.parse_args()
    folder = options.folder or Path("runs", "groups_quick" if options.quick else "groups")
    runs = [run for run in RUNS if run[0] == options.part][: 1 if options.quick else None]
    records = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    kept = {(row["part"], row["seed"], row["group"], row.get("change", "")): row for row in records}
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(partial(record, folder=folder, quick=options.quick), runs):
            print(line(found), flush=True)
            if options.json is not None:
                kept[found["part"], found["seed"], found["group"], ""] = found | {
                    "machine": machine()
                }
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(
                    json.dumps([kept[key] for key in sorted(kept)], indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
