"""For all tests: one thread a process where several share the cores; modules whose extra is missing
are left out.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import jaxtyping
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that a test starts
    torch.set_num_threads(1)

collect_ignore = ["tests/gpu/pretend.py"]  # it changes torch where it is imported
collect_ignore += [] if find_spec("lm_eval") else ["deqseq/integrations/lm_eval.py"]


UNCHECKED = {
    "benchmarks",
    "diagnostics",
    "docs",
    "examples",
    "huggingface",
    "integrations",
    "testing",
}
"""Folders whose tests run without the checks of shapes: the core's tests call the same with them.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A docstring's example imports all that it uses, because readers copy it."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.dtest.globs = {}


_checked: set[str] = set()  # tests of which a case has run


@contextmanager
def without_checks(wanted: bool = True) -> Iterator[None]:
    """Switch the checks off for a block, or leave them as they are."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", wanted or before)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True)
def checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The checks of shapes make small models three times slower: of each test its first case alone
    runs with them.
    """
    name = request.node.nodeid.partition("[")[0]
    core = "tests" not in request.path.parts or request.path.parent.name not in UNCHECKED
    with without_checks(not core or name in _checked):
        yield
    _checked.add(name)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test and every docstring's example draws the same numbers, whichever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """A test without the checks of shapes: it gives what they would refuse first, or
    runs for long.
    """
    with without_checks():
        yield
