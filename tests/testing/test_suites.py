"""The suites of deqseq.testing fail for broken parts, and run from an installed package."""

import itertools
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import deqseq as dq
from deqseq.testing import GradientContract, SolverContract, SweepContract
from deqseq.testing.gradient_problems import dense_jacobian, exact


def fails(suite: type, test: str, **attributes: Any) -> bool:
    """Whether a test of a suite fails for a part, with any of its parameters."""
    tests = type("Broken", (suite,), attributes)()
    marks = [mark for mark in getattr(getattr(suite, test), "pytestmark", []) if mark.name == "parametrize"]
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        arguments: dict[str, Any] = {}
        for mark, value in zip(marks, values, strict=True):
            names = [mark.args[0]] if isinstance(mark.args[0], str) else mark.args[0]
            arguments |= dict(zip(names, value if len(names) > 1 else [value], strict=True))
        try:
            getattr(tests, test)(**arguments)
        except (Exception, pytest.fail.Exception):
            return True
    return False


# solvers


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
    """A memory of another length than the batch, once finished rows are removed."""

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        previous = z if state is None else state()
        return z + 0.9 * (fz - z) + 0.1 * (z - previous), lambda: z


@dataclass(frozen=True)
class InPlace(dq.Solver[None]):
    def init(self, z0):
        return None

    def step(self, z, fz, state):
        return z.lerp_(fz, 0.8), None


@dataclass(frozen=True)
class GivesUpTogether(dq.Solver[None]):
    """Damps all rows more once one of them is not finite."""

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        return torch.lerp(z, fz, 0.8 if fz.isfinite().all() else 0.4), None


class NotFrozen(dq.Relaxed):
    """No dataclass of its own: its configuration can be changed."""

    def __init__(self, damping: float = 0.8) -> None:
        self.__dict__["damping"] = damping

    def __setattr__(self, name, value):
        self.__dict__[name] = value


@pytest.mark.parametrize(
    ("solver", "expected"),
    [
        (MixesRows(), "test_rows_do_not_depend_on_the_rest_of_the_batch"),
        (KeepsItsRows(), "test_removing_finished_rows_changes_nothing"),
        (InPlace(), "test_nothing_is_modified_in_place"),
        (NotFrozen(), "test_it_is_its_configuration"),
        (GivesUpTogether(), "test_a_row_that_is_not_finite_leaves_the_others_alone"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_broken_solver_fails(solver, expected):
    assert fails(SolverContract, expected, solver=solver)
    assert not fails(SolverContract, expected, solver=dq.Relaxed())


# gradients


@dataclass(frozen=True)
class Twice(dq.AttachedGradient):
    """A gradient of the right direction and the wrong size."""

    inner: dq.AttachedGradient = dq.Implicit(stop=dq.Stop(rtol=1e-12, max_steps=200))

    def attach(self, f, z_star):
        value = self.inner.attach(f, z_star)
        return 2 * value - value.detach()


@dataclass(frozen=True)
class Moved(dq.AttachedGradient):
    """The right gradient of the wrong value."""

    def attach(self, f, z_star):
        return dq.Implicit().attach(f, z_star) + 1e-3


@dataclass(frozen=True)
class KeepsTheHistory(dq.AttachedGradient):
    """One step that does not cut what came before."""

    def attach(self, f, z_star):
        z_star.mul_(1 + 1e-3)
        return f(z_star)


@dataclass(frozen=True)
class DifferentiableOnce(dq.AttachedGradient):
    """The exact gradient, whose own derivative leaves the Jacobian out."""

    def attach(self, f, z_star):
        value, jacobian = f(z_star), dense_jacobian(f, z_star)
        value.register_hook(lambda grad: exact(jacobian, grad.flatten()).view_as(grad))
        return value


@dataclass(frozen=True)
class DropsOptions(dq.Gradient):
    """The callback does not reach the solve."""

    def apply(self, f, z0, **call):
        kept = {name: call[name] for name in ("args", "solver", "stop", "has_aux")}
        return dq.Unrolled().apply(f, z0, **kept)


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (Twice(), "test_closure_tensors_and_an_injection_with_its_own_graph"),
        (Moved(), "test_value_is_the_fixed_point_and_the_start_is_untouched"),
        (KeepsTheHistory(), "test_value_is_the_fixed_point_and_the_start_is_untouched"),
        (DifferentiableOnce(), "test_a_second_derivative_is_right_or_an_error"),
        (DropsOptions(), "test_it_hands_on_what_solve_is_told"),
        (dq.OneStep(), "test_module_parameters_in_either_mode"),  # it is not exact, and does not say so
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_broken_gradient_fails(gradient, expected):
    assert fails(GradientContract, expected, gradient=gradient)
    assert not fails(GradientContract, expected, gradient=Twice().inner)


# sweeps


@dataclass(frozen=True)
class Empty(dq.Sweep):
    block = 0


class Fickle(dq.Sweep):
    """No frozen dataclass, and another window at every call."""

    block = 1
    calls = 0

    def width(self, length):
        Fickle.calls += 1
        return 1 + Fickle.calls % 2


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        (Empty(), "test_finds_the_fixed_point"),
        (Fickle(), "test_it_is_its_configuration"),
        (Fickle(), "test_statistics_are_per_token_and_count_what_was_computed"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_a_broken_sweep_fails(sweep, expected):
    assert fails(SweepContract, expected, sweep=sweep)
    assert not fails(SweepContract, expected, sweep=dq.Chunked(3))


# where they come from


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


def test_pytest_is_needed_by_the_suites_alone():
    code = """
import sys
sys.modules["pytest"] = None
import deqseq
assert not any(name.startswith("deqseq.testing") for name in sys.modules)
import deqseq.testing
"""
    result = run("-W", "ignore", "-c", code)
    assert result.returncode == 1
    assert 'ImportError: deqseq.testing needs pytest: pip install "deqseq[test]"' in result.stderr


def test_three_lines_test_a_part_of_ones_own(tmp_path):
    (tmp_path / "test_mine.py").write_text("""
import deqseq as dq
from deqseq.testing import SweepContract

class TestGood(SweepContract):
    sweep = dq.Chunked(4)

class Fickle(dq.Sweep):
    block = 1
    calls = 0
    def width(self, length):
        Fickle.calls += 1
        return 1 + Fickle.calls % 2

class TestBad(SweepContract):
    sweep = Fickle()
""")
    result = run("-m", "pytest", "-q", "-k", "statistics or configuration", "-p", "no:cacheprovider", cwd=tmp_path)
    assert result.returncode == 1
    assert "5 failed, 5 passed" in result.stdout
    assert re.search(r"assert \{[12]\} == \{[12]\}", result.stdout)  # asserts of the suites show their values
