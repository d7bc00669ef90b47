"""retrofit.py: stories and their hops, what is trained on, models that cannot be looped."""

import json
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import corpus
import gguf_model
import pytest
import retrofit
import torch
from swaps import BALLS, BYTES, Language, rows_of_text, tell
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, to_causal_lm

ROOT = Path(__file__).parents[2]
WORDS = Language(lambda text: [*text.encode("ascii")], vocab_size=128)


def loaded(folder, name):
    return AutoModelForCausalLM.from_pretrained(folder / name / "model").eval()


def test_stories_in_words_are_those_of_the_task():
    for seed in range(8):
        stories = tell(WORDS, 1, 6, (2, 4), random.Random(seed))
        said = bytes(stories.inputs[0].tolist()).decode()
        swaps = re.findall(r"swap (\d) for (\d) and \2 for \1 \. where is", said)
        assert len(swaps) == said.count("swap") in (2, 3, 4)
        once = BALLS.encode(re.sub(r" for (\d) and \d for \d", r" and \1", said))
        answers = BALLS.answers(once[None])
        asked = answers.targets >= 0
        scored = stories.targets >= 0
        assert scored.sum() == asked.sum() == 6
        cups = [chr(cup) for cup in stories.targets[scored].tolist()]
        assert cups == BALLS.decode(answers.targets[asked]).split()
        assert stories.hops[scored].equal(answers.hops[asked])


def test_stories_in_bytes_followed_by_hand():
    stories = tell(BYTES, 16, 8, (3, 8), random.Random(0))
    for told, answers, hops in zip(
        *(part.view(16, 8, 5).tolist() for part in stories), strict=True
    ):
        balls, moved = list("12345"), dict.fromkeys("12345", 0)
        for sentence, answer, count in zip(told, answers, hops, strict=True):
            a, b, *again, ball = bytes(sentence).decode()
            assert again == [b, a]
            if a != ".":
                here, there = balls.index(a), balls.index(b)
                balls[here], balls[there] = b, a
                moved[a], moved[b] = moved[b] + 1, moved[a] + 1
            assert answer == [*[-100] * 4, ord("ABCDE"[balls.index(ball)])]
            assert count == [*[-1] * 4, moved[ball]]


def test_held_out_text_is_not_trained_on():
    trained, held_out = (rows_of_text(BYTES, 64, held_out=held) for held in (False, True))
    assert trained.targets[:, :-1].equal(trained.inputs[:, 1:])
    seen = {tuple(row) for row in trained.inputs.unfold(1, 32, 1).flatten(0, 1).tolist()}
    rows = held_out.inputs[:, :32].tolist()
    assert sum(tuple(row) in seen for row in rows) < 0.1 * len(rows)


def test_deep_answers_are_not_scored_and_the_unlooped_model_sees_the_same_batches():
    options = retrofit.Options(hops=3, tokens=128)
    looped, unlooped = (
        retrofit.Mixture(options, BYTES, name, steps)
        for name, steps in (("looped", 40), ("unlooped", 90))
    )
    deepest = 0
    for _ in range(40):
        batch = next(looped)
        assert all(map(torch.equal, batch, next(unlooped)))
        assert not (batch.targets[batch.hops > 3] != -100).any()
        assert (batch.targets[(batch.hops >= 0) & (batch.hops <= 3)] != -100).all()
        deepest = max(deepest, batch.hops.max().item())
    assert deepest > 3


@pytest.mark.parametrize("name", ["looped", "unlooped"])
def test_half_of_the_updates_on_the_text_run_the_looped_layers_once(name):
    batches = retrofit.Mixture(retrofit.Options(text=0.5, tokens=128), BYTES, name, 200)
    solves = {True: [], False: []}
    for _ in range(200):
        is_text = (next(batches).hops == -1).all().item()
        solves[is_text].append(batches.solve)
    once = [solve for solve in solves[True] if solve]
    assert all(solve["stop"] == dq.Stop.exactly(1) for solve in once)
    assert not any(solves[False])
    share = len(once) / len(solves[True])
    assert 0.3 < share < 0.7 if name == "looped" else share == 0


def test_the_learning_rate_rises_and_falls():
    batches = retrofit.Mixture(retrofit.Options(lr=1.0), BYTES, "looped", 1000)
    rates = []
    for batches.step in (0, 49, 300, 650, 1000):
        rates.append(batches.lr)
    assert rates == pytest.approx([0.02, 1, 1, 0.5, 0.02])


@pytest.mark.parametrize("gate", [0.0, 0.3, 1.0])
def test_one_iteration_is_the_pretrained_model_with_any_gate(gate):
    options = retrofit.Options(gate=gate)
    model, _ = retrofit.source(options)
    ids = torch.arange(20)[None]
    lm = retrofit.looped(model, options)
    phase = retrofit.curriculum(options).at(0.5)
    assert 4 <= phase.solve.stop.max_steps <= 16
    once = replace(phase.solve, stop=dq.Stop.exactly(1))
    assert_close(lm(ids, solve=once).logits, model(ids).logits)


