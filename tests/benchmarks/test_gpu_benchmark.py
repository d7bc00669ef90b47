"""The GPU's benchmark at toy size, by the same code: it measures everything it says, on a CPU as well."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_everything_is_measured_at_toy_size(tmp_path):
    command = [sys.executable, "-W", "error", SCRIPT, "--device", "cpu", "--json", tmp_path / "gpu.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["metric"].split(" (")[0] for row in rows] == [
        "ms per iteration",
        "ms",
        "share of the limit",
        "ms per iteration",
        "ms",
        "share of the limit",
        "peak MiB of a solve of 24 iterations",
        "tokens/s",
        "tokens/s",
    ]
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows)
    assert rows[6]["holds"], "memory of a solve must not grow with its iterations"
    assert all(row["ours"] < 1.5 for row in rows if row["metric"].startswith("share"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "no CUDA device: --device cpu runs the same code at toy size\n")
