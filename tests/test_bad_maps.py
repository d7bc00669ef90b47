"""Starts, maps, records and solvers that break their contract are refused."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import SOLVERS
from torch import Tensor

import deqseq as dq
from deqseq import Naive, Relaxed, Stop, solve


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (torch.zeros(()), ValueError),
        (torch.zeros(2, 3, dtype=torch.bool), TypeError),
        *((torch.tensor([[0.0], [bad]]), ValueError) for bad in (torch.nan, torch.inf)),
        (torch.zeros(2, 3).to_sparse(), TypeError),
        (torch.zeros(2, 3, dtype=torch.float8_e4m3fn), TypeError),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_a_start_that_cannot_be_computed_with(start, error):
    with pytest.raises(error, match=r"^z0 must (be|have)"):
        solve(lambda z: 1 - z, start, solver=Naive(), stop=Stop())


@pytest.mark.parametrize(
    ("f", "args"), [(lambda z, x: z, None), (lambda z: z, torch.zeros(2)), (lambda: 3, None)]
)
@pytest.mark.parametrize("call", [dq.fixed_point, partial(solve, solver=Naive(), stop=Stop())])
def test_a_map_of_other_arguments(call, f, args):
    with pytest.raises(
        TypeError, match=rf"f must be a function of {1 if args is None else 2} argument"
    ):
        call(f, torch.zeros(2, 3), args=args)


@pytest.mark.parametrize("f", [lambda z: z, lambda z: (z, z, z)])
def test_a_map_without_the_aux_that_was_asked_for(f):
    with pytest.raises(TypeError, match="has_aux=True"):
        solve(f, torch.zeros(2, 3), solver=Naive(), stop=Stop(), has_aux=True)


class Halves(torch.nn.Module):
    """A map that writes its result into its argument, as ``ReLU(inplace=True)`` does."""

    def forward(self, z):
        return z.mul_(0.5).add_(1)


@pytest.mark.parametrize("gradient", [dq.Phantom(2), dq.OneStep(), dq.Implicit(), dq.Unrolled()])
def test_a_map_that_changes_z_in_place_is_refused(gradient):
    z0 = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"f must not change z in place.*z\.clone\(\)"):
        dq.fixed_point(Halves(), z0, gradient=gradient)
    with pytest.raises(ValueError, match="f must not change z in place"):
        dq.solve(torch.nn.ReLU(inplace=True), z0, solver=dq.Naive(), stop=dq.Stop())


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_in_inference_mode_a_map_that_changes_z_in_place_has_its_own_copy(solver):
    """There torch does not count changes."""
    with torch.inference_mode():
        solution = dq.solve(Halves(), torch.zeros(2, 3), solver=solver, stop=dq.Stop(rtol=1e-6))
        assert bool(solution.converged.all())
        torch.testing.assert_close(solution.value, torch.full((2, 3), 2.0))


def test_objects_that_hide_tensors_are_refused():
    slope = torch.tensor([0.1, 0.9])
    hidden = (
        SimpleNamespace(slope=slope),
        UserDict(slope=slope),
        {1, 2},
        slope.numpy(),
        SimpleNamespace(slope=[slope]),
    )
    for args in (*hidden, [0.1, 0.9]):
        with pytest.raises(
            TypeError, match=rf"args must be tensors, in .* got a {type(args).__name__}"
        ):
            dq.solve(
                lambda z, a: z / 2, torch.ones(2, 1), args=args, solver=dq.Naive(), stop=dq.Stop()
            )
    for aux in (torch.zeros(7), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="aux must have one row per row of z0, 2"):
            dq.solve(
                lambda z, aux=aux: (z, aux),
                torch.ones(2, 1),
                has_aux=True,
                solver=dq.Naive(),
                stop=dq.Stop(),
            )
    with pytest.raises(ValueError, match=r"args must have .*z0.* got .* \(3, 1\)"):
        dq.solve(
            lambda z, x: x,
            torch.zeros(2, 1),
            args=torch.ones(3, 1),
            solver=dq.Naive(),
            stop=dq.Stop(),
        )


@dataclass(frozen=True)
class Step(dq.Solver):
    """A solver whose step is a function."""

    next: Callable[[Tensor, Tensor], Any]

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        return self.next(z, fz)


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (
            lambda z, fz: fz,
            TypeError,
            r"Step.step must return a pair \(next point, state\), got Tensor",
        ),
        (lambda z, fz: (z.lerp_(fz, 0.5), None), ValueError, "must not change z or fz in place"),
        (lambda z, fz: (fz.sub_(z), None), ValueError, "must not change z or fz in place"),
        (
            lambda z, fz: (fz, torch.zeros(())),
            ValueError,
            "the state of Step must have one row per row of z0, 2",
        ),
    ],
)
def test_a_solver_that_breaks_its_contract(step, error, words):
    z = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(error, match=words):
        solve(lambda z, x: z / 2 + x, z, args=z + 1, solver=Step(step), stop=Stop())


def test_a_map_may_fill_one_buffer_again():
    """Plain iteration would take the buffer for its next point; other values that are kept have
    been copied.
    """
    buffer, rate = torch.empty(4, 1), torch.tensor([[0.0], [0.5], [0.5], [0.9]])

    def f(z, rate):
        return torch.add(rate * z, 1, out=buffer[: len(z)])

    solution = solve(
        f, torch.zeros(4, 1), args=rate, solver=Relaxed(0.9), stop=Stop(1e-6, max_steps=300)
    )
    torch.testing.assert_close(solution.value, 1 / (1 - rate), rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="f must not change z in place"):
        solve(f, torch.zeros(4, 1), args=rate, solver=Naive(), stop=Stop())
