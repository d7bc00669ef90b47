"""What examples/evaluate.py needs around lm-eval: tasks by name or made from texts, results, saved models."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib import import_module
from itertools import chain
from itertools import count as count_from
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from common import options as opt
from common.questions import Choice, Cloze, choice_questions, cloze_questions
from common.run import write_json, write_text
from common.text import local_documents
from deqseq.check import suggestion
from deqseq.integrations.huggingface import RecurrentDepthConfig

Questions = dict[str, tuple[str, tuple[Cloze, ...] | tuple[Choice, ...]]]
"""By the name of their task: their kind, and the questions."""

MEAN: dict[str, Any] = {"aggregation": "mean", "higher_is_better": True}
PERPLEXITY: dict[str, Any] = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
ASKED: dict[str, dict[str, Any]] = {
    "cloze": {
        "output_type": "loglikelihood",
        "doc_to_target": "target",
        "metric_list": [{"metric": "acc"} | MEAN, PERPLEXITY],
    },
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_target": "answer",
        "doc_to_choice": "options",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"} | MEAN, {"metric": "acc_norm"} | MEAN],
    },
}
"""Fields of a task's YAML that tell lm-eval how to ask each kind of question."""

_NAME = re.compile(r"""^[ \t]*["']?(task|group)["']?:[ \t]*["']?([^\s"'\[#]+)""", re.MULTILINE)
_TAGS = re.compile(r"""^["']?tag["']?:[ \t]*(.*(?:\n[ \t]*-[ \t].*)*)""", re.MULTILINE)


# Tasks


def make_questions(cloze: Sequence[str], choice: Sequence[str], count: int, seed: int, repeated: bool) -> Questions:
    """Questions about texts, by the name of their task.

    Raises:
        SystemExit: a text cannot be read, or is too short.
    """
    made: Questions = {}
    for kind, source in [("cloze", path) for path in cloze] + [("choice", path) for path in choice]:
        with opt.naming(f"--{kind} {source} (--questions {count})"):
            documents = local_documents(source)["text"][:]
            if kind == "cloze":
                questions = cloze_questions(documents, count, seed=seed, repeated=repeated)
            else:
                questions = choice_questions(documents, count, seed=seed)
        stem = f"{kind}_{Path(source).stem}"
        names = chain([stem], (f"{stem}_{number}" for number in count_from(1)))
        made[next(name for name in names if name not in made)] = kind, questions
    return made


def write_tasks(folder: Path, questions: Questions) -> list[str]:
    """Write questions, and YAML files that tell lm-eval how to ask them; returns the tasks' names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (kind, some) in questions.items():
        data = folder / f"{name}.jsonl"
        write_text(data, "".join(json.dumps(asdict(question)) + "\n" for question in some))
        task = {"task": name, "dataset_path": "json", "test_split": "test", "doc_to_text": "context", **ASKED[kind]}
        files = {"data_files": {"test": str(data.resolve())}, "cache_dir": str((folder / "cache").resolve())}
        write_json(folder / f"{name}.yaml", task | {"dataset_kwargs": files})  # JSON is YAML
    return list(questions)


def find_tasks(names: Sequence[str], folders: Sequence[str | Path]) -> tuple[Any, list[str]]:
    """lm-eval's manager of tasks that knows these names, and those that are lm-eval's own.

    Args:
        names: of tasks, groups or tags, of lm-eval or in ``folders``.
        folders: with YAML files of tasks.

    Raises:
        SystemExit: there is no task of that name.
    """
    manager_type: Any = import_module("lm_eval.tasks").TaskManager
    manager = manager_type(include_path=[*map(str, folders)], include_defaults=False)
    on_hub = [name for name in names if name not in manager.all_tasks]
    if not on_hub:
        return manager, []
    known = known_tasks()
    for name in on_hub:
        if name not in known:
            raise SystemExit(f"--tasks: lm-eval has no task {name!r}{suggestion(name, [*known, *manager.all_tasks])}")
    # lm-eval reads all of its 14,000 files, in minutes; the folder of a task is enough.
    files = [known[name] for name in on_hub]
    places = [*folders, *(file.parent for file in files if file)]
    return manager_type(include_path=[*map(str, places)], include_defaults=None in files), on_hub


def load_tasks(names: Sequence[str], folders: Sequence[str | Path], seed: int) -> dict[str, Any]:
    """Load tasks with their data; arguments as in :func:`find_tasks`, and the seed of the examples before a question.

    Raises:
        SystemExit: there is no task of that name, or its data cannot be loaded.
    """
    manager, on_hub = find_tasks(names, folders)
    tasks: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        try:
            tasks[name] = manager.load([name])
        except OSError as error:
            left = [other for other in on_hub if other not in tasks] if name in on_hub else [name]
            raise SystemExit(
                f"the data of {', '.join(left)} cannot be loaded ({error}). Tasks of lm-eval need the hub: go online "
                "(without HF_HUB_OFFLINE and HF_DATASETS_OFFLINE). Offline, give --cloze or --choice for questions "
                "about your texts, or --include for your tasks"
            ) from error
        for task in tasks[name]["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=seed)
    return tasks


@cache
def known_tasks() -> dict[str, Path | None]:
    """The names in lm-eval's files, found in seconds without parsing them.

    Returns:
        Per task the file that it stands in; None for a group, a tag, or a task whose file is not clear.
    """
    known: dict[str, Path | None] = {}
    folder = Path(import_module("lm_eval.tasks").__path__[0])
    for path in (path for path in folder.rglob("*") if path.suffix in ("", ".yaml") and path.is_file()):
        text = path.read_text(errors="replace")
        tasks = [(name, kind == "task" and path.suffix == ".yaml") for kind, name in _NAME.findall(text)]
        tags = [
            (name, False) for line in _TAGS.findall(text) for name in re.findall(r"[^\s,\[\]\"'-][^\s,\[\]\"']*", line)
        ]
        for name, alone in tasks + tags:
            known[name] = path if alone and name not in known else None
    return known


def metric_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per task and metric of lm-eval's result, accuracies first."""
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
            row = {"task": task, "metric": metric if filtered == "none" else f"{metric} ({filtered})"}
            row |= {"value": float(value), "stderr": float(spread) if isinstance(spread, int | float) else None}
            row |= {"chance": chance if metric.startswith("acc") else None, "questions": entry.get("sample_len")}
            rows.append(row)
    return sorted(rows, key=lambda row: row["metric"] != "acc")


