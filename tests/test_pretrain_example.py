"""examples/pretrain.py: what it writes, what it refuses; killed, and in two processes, it gives the same numbers."""

import json
import math
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import deqseq as dq
from deqseq.integrations.huggingface import to_causal_lm
from deqseq.tasks.text import LocalDocuments, PackedText
from deqseq.tasks.text.scoring import score
from deqseq.tasks.text.tokenizer import TokenizerEncoder

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "examples" / "pretrain.py")
TINY = ["--quick", "--d-model", "16", "--mlp-width", "32", "--tokens", "5120", "--checkpoint-every", "4"]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(output: Path, *options: str, processes: int = 0) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes else []
    return [sys.executable, *run, SCRIPT, *TINY, "--output", str(output), *options]


def run(output: Path, *options: str, processes: int = 0) -> subprocess.CompletedProcess[str]:
    called = command(output, *options, processes=processes)
    return subprocess.run(called, capture_output=True, text=True, timeout=300, check=False, env=QUIET)


def curve(output: Path, name: str) -> dict[int, float]:
    lines = (output / "curves" / f"{name}.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


@pytest.mark.slow
def test_a_quick_run_from_text_to_a_model_that_transformers_loads(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for n in range(20):
        (corpus / f"{n}.txt").write_text(f"the king sees the fool {n} times and the fool mocks the king. " * 8)
    output = tmp_path / "out"
    done = run(output, "--corpus", str(corpus), "--tensorboard", "--bfloat16", "--accumulate", "2")
    assert done.returncode == 0, done.stderr
    rows = json.loads((output / "results.json").read_text())
    assert {(row["kind"], row["family"]) for row in rows} == {
        (kind, family) for kind in ("implicit", "bounded", "explicit") for family in ("llama", "mamba2")
    }
    for row in rows:
        assert 0 < row["bits_per_byte"] < 8
        assert row["perplexity"] == pytest.approx(math.exp(torch.tensor(row["by_position"]).nanmean()), rel=0.2)
        assert (row["self_iterations"] is None) == (row["kind"] == "explicit")
    assert (output / "pretrain.png").stat().st_size > 20_000
    assert len(list((output / "tensorboard").glob("*/events*"))) >= 6
    folder = output / "models" / "implicit-mamba2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    held_out = list(LocalDocuments(corpus))[-1:]
    found = score(to_causal_lm(model), PackedText.pack(held_out, TokenizerEncoder(tokenizer), 32), batch_size=8)
    (row,) = [r for r in rows if (r["model"], r["sweep"], r["length"]) == ("implicit-mamba2", "simultaneous", 32)]
    assert found.bits_per_byte == pytest.approx(row["bits_per_byte"], rel=1e-4)
    assert found.perplexity < 250  # a fresh model has about the size of the vocabulary, 300


@pytest.mark.slow
def test_killed_again_and_again_it_gives_the_same_losses(tmp_path):
    models = ["--models", "bounded-mamba2", "implicit-mamba2"]
    whole = run(tmp_path / "whole", *models)
    assert whole.returncode == 0, whole.stderr
    draw, parts, kills = random.Random(0), tmp_path / "parts", 0
    path = parts / "curves" / "trunk-mamba2.jsonl"
    for _ in range(4):
        process = subprocess.Popen(
            command(parts, *models), env=QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        before = path.stat().st_mtime_ns if path.exists() else 0
        while process.poll() is None and (path.stat().st_mtime_ns if path.exists() else 0) == before:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.4))
        process.kill()
        kills += process.wait() == -9
    assert kills >= 2
    last = run(parts, *models)
    assert last.returncode == 0, last.stderr
    for name in ("trunk-mamba2", "bounded-mamba2", "implicit-mamba2"):
        assert curve(parts, name).items() <= curve(tmp_path / "whole", name).items()
    ends = [json.loads((tmp_path / part / "results.json").read_text()) for part in ("whole", "parts")]
    assert str(ends[0]) == str(ends[1])  # NaN positions are equal to themselves


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one(tmp_path, spread):
    models = ["--models", "implicit-llama", "explicit-mamba2"]
    one, two = run(tmp_path / "one", *models), run(tmp_path / "two", *models, "--spread", spread, processes=2)
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
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "models" / "implicit-llama")
    assert sum(parameter.numel() for parameter in again.parameters()) == results[1][0]["parameters"]


def test_the_papers_models_have_their_own_curricula():
    script = runpy.run_path(SCRIPT)
    options = script["parse"]([*TINY])[0]
    kinds = {"explicit": "explicit", "pretrain": "bounded", "implicit": "implicit"}
    for name in dq.preset_names()[:-1]:
        family, _, kind = name.split("-")
        assert script["parts_of"](name) == (kinds[kind], {"llama3": "llama", "mamba2": "mamba2"}[family])
        assert script["spec_of"](name, options, 300) == replace(dq.preset(name), vocab_size=300)
        phases = [phase.name for phase in script["curriculum_of"](name, options).phases]
        assert phases == (["bounded", "free"] if kind == "implicit" else ["bounded"])


def test_the_same_excerpts_are_scored_whatever_the_length_of_the_rows():
    script = runpy.run_path(SCRIPT)
    options = script["parse"]([*TINY, "--eval-tokens", "64"])[0]
    tokens = torch.arange(1, 206).byte().numpy()  # 204 targets: 12 excerpts of 16 and one of 12
    packed = {length: PackedText(tokens, tokens, length) for length in (4, 8, 16)}
    rows = {length: script["rows_to_score"](text, options, 16) for length, text in packed.items()}
    assert rows[16] == [0, 3, 6, 9]
    assert rows[8] == [0, 1, 6, 7, 12, 13, 18, 19]
    targets = [
        sorted(t for b in packed[n].in_order(2, rows=rows[n]) for t in b.targets.flatten().tolist()) for n in rows
    ]
    assert targets[0] == targets[1] == targets[2]
    everything = script["rows_to_score"](packed[4], replace(options, eval_tokens=0), 16)
    assert everything == list(range(51))  # and no row behind the end


@pytest.mark.parametrize("page", ["examples/pretrain.md", "guides/training.md", "tutorials/text.md"])
def test_the_commands_that_the_pages_print_are_accepted(page):
    lines = (ROOT / "docs" / page).read_text().replace("\\\n", " ").splitlines()
    commands = [line for line in lines if re.match(r"(python|torchrun .*) examples/pretrain.py", line)]
    assert len(commands) >= 3
    for line in commands:
        arguments = shlex.split(line.partition("pretrain.py")[2], comments=True)
        assert runpy.run_path(SCRIPT)["parse"](arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "implicit-lama"], "--models must be presets of language models or any of implicit-llama"),
        (["--models", "mamba2-state-tracking"], "--models must be presets of language models or any of"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--eval-tokens", "-1"], "--eval-tokens -1 and --extrapolation [2] must be at least 0 and 1"),
        (["--extrapolation", "0"], "--eval-tokens 1024 and --extrapolation [0] must be at least 0 and 1"),
        (["--decay", "1"], "--decay must lie between 0 and 1, got 1.0"),
        (["--warmup", "50"], "--warmup 50 and --decay 0.2 leave nothing of 20 updates"),
        (["--heads", "3"], "n_heads"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(tmp_path, capsys, options, message):
    script = runpy.run_path(SCRIPT)
    with pytest.raises(SystemExit, match="2"):
        script["main"]([*TINY, "--output", str(tmp_path / "out"), *options])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
