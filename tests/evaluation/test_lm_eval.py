"""lm-eval's results for a saved model are those of its logits, text by text; the solves are counted."""

import json
import math
from importlib import import_module
from itertools import pairwise

import pytest
from common import evaluation_report
from evaluated_models import KINDS, STORIES, ByHand, Llama, Mamba2, save, script, stories, tokenizer, whole_texts

from deqseq import ImplicitModel, Relaxed

pytestmark = pytest.mark.evaluation


def run(tmp_path, *flags, models=("model",)):
    """Rows of an evaluation of models in a folder, and all that lm-eval has logged of each task."""
    example = script()
    options = example.read_options(
        [*(str(tmp_path / m) for m in models), "--output", str(tmp_path / "out"), *map(str, flags)]
    )
    tasks, rows = example.make_tasks(options), []
    for name in options.models:
        rows += example.evaluate(name, name, tasks, options)
    return rows


def asked(tmp_path, task, *flags):
    """Every question of a task with lm-eval's answers, the rows that are made of them, and who gave them."""
    example = script()
    options = example.read_options([str(tmp_path / "model"), "--output", str(tmp_path / "out"), *map(str, flags)])
    model, words = example.load_model(options.models[0], options.models[0], device="cpu", bos=options.bos)
    core = model.model.core
    (way,) = example.ways_to_solve(options, core.solve_config.stop if isinstance(core, ImplicitModel) else None)
    subject = example.solved_lm()(model, words, way, batch_size=options.batch_size, max_length=options.max_length)
    found = import_module("lm_eval.evaluator").evaluate(
        lm=subject, task_dict=example.make_tasks(options)[task], bootstrap_iters=10
    )
    return found["samples"][task], example.metric_rows(found), subject


