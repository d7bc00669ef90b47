"""Evaluation with lm-eval: accuracies of saved models, beside what their solves took.

A model is a folder written by ``save_pretrained``, with its tokenizer, or a name on the hub. Tasks are the paper's
seven or any others that lm-eval knows by name, for which a hub must be within reach; and, offline, questions made from
text of your own, or tasks that a YAML file describes. How an implicit model is solved can be chosen, also several ways
at once; mean self-iterations and the share of solves that converged stand beside the accuracies.

    python examples/evaluate.py --quick                                # trains two tiny models and evaluates them
    python examples/evaluate.py MODEL --tasks paper                    # or --tasks lambada_openai,piqa
    python examples/evaluate.py MODEL OTHER --cloze plays/ --choice plays/
    python examples/evaluate.py MODEL --tasks mine --include my_tasks/
    python examples/evaluate.py MODEL --cloze plays/ --max-steps 2 4 8 16 --sweep simultaneous sliding
"""

import argparse
import difflib
import importlib
import itertools
import json
import logging
import os
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # this folder comes last: lm-eval imports a package that is called evaluate, too

import torch

try:
    lm_eval: Any = importlib.import_module("lm_eval.evaluator")
    tasks_of_lm_eval: Any = importlib.import_module("lm_eval.tasks")
except ImportError as error:
    raise ImportError('examples/evaluate.py needs lm-eval: pip install "deqseq[eval]"') from error
try:
    import matplotlib
except ImportError as error:
    raise ImportError('examples/evaluate.py needs matplotlib: pip install "deqseq[examples]"') from error

from _evaluate_loading import load
from _evaluate_quick import train_and_save

import deqseq as dq
from deqseq.integrations.huggingface import from_json
from deqseq.integrations.huggingface.modeling_causal_lm import ImplicitCausalLM
from deqseq.integrations.lm_eval import SolvedLM
from deqseq.tasks.text import LocalDocuments, choice_questions, cloze_questions

matplotlib.use("Agg")
import matplotlib.pyplot as plt

log = logging.getLogger("evaluate")

PAPER = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")
MEAN: dict[str, Any] = {"aggregation": "mean", "higher_is_better": True}
QUESTIONS: dict[str, Any] = {"cloze": cloze_questions, "choice": choice_questions}
ASKED: dict[str, dict[str, Any]] = {
    "cloze": {
        "output_type": "loglikelihood",
        "doc_to_target": "target",
        "metric_list": [
            {"metric": "acc"} | MEAN,
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
    },
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_target": "answer",
        "doc_to_choice": "options",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"} | MEAN, {"metric": "acc_norm"} | MEAN],
    },
}
"""How lm-eval is to ask the questions of deqseq.tasks.text: the fields of a task's YAML that differ."""


def option(default: Any, text: str, kind: Any = str) -> Any:
    """A field that is also a command-line option."""
    return field(default=default, metadata={"help": text, "kind": kind})


@dataclass(frozen=True)
class Options:
    """Everything that decides an evaluation."""

    models: tuple[str, ...]
    tokenizer: str = option("", "folder or name of the tokenizer; empty: each model's own")
    tasks: tuple[str, ...] = option((), "tasks by name, with commas or spaces between; paper: the paper's seven")
    include: tuple[str, ...] = option((), "folders with YAML files of tasks")
    cloze: tuple[str, ...] = option((), "texts of which the last words of passages are asked, a task each")
    choice: tuple[str, ...] = option((), "texts of which the next sentence is asked, a task each")
    questions: int = option(100, "questions of each of these tasks", int)
    limit: int | None = option(None, "questions of each task, at most", int)
    sweep: tuple[str, ...] = option((), "simultaneous, sequential, sliding, or JSON with their fields")
    solver: str = option("", "relaxed, naive, anderson, broyden, or JSON; empty: the model's own")
    max_steps: tuple[int, ...] = option((), "budgets of self-iterations; none: the model's own", int)
    rtol: float | None = option(None, "relative tolerance; none: the model's own", float)
    batch_size: int = option(16, "texts that are solved together", int)
    max_length: int | None = option(None, "tokens after which texts are cut; none: as the model says, or 2048", int)
    bootstrap: int = option(1000, "samples for standard errors that have no closed form", int)
    seed: int = option(0, "seed of the questions made from texts", int)
    device: str = option("cpu", "where to run")
    output: str = option("runs/evaluate", "folder of the results")
    repeated: bool = option(False, "ask for last words only that occurred before in their passage", bool)
    bos: bool = option(False, "begin every text with the tokenizer's BOS token, which it does not do itself", bool)
    quick: bool = option(False, "without MODEL: train two tiny ones and evaluate these; else 20 questions a task", bool)


