"""Starts, maps, records and solvers that break their contract are refused."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import SOLVERS
from torch import Tensor

import deqseq as dq


def solve(f, z0, solver=dq.Naive(), **options):
    return dq.solve(f, z0, solver=solver, stop=dq.Stop(1e-6, max_steps=300), **options)


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (torch.zeros(()), ValueError),
        (torch.zeros(2, 3, dtype=torch.bool), TypeError),
        (torch.tensor([[0.0], [torch.nan]]), ValueError),
        (torch.tensor([[0.0], [torch.inf]]), ValueError),
        (torch.zeros(2, 3).to_sparse(), TypeError),
        (torch.zeros(2, 3, dtype=torch.float8_e4m3fn), TypeError),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_a_start_that_cannot_be_computed_with(start, error):
    with pytest.raises(error, match=r"^z0 must (be|have)"):
        solve(lambda z: 1 - z, start)


@pytest.mark.parametrize(
    ("f", "args", "message"),
    [
        (lambda z, x: z, None, r"f must take z only, got <lambda>\(z, x\): .* second one as args="),
        (lambda z: z, torch.zeros(2), "f must be a function of 2 argument"),
        (lambda: 3, None, "f must be a function of 1 argument"),
    ],
)
@pytest.mark.parametrize("call", [dq.fixed_point, solve])
def test_a_map_of_other_arguments(call, f, args, message):
    with pytest.raises(TypeError, match=message):
        call(f, torch.zeros(2, 3), args=args)


@pytest.mark.parametrize("f", [lambda z: z, lambda z: (z, z, z)])
def test_a_map_without_the_aux_that_was_asked_for(f):
    with pytest.raises(TypeError, match="has_aux=True"):
        solve(f, torch.zeros(2, 3), has_aux=True)


class Halves(torch.nn.Module):
    """A map that writes its result into its argument, as ``ReLU(inplace=True)`` does."""

    def forward(self, z):
        return z.mul_(0.5).add_(1)


@pytest.mark.parametrize(
    "gradient", [None, dq.Phantom(2), dq.OneStep(), dq.Implicit(), dq.Unrolled()], ids=str
)
def test_a_map_that_changes_z_in_place_is_refused(gradient):
    with pytest.raises(ValueError, match=r"f must not change z in place.*z\.clone\(\)"):
        dq.fixed_point(Halves(), torch.zeros(2, 3), gradient=gradient)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_in_inference_mode_a_map_that_changes_z_in_place_has_its_own_copy(solver):
    """There torch does not count changes."""
    with torch.inference_mode():
        solution = solve(Halves(), torch.zeros(2, 3), solver)
        assert solution.converged.all()
        torch.testing.assert_close(solution.value, torch.full((2, 3), 2.0))


SLOPE = torch.tensor([0.1, 0.9])


@pytest.mark.parametrize(
    "args",
    [
        SimpleNamespace(slope=SLOPE),
        SimpleNamespace(slope=[SLOPE]),
        UserDict(slope=SLOPE),
        {1, 2},
        SLOPE.numpy(),
        [0.1, 0.9],
    ],
    ids=repr,
)
def test_objects_that_hide_tensors_are_refused(args):
    kind = type(args).__name__
    with pytest.raises(TypeError, match=rf"args must be tensors, in .* got a {kind}"):
        solve(lambda z, a: z / 2, torch.ones(2, 1), args=args)


@pytest.mark.parametrize("aux", [torch.zeros(7), torch.tensor(1.0)])
def test_aux_without_a_row_for_each_row_is_refused(aux):
    with pytest.raises(ValueError, match="aux must have one row per row of z0, 2"):
        solve(lambda z: (z, aux), torch.ones(2, 1), has_aux=True)


def test_args_without_a_row_for_each_row_are_refused():
    with pytest.raises(ValueError, match=r"args must have .*z0.* got .* \(3, 1\)"):
        solve(lambda z, x: x, torch.zeros(2, 1), args=torch.ones(3, 1))


@dataclass(frozen=True)
class Step(dq.Solver):
    """A solver whose step is a function."""

    function: Callable[[Tensor, Tensor], Any]

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        return self.function(z, fz)


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (lambda z, fz: fz, TypeError, r"return a pair \(next point, state\), got Tensor"),
        (lambda z, fz: (z.lerp_(fz, 0.5), None), ValueError, "must not change z or fz in place"),
        (lambda z, fz: (fz.sub_(z), None), ValueError, "must not change z or fz in place"),
        (lambda z, fz: (fz, torch.zeros(())), ValueError, "must have one row per row of z0, 2"),
    ],
)
def test_a_solver_that_breaks_its_contract(step, error, words):
    z = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(error, match=f"Step.*{words}"):
        solve(lambda z, x: z / 2 + x, z, Step(step), args=z + 1)


def test_under_autocast_a_solver_must_keep_the_dtype():
    refused = pytest.raises(TypeError, match=r"Step.step must keep the dtype of z")
    with refused, torch.autocast("cpu", dtype=torch.bfloat16):
        solve(torch.cos, torch.zeros(1, 1), Step(lambda z, fz: (fz.double(), None)))


def test_a_mask_of_all_rows_inside_of_f_is_refused_when_rows_are_removed():
    mask, x = torch.tensor([True, False, True]), torch.tensor([[0.0], [1.0], [2.0]])

    def f(z, x):
        fz = (z + x) / 2
        fz[mask] *= 1
        return fz

    with pytest.raises(ValueError, match="what it uses of each row, such as a mask, belongs in"):
        solve(f, torch.zeros_like(x), args=x)


def test_a_map_may_fill_one_buffer_again():
    """Plain iteration would take the buffer for its next point; other values that are kept have
    been copied.
    """
    buffer = torch.empty(4, 1)
    rate = torch.tensor([[0.0], [0.5], [0.5], [0.9]])

    def f(z, rate):
        return torch.add(rate * z, 1, out=buffer[: len(z)])

    solution = solve(f, 0 * rate, dq.Relaxed(0.9), args=rate)
    torch.testing.assert_close(solution.value, 1 / (1 - rate), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="f must not change z in place"):
        solve(f, 0 * rate, args=rate)


@pytest.mark.filterwarnings(
    "ignore:.*jit.trace:DeprecationWarning", "ignore:.*jit.trace:FutureWarning"
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_tracing_keeps_one_run_of_the_loop_so_a_tolerance_is_refused():
    def solved(x):
        return dq.solve(lambda z: torch.cos(z + x), 0 * x, solver=dq.Naive(), stop=dq.Stop()).value

    with pytest.raises(TypeError, match=r"cannot be traced.*Stop\.exactly"):
        torch.jit.trace(solved, torch.ones(1, 1), check_trace=False)


def test_a_map_of_two_arguments_needs_args():
    z0 = torch.zeros(2, 3)
    add = lambda z, x: z / 2 + x  # noqa: E731
    with pytest.raises(TypeError, match=r"f must take z only, .*give the second one as args="):
        dq.fixed_point(add, z0)
    assert dq.fixed_point(add, z0, args=torch.ones(2, 3)).converged.all()
    with pytest.raises(TypeError, match="f must be a function of 1 argument"):
        dq.fixed_point(lambda: z0, z0)
