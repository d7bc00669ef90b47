"""A decoder is looped and fine-tuned beside the original; a killed run goes on as if it had not been."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import retrofit
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, LlamaConfig

import deqseq.integrations.huggingface  # noqa: F401  registers the model type

SCRIPT = Path(__file__).parents[2] / "examples" / "retrofit.py"
TINY = ["--quick", "--steps", "12", "--tiny-steps", "12", "--eval-tokens", "128", "--checkpoint-every", "4"]


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


def test_layers_that_do_not_add_up_are_named_and_nothing_is_written(tmp_path, monkeypatch):
    LlamaConfig(num_hidden_layers=5).save_pretrained(tmp_path / "model")
    options = [*TINY, "--output", str(tmp_path / "run")]
    with pytest.raises(
        SystemExit, match=r"--prelude 1 \+ --core 2 \+ --coda 1 \+ --dropped 0 must add up to the 5 layers"
    ):
        retrofit.main([*options, "--model", str(tmp_path / "model")])
    BloomConfig().save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit, match=r"--model must be of one of the families .*, got bloom"):
        retrofit.main([*options, "--model", str(tmp_path / "other")])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="runs in one process"):
        retrofit.main(options)
    assert not (tmp_path / "run").exists()