def parse(arguments: list[str]) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="folders, or names on the hub")
    for item in fields(Options)[1:]:
        how: dict[str, Any] = {"help": item.metadata["help"], "default": item.default}
        if item.metadata["kind"] is bool:
            how |= {"action": "store_true"}
        else:
            how |= {"type": item.metadata["kind"], "nargs": "+" if isinstance(item.default, tuple) else None}
        parser.add_argument(f"--{item.name.replace('_', '-')}", **how)
    given = vars(parser.parse_args(arguments))
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    names = [name for part in values["tasks"] for name in part.split(",") if name]
    values["tasks"] = tuple(itertools.chain(*(PAPER if name == "paper" else (name,) for name in names)))
    options = Options(**values)
    try:
        check(options)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:  # torch names a bad device by any of these
        parser.error(str(error))
    return replace(options, limit=options.limit or 20) if options.quick and options.models else options


def check(options: Options) -> None:
    """Refuse, before anything is read, what could not be evaluated.

    Raises:
        ValueError, TypeError, RuntimeError, AssertionError: names the option, or is the library's own refusal.
    """
    for name in ("questions", "limit", "batch_size", "max_length", "bootstrap"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not options.output or Path(options.output).is_file():
        raise ValueError(f"--output must be a folder, got {options.output!r}")
    for folder in options.include:
        if not Path(folder).is_dir():
            raise ValueError(f"--include must name folders, got {folder!r}")
    asked = bool(options.tasks or options.cloze or options.choice)
    if options.quick and not options.models and asked:
        raise ValueError("--quick without a MODEL asks questions of its own: leave out --tasks, --cloze and --choice")
    if not options.models and not options.quick:
        raise ValueError("name a MODEL, or give --quick")
    if not (options.quick or asked):
        raise ValueError("name tasks (--tasks) or texts to ask about (--cloze, --choice)")
    ways_to_solve(options, dq.Stop())
    torch.empty(0, device=options.device)


def ways_to_solve(options: Options, stop: dq.Stop | None) -> list[dict[str, Any]]:
    """The arguments of an implicit model's call, one set for each way that was asked for; of an explicit one, none.

    Args:
        options: of the command line.
        stop: the model's own stopping rule; None: the model is explicit.
    """
    if stop is None:
        return [{}]
    given = {} if options.rtol is None else {"rtol": options.rtol}
    stops = [replace(stop, **given, max_steps=budget) for budget in options.max_steps or (stop.max_steps,)]
    sweeps = [from_json("sweep", spelt(name), "--sweep") for name in options.sweep or ("simultaneous",)]
    solver = {"solver": from_json("solver", spelt(options.solver), "--solver")} if options.solver else {}
    return [{"sweep": sweep, "stop": stop} | solver for sweep, stop in itertools.product(sweeps, stops)]


def spelt(name: str) -> Any:
    """What a configuration calls it: ``sliding`` is ``Sliding``, JSON is parsed."""
    return json.loads(name) if name.lstrip().startswith("{") else name.capitalize()


def write_tasks(options: Options) -> list[str]:
    """Make questions of the texts that were given, and say in a YAML file how lm-eval is to ask them.

    Returns:
        The names of the tasks.

    Raises:
        SystemExit: names the file that cannot be read, or holds too little.
    """
    folder, names = Path(options.output) / "tasks", []
    folder.mkdir(parents=True, exist_ok=True)
    for kind, source in [("cloze", f) for f in options.cloze] + [("choice", f) for f in options.choice]:
        special = {"repeated": options.repeated} if kind == "cloze" else {}
        try:
            documents = list(LocalDocuments(source))
            questions = QUESTIONS[kind](documents, options.questions, seed=options.seed, **special)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--{kind} {source} (--questions {options.questions}): {error}") from error
        stem = f"{kind}_{Path(source).stem}"
        name = stem if stem not in names else f"{stem}_{len(names)}"
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(asdict(question)) + "\n" for question in questions))
        task = {"task": name, "dataset_path": "json", "test_split": "test", "doc_to_text": "context", **ASKED[kind]}
        files = {"data_files": {"test": str(data.resolve())}, "cache_dir": str((folder / "cache").resolve())}
        (folder / f"{name}.yaml").write_text(json.dumps(task | {"dataset_kwargs": files}, indent=1))  # JSON is YAML
        names.append(name)
    return names


