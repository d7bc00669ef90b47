"""examples/evaluate.py as it is called: what it writes, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from evaluated_models import SCRIPT, STORIES, Mamba2, save, script, stories, whole_texts

pytestmark = pytest.mark.evaluation


def call(*arguments, **variables):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | variables)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model, and a file of stories beside it."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "model", Mamba2, implicit=True)
    stories(folder)
    return folder


def test_quick_trains_evaluates_and_writes_table_figure_and_numbers(tmp_path):
    done = call("--quick", "--output", tmp_path, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())
    metrics = {"cloze_stories": ["acc", "perplexity"], "choice_stories": ["acc", "acc_norm"]}
    wanted = [(kind, task, m) for kind in ("implicit", "explicit") for task in metrics for m in metrics[task]]
    assert sorted((row["model"], row["task"], row["metric"]) for row in rows) == sorted(wanted)
    counts = {"self_iterations", "token_updates", "converged", "converged_tokens", "diverged", "evaluations"}
    keys = {"model", "kind", "task", "metric", "value", "stderr", "chance", "questions", "sweep", "max_steps", "rtol"}
    assert all(row.keys() == keys | counts | {"seconds"} for row in rows)
    for row in rows:
        assert row["questions"] == 100
        assert row["stderr"] >= 0
        assert (row["self_iterations"] is None) == (row["kind"] == "explicit")
        if (row["task"], row["metric"]) == ("cloze_stories", "acc"):
            assert row["value"] >= 0.9, row  # who owns what is learned in seconds
        if row["kind"] == "implicit":
            assert row["converged"] >= 0.95, row
    assert (tmp_path / "table.md").read_text().strip() in done.stdout
    assert (tmp_path / "evaluate.png").stat().st_size > 10_000
    assert "implicit cloze_stories: " in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name tasks (--tasks) or texts to ask about (--cloze, --choice)"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--questions", "-2"], "--questions must be at least 1, got -2"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--max-length", "0"], "--max-length must be at least 1, got 0"),
        (["--bootstrap", "0"], "--bootstrap must be at least 1, got 0"),
        (["--max-steps", "4", "0"], "Stop.max_steps must be an integer >= 1, got 0"),
        (["--rtol", "nan"], "Stop.rtol must be a finite number >= 0, got nan"),
        (["--sweep", "slidng"], "--sweep: name 'Slidng' is unknown; did you mean 'Sliding'?"),
        (["--sweep", '{"name": "Sliding", "windw": 3}'], "--sweep: Sliding field 'windw' is unknown"),
        (["--sweep", "{name"], "Expecting property name"),
        (["--solver", "newton"], "--solver: name 'Newton' is unknown"),
        (["--include", "nowhere"], "--include must name folders, got 'nowhere'"),
        (["--device", "abacus"], "abacus"),
        (["--stepz", "5"], "unrecognized arguments: --stepz 5"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_is_written(tmp_path, capsys, flags, message):
    asked = ["--cloze", "text"] if flags else []
    with pytest.raises(SystemExit) as refused:
        script().parse(["model", "--output", str(tmp_path / "out"), *asked, *flags])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cloze", "text"], "name a MODEL, or give --quick"),
        (["--quick", "--cloze", "text"], "--quick without a MODEL asks questions of its own"),
        (["model", "--cloze", "text", "--output", __file__], "--output must be a folder, got"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        script().parse(arguments)
    assert message in capsys.readouterr().err


def test_quick_with_a_model_asks_twenty_questions():
    assert script().parse(["model", "--cloze", "text", "--quick"]).limit == 20
    assert script().parse(["model", "--cloze", "text", "--quick", "--limit", "7"]).limit == 7


def test_names_may_stand_with_commas_and_the_paper_has_seven():
    tasks = script().parse(["model", "--tasks", "mine,piqa", "paper"]).tasks
    seven = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")
    assert tasks == ("mine", "piqa", *seven)


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("", (), "has no text in it"),
        ("One short story. It ends here.", (), "documents hold 0 passages of 4 sentences, fewer than count=100"),
        (None, (), "no file or folder"),
        (" ".join(STORIES), ("--seed", "-1"), "seed must be at least 0, got -1"),
    ],
)
def test_texts_that_hold_no_questions_are_named(saved, tmp_path, content, flags, message):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_text(content)
    options = script().parse([str(saved / "model"), "--cloze", str(text), "--output", str(tmp_path / "out"), *flags])
    with pytest.raises(SystemExit, match=r"^--cloze .*text\.txt \(--questions 100\): ") as refused:
        script().load_tasks(options)
    assert message in str(refused.value)


def refusal(model, **how):
    with pytest.raises(SystemExit) as refused:
        script().load(str(model), str(how.get("source", model)), device="cpu", bos=False)
    return str(refused.value)


def test_what_is_no_model_is_named(tmp_path):
    assert "is no model that can be loaded" in refusal(tmp_path)


def test_a_missing_tokenizer_is_named_and_another_may_be_given(saved, tmp_path):
    shutil.copytree(saved / "model", tmp_path / "bare")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    text = refusal(tmp_path / "bare")
    assert "is neither a folder with a tokenizer nor one of the hub's" in text
    assert text.endswith("save it there with tokenizer.save_pretrained(), or give --tokenizer")
    _, words = script().load(str(tmp_path / "bare"), str(saved / "model"), device="cpu", bos=False)
    assert words.decode(words.encode("Ann")) == "Ann"


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(saved, tmp_path):
    save(tmp_path / "small", Mamba2, implicit=False, vocab_size=100)
    assert "tokens and the model" in refusal(tmp_path / "small", source=saved / "model")


def test_a_tokenizer_that_ends_texts_is_refused(tmp_path):
    save(tmp_path / "model", Mamba2, implicit=False, words="adds eos")
    assert "adds tokens behind a text, where its continuation should begin" in refusal(tmp_path / "model")


def test_files_of_one_name_are_tasks_of_their_own(saved, tmp_path):
    (tmp_path / "stories.txt").write_text("\n\n".join(STORIES[::-1]))
    files = (str(saved / "stories.txt"), str(tmp_path / "stories.txt"))
    flags = ["--cloze", *files, "--questions", "3", "--output", str(tmp_path / "out")]
    tasks = script().load_tasks(script().parse([str(saved / "model"), *flags]))
    assert list(tasks) == ["cloze_stories", "cloze_stories_1"]


def test_a_continuation_that_is_too_long_is_named(saved, tmp_path):
    flags = ["--choice", str(saved / "stories.txt"), "--questions", "3", "--max-length", "4"]
    options = script().parse([str(saved / "model"), *flags, "--output", str(tmp_path)])
    tasks = script().load_tasks(options)
    with pytest.raises(SystemExit, match=r"^mine on choice_stories: a continuation of \d+ tokens is longer than"):
        script().evaluate("mine", options.models[0], tasks, options)


def test_unknown_names_and_a_hub_out_of_reach_are_named(saved, tmp_path):
    flags = (saved / "model", "--output", tmp_path, "--cloze", saved / "stories.txt", "--questions", "3", "--tasks")
    unknown = call(*flags, "lambada_opena")
    assert unknown.returncode == 1
    assert "lm-eval knows no task 'lambada_opena'; did you mean lambada_openai" in unknown.stderr
    away = call(*flags, "paper", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    assert away.returncode == 1
    seven = "lambada_openai, hellaswag, piqa, arc_easy, arc_challenge, winogrande, openbookqa"
    assert f"the data of {seven} cannot be loaded" in away.stderr
    assert "evaluate offline: --cloze and --choice ask questions about texts of yours, --include reads" in away.stderr
    assert not (tmp_path / "results.json").exists()


def test_lm_eval_finds_the_package_that_is_called_evaluate(saved, tmp_path):
    """Its own tasks import it; the script's folder must not stand before it."""
    folder = whole_texts(tmp_path, STORIES[:1])
    (folder / "own.yaml").write_text((folder / "own.yaml").read_text()[:-1] + ', "process_docs": !function utils.same}')
    (folder / "utils.py").write_text("import evaluate\n\nevaluate.load_metric = evaluate.EvaluationModule\n\n\n" + SAME)
    done = call(saved / "model", "--tasks", "own", "--include", folder, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr


SAME = "def same(docs):\n    return docs\n"


@pytest.mark.parametrize(("package", "extra"), [("lm_eval", "eval"), ("matplotlib", "examples")])
def test_a_missing_package_is_named_with_its_extra(package, extra):
    code = f"import sys, runpy; sys.modules[{package!r}] = None; runpy.run_path({str(SCRIPT)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.splitlines()[-1].endswith(f': pip install "deqseq[{extra}]"'), done.stderr
