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
from collections import defaultdict
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # this folder comes last: lm-eval imports a package that is also called evaluate

import tyro
from common.evaluation import load_model, load_tasks, metric_rows, write_tasks
from common.options import check, check_counts, check_device, parse
from common.run import log_to, write_json, write_text
from common.tables import figure, markdown, plt
from common.tiny_models import train_tiny_models

import deqseq as dq
from deqseq.integrations.huggingface import from_json
from deqseq.integrations.lm_eval import SolvedLM

lm_eval: Any = import_module("lm_eval.evaluator")
log = logging.getLogger("examples")

PAPER = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")


@dataclass(frozen=True)
class Options:
    """Accuracies of saved models on tasks of lm-eval, beside what their solves took."""

    models: tyro.conf.Positional[tuple[str, ...]] = ()  # folders, or names on the hub
    tokenizer: str | None = None  # folder or name of the tokenizer; default: each model's own
    tasks: tuple[str, ...] = ()  # names, separated by commas or spaces; paper: the paper's seven
    include: tuple[str, ...] = ()  # folders with YAML files of tasks
    cloze: tuple[str, ...] = ()  # texts, a task each: what is the last word of a passage?
    choice: tuple[str, ...] = ()  # texts, a task each: which sentence follows a passage?
    questions: int = 100  # questions of each of these tasks
    limit: int | None = None  # questions of each task, at most
    sweep: tuple[str, ...] = ("simultaneous",)  # simultaneous, sequential, sliding, or JSON with fields
    solver: str | None = None  # relaxed, naive, anderson, broyden, or JSON with fields; default: the model's own
    max_steps: tuple[int, ...] = ()  # budgets of iterations; default: the model's own
    rtol: float | None = None  # relative tolerance; default: the model's own
    batch_size: int = 16  # texts that are solved together
    max_length: int | None = None  # tokens after which texts are cut; default: as the model says, or 2048
    bootstrap: int = 1000  # samples for standard errors that have no closed form
    seed: int = 0  # seed of the questions made from texts
    device: str = "cpu"  # where to run
    output: str = "runs/evaluate"  # folder of the results
    repeated: bool = False  # ask only for last words that occurred before in their passage
    bos: bool = False  # begin every text with the BOS token, even if the tokenizer does not
    quick: bool = False  # without MODEL: train two tiny models and evaluate them; else 20 questions per task

    def __post_init__(self) -> None:
        check_counts(self, "questions", "batch_size", "bootstrap", "max_steps")
        check(self, "at least 1", lambda value: value is None or value >= 1, "limit", "max_length")
        check_counts(self, "seed", least=0)
        check(self, "a folder", lambda path: path and not Path(path).is_file(), "output")
        check(self, "folders with YAML files", lambda path: Path(path).is_dir(), "include")
        check(self, "files or folders of text", lambda path: Path(path).exists(), "cloze", "choice")
        check_device(self)
        try:
            ways_to_solve(self, dq.Stop())
        except TypeError as error:
            raise ValueError(str(error)) from error
        asks = bool(self.tasks or self.cloze or self.choice)
        if self.quick and not self.models and asks:
            raise ValueError("--quick without a MODEL has its own questions: leave out --tasks, --cloze and --choice")
        if not self.models and not self.quick:
            raise ValueError("name a MODEL, or give --quick")
        if not (self.quick or asks):
            raise ValueError("name tasks (--tasks) or texts to ask about (--cloze, --choice)")


def read_options(arguments: list[str]) -> Options:
    """Read the command line; names of tasks are separated."""
    options = parse(Options, arguments)
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
    sweeps = [from_json("sweep", spell(name), "--sweep") for name in options.sweep or ("simultaneous",)]
    solver = {} if options.solver is None else {"solver": from_json("solver", spell(options.solver), "--solver")}
    return [{"sweep": sweep, "stop": stop} | solver for sweep, stop in itertools.product(sweeps, stops)]


def spell(name: str) -> Any:
    """A name as configurations spell it (``sliding`` is ``Sliding``), or parsed JSON."""
    return json.loads(name) if name.lstrip().startswith("{") else name.capitalize()


def make_tasks(options: Options) -> dict[str, Any]:
    """All tasks with their data, by name."""
    folder, texts = Path(options.output) / "tasks", (options.cloze, options.choice)
    local = write_tasks(folder, *texts, options.questions, options.seed, options.repeated)
    return load_tasks([*options.tasks, *local], [folder, *map(Path, options.include)], options.seed)


def evaluate(label: str, name: str, tasks: dict[str, Any], options: Options) -> list[dict[str, Any]]:
    """Evaluate a model on every task in every way to solve; a row per metric.

    Raises:
        SystemExit: the model cannot be loaded, a request cannot be scored, or a way to solve does not suit the model.
    """
    model, tokenizer = load_model(name, options.tokenizer or name, device=options.device, bos=options.bos)
    core = getattr(model.base_model, "core", None)  # a plain model of transformers has none
    stop = core.solve_config.stop if isinstance(core, dq.ImplicitModel) else None
    rows = []
    for solve, (task, loaded) in itertools.product(ways_to_solve(options, stop), tasks.items()):
        begun = time.perf_counter()
        subject = SolvedLM(model, tokenizer, solve, batch_size=options.batch_size, max_length=options.max_length)
        try:
            found = lm_eval.evaluate(
                lm=subject, task_dict=loaded, limit=options.limit, bootstrap_iters=options.bootstrap
            )
        except ValueError as error:
            raise SystemExit(f"{label} on {task}: {error}") from error
        how: dict[str, Any] = dict.fromkeys(("sweep", "max_steps", "rtol"))
        if solve:
            how = {"sweep": str(solve["sweep"]), "max_steps": solve["stop"].max_steps, "rtol": solve["stop"].rtol}
        how |= subject.tally.numbers() | {"seconds": round(time.perf_counter() - begun, 3)}
        head = {"model": label, "kind": "explicit" if stop is None else "implicit"}
        rows += [head | row | how for row in metric_rows(found)]
        log.info("%s %s: %s, %s", label, task, found["results"], how)
    return rows


