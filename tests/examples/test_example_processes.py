"""Two processes, under DDP and FSDP2, train as one does, and their checkpoints go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "trained_in_processes.py"
pytestmark = pytest.mark.slow


def trained(folder: Path, kind: str, until: int, precision: str = "float32") -> dict:
    world = 1 if kind == "none" else 2
    start = [sys.executable] if world == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
    ]  # fmt: skip
    command = [*start, str(SCRIPT), str(folder), kind, precision, str(until)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / f"{kind}-{world}-{until}.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    return trained(tmp_path_factory.mktemp("alone"), "none", 8)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one_and_go_on(alone, tmp_path, kind):
    first, then = trained(tmp_path, kind, 4), trained(tmp_path, kind, 8)
    assert first["wrapped"] == then["wrapped"] == [kind]
    updates = first["updates"] + then["updates"]
    assert [update["step"] for update in updates] == list(range(1, 9))
    for found, wanted in zip(updates, alone["updates"], strict=True):
        for name in ("phase", "lr", "iterations", "converged"):
            assert found[name] == pytest.approx(wanted[name]), name
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-3)
    assert then["logits"] == pytest.approx(alone["logits"], abs=1e-4)
    names = {path.name for path in (tmp_path / kind / "checkpoint-00000008").iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= names


def test_two_processes_go_on_from_one(alone, tmp_path):
    trained(tmp_path, "none", 4)
    (tmp_path / "none").rename(tmp_path / "ddp")
    updates = trained(tmp_path, "ddp", 8)["updates"]
    assert [update["loss"] for update in updates] == pytest.approx(
        [update["loss"] for update in alone["updates"][4:]], rel=1e-5
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_bfloat16(alone, tmp_path, kind):
    updates = trained(tmp_path, kind, 8, "bfloat16")["updates"]
    for found, wanted in zip(updates, alone["updates"], strict=True):
        assert found["loss"] != wanted["loss"]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=0.05)