# Models


def solved_lm() -> Any:
    """The class :class:`deqseq.integrations.lm_eval.SolvedLM`; SystemExit where lm-eval is missing."""
    try:
        return import_module("deqseq.integrations.lm_eval").SolvedLM
    except ImportError as error:
        raise SystemExit(str(error)) from error


REMEDY = "save it there with tokenizer.save_pretrained(), or give --tokenizer"


def check_models(names: Sequence[str], tokenizer_name: str | None) -> bool:
    """Refuse models and tokenizers that are not there, and weights that are cut short, before anything is written.

    Returns:
        Whether one of the models is implicit.
    """
    configs = []
    for name in names:
        with opt.naming(f"{name} is no model that can be loaded"):
            configs.append(AutoConfig.from_pretrained(name))
            for file in sorted(Path(name).glob("*.safetensors")):
                with safe_open(file, "pt"):
                    pass
    for name in {tokenizer_name or name for name in names}:
        with opt.naming(f"{name} has no tokenizer that can be loaded ({REMEDY})"):
            AutoTokenizer.from_pretrained(name)
    return any(getattr(config, "implicit", isinstance(config, RecurrentDepthConfig)) for config in configs)


def load_model(
    name: str, tokenizer_name: str, *, device: str, bos: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a saved model and its tokenizer.

    Args:
        name: folder of the model, or its name on the hub.
        tokenizer_name: the same of the tokenizer.
        device: of the model.
        bos: whether the tokenizer begins every text with its BOS token.

    Raises:
        SystemExit: something is missing, or does not fit.
    """
    with opt.naming(f"{name} is no model that can be loaded"):
        model: Any = AutoModelForCausalLM.from_pretrained(name)
    with opt.naming(f"{tokenizer_name} has no tokenizer that can be loaded ({REMEDY})"):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    size = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise SystemExit(f"the tokenizer {tokenizer_name} has {len(tokenizer)} tokens and the model {name} only {size}")
    if bos:
        _begin_with_bos(tokenizer, tokenizer_name)
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    if whole[-len(plain) :] != plain:
        raise SystemExit(f"the tokenizer {tokenizer_name} adds tokens after a text, where its continuation must begin")
    if tokenizer.pad_token is None:  # any token will do: padding is masked
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return model.to(device).eval(), tokenizer


def _begin_with_bos(tokenizer: Any, name: str) -> None:
    if tokenizer.bos_token is None:
        raise SystemExit(f"--bos needs a tokenizer with a BOS token, and {name} has none")
    if tokenizer.encode("a")[0] != tokenizer.bos_token_id:
        known = [(tokenizer.bos_token, tokenizer.bos_token_id)]
        bos = TemplateProcessing(single=f"{tokenizer.bos_token} $A", special_tokens=known)
        before = tokenizer.backend_tokenizer.post_processor
        tokenizer.backend_tokenizer.post_processor = bos if before is None else Processors([before, bos])
