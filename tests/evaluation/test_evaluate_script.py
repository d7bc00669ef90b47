"""examples/evaluate.py as it is called: what it writes, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from common import evaluation
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


BAD = [
    ["--limit", "0"],
    ["--questions", "-2"],
    ["--batch-size", "0"],
    ["--batch-size", "many"],
    ["--max-length", "0"],
    ["--bootstrap", "1"],
    ["--max-steps", "4", "0"],
    ["--rtol", "nan"],
    ["--rtol", "-1"],
    ["--sweep", "slidng"],
    ["--sweep", '{"name": "Sliding", "windw": 3}'],
    ["--sweep", "{name"],
    ["--solver", "newton"],
    ["--tasks", ","],
    ["--include", "nowhere"],
    ["--choice", "nowhere"],
    ["--seed", "-1"],
    ["--device", "gpu7"],
    ["--output", ""],
    ["--output", __file__],
    ["--stepz", "5"],
]


@pytest.mark.parametrize("flags", BAD, ids=" ".join)
def test_bad_options_are_refused_before_anything_is_written(saved, tmp_path, capsys, flags):
    with pytest.raises(SystemExit) as refused:
        script().read_options(["model", "--output", str(tmp_path / "out"), "--cloze", str(saved), *flags])
    assert refused.value.code == 2
    assert flags[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "name tasks"),
        (["--tasks", "piqa"], "name a MODEL"),
        (["--quick", "--tasks", "piqa"], "has its own questions"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as refused:
        script().read_options(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_quick_with_a_model_asks_twenty_questions():
    assert script().read_options(["model", "--tasks", "piqa", "--quick"]).limit == 20
    assert script().read_options(["model", "--tasks", "piqa", "--quick", "--limit", "7"]).limit == 7


def test_tasks_are_separated_by_commas_or_spaces_and_the_paper_has_seven():
    tasks = script().read_options(["model", "--tasks", "mine,piqa", "paper"]).tasks
    seven = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande", "openbookqa")
    assert tasks == ("mine", "piqa", *seven)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "text.txt"),
        ("One short story. It ends here.", "documents hold 0 passages of 4 sentences, fewer than count=100"),
    ],
)
def test_texts_without_questions_are_named(saved, tmp_path, content, message):
    text = tmp_path / "text.txt"
    text.write_text(content)
    options = script().read_options([str(saved / "model"), "--cloze", str(text), "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"^--cloze .*text\.txt \(--questions 100\): ") as refused:
        script().make_tasks(options)
    assert message in str(refused.value)


def refusal(model, **how):
    with pytest.raises(SystemExit) as refused:
        script().load_model(str(model), str(how.get("source", model)), device="cpu", bos=False)
    return str(refused.value)


def test_what_is_no_model_is_named(tmp_path):
    assert "is no model that can be loaded" in refusal(tmp_path)


def test_a_missing_tokenizer_is_named_and_another_may_be_given(saved, tmp_path):
    shutil.copytree(saved / "model", tmp_path / "bare")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    text = refusal(tmp_path / "bare")
    assert "has no tokenizer that can be loaded" in text
    assert "save it there with tokenizer.save_pretrained(), or give --tokenizer" in text
    _, words = script().load_model(str(tmp_path / "bare"), str(saved / "model"), device="cpu", bos=False)
    assert words.decode(words.encode("Ann")) == "Ann"


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(saved, tmp_path):
    save(tmp_path / "small", Mamba2, implicit=False, vocab_size=100)
    assert "tokens and the model" in refusal(tmp_path / "small", source=saved / "model")


def test_a_tokenizer_that_ends_texts_is_refused(tmp_path):
    save(tmp_path / "model", Mamba2, implicit=False, words="adds eos")
    assert "adds tokens after a text, where its continuation must begin" in refusal(tmp_path / "model")


def test_files_of_one_name_are_tasks_of_their_own(saved, tmp_path):
    (tmp_path / "stories.txt").write_text("\n\n".join(STORIES[::-1]))
    files = (str(saved / "stories.txt"), str(tmp_path / "stories.txt"))
    flags = ["--cloze", *files, "--questions", "3", "--output", str(tmp_path / "out")]
    tasks = script().make_tasks(script().read_options([str(saved / "model"), *flags]))
    assert list(tasks) == ["cloze_stories", "cloze_stories_1"]
    again = str(shutil.copy(saved / "stories.txt", tmp_path / "stories_1.txt"))
    flags = ["--cloze", again, *files, "--questions", "3", "--output", str(tmp_path / "out")]
    tasks = script().make_tasks(script().read_options([str(saved / "model"), *flags]))
    assert list(tasks) == ["cloze_stories_1", "cloze_stories", "cloze_stories_2"]


def test_a_continuation_that_is_too_long_is_named(saved, tmp_path):
    flags = ["--choice", str(saved / "stories.txt"), "--questions", "3", "--max-length", "4"]
    options = script().read_options([str(saved / "model"), *flags, "--output", str(tmp_path)])
    tasks = script().make_tasks(options)
    with pytest.raises(SystemExit, match=r"^mine on choice_stories: a continuation of \d+ tokens is longer than"):
        script().evaluate("mine", options.models[0], tasks, options)


def test_an_unknown_task_is_refused_without_reading_all_of_lm_evals_tasks(saved, tmp_path, monkeypatch):
    import lm_eval.tasks  # of an extra that the other tests do without

    real = lm_eval.tasks.TaskManager

    def manager(*, include_path, include_defaults):
        assert not include_defaults, "reading all tasks takes minutes"
        return real(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)
    options = script().read_options(["no_model", "--output", str(tmp_path), "--tasks", "lambada_opena"])
    with pytest.raises(SystemExit, match="lm-eval has no task 'lambada_opena'; did you mean 'lambada_openai'"):
        script().make_tasks(options)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "piqaa"], "--tasks: lm-eval has no task 'piqaa'; did you mean 'piqa'"),
        (["--cloze", "{short}"], "--cloze .*short.txt .* documents hold 0 passages"),
        (["--cloze", "{stories}", "--questions", "3"], "is no model that can be loaded"),
    ],
    ids=str,
)
def test_what_is_missing_is_said_before_anything_is_made(saved, tmp_path, monkeypatch, flags, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "short.txt").write_text("One short story.")
    (tmp_path / "no_model").mkdir()
    files = {"short": tmp_path / "short.txt", "stories": saved / "stories.txt"}
    flags = [flag.format(**files) for flag in flags]
    with pytest.raises(SystemExit, match=said):
        script().main([str(tmp_path / "no_model"), "--output", str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_files_is_refused_and_an_evaluation_replaces_the_one_before(saved, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "results.json").write_text("years of work")
    flags = [str(saved / "model"), "--cloze", str(saved / "stories.txt"), "--max-steps", "2"]
    with pytest.raises(SystemExit, match="holds files but no run"):
        script().main([*flags, "--questions", "2", "--output", str(tmp_path / "mine")])
    assert (tmp_path / "mine" / "results.json").read_text() == "years of work"
    for count in ("2", "3"):
        script().main([*flags, "--questions", count, "--output", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "results.json").read_text())[0]["questions"] == 3
    results = (tmp_path / "out" / "results.json").read_text()
    for broken in ("bare", "cut"):
        shutil.copytree(saved / "model", tmp_path / broken)
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    for broken, said in (("bare", "has no tokenizer"), ("cut", "is no model that can be loaded")):
        with pytest.raises(SystemExit, match=said):
            script().main([str(tmp_path / broken), *flags[1:], "--questions", "2", "--output", str(tmp_path / "out")])
    save(tmp_path / "explicit", Mamba2, implicit=False)
    for given in ("--max-steps 2", "--rtol 0", "--sweep sliding", "--solver naive"):
        with pytest.raises(SystemExit, match=f"{given.split()[0]} has no effect on explicit models"):
            explicit = [str(tmp_path / "explicit"), *flags[1:3], *given.split(), "--questions", "2"]
            script().main([*explicit, "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / "results.json").read_text() == results
    (tmp_path / "out" / "notes.txt").write_text("mine")
    monkeypatch.setattr(script(), "train_tiny_models", lambda output: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # results of other options are not left beside these
        script().main(["--quick", "--output", str(tmp_path / "out")])
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert not left - {".lock", "log.txt", "notes.txt", "options.json", "tasks"}


def test_data_that_cannot_be_loaded_is_named(saved, tmp_path):
    flags = (saved / "model", "--output", tmp_path / "out", "--cloze", saved / "stories.txt", "--questions", "3")
    away = call(*flags, "--tasks", "paper", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    assert away.returncode == 1
    seven = "lambada_openai, hellaswag, piqa, arc_easy, arc_challenge, winogrande, openbookqa"
    assert f"the data of {seven} cannot be loaded" in away.stderr
    assert "--cloze or --choice" in away.stderr
    assert not (tmp_path / "out" / "results.json").exists()


def test_tasks_groups_and_tags_of_lm_eval_are_known():
    known = evaluation.known_tasks()
    for name in script().PAPER:
        assert known[name] is not None and name in known[name].read_text()
    for name in ("mmlu", "ai2_arc", "lambada"):
        assert name in known
    assert "piqaa" not in known


def test_lm_eval_finds_the_package_that_is_called_evaluate(saved, tmp_path):
    """Its own tasks import it; the script's folder must not stand before it."""
    folder = whole_texts(tmp_path, STORIES[:1])
    (folder / "own.yaml").write_text((folder / "own.yaml").read_text()[:-1] + ', "process_docs": !function utils.same}')
    (folder / "utils.py").write_text("import evaluate\n\nevaluate.load_metric = evaluate.EvaluationModule\n\n\n" + SAME)
    done = call(saved / "model", "--tasks", "own", "--include", folder, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr


SAME = "def same(docs):\n    return docs\n"


def test_a_missing_lm_eval_is_named_with_its_extra(monkeypatch):
    for name in {"lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "deqseq.integrations.lm_eval", raising=False)
    with pytest.raises(SystemExit, match=r'pip install "deqseq\[eval\]"'):
        script().main(["model", "--tasks", "piqa"])


@pytest.mark.parametrize("option", ["--include", "--cloze", "--choice"])
def test_what_is_read_is_not_cleared_first(tmp_path, capsys, option):
    (tmp_path / "tasks").mkdir()
    with pytest.raises(SystemExit):
        script().read_options(["model", "--tasks", "own", option, str(tmp_path / "tasks"), "--output", str(tmp_path)])
    assert "name another folder" in capsys.readouterr().err
