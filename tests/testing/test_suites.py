"""The suites of deqseq.testing fail for broken parts, and run from an installed package."""

import itertools
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import deqseq as dq
from deqseq.backbones.affine import AffineCache
from deqseq.testing import BackboneContract, GradientContract, SolverContract, SweepContract
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
    """Neither trace nor callback reach the solve."""

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
class TooLong(dq.Sweep):
    def sizes(self, length):
        return [4] * (length // 4 + 1)


@dataclass(frozen=True)
class Empty(dq.Sweep):
    def sizes(self, length):
        return [0, length]


class Forgetful(dq.Sweep):
    """Another plan at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def sizes(self, length):
        self.calls += 1
        return [1] * length if self.calls % 2 else [length]


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        (TooLong(), "test_sizes_are_at_least_one_and_add_up"),
        (TooLong(), "test_finds_the_fixed_point"),
        (Empty(), "test_sizes_are_at_least_one_and_add_up"),
        (Empty(), "test_finds_the_fixed_point"),
        (Forgetful(), "test_sizes_are_at_least_one_and_add_up"),
        (Forgetful(), "test_it_is_its_configuration"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_broken_sweep_fails(sweep, expected):
    assert fails(SweepContract, expected, sweep=sweep)
    assert not fails(SweepContract, expected, sweep=dq.Chunked(3))


# backbones


class Broken(dq.Affine):
    """Affine, of which each subclass breaks one promise."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(4)


class LooksAhead(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + 0.01 * z.mean(dim=1, keepdim=True), aux


class OffByOne(Broken):
    def advance(self, cache, aux, tokens, counts=None):
        return super().advance(cache, aux, tokens - 1, None if counts is None else counts - 1)


class ForgetsPadding(Broken):
    def advance(self, cache, aux, tokens, counts=None):
        return super().advance(cache, aux, tokens)


class ChangesItsCache(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        result = super().forward(z, inputs, cache, need_aux=need_aux)
        if cache is not None:
            cache.previous.mul_(0.9)
        return result


class Counts(Broken):
    """Is another map at every evaluation."""

    calls = 0

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        self.calls += 1
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + 1e-4 * self.calls, aux


class MixesItsRows(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + 0.01 * z.mean(dim=0, keepdim=True), aux


class KeepsAGraph(Broken):
    def advance(self, cache, aux, tokens, counts=None):
        with torch.enable_grad():
            return AffineCache(aux[:, tokens] * self.A.sum())


class IgnoresItsInput(Broken):
    def prepare(self, x, cache=None, mask=None):
        inputs = super().prepare(x, cache, mask)
        return replace(inputs, injection=torch.ones_like(inputs.injection))


class OnTheWrongDevice(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + torch.zeros(self.d_model, dtype=z.dtype), aux


class Float32(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value.float(), aux


class Expands(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + 2 * z, aux


class CutsTheGraph(Broken):
    def prepare(self, x, cache=None, mask=None):
        inputs = super().prepare(x, cache, mask)
        return replace(inputs, injection=inputs.injection.detach())


class DrawsItsMasks(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return torch.dropout(value, 0.2, self.training), aux


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        (LooksAhead, "test_causal"),
        (OffByOne, "test_a_sequence_cut_in_two_is_the_sequence"),
        (OffByOne, "test_every_sweep_comes_to_the_same"),
        (ForgetsPadding, "test_padding_leaves_what_the_row_alone_leaves"),
        (ChangesItsCache, "test_pure"),
        (Counts, "test_pure"),
        (MixesItsRows, "test_rows_are_independent"),
        (KeepsAGraph, "test_a_sequence_cut_in_two_is_the_sequence"),
        (IgnoresItsInput, "test_keeps_the_shape_and_depends_on_its_input"),
        (OnTheWrongDevice, "test_tensors_are_made_on_the_device_of_the_state"),
        (Float32, "test_keeps_the_dtype"),
        (Expands, "test_every_sweep_comes_to_the_same"),
        (CutsTheGraph, "test_gradients_are_those_of_the_map"),
        (DrawsItsMasks, "test_one_prepare_makes_one_map_in_training_mode_too"),
    ],
)
def test_a_broken_backbone_fails(backbone, expected):
    assert fails(BackboneContract, expected, backbone=backbone())
    assert not fails(BackboneContract, expected, backbone=Broken())


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

class Short(dq.Sweep):
    def sizes(self, length):
        return [1]

class TestBad(SweepContract):
    sweep = Short()
""")
    result = run("-m", "pytest", "-q", "-k", "sizes or configuration", "-p", "no:cacheprovider", cwd=tmp_path)
    assert result.returncode == 1
    assert "19 failed, 21 passed" in result.stdout
    assert "assert 1 == 2" in result.stdout  # asserts of the suites show their values