def describe(row: dict[str, Any]) -> str:
    """How the model of a row was solved."""
    return "-" if row["sweep"] is None else f"{row['sweep']}, ≤ {row['max_steps']}, rtol {row['rtol']:g}"


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with a line per model, task and way to solve."""
    cases: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[row["model"], row["task"], describe(row)].append(row)
    lines = []
    for (model, task, way), case in cases.items():
        spread = [f" ± {row['stderr']:.3f}" if row["stderr"] is not None else "" for row in case]
        result = ", ".join(f"{row['metric']} {row['value']:.3f}{text}" for row, text in zip(case, spread, strict=True))
        iterations = case[0]["self_iterations"]
        iterations = "-" if iterations is None else f"{iterations:.1f}"
        lines.append((model, task, case[0]["questions"], way, result, iterations, converged(case[0])))
    return markdown(("model", "task", "questions", "solved", "result", "self-iterations", "converged"), lines)


def converged(row: dict[str, Any]) -> str:
    """The shares of the rows that converged (and of their tokens, if counted) and diverged."""
    if row["converged"] is None:
        return "-"
    tokens = "" if row["converged_tokens"] is None else f" ({percent(row['converged_tokens'])} of the tokens)"
    return percent(row["converged"]) + tokens + f", {percent(row['diverged'])} diverged" * (row["diverged"] > 0)


def percent(share: float) -> str:
    """A share in per cent; only exact shares become 0.0% and 100.0%."""
    return f"{share if share in (0, 1) else min(max(share, 0.001), 0.999):.1%}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars with standard errors: a panel per metric, tasks across, models side by side; dotted lines: chance."""
    drawn: dict[str, str] = {}
    for row in rows:  # the first metric of each task: the accuracy, if there is one
        drawn.setdefault(row["task"], row["metric"])
    panels = {metric: [task for task in drawn if drawn[task] == metric] for metric in drawn.values()}
    bars = list(dict.fromkeys((row["model"], describe(row)) for row in rows))
    width, height = max(6.0, 2.0 + (0.45 * len(bars) + 0.5) * len(drawn)), 3.6 + 0.2 * len(bars)
    with figure(path, len(panels), width, height) as axes:
        for axis, (metric, tasks) in zip(axes, panels.items(), strict=True):
            shown = [row for row in rows if row["metric"] == metric and row["task"] in tasks]
            for number, bar in enumerate(bars):
                chosen = [row for row in shown if (row["model"], describe(row)) == bar]
                doubt = any(row["converged"] is not None and row["converged"] < 1 for row in chosen)
                axis.bar(
                    [tasks.index(row["task"]) + (number + 0.5) / len(bars) * 0.8 - 0.4 for row in chosen],
                    [row["value"] for row in chosen],
                    0.76 / len(bars),
                    yerr=[row["stderr"] or 0.0 for row in chosen],
                    color=plt.get_cmap("tab20" if len(bars) > 10 else "tab10")(number % 20),
                    hatch="//" if doubt else None,
                    edgecolor="white",
                    capsize=3,
                    label=bar[0] + f", {bar[1]}" * (bar[1] != "-") + " (hatched: not all rows converged)" * doubt,
                )
            chances = {tasks.index(row["task"]): row["chance"] for row in shown if row["chance"] is not None}
            for place, chance in chances.items():
                label = "chance" if place == min(chances) else ""
                axis.hlines(chance, place - 0.45, place + 0.45, colors="#333333", linestyles=":", label=label)
            axis.set_xticks(range(len(tasks)), tasks, rotation=20 if len(drawn) > 3 else 0)
            axis.set(ylabel=metric, axisbelow=True)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", fontsize=8)


def main(arguments: list[str]) -> None:
    """Evaluate, and write the table, the figure and the numbers."""
    options = read_options(arguments)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's bootstrap would fork a process that runs threads
    log_to(output / "log.txt")
    if not options.models:
        models, text = train_tiny_models(output)
        options = replace(options, models=models, cloze=(text,), choice=(text,), repeated=True, quick=False)
    tasks, rows = make_tasks(options), []
    short = [Path(name).name for name in options.models]
    for name in options.models:
        label = Path(name).name if short.count(Path(name).name) == 1 else name
        rows += evaluate(label, name, tasks, options)
        write_json(output / "results.json", rows)  # after each model, in case a later one fails
        write_text(output / "table.md", table(rows) + "\n")
        draw(rows, output / "evaluate.png")
    print(table(rows))
    print(f"\nfigure: {output}/evaluate.png   numbers: {output}/results.json   log: {output}/log.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
