"""For all tests: one thread a process where several share the cores; modules whose extra is missing are left out."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import jaxtyping
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that a test starts
    torch.set_num_threads(1)

collect_ignore = [] if find_spec("lm_eval") else ["deqseq/integrations/lm_eval.py"]


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the checks of shapes, which make small models three times slower; other tests make the same calls."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