def test_a_run_writes_numbers_a_table_a_figure_and_models_and_goes_on(
    tmp_path, capsys, monkeypatch
):
    counts = {"steps": 60, "pretraining": 12, "unlooped-steps": 12, "tests": 4}
    short = ["--quick", *(f"--{name}={count}" for name, count in counts.items()), "--output"]
    drawn = retrofit.Mixture.__next__

    def interrupted(batches):
        if batches.last == 60 and batches.step == 55:
            raise KeyboardInterrupt
        return drawn(batches)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="to go on"):
        patch.setattr(retrofit.Mixture, "__next__", interrupted)
        retrofit.main([*short, str(tmp_path / "run")])
    retrofit.main([*short, str(tmp_path / "run")])
    assert "looped: going on from step 50" in capsys.readouterr().out
    retrofit.main([*short, str(tmp_path / "whole")])
    rows, whole = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "whole")
    )
    ways = [("pretrained", None), ("unlooped", None)]
    ways += [("looped", budget) for budget in (*retrofit.BUDGETS, "solved")]
    assert [(row["model"], row["budget"]) for row in rows] == ways
    for row, other in zip(rows, whole, strict=True):
        assert row | {"cpu_minutes": 0} == other | {"cpu_minutes": 0}
        assert sum(asked for _, asked in row["by_hops"].values()) <= 4 * 32
    assert "| looped | 16 | " in capsys.readouterr().out
    assert (tmp_path / "run" / "retrofit.png").stat().st_size > 10_000
    assert to_causal_lm(loaded(tmp_path / "run", "looped")).core is not None
    assert type(loaded(tmp_path / "run", "unlooped")).__name__ == "LlamaForCausalLM"


def test_a_model_with_a_tokenizer_reads_words(tmp_path):
    tokenizer = corpus.train_tokenizer(corpus.babble(200), 290)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=3, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    layers = "--prelude 1 --core 1 --coda 1 --steps 3 --unlooped-steps 3 --tests 2"
    retrofit.main(f"--quick --model {tmp_path}/model {layers} --output {tmp_path}/run".split())
    rows = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["model"] for row in rows[:3]] == ["pretrained", "unlooped", "looped"]
    assert not (tmp_path / "run" / "pretrained").exists()
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "looped" / "model")
    assert saved("swap 1 for 3").input_ids == tokenizer("swap 1 for 3").input_ids
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = loaded(tmp_path / "run", "unlooped").state_dict()
    assert any(not weight.equal(after[name]) for name, weight in before.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses an older name of transformers
def test_adapters_are_trained_and_merged(tmp_path):
    pytest.importorskip("peft")
    short = "--quick --pretraining 4 --steps 12 --unlooped-steps 12 --tests 4 --lora 2 --output"
    retrofit.main([*short.split(), str(tmp_path)])
    before = loaded(tmp_path, "pretrained").state_dict()
    weights = loaded(tmp_path, "unlooped").state_dict()
    assert [*weights] == [*before]
    assert not all(weight.equal(weights[name]) for name, weight in before.items())
    looped = loaded(tmp_path, "looped")
    assert not [name for name, _ in looped.named_parameters() if "lora" in name]
    injection = to_causal_lm(looped).core.backbone.injection.weight
    assert not injection.equal(dq.ConcatInjection(64, 0.5).weight)  # it was trained


@pytest.mark.slow
def test_smollm2_is_converted_with_its_tokenizer_and_looped(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        folder = gguf_model.smollm2()
    except OSError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    split = retrofit.looped(model, retrofit.Options(prelude=12, core=10, coda=8, gate=0.0))
    from_causal_lm(split).save_pretrained(tmp_path / "looped" / "model")
    looped = loaded(tmp_path, "looped")

    def generated(**inputs):
        tokens, expected = (
            one.generate(**inputs, max_new_tokens=9, do_sample=False) for one in (looped, model)
        )
        assert tokens.equal(expected)
        return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    question = tokenizer.apply_chat_template(
        messages, return_tensors="pt", return_dict=True, add_generation_prompt=True
    )
    assert generated(**question) == "The capital of France is Paris."
    texts = ["The capital of France", "In the beginning God created"]
    generated(**tokenizer(texts, return_tensors="pt", padding=True))
    long = question["input_ids"].repeat(1, 99)[:, :2048]
    with torch.no_grad():
        for dtype, tokens in ((torch.float32, long), (torch.bfloat16, long[:, :512])):
            logits = looped.to(dtype)(tokens).logits
            assert_close(logits, model.to(dtype)(tokens).logits)


def test_the_commands_that_the_page_prints_are_accepted():
    page = (ROOT / "docs" / "examples" / "retrofit.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^python examples/retrofit.py(.*)", page, re.MULTILINE)
    assert commands
    for arguments in commands:
        arguments = shlex.split(arguments, comments=True)
        assert retrofit.read_options(retrofit.Options, arguments, retrofit.QUICK)


BAD = (
    "steps 0, gate 1.5, injection mul, depth 0, least 0, least 17, lora -1, core 0, text 1, "
    "model no/such/model, model {file}, output {file}, stepz 5"
)


def test_a_gate_belongs_to_a_concatenation():
    with pytest.raises(ValueError, match="--gate needs --injection concat, got add"):
        retrofit.Options(gate=0.3, injection="add")


@pytest.mark.parametrize("line", BAD.split(", "))
def test_bad_options_are_named_and_nothing_is_written(tmp_path, monkeypatch, capsys, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (file := tmp_path / "file").write_text("mine")
    flag, value = line.format(file=file).split(" ")
    with pytest.raises(SystemExit) as error:
        retrofit.main(["--quick", f"--{flag}", value])
    said = re.sub(r"[\s│]+", " ", capsys.readouterr().err + str(error.value))
    assert f"--{flag}" in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("./llama", r"^--model .*must add up to the model's 5 layers, got 2 \+ 2 \+ 2 \+ 0"),
        ("./bloom", "^--model .*Bloom"),
        ("./llama --core 1", "^--model .* neither a folder with a tokenizer"),
    ],
)
def test_models_that_cannot_be_looped_are_named_and_nothing_is_written(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    LlamaConfig(num_hidden_layers=5).save_pretrained("llama")
    BloomConfig().save_pretrained("bloom")
    with pytest.raises(SystemExit, match=message):
        retrofit.main(f"--quick --output run --model {arguments}".split())
    assert not (tmp_path / "run").exists()
