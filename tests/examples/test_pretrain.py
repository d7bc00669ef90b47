"""pretrain.py: what is written, going on after a kill, bad options."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import corpus
import datasets
import pretrain
import pytest
import text_training
import torch
import transformers
from processes import output_of
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import deqseq as dq

ROOT = Path(__file__).parents[2]
MODELS = ("implicit-mamba2", "explicit-llama")


def command(output, launcher=""):
    short = "--quick --steps 12 --eval-tokens 128 --checkpoint-every 4"
    tiny = f"--d-model 16 --warmup 2 --models {' '.join(MODELS)}"
    return shlex.split(f"{launcher} {ROOT}/examples/pretrain.py --output {output} {short} {tiny}")


def run(output, launcher=""):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return output_of(*command(output, launcher), timeout=600, env=env)


def results(folder):
    return json.loads((folder / "results.json").read_text())


def weights(folder, model):
    return load_file(folder / model / "model" / "model.safetensors")


def changed(folder):
    """When each file of weights was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a finished run, and what the run printed."""
    folder = tmp_path_factory.mktemp("pretrain")
    return folder, run(folder)


@pytest.mark.slow
def test_a_run_writes_numbers_a_table_a_figure_and_models(whole):
    folder, printed = whole
    rows = results(folder)
    assert all(0 < row["bits_per_byte"] < 8 for row in rows)
    assert (folder / "table.md").read_text().strip() in printed
    for model in MODELS:
        loaded = AutoModelForCausalLM.from_pretrained(folder / model / "model")
        tokenizer = AutoTokenizer.from_pretrained(folder / model / "model")
        ids = tokenizer("the", return_tensors="pt").input_ids
        generated = loaded.generate(ids, max_new_tokens=3, do_sample=False)
        assert generated.shape == (1, ids.shape[1] + 3)
    assert (folder / "pretrain.png").stat().st_size > 10_000
    assert [row["length"] for row in rows] == [32, 32, 64, 32, 64]
    sweeps = ["simultaneous", "sequential", "simultaneous", "one pass", "one pass"]
    assert [row["sweep"] for row in rows] == sweeps


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_it_had_not_been(whole, tmp_path):
    first, second = MODELS
    for place in (f"{first}/checkpoint-8", f"{second}/checkpoint-4", f"{second}/checkpoint-12"):
        script = [sys.executable, *command(tmp_path)]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(script, **silent)
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if (tmp_path / place).exists():
                break
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -9, "the run ended before it could be killed"
    run(tmp_path)
    folder, _ = whole
    assert results(tmp_path) == results(folder)
    for model in MODELS:
        assert_close(weights(tmp_path, model), weights(folder, model), rtol=0, atol=0)
    before = changed(tmp_path)
    run(tmp_path)  # nothing is trained again
    assert changed(tmp_path) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_of_several_epochs_goes_on_with_the_rows_that_are_left(
    tmp_path, monkeypatch, capsys, stream
):
    warned = []
    monkeypatch.setattr(transformers.trainer.logger, "warning", warned.append)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (data := tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        lines = [json.dumps({"text": words}) + "\n" for words in corpus.babble(60)]
        (data / f"{split}.jsonl").write_text("".join(lines))
    source = f"hub:{data}" if stream else f"{data}/train.jsonl"
    places = {"corpus": source, "output": str(tmp_path / "run"), "checkpoint_every": 5}
    sizes = {"batch": 16, "steps": 12, "warmup": 2, "vocab_size": 290}
    options = pretrain.Options(**pretrain.QUICK | places | sizes)
    tokenizer, rows, _ = text_training.prepare(options, None)
    found = []
    for _ in range(2):
        folder = pretrain.train_model("explicit-llama", options, tokenizer, rows)
        found.append(load_file(folder / "model.safetensors"))
        shutil.rmtree(folder)
    assert (folder.parent / "checkpoint-10").exists()
    assert_close(*found, rtol=0, atol=0)
    assert "explicit-llama: training from step 10 to 12, " in capsys.readouterr().out
    assert not [text for text in warned if "missing keys" in text]  # the head is tied


def test_half_checkpoints_and_the_last_one_are_not_resumed(tmp_path):
    for step, state in ((4, "{}"), (8, "{}"), (12, '{"half'), (16, "{}")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert text_training.newest_checkpoint(tmp_path, 16).name == "checkpoint-8"
    assert text_training.newest_checkpoint(tmp_path, 4) is None


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(whole, tmp_path):
    run(tmp_path, "-m torch.distributed.run --standalone --nproc_per_node 2")
    for one, two in zip(results(whole[0]), results(tmp_path), strict=True):
        assert two["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-3)


def test_presets_have_the_papers_sizes_and_curricula():
    options = pretrain.read_options(pretrain.Options, ["--quick"], pretrain.QUICK)
    for name in pretrain.PRESETS:
        assert pretrain.spec_of(name, options, 300) == replace(dq.preset(name), vocab_size=300)
        phases = [phase.name for phase in pretrain.curriculum_of(name, options).phases]
        assert phases == (["bounded", "free"] if name.endswith("implicit") else ["bounded"])


def test_the_commands_that_the_page_prints_are_accepted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    page = (ROOT / "docs" / "examples" / "pretrain.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^(?:python|torchrun .*) examples/pretrain.py(.*)", page, re.MULTILINE)
    assert commands
    for arguments in commands:
        arguments = shlex.split(arguments.replace("texts/", f"{ROOT}/docs"), comments=True)
        assert pretrain.read_options(pretrain.Options, arguments, pretrain.QUICK)


BAD = (
    "steps 0, steps -1, length 1, length 1.5, checkpoint-every 99999999999, seed -1, "
    "vocab-size 256, batch 3, "
    "lr 0, lr nan, lr inf, lr much, output , output {file}, output {file}/run, corpus , "
    "corpus shakespere, "
    "held-out , held-out nowhere/, device gpu7, stepz 5, "
    "models , models implicit-lama, models mamba2-state-tracking, extrapolation 0, decay 0, "
    "decay 1, phantom 0, "
    "bounded-share 0, bounded-share 0.99, weight-decay -1, warmup 60, budget -1, rtol 0, "
    "heads 3, headdim 7, fsdp"
)
LINES = [line.split(" ") for line in BAD.split(", ")]


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_bad_options_are_named_and_nothing_is_written(tmp_path, monkeypatch, capsys, line):
    flag, *value = line
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WORLD_SIZE", "2" if flag == "batch" else "1")
    (file := tmp_path / "file").write_text("mine")
    given = [f"--{flag}", *(part.format(file=file) for part in value)]
    with pytest.raises(SystemExit) as error:
        pretrain.main(["--quick", *given])
    said = re.sub(r"[\s│]+", " ", capsys.readouterr().err + str(error.value))
    assert f"--{flag}" in said or flag.replace("-", "_").replace("heads", "n_heads") in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--vocab-size 257 --corpus corpus", "^--corpus .* fewer than 32 tokens"),
        ("--corpus empty", "^--corpus .* has no text"),
        ("--held-out corpus", "^--held-out.* fewer than an excerpt of 64"),
        ("--tokenizer ./model", "^tokenizer ./model: .* neither a folder with a tokenizer"),
    ],
)
def test_what_cannot_be_read_is_named_and_nothing_is_written(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for folder, words in (("corpus", "a b c d"), ("empty", "")):
        Path(folder).mkdir()
        Path(folder, "a.txt").write_text(words)
    LlamaConfig().save_pretrained("model")
    with pytest.raises(SystemExit, match=message):
        pretrain.main(["--quick", "--output", "run", *arguments.split()])
    assert not Path("run").exists()


def test_several_gpus_in_one_process_are_refused(monkeypatch, capsys):
    """The Trainer would use them all, by DataParallel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        pretrain.main(["--quick", "--device", "cuda"])
    assert "CUDA_VISIBLE_DEVICES=0" in capsys.readouterr().err
