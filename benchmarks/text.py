"""Language models on bytes: explicit, (4+1) and free ones of 200,000 parameters, three seeds.

Each kind has the best of three learning rates on one text (`--bible FILE`; Debian's package
bible-kjv prints the King James Bible with `bible -f ge1:1-re22:21`), 600 updates of 8 x 256 bytes,
seed 0. It is then run once with the seeds 1 to 3 on Shakespeare's plays, 4,000 updates, and scored
on three other plays. What holds Mamba2's (4+1)-model back is looked for on the first text; the best
change is run on the plays, too. At equal time: free models also make 1,300 updates, and the
explicit Mamba2 makes 16,000, as long as the best change takes.

Each run is a process of one thread, ``--jobs`` at a time, and a call of `examples/pretrain.py`. The
same command goes on after an interruption. The file of ``--json`` gets the rows of all runs, after
each of them.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from harness import command_line, machine

import deqseq as dq
from deqseq.training import Curriculum, Phase, bounded, unrolled

KINDS, RATES, SEEDS = ("explicit", "bounded", "free"), (0.002, 0.005, 0.0125), (1, 2, 3)
BYTES = "--vocab-size 257 --headdim 16 --eval-tokens 32768 --extrapolation 2 --checkpoint-every 500"
SIZES = {  # of explicit and implicit models, 199,000 to 200,600 parameters
    "mamba2": ("--d-model 112", "--d-model 96"),
    "llama": ("--d-model 88 --heads 4 --mlp-width 216", "--d-model 80 --heads 4 --mlp-width 220"),
}
DAMPED, PLAIN = dq.SolveConfig(dq.Relaxed(0.8)), dq.SolveConfig(dq.Naive())
FOUR, UNROLLED = bounded(4, 4, until=None, base=DAMPED), unrolled(5, until=None, base=DAMPED)
CHANGES: dict[str, Phase] = {  # what the (4+1)-model has in place of bounded(4, 1, base=DAMPED)
    "no damping": bounded(4, 1, until=None, base=PLAIN),
    "start at the input": bounded(4, 1, until=None, base=replace(DAMPED, start="input")),
    "4 phantom steps": FOUR,
    "8 iterations": bounded(8, 1, until=None, base=DAMPED),
    "5 unrolled": UNROLLED,
    "no weight norm": bounded(4, 1, until=None, base=DAMPED),
    "4 phantom steps, no weight norm": FOUR,
    "5 unrolled, no weight norm": UNROLLED,
}


class Run(NamedTuple):
    """A model, how it is trained, and what is changed."""

    family: str
    kind: str
    text: str
    seed: int
    steps: int
    rate: float
    change: str = ""


Rows = list[dict[str, Any]]


def record(run: Run, folder: Path, bible: str, quick: bool) -> Rows:
    """Train and score, or read what is there."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import pretrain

    output = folder / "_".join(str(part).replace(" ", "-") for part in run if part != "")
    command = ["--models", f"{'explicit' if run.kind == 'explicit' else 'implicit'}-{run.family}"]
    command += ["--seed", str(run.seed), "--lr", str(run.rate), "--output", str(output)]
    command += ["--bounded-share", "1"] if run.kind == "bounded" else []
    if quick:
        command += ["--quick", "--steps", "10", "--warmup", "1"]
    else:
        command += [*BYTES.split(), *SIZES[run.family][run.kind != "explicit"].split()]
        command += [
            "--steps",
            str(run.steps),
            *(["--corpus", bible] if run.text == "bible" else []),
        ]
    usual = pretrain.spec_of, pretrain.curriculum_of

    def spec_of(*given: Any) -> dq.LanguageModelSpec:
        spec = usual[0](*given)
        if "norm" in run.change:
            return replace(spec, backbone=replace(spec.backbone, weight_norm=False))
        return spec

    def curriculum_of(*given: Any) -> Curriculum:
        return Curriculum((CHANGES[run.change],)) if run.change else usual[1](*given)

    if not (output / "minutes").exists():
        begun = time.process_time()
        changed = patch.multiple(pretrain, spec_of=spec_of, curriculum_of=curriculum_of)
        with changed, contextlib.redirect_stdout(sys.stderr):
            pretrain.main(command)
        (output / "minutes").write_text(f"{(time.process_time() - begun) / 60:.1f}")
    rows, minutes = (
        json.loads((output / "results.json").read_text()),
        float((output / "minutes").read_text()),
    )
    shown = {name: value for name, value in run._asdict().items() if name != "seed"} | {
        "cpu_minutes": minutes
    }
    return [
        shown | {name: value for name, value in row.items() if name != "by_position"}
        for row in rows
    ]


def bits(rows: Rows) -> float:
    """Bits per byte at the trained length, of all tokens solved together."""
    return next(row["bits_per_byte"] for row in rows if row["sweep"] != "sequential")


def main() -> None:
    """Run what is not there yet, print a line for each run, and write the rows."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--bible", metavar="FILE", help="the text on which learning rates are chosen"
    )
    jobs = {"type": int, "choices": range(1, 257), "metavar": "N", "default": os.cpu_count() or 1}
    parser.add_argument("--jobs", **jobs, help="processes of one thread each")
    parser.add_argument(
        "--folder", type=Path, help="finished runs; default: runs/text, or runs/text_quick"
    )
    options = parser.parse_args()
    if not options.quick and not (options.bible and Path(options.bible).is_file()):
        parser.error(f"--bible must be a text file, got {options.bible!r}")
    folder, rates = options.folder or Path("runs", "text_quick" if options.quick else "text"), RATES
    models = [(family, kind) for family in SIZES for kind in KINDS]
    changes = [Run("mamba2", "bounded", "bible", 0, 600, RATES[-1], change) for change in CHANGES]
    seeds = SEEDS
    if options.quick:
        models, rates, seeds, changes = [("mamba2", "bounded")], (0.01,), (1,), changes[:1]
    os.environ |= {"OMP_NUM_THREADS": "1"}
    call = partial(record, folder=folder, bible=options.bible, quick=options.quick)
    found: Rows = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=spawn, max_tasks_per_child=1) as pool:

        def done(runs: list[Run]) -> dict[Run, float]:
            scores = {}
            for run, rows in zip(runs, pool.map(call, runs), strict=True):
                scores[run] = bits(rows)
                print(
                    f"{', '.join(str(part) for part in run if part != '')}: {scores[run]:.3f}",
                    flush=True,
                )
                found.extend(row | {"machine": machine()} for row in rows)
                if options.json is not None:
                    options.json.parent.mkdir(parents=True, exist_ok=True)
                    options.json.write_text(json.dumps(found, indent=1) + "\n")
            return scores

        print("bits per byte of held-out text at the trained length, all tokens at once")
        tried = done([Run(*model, "bible", 0, 600, rate) for model in models for rate in rates])
        best = {
            model: min(rates, key=lambda rate: tried[Run(*model, "bible", 0, 600, rate)])
            for model in models
        }
        runs = [Run(*model, "plays", seed, 4000, best[model]) for seed in seeds for model in models]
        as_long = {("mamba2", "free"): 1300, ("llama", "free"): 1300, ("mamba2", "explicit"): 16000}
        longer = [(model, steps) for model, steps in as_long.items() if model in models]
        runs += [
            Run(*model, "plays", seed, steps, best[model])
            for model, steps in longer
            for seed in seeds
        ]
        changed = done(changes)
        better = min(changed, key=lambda run: changed[run])
        done([better._replace(text="plays", seed=seed, steps=4000) for seed in seeds] + runs)


if __name__ == "__main__":
    main()
