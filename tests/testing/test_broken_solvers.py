"""The suite for solvers fails for each that breaks one promise, and runs without pytest."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from processes import output_of

import deqseq as dq
from deqseq.testing import SolverContract


def fails(suite, test, **attributes):
    """Whether a test of a suite fails for a part."""
    try:
        getattr(type("Broken", (suite,), attributes)(), test)()
    except Exception:
        return True
    return False


@dataclass(frozen=True)
class MixesRows(dq.Solver[None]):
    """Damps by what the whole batch does."""

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        moved = (fz - z).norm() / fz.norm().clamp_min(1e-12)
        return torch.lerp(z, fz, float(0.5 + 0.3 * moved.clamp(max=1))), None


@dataclass(frozen=True)
class KeepsItsRows(dq.Solver[Any]):
    """Keeps as many rows as it began with when finished rows are removed."""

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        previous = z if state is None else state()
        return z + 0.9 * (fz - z) + 0.1 * (z - previous), lambda: z


class Counting(dq.Solver[Any]):
    """Counts its steps for the whole batch."""

    def init(self, z0):
        return z0, 1.0

    def step(self, z, fz, state):
        return (z + fz) / 2, (z, state[1] + 1)


def test_one_row_that_ends_early_need_not_be_removed(monkeypatch):
    """Seven of eight rows end together, long after the first."""
    monkeypatch.setattr("deqseq.testing.solvers.GAINS", (0.0, *[0.001] * 7))
    suite = type("Suite", (SolverContract,), {"solver": dq.Naive()})()
    suite.test_removing_finished_rows_changes_nothing()


def test_a_number_in_the_memory_is_refused_where_rows_are_restarted():
    bits = torch.randint(2, (4, 24))
    message = r"the memory of Counting must be tensors with a row .*, got a number"
    with pytest.raises(TypeError, match=message):
        dq.load_example("parity")(bits, solver=Counting(), sweep=dq.Sliding(4))


@pytest.mark.parametrize(
    ("solver", "expected"),
    [
        (MixesRows(), "test_rows_do_not_depend_on_the_rest_of_the_batch"),
        (KeepsItsRows(), "test_removing_finished_rows_changes_nothing"),
    ],
)
def test_a_broken_solver_fails(solver, expected):
    assert fails(SolverContract, expected, solver=solver)
    assert not fails(SolverContract, expected, solver=dq.Relaxed())


def test_the_suites_run_without_pytest():
    code = """
import sys, unittest
sys.modules["pytest"] = None
import deqseq as dq
assert not any(name.startswith("deqseq.testing") for name in sys.modules)
from deqseq.testing import BackboneContract, SolverContract
class TestRelaxed(SolverContract, unittest.TestCase):
    solver = dq.Relaxed()
unittest.main(argv=["-", "TestRelaxed.test_keeps_the_dtype"])
"""
    output_of("-W", "ignore", "-c", code)
