"""The checks that benchmarks/gpu.py makes on a GPU, made here."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu import TOY, Bench, checks

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:Deterministic mode")]


def test_the_benchmark_checks_the_kernels():
    rows = checks(Bench(torch.device("cpu"), TOY, "mamba_ssm"))
    assert [row.metric.split(":")[0] for row in rows] == ["forward", "gradients", "step"]
    assert all(row.holds and row.ours < 1e-4 for row in rows), rows
