"""A decoder is looped and fine-tuned beside the original; a killed run goes on as if it had not been."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import retrofit
import torch
from common.bits_per_byte import Rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, LlamaConfig, LlamaForCausalLM

from deqseq.integrations.huggingface import from_causal_lm, to_causal_lm
from deqseq.training import Curriculum, unrolled

SCRIPT = Path(__file__).parents[2] / "examples" / "retrofit.py"
SHORT = ["--quick", "--steps", "12", "--eval-tokens", "128", "--checkpoint-every", "4"]
TINY = [*SHORT, "--tiny-steps", "12"]


def command(output: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *TINY, "--output", str(output), *options]


def run(output: Path, *options: str, **variables: str) -> subprocess.CompletedProcess:
    shell = os.environ | variables
    return subprocess.run(command(output, *options), capture_output=True, text=True, timeout=600, env=shell)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "table.md").read_text().strip() in done.stdout
    return folder


@pytest.mark.slow
def test_models_and_numbers_are_written(whole):
    rows = json.loads((whole / "results.json").read_text())
    assert [(row["model"], row["budget"]) for row in rows] == [
        *(("pretrained", None), ("unlooped", None)),
        *(("looped", n) for n in (1, 2, 4, 8, 16, 32, 64)),
        ("looped", None),
    ]
    assert all(0 < row["bits_per_byte"] < 8 for row in rows)
    assert [row["self_iterations"] for row in rows[:9]] == [None, None, 1, 2, 4, 8, 16, 32, 64]
    assert rows[-1]["converged"] == 1
    assert (whole / "retrofit.png").stat().st_size > 10_000
    model = AutoModelForCausalLM.from_pretrained(whole / "looped" / "model")
    ids = AutoTokenizer.from_pretrained(whole / "looped" / "model")("The", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, ids.shape[1] + 3)
    weight = model.model.solved.backbone.injection.weight
    assert weight[:, : len(weight)].abs().max() > 0  # it was trained


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(whole, tmp_path):
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (tmp_path / "looped" / "training" / "checkpoint-4").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    ours, theirs = (load_file(folder / "looped" / "model" / "model.safetensors") for folder in (tmp_path, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore::UserWarning:peft")
def test_adapters_are_trained_and_merged(whole, tmp_path):
    pytest.importorskip("peft")
    retrofit.main([*TINY, "--output", str(tmp_path), "--lora", "2"])
    ours, theirs = (load_file(folder / "looped" / "model" / "model.safetensors") for folder in (tmp_path, whole))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].shape == theirs[name].shape for name in theirs)


def test_a_finished_stage_is_loaded_without_another_update(tmp_path):
    options = replace(retrofit.Options(**retrofit.QUICK), batch=2, checkpoint_every=2)
    rows = [{"input_ids": list(range(first, first + 8))} for first in range(20)]
    run = retrofit.Run(options, tmp_path, rows, Rows(*[torch.zeros(0)] * 3))
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config, phase = LlamaConfig(num_hidden_layers=3, **sizes), unrolled(3, until=None)
    (tmp_path / "looped" / "training" / "checkpoint-best").mkdir(parents=True)
    weights, updates = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = from_causal_lm(retrofit.retrofit(LlamaForCausalLM(config), prelude=1, core=1, coda=1))
        model.register_forward_pre_hook(lambda *_: updates.append(1))
        run.train("looped", model, 4, 1e-2, Curriculum((phase,)))
        weights.append(model.state_dict())
        assert to_causal_lm(model).core.solve == phase.solve
    assert len(updates) == 4
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_layers_that_do_not_add_up_are_named_and_nothing_is_written(tmp_path):
    LlamaConfig(num_hidden_layers=5).save_pretrained(tmp_path / "model")
    options = [*SHORT, "--output", str(tmp_path / "run")]
    with pytest.raises(
        SystemExit, match=r"--prelude 1 \+ --core 2 \+ --coda 1 \+ --dropped 0 must add up to the 5 layers"
    ):
        retrofit.main([*options, "--model", str(tmp_path / "model")])
    BloomConfig().save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit, match=r"--model must be of one of the families .*, got bloom"):
        retrofit.main([*options, "--model", str(tmp_path / "other")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab-size", "257", "--corpus", "{corpus}"], "^--corpus .* fewer than a row: give more text"),
        (["--corpus", "{empty}"], "^--corpus .* has no"),
        (["--model", "{model}", "--core", "3"], "^--model .*/model: .* tokenizer"),
    ],
    ids=("short", "empty", "no tokenizer"),
)
def test_what_cannot_be_read_is_named_and_nothing_is_written(tmp_path, monkeypatch, options, message):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, text in (("corpus", "a b c d"), ("empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
    LlamaConfig(num_hidden_layers=5).save_pretrained(tmp_path / "model")
    paths = {name: tmp_path / name for name in ("corpus", "empty", "model")}
    given = [*SHORT, "--output", str(tmp_path / "run"), *options]
    with pytest.raises(SystemExit, match=message):
        retrofit.main([part.format(**paths) for part in given])
    assert not (tmp_path / "run").exists()


def test_several_gpus_are_refused(tmp_path, monkeypatch):
    """The Trainer would use them all, by DataParallel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match=r"^--device cuda: .* CUDA_VISIBLE_DEVICES=0"):
        retrofit.main([*TINY, "--device", "cuda", "--output", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
