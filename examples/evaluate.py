"""Evaluation with lm-eval: accuracies of saved models, beside what their solves took.

A model is a folder written by ``save_pretrained``, with its tokenizer, or a name on the hub. Tasks are the paper's
seven, any others that lm-eval knows by name (these need the hub), tasks in YAML files of your own, or questions made
from your texts. The solves of implicit models can be configured, also in several ways at once; mean iterations and the
share of solves that converged stand beside the accuracies.

    python examples/evaluate.py --quick                                # trains two tiny models and evaluates them
    python examples/evaluate.py MODEL --tasks paper                    # or --tasks lambada_openai,piqa
    python examples/evaluate.py MODEL OTHER --cloze plays/ --choice plays/
    python examples/evaluate.py MODEL --tasks mine --include my_tasks/
    python examples/evaluate.py MODEL --cloze plays/ --max-steps 2 4 8 16 --sweep simultaneous sliding
"""

import itertools
import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # this folder comes last: lm-eval imports a package that is also called evaluate

import tyro
from common import options as opt
from common.evaluation import (
    Questions,
    check_models,
    find_tasks,
    load_model,
    load_tasks,
    make_questions,
    metric_rows,
    solved_lm,
    write_tasks,
)
from common.evaluation_report import draw, table
from common.processes import one_process
from common.run import Progress, claim_folder, log_to, write_json, write_text
from common.tiny_models import train_tiny_models

import deqseq as dq
from deqseq.integrations.huggingface import from_json

log = logging.getLogger("examples")

WRITES = ("results.json", "table.md", "evaluate.png", "log.txt", "tasks/*.jsonl", "tasks/*.yaml")
SOLVES = ("max_steps", "rtol", "sweep", "solver")  # how an implicit model is solved
PAPER = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")


@dataclass(frozen=True)
class Options:
    """Accuracies of saved models on tasks of lm-eval, beside what their solves took."""

    models: tyro.conf.Positional[tuple[opt.Pretrained, ...]] = ()  # folders, or names on the hub
    tokenizer: opt.Pretrained | None = None  # folder or name of the tokenizer; default: each model's own
    tasks: tuple[opt.Text, ...] = ()  # names, separated by commas or spaces; paper: the paper's seven
    include: tuple[opt.Folder, ...] = ()  # folders with YAML files of tasks
    cloze: tuple[opt.Existing, ...] = ()  # texts, a task each: what is the last word of a passage?
    choice: tuple[opt.Existing, ...] = ()  # texts, a task each: which sentence follows a passage?
    questions: opt.Count = 100  # questions of each of these tasks
    limit: opt.Count | None = None  # questions of each task, at most
    sweep: Annotated[tuple[opt.Text, ...], opt.Some] = ("simultaneous",)  # or sequential, sliding, JSON with fields
    solver: opt.Text | None = None  # adaptive, relaxed, naive, anderson, broyden, or JSON; default: the model's own
    max_steps: Annotated[tuple[opt.Count, ...], opt.Distinct] = ()  # budgets of iterations; default: the model's own
    rtol: opt.NotNegative | None = None  # relative tolerance; default: the model's own
    batch_size: opt.Size = 16  # texts that are solved together
    max_length: opt.Size | None = None  # tokens after which texts are cut; default: as the model says, or 2048
    bootstrap: Annotated[int, opt.integer(2, 10**9)] = 1000  # samples for standard errors that have no closed form
    seed: opt.Natural = 0  # seed of the questions made from texts
    device: opt.Device = "cpu"  # where to run
    output: opt.Output = "runs/evaluate"  # folder of the results; those of an earlier evaluation are replaced
    repeated: bool = False  # ask only for last words that occurred before in their passage
    bos: bool = False  # begin every text with the BOS token, even if the tokenizer does not
    quick: bool = False  # without MODEL: train two tiny models and evaluate them; else 20 questions per task

    def __post_init__(self) -> None:
        opt.check_options(self)
        ways_to_solve(self, dq.Stop())
        if empty := [part for part in self.tasks if not part.strip(", ")]:
            raise ValueError(f"--tasks must have names, separated by commas or spaces, got {empty[0]!r}")
        asks = bool(self.tasks or self.cloze or self.choice)
        if self.quick and not self.models and asks:
            raise ValueError("--quick without a MODEL has its own questions: leave out --tasks, --cloze and --choice")
        if not self.models and not self.quick:
            raise ValueError("name a MODEL, or give --quick")
        if self.models and not asks:
            raise ValueError("name tasks (--tasks) or texts to ask about (--cloze, --choice)")
        written = Path(self.output, "tasks").resolve()
        for path in (*self.include, *self.cloze, *self.choice):
            if Path(path).resolve().is_relative_to(written):
                raise ValueError(f"--output {self.output} is cleared first, and {path} lies in it: name another folder")


def read_options(arguments: list[str]) -> Options:
    """Read the command line; names of tasks are separated."""

    def idle(options: Options) -> dict[str, tuple[str, ...]]:
        own = not options.models  # --quick asks its own questions
        return {
            "without --cloze or --choice": ("questions",) * (not (own or options.cloze or options.choice)),
            "without --cloze": ("repeated",) * (own or not options.cloze),
            "without --tasks": ("include",) * (not options.tasks),
        }

    options = opt.parse(Options, arguments, idle)
    names = [name for part in options.tasks for name in part.split(",") if name]
    names = itertools.chain(*(PAPER if name == "paper" else (name,) for name in names))
    limit = options.limit or 20 if options.quick and options.models else options.limit
    return replace(options, tasks=tuple(names), limit=limit)


