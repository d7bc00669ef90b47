"""mamba_ssm's own Triton code: in Triton's interpreter, for which `.ci/kernels` makes the
environment, or on a GPU.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from stand_ins import install


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    """The kernels, made to run here; without interpreter and GPU these tests are an error, never a
    silent pass.
    """
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            install(patch)
            yield
        elif torch.cuda.is_available():
            patch.setenv(
                "TRITON_F32_DEFAULT", "ieee"
            )  # products of float32 as on a CPU, without TF32
            with torch.device("cuda"):
                yield
        else:
            pytest.fail(
                "the kernels' tests need TRITON_INTERPRET=1 and an environment of their own: run "
                ".ci/kernels"
            )