def value(rows, metric):
    (row,) = (row for row in rows if row["metric"] == metric)
    return row["value"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_last_word_is_scored_as_by_hand(tmp_path, kind):
    family, implicit = KINDS[kind]
    save(tmp_path / "model", family, implicit=implicit)
    flags = ("--cloze", stories(tmp_path), "--questions", 8, "--batch-size", 5)
    samples, rows, _ = asked(tmp_path, "cloze_stories", *flags)
    by_hand, scores = ByHand(tmp_path / "model"), []
    for sample in samples:
        scores.append(by_hand.continuation(tokenizer(), sample["doc"]["context"], sample["doc"]["target"]))
        assert sample["resps"][0][0] == (pytest.approx(scores[-1][0], abs=1e-8), scores[-1][1])
    assert len(scores) == 8
    assert value(rows, "acc") == sum(greedy for _, greedy in scores) / 8
    assert value(rows, "perplexity") == pytest.approx(math.exp(-sum(score for score, _ in scores) / 8), rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_scored_as_by_hand(tmp_path, kind):
    family, implicit = KINDS[kind]
    save(tmp_path / "model", family, implicit=implicit)
    flags = ("--choice", stories(tmp_path), "--questions", 3, "--batch-size", 7)
    samples, rows, _ = asked(tmp_path, "choice_stories", *flags)
    by_hand, right, right_per_letter = ByHand(tmp_path / "model"), 0, 0
    for sample in samples:
        options, answer = sample["doc"]["options"], sample["doc"]["answer"]
        scores = [by_hand.continuation(tokenizer(), sample["doc"]["context"], option)[0] for option in options]
        assert [resps[0][0] for resps in sample["resps"]] == pytest.approx(scores, abs=1e-8)
        right += scores[answer] == max(scores)
        per_letter = [score / len(option) for score, option in zip(scores, options, strict=True)]
        right_per_letter += per_letter[answer] == max(per_letter)
    assert (value(rows, "acc"), value(rows, "acc_norm")) == (right / 3, right_per_letter / 3)
    assert [row["chance"] for row in rows] == [0.25, 0.25]


@pytest.mark.parametrize("words", ["plain", "adds bos", "none"])
@pytest.mark.parametrize("bos", [False, True])
def test_texts_begin_with_bos_if_the_tokenizer_or_the_user_says_so(tmp_path, words, bos):
    save(tmp_path / "model", Llama, implicit=True, words=words)
    flags = ("--cloze", stories(tmp_path), "--questions", 5, *["--bos"] * bos)
    if bos and words == "none":
        with pytest.raises(SystemExit, match=r"--bos needs a tokenizer with a BOS token, and .* has none"):
            asked(tmp_path, "cloze_stories", *flags)
        return
    samples, _, _ = asked(tmp_path, "cloze_stories", *flags)
    told = ByHand(tmp_path / "model", prefix=[0] if bos or words == "adds bos" else [])
    for sample in samples:
        score, greedy = told.continuation(tokenizer(), sample["doc"]["context"], sample["doc"]["target"])
        assert sample["resps"][0][0] == (pytest.approx(score, abs=1e-8), greedy)


@pytest.mark.parametrize("words", ["plain", "adds bos"])
@pytest.mark.parametrize("longest", [1000, 7])
def test_whole_texts_are_predicted_token_by_token_each_once(tmp_path, words, longest):
    save(tmp_path / "model", Mamba2, implicit=True, words=words)
    texts = [*STORIES[:3], "Ann met Bo."]
    flags = ("--tasks", "own", "--include", whole_texts(tmp_path, texts), "--max-length", longest, "--batch-size", 3)
    by_hand, total = ByHand(tmp_path / "model"), 0.0
    for text in texts:
        ids = [0, *tokenizer().encode(text)]  # the end of text stands before
        starts = [*range(0, len(ids) - 1, longest), len(ids) - 1]
        for begin, end in pairwise(starts):
            before = ids[max(0, end - longest) : begin + 1]  # a last window that is short sees more of what came before
            total += by_hand.scored(before, ids[begin + 1 : end + 1])[0]
    (row,) = run(tmp_path, *flags)
    size = sum(len(text.encode()) for text in texts)
    assert row["metric"] == "bits_per_byte"
    assert row["value"] == pytest.approx(-total / math.log(2) / size, rel=1e-9)


def test_whole_texts_need_something_to_begin_with(tmp_path):
    save(tmp_path / "model", Mamba2, implicit=False, words="none")
    with pytest.raises(SystemExit, match=r"on own: an empty context needs a token to begin with, and the"):
        run(tmp_path, "--tasks", "own", "--include", whole_texts(tmp_path, STORIES[:2]))


@pytest.mark.parametrize("kind", ["Mamba2-implicit", "Llama-implicit"])
@pytest.mark.parametrize("sweep", ["simultaneous", '{"name": "Sliding", "window": 3}'])
def test_the_batch_decides_nothing_and_only_texts_are_counted(tmp_path, kind, sweep):
    save(tmp_path / "model", KINDS[kind][0], implicit=True)
    flags = ("--cloze", stories(tmp_path), "--questions", 4, "--sweep", sweep, "--rtol", 1e-4)
    alone, _, one = asked(tmp_path, "cloze_stories", *flags, "--batch-size", 1)
    together, _, many = asked(tmp_path, "cloze_stories", *flags, "--batch-size", 16)
    for this, that in zip(alone, together, strict=True):
        assert this["resps"][0][0][0] == pytest.approx(that["resps"][0][0][0], abs=1e-10)
    by_hand = ByHand(tmp_path / "model", solve=one.solve)
    for sample in alone:
        by_hand.continuation(tokenizer(), sample["doc"]["context"], sample["doc"]["target"])
    outputs = list(by_hand.outputs.values())
    evaluations = sum(output.stats.evaluations for output in outputs)
    assert many.tally.numbers()["evaluations"] < one.tally.numbers()["evaluations"] == evaluations
    assert one.tally.counted["rows"] == many.tally.counted["rows"] == len(outputs)
    steps = [count for output in outputs for count in output.stats.iterations.flatten().tolist()]
    assert one.tally.numbers()["self_iterations"] == pytest.approx(sum(steps) / len(steps), rel=1e-12)
    assert one.tally.numbers()["converged"] == 1
    tokens = sum(len(ids) for ids in by_hand.outputs)
    assert one.tally.counted["updates of"] == many.tally.counted["updates of"] == tokens  # and no padding
    assert many.tally.numbers()["self_iterations"] == pytest.approx(one.tally.numbers()["self_iterations"])


def test_budgets_and_sweeps_make_rows_and_what_did_not_converge_is_said(tmp_path):
    save(tmp_path / "model", Mamba2, implicit=True)
    save(tmp_path / "plain", Mamba2, implicit=False)
    flags = ("--cloze", stories(tmp_path), "--questions", 2, "--max-steps", 1, 3, 200, "--rtol", 1e-4)
    rows = run(tmp_path, *flags, "--sweep", "simultaneous", "sequential", models=("model", "plain"))
    rows = [row for row in rows if row["metric"] == "acc"]
    ways = [(sweep, steps) for sweep in ("Simultaneous()", "Sequential()") for steps in (1, 3, 200)]
    assert [(row["sweep"], row["max_steps"]) for row in rows] == [*ways, (None, None)]
    *solved, explicit = rows
    for row in solved:
        enough = row["max_steps"] == 200
        assert row["rtol"] == 1e-4
        assert row["converged"] == enough
        assert row["self_iterations"] == row["max_steps"] or enough
        assert row["converged_tokens"] == float(enough)
    counts = ("self_iterations", "token_updates", "converged", "converged_tokens", "diverged", "evaluations")
    assert all(explicit[count] is None for count in counts)
    text = evaluation_report.table(rows)
    assert "Simultaneous(), ≤ 3, rtol 0.0001" in text
    assert "| 3.0 | 0.0% (0.0% of the tokens) |" in text
    assert text.splitlines()[-1].endswith("| - | - |")


def test_some_tokens_that_did_not_converge_are_not_rounded_away():
    row = {"converged": 0.99999, "converged_tokens": 0.5, "diverged": 1e-6}
    assert evaluation_report.converged(row) == "99.9% (50.0% of the tokens), 0.1% diverged"
    assert evaluation_report.converged({"converged": 1.0, "converged_tokens": None, "diverged": 0.0}) == "100.0%"


def test_the_solver_can_be_chosen(tmp_path):
    save(tmp_path / "model", Mamba2, implicit=True)
    flags = ("--cloze", stories(tmp_path), "--questions", 3)
    _, _, plain = asked(tmp_path, "cloze_stories", *flags)
    _, _, damped = asked(tmp_path, "cloze_stories", *flags, "--solver", '{"name": "Relaxed", "damping": 0.5}')
    assert damped.solve["solver"] == Relaxed(0.5)
    assert damped.tally.numbers()["self_iterations"] > 1.2 * plain.tally.numbers()["self_iterations"]


PROMPTS = ["Ann", "Bo has a red", "Christopher met Ann. Then"]


def continuing(tmp_path):
    """A task of one's own: prompts to be continued."""
    folder = whole_texts(tmp_path, PROMPTS)
    task = json.loads((folder / "own.yaml").read_text()) | {
        "output_type": "generate_until",
        "doc_to_text": "text",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 5},
        "metric_list": [{"metric": "exact_match"}],
    }
    (folder / "own.yaml").write_text(json.dumps(task))
    return "--tasks", "own", "--include", folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", [False, True])
def test_prompts_of_unequal_length_are_continued_as_alone(tmp_path, kind, bos):
    family, implicit = KINDS[kind]
    save(tmp_path / "model", family, implicit=implicit)
    samples, _, subject = asked(tmp_path, "own", *continuing(tmp_path), "--batch-size", 3, *["--bos"] * bos)
    by_hand, words = ByHand(tmp_path / "model"), tokenizer()
    for sample in samples:
        ids = [0] * bos + words.encode(sample["doc"]["text"])
        for _ in range(5):
            ids.append(by_hand.predicted(ids)[-1].argmax().item())
        text = words.decode(ids).removeprefix("<|endoftext|>").removeprefix(sample["doc"]["text"])
        assert sample["resps"][0][0] == text.partition("<|endoftext|>")[0].partition("\n\n")[0]
    assert subject.tally.numbers()["converged"] == (1 if implicit else None)


@pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")
def test_continuing_is_solved_as_told_and_padding_is_not_counted(tmp_path):
    save(tmp_path / "model", Mamba2, implicit=True)
    flags = (*continuing(tmp_path), "--batch-size", 3, "--sweep", "sliding", "--max-steps", 2, "--rtol", 0)
    _, _, subject = asked(tmp_path, "own", *flags)
    prompted = sum(len(tokenizer().encode(prompt)) for prompt in PROMPTS)
    assert subject.tally.counted["steps of"] == prompted + 3 * 4  # the last of five tokens needs no solve
    assert subject.tally.counted["rows"] == 3 * 5
    numbers = subject.tally.numbers()
    assert (numbers["converged"], numbers["converged_tokens"]) == (0, 0)


def test_a_second_model_is_evaluated_as_if_alone(tmp_path):
    save(tmp_path / "model", Mamba2, implicit=True)
    save(tmp_path / "plain", Llama, implicit=False)
    flags = ("--cloze", stories(tmp_path), "--choice", stories(tmp_path), "--questions", 5)
    both = run(tmp_path, *flags, models=("model", "plain"))
    alone = run(tmp_path, *flags, models=("plain",))
    assert [untimed(row) for row in both[4:]] == [untimed(row) for row in alone]


def untimed(row):
    return {name: value for name, value in row.items() if name != "seconds"}


def test_the_limit_takes_the_first_questions(tmp_path):
    save(tmp_path / "model", Mamba2, implicit=False)
    rows = run(tmp_path, "--cloze", stories(tmp_path), "--questions", 9, "--limit", 4)
    assert {row["questions"] for row in rows} == {4}
