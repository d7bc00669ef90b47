"""mamba_ssm's own Triton code on CPU tensors, in Triton's interpreter; `.ci/kernels` makes the environment."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stand_ins import install


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    """The kernels, made to run here; without the interpreter these tests are an error, never a silent pass."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("the kernels' tests need TRITON_INTERPRET=1 and an environment of their own: run .ci/kernels")
    patch = pytest.MonkeyPatch()
    install(patch)
    yield
    patch.undo()
