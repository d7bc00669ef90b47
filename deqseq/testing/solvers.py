"""What every solver must do, whatever its algorithm."""

from dataclasses import FrozenInstanceError, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar
from unittest import TestCase

import torch
from torch import Tensor
from torch.testing import assert_close

from deqseq.fixed_point import fixed_point
from deqseq.gradients import Unrolled
from deqseq.rows import take
from deqseq.solution import Solution, Status
from deqseq.solve import solve
from deqseq.solvers import Solver
from deqseq.stop import Stop
from deqseq.testing.problems import Recorded, affine, mapped, row_tanh, zeros

TIGHT = Stop(rtol=1e-13, max_steps=500)
GAINS = (0.0, 0.2, -0.5, 0.8, 0.5, -0.3, 0.7, 0.1)
"""One contraction per row: the rows of a solve end at different iterations."""


class SolverContract:
    """The suite for a solver: subclass it as ``TestName``, and set ``solver``.

    It checks that the solver finds fixed points that are known in closed form, in float64 and in
    half precision; that the value it returns passes the tolerance; that each row has the same
    result, bit for bit, whatever the others do, also if one becomes NaN, and when finished rows are
    removed from the solver's memory; that a restarted row is iterated as in a new solve; that
    nothing is modified in place; and that the iteration can be differentiated.

    Attributes:
        solver: the solver.

    Example:
        >>> from deqseq.testing import SolverContract
        >>> import deqseq as dq
        >>> class TestDamped(SolverContract):
        ...     solver = dq.Relaxed(0.9)
    """

    solver: ClassVar[Solver[Any]]

    def solve(self, f: Any, z0: Tensor, stop: Stop = TIGHT, **options: Any) -> Solution:
        """:func:`deqseq.solve` with the solver."""
        return solve(f, z0, solver=self.solver, stop=stop, **options)

    # Values

    def test_finds_the_fixed_point_in_float64(self) -> None:
        for event, batch in product(((), (5,), (3, 2), (2, 3, 2)), (1, 3)):
            gains = GAINS[1 : 1 + batch]
            for f in (affine(batch=batch, event=event), row_tanh(gains, event=event)):
                solution = self.solve(f, zeros(batch, *event))
                assert bool(solution.converged.all())
                assert solution.stats.iterations.shape == (batch,)
                assert solution.stats.residual.shape == (batch,)
                assert_close(solution.value, f.fixed_point(), rtol=0, atol=1e-10)

    def test_keeps_the_dtype(self) -> None:
        for dtype, rtol, error in (
            (torch.float32, 1e-6, 2e-5),
            (torch.bfloat16, 2e-2, 0.1),
            (torch.float16, 2e-3, 0.02),
        ):
            f = row_tanh([0.5, -0.5, 0.2], dtype=dtype)
            solution = self.solve(f, torch.zeros(3, 3, dtype=dtype), Stop(rtol, max_steps=200))
            assert solution.value.dtype == dtype
            assert solution.stats.residual.dtype == torch.float32
            assert bool(solution.converged.all())
            assert_close(solution.value, f.fixed_point(), rtol=error, atol=0)

    # Statistics

    def test_value_and_residual_are_those_of_the_last_evaluation(self) -> None:
        z0 = zeros(3, 4) + torch.tensor([[0.1], [0.3], [0.7]])
        alternating, chaotic = (lambda z: 1 - z), (lambda z: 3.9 * z * (1 - z))
        expanding = row_tanh([-3.0, -2.5, -3.5], event=(4,))
        maps = affine(radius=0.8), alternating, chaotic, expanding
        for plain, budget in product(maps, (1, 2, 11, 200)):
            f = Recorded(plain)
            solution = self.solve(f, z0, Stop(rtol=1e-9, max_steps=budget))
            assert f.evaluations == solution.stats.evaluations <= budget
            for row, iterations in enumerate(solution.stats.iterations.tolist()):
                z, fz = (tensor[row] for tensor in f.calls[iterations - 1])
                spent = solution.status[row] == Status.MAX_STEPS_REACHED
                value = fz if spent else z
                assert torch.equal(solution.value[row], value)
                residual = (fz - z).norm() / fz.norm().clamp_min(1e-300)
                assert_close(solution.stats.residual[row], residual, rtol=1e-12, atol=0)

    # Rows

    def test_rows_do_not_depend_on_the_rest_of_the_batch(self) -> None:
        """Row 0 becomes NaN, and stays in the batch: without ``args`` no row is removed."""
        problem, stop = row_tanh(GAINS), Stop(rtol=1e-11, max_steps=300)
        z0 = zeros(len(GAINS), 3)

        def f(z: Tensor) -> Tensor:
            fz = problem(z)
            fz[0] = torch.where(z[0] > 0.3, torch.nan, z[0] + 1)
            return fz

        batch = self.solve(f, z0, stop)
        assert batch.status[0] == Status.DIVERGED
        assert len(set(batch.stats.iterations.tolist())) > 2
        for row in torch.arange(1, len(GAINS)).split(1):
            assert_same_rows(batch, row, self.solve(take(problem, row), z0[row], stop))

    def test_removing_finished_rows_changes_nothing(self) -> None:
        rows = len(GAINS)
        problem, z0 = row_tanh(GAINS, event=(4, 3)), zeros(rows, 4, 3)
        for check_every in (1, 3):
            f, stop = Recorded(mapped), Stop(rtol=1e-11, max_steps=300, check_every=check_every)
            removing = self.solve(f, z0, stop, args=problem)
            assert_same_rows(self.solve(problem, z0, stop), slice(None), removing)
            iterations = removing.stats.iterations
            ended_early = int((iterations + check_every < iterations.max()).sum())
            if ended_early >= rows / 4:  # fewer rows are not removed
                assert f.rows[-1] < rows, "rows that had ended were not removed from the batch"
            assert f.rows == sorted(f.rows, reverse=True)

    def test_a_restarted_row_is_a_new_solve(self) -> None:
        """Row 1 goes on from elsewhere; the others are not affected."""
        f, z0, elsewhere = row_tanh(GAINS[1:5]), zeros(4, 3) + 0.1, zeros(1, 3) + 0.5
        row, others = torch.tensor([1]), [0, 2, 3]

        def points(problem: Any, z: Tensor, steps: int, restart_at: int | None = None) -> Tensor:
            state = self.solver.init(z)
            visited: list[Tensor] = []
            for step in range(steps):
                if step == restart_at:
                    z = z.index_copy(0, row, elsewhere)
                    state = self.solver.restart(state, z, row)
                z, state = self.solver.step(z, problem(z), state)
                visited.append(z)
            return torch.stack(visited)

        expected = points(take(f, row), elsewhere, 9)
        for restart_at in (1, 2, 7):
            restarted = points(f, z0, restart_at + 9, restart_at)
            undisturbed = points(f, z0, restart_at + 9)
            assert_close(restarted[restart_at:, row], expected, rtol=1e-9, atol=1e-12)
            assert_close(restarted[:, others], undisturbed[:, others], rtol=1e-9, atol=1e-12)

    def test_it_is_its_configuration(self) -> None:
        fields = vars(self.solver)
        with TestCase().assertRaises(FrozenInstanceError):
            setattr(self.solver, next(iter(fields), "steps"), 3)
        equal = type(self.solver)(**fields)
        assert {self.solver: 1}[equal] == 1

    # Gradients through the iteration

    def test_unrolled_steps_pass_gradcheck(self) -> None:
        inner = affine(radius=0.6, batch=2, event=(3,))
        z0 = zeros(2, 3) + 0.1
        inputs = [x.clone().requires_grad_() for x in (inner.weight, inner.bias, z0)]

        def unrolled(stop: Stop, weight: Tensor, bias: Tensor, z0: Tensor) -> Tensor:
            f = lambda z: torch.tanh(z @ weight.T + bias)  # noqa: E731
            return fixed_point(f, z0, solver=self.solver, stop=stop, gradient=Unrolled()).value

        for steps in (1, 5):
            value = partial(unrolled, Stop.exactly(steps))
            assert torch.autograd.gradcheck(value, inputs, fast_mode=True)

    def test_gradients_through_freezing_and_removing_are_those_of_each_row_alone(self) -> None:
        problem, stop = row_tanh(GAINS), Stop(rtol=1e-6, max_steps=300)
        z0 = zeros(len(GAINS), 3) + 0.1

        def gradient(rows: Tensor) -> Tensor:
            gain = problem.gain[rows].requires_grad_()
            args = replace(take(problem, rows), gain=gain)
            value = self.solve(mapped, z0[rows], stop, args=args).value
            return torch.autograd.grad(value.square().sum(), gain)[0]

        rows = torch.arange(len(GAINS))
        alone = torch.cat([gradient(row) for row in rows.split(1)])
        assert_close(gradient(rows), alone, rtol=1e-12, atol=0)

    def test_gradients_are_finite_where_a_residual_is_exactly_zero(self) -> None:
        """Row 0 starts at its fixed point and is frozen; row 1 goes on with the same parameter."""
        gain = (zeros() + 0.5).requires_grad_()
        offset = zeros(2, 2) + torch.tensor([[2.0, 0.0], [1.0, 3.0]])
        z0 = zeros(2, 2)
        z0[0, 0] = 4
        solution = self.solve(lambda z: gain * z + offset, z0, Stop(rtol=1e-9, max_steps=100))
        assert solution.stats.residual[0].item() == 0
        (gradient,) = torch.autograd.grad(solution.value[1].sum(), gain)
        assert bool(gradient.isfinite()), (
            "guard divisions by the residual before they are made, not after"
        )
        assert_close(gradient.item(), 4 / (1 - 0.5) ** 2, rtol=1e-6, atol=0)


def assert_same_rows(actual: Solution, rows: slice | Tensor, expected: Solution) -> None:
    """Bit for bit: these rows of one solution are those of another."""
    assert_close(actual.value[rows], expected.value, rtol=0, atol=0, equal_nan=True)
    assert actual.status[rows].tolist() == expected.status.tolist()
    ours, theirs = actual.stats, expected.stats
    assert ours.iterations[rows].tolist() == theirs.iterations.tolist()
    assert ours.residual[rows].tolist() == theirs.residual.tolist()