def load_tasks(options: Options) -> dict[str, Any]:
    """All tasks by name, with their data, as lm-eval holds them.

    Raises:
        SystemExit: a name that lm-eval does not know, or data on a hub that cannot be reached.
    """
    local = write_tasks(options)
    folders = [Path(options.output) / "tasks", *map(Path, options.include)]
    manager = tasks_of_lm_eval.TaskManager(include_path=folders, include_defaults=False)
    on_hub = [name for name in options.tasks if name not in manager.all_tasks]
    if on_hub:
        manager = tasks_of_lm_eval.TaskManager(include_path=folders, include_defaults=True)
    for name in on_hub:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            raise SystemExit(f"lm-eval knows no task {name!r}" + f"; did you mean {' or '.join(near)}?" * bool(near))
    tasks = {}
    for name in dict.fromkeys([*options.tasks, *local]):
        try:
            tasks[name] = manager.load([name])
        except OSError as error:
            left = [other for other in on_hub if other not in tasks] if name in on_hub else [name]
            raise SystemExit(
                f"the data of {', '.join(left)} cannot be loaded ({error}). Tasks by name need a hub within reach: go "
                "online (HF_HUB_OFFLINE and HF_DATASETS_OFFLINE must not be set), or evaluate offline: --cloze and "
                "--choice ask questions about texts of yours, --include reads tasks of yours"
            ) from error
        for task in tasks[name]["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=options.seed)
    return tasks


def evaluate(label: str, name: str, tasks: dict[str, Any], options: Options) -> list[dict[str, Any]]:
    """Every task, solved in every way that was asked for; a row for each metric.

    Raises:
        SystemExit: names what cannot be loaded, scored, or solved in such a way.
    """
    model, tokenizer = load(name, options.tokenizer or name, device=options.device, bos=options.bos)
    stop = model.model.stop if isinstance(model, ImplicitCausalLM) else None
    rows = []
    for solve, (task, loaded) in itertools.product(ways_to_solve(options, stop), tasks.items()):
        begun = time.perf_counter()
        subject = SolvedLM(model, tokenizer, solve, batch_size=options.batch_size, max_length=options.max_length)
        try:
            found = lm_eval.evaluate(
                lm=subject, task_dict=loaded, limit=options.limit, bootstrap_iters=options.bootstrap
            )
        except ValueError as error:  # of a request that cannot be scored, or a way to solve that does not suit
            raise SystemExit(f"{label} on {task}: {error}") from error
        how: dict[str, Any] = dict.fromkeys(("sweep", "max_steps", "rtol"))
        if solve:
            how = {"sweep": str(solve["sweep"]), "max_steps": solve["stop"].max_steps, "rtol": solve["stop"].rtol}
        how |= subject.tally.numbers() | {"seconds": round(time.perf_counter() - begun, 3)}
        head = {"model": label, "kind": "explicit" if stop is None else "implicit"}
        rows += [head | row | how for row in metrics(found)]
        log.info("%s %s: %s, %s", label, task, found["results"], how)
    return rows


def metrics(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What lm-eval has found, a row for each task and metric."""
    rows = []
    for task, entry in found["results"].items():
        samples = found["samples"].get(task, [])
        choosing = found["configs"].get(task, {}).get("output_type") == "multiple_choice"
        chance = sum(1 / len(sample["resps"]) for sample in samples) / len(samples) if choosing else None
        for key, value in entry.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            spread = entry.get(f"{metric}_stderr,{filtered}")
            rows.append(
                {
                    "task": task,
                    "metric": metric if filtered == "none" else f"{metric} ({filtered})",
                    "value": float(value),
                    "stderr": float(spread) if isinstance(spread, int | float) else None,
                    "chance": chance if metric.startswith("acc") else None,
                    "questions": entry.get("sample_len"),
                }
            )
    return sorted(rows, key=lambda row: row["metric"] != "acc")


def solved(row: dict[str, Any]) -> str:
    """How a row's model was solved, for people."""
    return "-" if row["sweep"] is None else f"{row['sweep']}, ≤ {row['max_steps']}, rtol {row['rtol']:g}"


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each model, task and way to solve, as Markdown."""
    lines = ["| model | task | questions | solved | result | self-iterations | converged |", "|---" * 7 + "|"]
    cases: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[row["model"], row["task"], solved(row)].append(row)
    for (model, task, way), case in cases.items():
        first = case[0]
        spread = [f" ± {row['stderr']:.3f}" if row["stderr"] is not None else "" for row in case]
        result = ", ".join(f"{row['metric']} {row['value']:.3f}{text}" for row, text in zip(case, spread, strict=True))
        steps = "-" if first["self_iterations"] is None else f"{first['self_iterations']:.1f}"
        lines.append(f"| {model} | {task} | {first['questions']} | {way} | {result} | {steps} | {converged(first)} |")
    return "\n".join(lines)


def converged(row: dict[str, Any]) -> str:
    """The share of the rows that converged, of their tokens where these are told apart, of the rows that diverged."""
    if row["converged"] is None:
        return "-"
    tokens = "" if row["converged_tokens"] is None else f" ({percent(row['converged_tokens'])} of the tokens)"
    return percent(row["converged"]) + tokens + f", {percent(row['diverged'])} diverged" * (row["diverged"] > 0)


def percent(share: float) -> str:
    """A share that is not all is not rounded to all, nor one that is not nothing to nothing."""
    return f"{share if share in (0, 1) else min(max(share, 0.001), 0.999):.1%}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars with standard errors, tasks across, models beside one another; dotted: chance. A panel for each metric."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    drawn: dict[str, str] = {}
    for row in rows:  # of each task the first metric, which is the accuracy where there is one
        drawn.setdefault(row["task"], row["metric"])
    panels = {metric: [task for task in drawn if drawn[task] == metric] for metric in drawn.values()}
    bars = list(dict.fromkeys((row["model"], solved(row)) for row in rows))
    size = (max(6.0, 2.0 + (0.45 * len(bars) + 0.5) * len(drawn)), 3.6 + 0.2 * len(bars))
    widths = [len(tasks) for tasks in panels.values()]
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", width_ratios=widths, squeeze=False)
    for axis, (metric, tasks) in zip(axes[0], panels.items(), strict=True):
        shown = [row for row in rows if row["metric"] == metric and row["task"] in tasks]
        for number, bar in enumerate(bars):
            chosen = [row for row in shown if (row["model"], solved(row)) == bar]
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
            label = "chance" if place == min(chances) else None
            axis.hlines(chance, place - 0.45, place + 0.45, colors="#333333", linestyles=":", label=label)
        axis.set_xticks(range(len(tasks)), tasks, rotation=20 if len(drawn) > 3 else 0)
        axis.set(ylabel=metric)
        axis.grid(axis="y", alpha=0.25)
        axis.set_axisbelow(True)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper left", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    """Evaluate, and write the table, the figure and the numbers."""
    options = parse(arguments)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's bootstrap would fork a process that runs threads
    logging.basicConfig(filename=output / "log.txt", level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    if not options.models:
        models, text = train_and_save(output)
        options = replace(options, models=models, cloze=(text,), choice=(text,), repeated=True)
    tasks, rows = load_tasks(options), []
    short = [Path(name).name for name in options.models]
    for name in options.models:
        label = Path(name).name if short.count(Path(name).name) == 1 else name
        rows += evaluate(label, name, tasks, options)
        (output / "results.json").write_text(json.dumps(rows, indent=1))  # what is there if a later model fails
        (output / "table.md").write_text(table(rows) + "\n")
        draw(rows, output / "evaluate.png")
    print(table(rows))
    print(f"\nfigure: {output}/evaluate.png   numbers: {output}/results.json   log: {output}/log.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