def ways_to_solve(options: Options, stop: dq.Stop | None) -> list[dict[str, Any]]:
    """The keyword arguments of an implicit model's call, one set per way to solve; of an explicit model's, none.

    Args:
        options: of the command line.
        stop: the model's own stopping rule. None: the model is explicit.
    """
    if stop is None:
        return [{}]
    given = {} if options.rtol is None else {"rtol": options.rtol}
    stops = [replace(stop, **given, max_steps=budget) for budget in options.max_steps or (stop.max_steps,)]
    sweeps = [read_object("sweep", name) for name in options.sweep]
    solver = {} if options.solver is None else {"solver": read_object("solver", options.solver)}
    return [{"sweep": sweep, "stop": stop} | solver for sweep, stop in itertools.product(sweeps, stops)]


def read_object(kind: Literal["sweep", "solver"], text: str) -> Any:
    """A sweep or a solver by its name, as ``sliding``, or by JSON."""
    try:
        return from_json(kind, json.loads(text) if text.lstrip().startswith("{") else text.capitalize(), f"--{kind}")
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--{kind} {text}: {error}") from error


@cache
def ask(options: Options) -> Questions:
    """The questions about texts, by task; SystemExit if a text has too few."""
    return make_questions(options.cloze, options.choice, options.questions, options.seed, options.repeated)


def make_tasks(options: Options) -> dict[str, Any]:
    """All tasks with their data, by name; the questions about texts are written."""
    folder = Path(options.output) / "tasks"
    return load_tasks([*options.tasks, *write_tasks(folder, ask(options))], [folder, *options.include], options.seed)


def evaluate(label: str, name: str, tasks: dict[str, Any], options: Options) -> list[dict[str, Any]]:
    """Evaluate a model on every task in every way to solve; a row per metric.

    Raises:
        SystemExit: the model cannot be loaded, a request cannot be scored, or a way to solve does not suit the model.
    """
    model, tokenizer = load_model(name, options.tokenizer or name, device=options.device, bos=options.bos)
    counted, progress = itertools.count(1), Progress(f"passes of {label}", None, shown=not sys.stderr.isatty())
    model.register_forward_hook(lambda *_: progress.to(next(counted)))
    core = getattr(model.base_model, "solved", None)  # None: an explicit model; a plain one of transformers has none
    stop = None if core is None else core.solve_config.stop
    lm_eval, subject_type, rows = import_module("lm_eval.evaluator"), solved_lm(), []
    for solve, (task, loaded) in itertools.product(ways_to_solve(options, stop), tasks.items()):
        begun = time.perf_counter()
        subject = subject_type(model, tokenizer, solve, batch_size=options.batch_size, max_length=options.max_length)
        with opt.naming(f"{label} on {task}"):
            found = lm_eval.evaluate(
                lm=subject, task_dict=loaded, limit=options.limit, bootstrap_iters=options.bootstrap
            )
        how: dict[str, Any] = dict.fromkeys(("sweep", "max_steps", "rtol"))
        if solve:
            how = {"sweep": str(solve["sweep"]), "max_steps": solve["stop"].max_steps, "rtol": solve["stop"].rtol}
        how |= subject.tally.numbers() | {"seconds": round(time.perf_counter() - begun, 3)}
        head = {"model": label, "kind": "explicit" if stop is None else "implicit"}
        rows += [head | row | how for row in metric_rows(found)]
        log.info("%s %s: %s, %s", label, task, found["results"], how)
    return rows


def main(arguments: list[str]) -> None:
    """Evaluate, and write the table, the figure and the numbers."""
    one_process("evaluate.py")
    options = read_options(arguments)
    solved_lm()
    ask(options)
    find_tasks(options.tasks, options.include)
    given = [f"--{name.replace('_', '-')}" for name in SOLVES if getattr(options, name) != getattr(Options, name)]
    if not check_models(options.models, options.tokenizer) and options.models and given:
        raise SystemExit(f"{given[0]} has no effect on explicit models: leave it out")
    output = claim_folder(options.output, "evaluate", asdict(options), fresh=True, writes=WRITES)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's bootstrap would fork a process that runs threads
    log_to(output / "log.txt")
    note = "\n\nA --quick run: too few questions to compare models." * options.quick
    if not options.models:
        models, text = train_tiny_models(output)
        options = replace(options, models=models, cloze=(text,), choice=(text,), repeated=True, quick=False)
    tasks, rows = make_tasks(options), []
    short = [Path(name).name for name in options.models]
    for name in options.models:
        label = Path(name).name if short.count(Path(name).name) == 1 else name
        rows += evaluate(label, name, tasks, options)
        write_json(output / "results.json", rows)  # after each model, in case a later one fails
        write_text(output / "table.md", table(rows) + note + "\n")
        draw(rows, output / "evaluate.png")
    print(table(rows) + note)
    print(f"\nfigure: {output}/evaluate.png   numbers: {output}/results.json   log: {output}/log.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
