"""examples/pretrain.py: what it writes, what it refuses; killed, and in two processes, it gives the same numbers."""

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pretrain
import pytest
import torch
from common.bits_per_byte import rows_in_order, score
from common.language_models import SCALED, curriculum_of, kind_of, lr_factor, spec_of, widened
from common.tokens import encode
from transformers import AutoModelForCausalLM, AutoTokenizer

import deqseq as dq
from deqseq.integrations.huggingface import to_causal_lm

ROOT = Path(__file__).parents[2]
TINY = ["--quick", "--d-model", "16", "--tokens", "5120", "--checkpoint-every", "4"]
TINY += ["--eval-tokens", "256", "--sample-tokens", "4"]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def options(*arguments):
    return pretrain.read_options([*TINY, *arguments])


def command(output, *arguments, processes=0):
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes else []
    return [sys.executable, *run, str(ROOT / "examples" / "pretrain.py"), *TINY, "--output", str(output), *arguments]


def run(output, *arguments, processes=0):
    called = command(output, *arguments, processes=processes)
    return subprocess.run(called, capture_output=True, text=True, timeout=500, check=False, env=QUIET)


def curve(output, name):
    lines = (output / "curves" / f"{name}.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.mark.slow
def test_a_quick_run_from_text_to_models_that_transformers_loads(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for n in range(20):
        (corpus / f"{n:02d}.txt").write_text(f"the king sees the fool {n} times and the fool mocks the king. " * 8)
    output, cache = tmp_path / "out", {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    called = command(output, "--corpus", str(corpus), "--bfloat16", "--accumulate", "2")
    done = subprocess.run(called, capture_output=True, text=True, timeout=500, check=False, env=QUIET | cache)
    assert done.returncode == 0, done.stderr
    rows = json.loads((output / "results.json").read_text())
    assert {f"{row['kind']}-{row['family']}" for row in rows} == set(SCALED)
    for row in rows:
        assert 0 < row["bits_per_byte"] < 8
        assert row["perplexity"] == pytest.approx(math.exp(torch.tensor(row["by_position"]).nanmean()), rel=0.2)
        assert (row["self_iterations"] is None) == (row["kind"] == "explicit")
    assert (output / "pretrain.png").stat().st_size > 20_000
    assert (output / "table.md").read_text().strip() in done.stdout
    assert (output / "samples.md").read_text().count("# ") == 6
    folder = output / "models" / "implicit-mamba2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    held_out = encode([(corpus / "19.txt").read_text()], tokenizer)
    found = score(to_causal_lm(model), rows_in_order(held_out, 32), batch_size=8)
    (row,) = [r for r in rows if (r["model"], r["sweep"], r["length"]) == ("implicit-mamba2", "simultaneous", 32)]
    assert found.bits_per_byte == pytest.approx(row["bits_per_byte"], rel=1e-4)
    assert found.perplexity < 250  # a fresh model has about the size of the vocabulary, 300
    pretrain.claim_folder(output, "pretrain", {}, fresh=True, writes=pretrain.WRITES)
    assert {path.name for path in output.rglob("*")} == {"options.json", ".lock"}


@pytest.mark.slow
def test_killed_again_and_again_it_gives_the_same_numbers(tmp_path):
    models = ["--models", "bounded-mamba2", "implicit-mamba2"]
    whole = run(tmp_path / "whole", *models)
    assert whole.returncode == 0, whole.stderr
    rng, parts, kills = random.Random(0), tmp_path / "parts", 0
    path = parts / "curves" / "trunk-mamba2.jsonl"
    for _ in range(3):
        process = subprocess.Popen(
            command(parts, *models), env=QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        before = path.stat().st_mtime_ns if path.exists() else 0
        while process.poll() is None and (path.stat().st_mtime_ns if path.exists() else 0) == before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.1))  # a run may end within half a second of its first line
        process.kill()
        kills += process.wait() == -9
    assert kills >= 2
    last = run(parts, *models)
    assert last.returncode == 0, last.stderr
    for name in ("trunk-mamba2", "bounded-mamba2", "implicit-mamba2"):
        assert curve(parts, name) == curve(tmp_path / "whole", name)
    ends = [json.loads((tmp_path / part / "results.json").read_text()) for part in ("whole", "parts")]
    assert str(ends[0]) == str(ends[1])  # NaN positions are equal to themselves


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path):  # with DDP: test_example_processes.py
    models = ["--models", "implicit-llama", "explicit-mamba2"]
    one, two = run(tmp_path / "one", *models), run(tmp_path / "two", *models, "--spread", "fsdp", processes=2)
    assert one.returncode == 0, one.stderr
    assert two.returncode == 0, two.stderr
    for name in models[1:]:
        mine, theirs = (curve(tmp_path / part, name) for part in ("one", "two"))
        assert mine.keys() == theirs.keys()
        for step, loss in mine.items():
            assert theirs[step] == pytest.approx(loss, rel=2e-4), (name, step)
    results = [json.loads((tmp_path / part / "results.json").read_text()) for part in ("one", "two")]
    for mine, theirs in zip(*results, strict=True):
        assert theirs["bits_per_byte"] == pytest.approx(mine["bits_per_byte"], rel=1e-3)
        assert theirs["tokens"] == mine["tokens"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "models" / "implicit-llama")
    assert sum(parameter.numel() for parameter in again.parameters()) == results[1][0]["parameters"]


def test_the_papers_models_have_their_own_curricula():
    kinds, tiny = {"explicit": "explicit", "pretrain": "bounded", "implicit": "implicit"}, options()
    for name in list(dq.PRESETS)[:-1]:
        family, _, kind = name.split("-")
        assert kind_of(name) == (kinds[kind], {"llama3": "llama", "mamba2": "mamba2"}[family])
        assert spec_of(name, tiny, 300) == replace(dq.preset(name), vocab_size=300)
        phases = [phase.name for phase in curriculum_of(name, tiny).phases]
        assert phases == (["bounded", "free"] if kind == "implicit" else ["bounded"])


def test_the_learning_rate():
    factors = [lr_factor(step, steps=100, warmup=4, decay=25, floor=0.01) for step in range(101)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1]
    assert set(factors[4:76]) == {1}
    assert factors[75:] == pytest.approx([0.01 + 0.99 * (1 - math.sqrt(step / 25)) for step in range(26)])
    assert lr_factor(0, steps=100, warmup=0, decay=25, floor=0.01) == 1


def test_the_free_phase_begins_with_the_first_step_of_its_share():
    """As floats, 0.55 * 100 is more than 55, and 0.29 * 100 less than 29."""
    for steps, share, first in ((100, 0.55, 55), (100, 0.29, 29), (20, 0.8, 16), (20, 0.51, 11)):
        given = options("--tokens", str(steps * 256), "--bounded-share", str(share))
        assert given.first_free("implicit-llama") == first
        assert given.first_free("explicit-llama") == given.first_free("bounded-llama") == 0


def test_the_commands_that_the_page_prints_are_accepted():
    lines = (ROOT / "docs" / "examples" / "pretrain.md").read_text().replace("\\\n", " ").splitlines()
    commands = [line for line in lines if re.match(r"(python|torchrun .*) examples/pretrain.py", line)]
    assert commands
    for line in commands:
        arguments = [
            part.replace("texts/", "docs") for part in shlex.split(line.partition("pretrain.py")[2], comments=True)
        ]
        arguments = ["cpu" if part == "cuda" else part for part in arguments]
        assert pretrain.read_options(arguments)


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (["--held-out", "{file}"], "", "--held-out .*file.jsonl has no text: give a file with text"),
        (["--corpus", "{file}"], '{"text": "a"}\n{"text": null}\n', "--corpus .*'text' must be text, and is null in 1"),
        (["--tokenizer", "bytes", "--corpus", "{file}"], "a few words", "--corpus .*fewer than 33 tokens.* more text"),
        (["--tokenizer", "{file}"], "", "--tokenizer: "),
    ],
    ids=("empty", "null", "short", "tokenizer"),
)
def test_text_that_cannot_be_used_is_refused_before_training(tmp_path, monkeypatch, arguments, content, message):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "file.jsonl").mkdir()
    file = folder / ("text.jsonl" if content.startswith("{") else "text.txt")
    file.write_text(content)
    with pytest.raises(SystemExit, match=message):
        pretrain.main([*TINY, "--output", str(tmp_path / "out"), *(part.format(file=folder) for part in arguments)])
    assert not (tmp_path / "out" / "curves").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "implicit-lama"], "--models must be one of ('implicit-llama'"),
        (["--models", "mamba2-state-tracking"], "--models must be one of"),
        (["--tokens", "0"], "--tokens must be an integer in 1.."),
        (["--vocab-size", "256"], "--vocab-size must be an integer in 257.."),
        (["--eval-tokens", "-1"], "--eval-tokens must be an integer in 0.."),
        (["--extrapolation", "0"], "--extrapolation must be an integer in 1.."),
        (["--decay", "1"], "--decay must be a number in (0, 1), got 1.0"),
        (["--bounded-share", "0"], "--bounded-share must be a number in (0, 1), got 0.0"),
        (["--bounded-share", "0.96"], "--models implicit-llama has no update of 20 left for its free phase: give more"),
        (["--weight-decay", "nan"], "--weight-decay must be a number in [0, inf)"),
        (["--warmup", "50"], "--warmup 50 and --decay 0.2 must fit into 20 updates"),
        (["--sample", ""], "--sample must not be empty"),
        (["--models"], "--models"),
        (
            ["--corpus", "missing/"],
            "or a file or folder, got 'missing/'",
        ),
        (["--heads", "3"], "n_heads"),
        (["--headdim", "7"], "headdim"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(tmp_path, capsys, arguments, message):
    with pytest.raises((SystemExit, ValueError)) as error:
        pretrain.main([*TINY, "--output", str(tmp_path / "out"), *arguments])
    said = re.sub(r"[\s│]+", " ", capsys.readouterr().err + str(error.value))
    assert message in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "backbone",
    [
        dq.LlamaConfig(d_model=60, n_layers=2, n_heads=5, mlp_width=100),
        dq.Mamba2Config(d_model=48, n_layers=2, d_state=8, headdim=16),
        dq.Mamba2Config(d_model=48, n_layers=3, d_state=8, headdim=24, expand=1),
    ],
    ids=["llama", "mamba2", "expand 1"],
)
def test_a_widened_model_is_the_nearest_in_size(backbone):
    implicit = dq.LanguageModelSpec(100, backbone)
    plain = replace(implicit.explicit(), backbone=replace(backbone, weight_norm=False))
    wanted = dq.parameter_count(implicit)
    found = widened(plain, wanted)
    assert replace(found, backbone=replace(found.backbone, d_model=backbone.d_model)) == plain
    sizes = {}
    for width in range(backbone.d_model, 3 * backbone.d_model):
        try:
            spec = replace(plain, backbone=replace(plain.backbone, d_model=width))
            sizes[width] = abs(dq.parameter_count(spec) - wanted)
        except ValueError:
            continue  # heads would not be whole
    assert sizes[found.backbone.d_model] == min(sizes.values())
    assert widened(implicit, wanted) is implicit
