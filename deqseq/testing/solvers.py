"""What every solver must do, whatever its algorithm."""

from dataclasses import FrozenInstanceError, replace
from itertools import product
from typing import Any, ClassVar
from unittest import TestCase

import torch
from torch import Tensor

from deqseq.fixed_point import fixed_point
from deqseq.gradients import Unrolled
from deqseq.rows import take
from deqseq.solution import Solution, Status
from deqseq.solve import solve
from deqseq.solvers import Solver
from deqseq.stop import Stop
from deqseq.testing.problems import Recorded, affine, mapped, row_tanh

TIGHT = Stop(rtol=1e-13, max_steps=500)
GAINS = (0.0, 0.2, -0.5, 0.8, 0.5, -0.3, 0.7, 0.1)


def assert_same_rows(got: Solution, rows: slice | Tensor, expected: Solution) -> None:
    """Bit for bit: the rows of one solution are those of another."""
    torch.testing.assert_close(got.value[rows], expected.value, rtol=0, atol=0, equal_nan=True)
    assert got.status[rows].tolist() == expected.status.tolist()
    assert got.stats.iterations[rows].tolist() == expected.stats.iterations.tolist()
    assert got.stats.residual[rows].tolist() == expected.stats.residual.tolist()


class SolverContract:
    """The suite for a solver: subclass it as ``TestName``, and set ``solver``.

    It checks that the solver finds fixed points that are known in closed form, in float64 and in
    half precision; that the value it returns passes the tolerance; that rows are independent of
    each other, bit for bit, also of one that becomes NaN, and when finished rows are removed from
    its state; that nothing is modified in place; and that the iteration can be differentiated.

    Attributes:
        solver: the solver.

    Example:
        >>> import deqseq as dq
        >>> class TestDamped(SolverContract):
        ...     solver = dq.Relaxed(0.9)
    """

    solver: ClassVar[Solver[Any]]

    def solve(self, f: Any, z0: Tensor, stop: Stop = TIGHT, **options: Any) -> Solution:
        """:func:`deqseq.solve` with the solver."""
        return solve(f, z0, solver=self.solver, stop=stop, **options)

    # what it finds

    def test_finds_the_fixed_point_in_float64(self) -> None:
        for event, batch in product(((), (5,), (3, 2), (2, 3, 2)), (1, 3)):
            for f in (
                affine(batch=batch, event=event),
                row_tanh(GAINS[1 : 1 + batch], event=event),
            ):
                solution = self.solve(f, torch.zeros(batch, *event, dtype=torch.float64))
                assert solution.status.tolist() == [Status.CONVERGED] * batch
                assert solution.stats.iterations.shape == solution.stats.residual.shape == (batch,)
                torch.testing.assert_close(solution.value, f.fixed_point(), rtol=0, atol=1e-10)

    def test_keeps_the_dtype(self) -> None:
        halves = ((torch.bfloat16, 2e-2, 0.1), (torch.float16, 2e-3, 0.02))
        for dtype, rtol, close in ((torch.float32, 1e-6, 2e-5), *halves):
            f = row_tanh([0.5, -0.5, 0.2], dtype=dtype)
            solution = self.solve(f, torch.zeros(3, 3, dtype=dtype), Stop(rtol=rtol, max_steps=200))
            assert solution.value.dtype == dtype
            assert solution.stats.residual.dtype == torch.float32
            assert bool(solution.converged.all())
            torch.testing.assert_close(solution.value, f.fixed_point(), rtol=close, atol=0)

    def test_what_is_returned_passes(self) -> None:
        """The residual of the value itself; a solver that returns its points promises it where the
        map expands too.
        """
        maps = (
            row_tanh(GAINS[1:4]),
            *([row_tanh([-3.0, -2.5, -3.5])] if self.solver.returns_point else []),
        )
        for f, rtol in product(maps, (1e-2, 1e-4, 1e-8)):
            solution = self.solve(
                f, torch.zeros(3, 3, dtype=torch.float64), Stop(rtol, max_steps=500)
            )
            assert bool(solution.converged.all())
            fz = f(solution.value)
            assert bool(((fz - solution.value).norm(dim=1) <= rtol * fz.norm(dim=1)).all())

    # what it reports

    def test_value_and_residual_are_those_of_the_last_evaluation(self) -> None:
        z0 = torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64)[:, None].expand(3, 4).contiguous()
        alternating, chaotic = (lambda z: 1 - z), (lambda z: 3.9 * z * (1 - z))
        for plain, budget in product((affine(radius=0.8), alternating, chaotic), (1, 2, 11, 200)):
            f = Recorded(plain)
            solution = self.solve(f, z0, Stop(rtol=1e-9, max_steps=budget))
            assert f.evaluations == solution.stats.evaluations <= budget
            for row, last in enumerate(solution.stats.iterations.tolist()):
                z, fz = (x[row] for x in f.calls[last - 1])
                status = solution.status[row]
                at_point = status == Status.DIVERGED or (
                    status == Status.CONVERGED and self.solver.returns_point
                )
                assert torch.equal(solution.value[row], z if at_point else fz)
                residual = (fz - z).norm() / fz.norm().clamp_min(1e-300)
                torch.testing.assert_close(
                    solution.stats.residual[row], residual, rtol=1e-12, atol=0
                )

    # rows

    def test_rows_do_not_depend_on_the_rest_of_the_batch(self) -> None:
        f, stop = row_tanh(GAINS), Stop(rtol=1e-11, max_steps=300)
        z0 = torch.zeros(len(GAINS), 3, dtype=torch.float64)
        together = self.solve(f, z0, stop)
        assert len(set(together.stats.iterations.tolist())) > 2
        for row in range(len(GAINS)):
            one = torch.tensor([row])
            assert_same_rows(together, one, self.solve(take(f, one), z0[one], stop))

    def test_a_row_that_is_not_finite_leaves_the_others_alone(self) -> None:
        """Row 2 becomes NaN, and stays in the batch: without ``args`` no row is removed."""
        problem, z0, bad = (
            row_tanh(GAINS[1:5]),
            torch.zeros(4, 3, dtype=torch.float64),
            torch.arange(4)[:, None] == 2,
        )

        def f(z: Tensor) -> Tensor:
            return torch.where(bad, torch.where(z > 0.3, torch.nan, z + 1), problem(z))

        together = self.solve(f, z0)
        assert together.status[2] == Status.DIVERGED
        for row in (0, 1, 3):
            one = torch.tensor([row])
            assert_same_rows(together, one, self.solve(take(problem, one), z0[one]))

    def test_removing_finished_rows_changes_nothing(self) -> None:
        problem, z0 = (
            row_tanh(GAINS, event=(4, 3)),
            torch.zeros(len(GAINS), 4, 3, dtype=torch.float64),
        )
        for check_every in (1, 3):
            f, stop = Recorded(mapped), Stop(rtol=1e-11, max_steps=300, check_every=check_every)
            removing = self.solve(f, z0, stop, args=problem)
            assert_same_rows(self.solve(problem, z0, stop), slice(None), removing)
            ends = removing.stats.iterations
            if 4 * int((ends + check_every < ends.max()).sum()) >= len(
                GAINS
            ):  # fewer are not removed
                assert f.rows[-1] < len(GAINS), (
                    "rows that had ended were not removed from the batch"
                )
            assert f.rows == sorted(f.rows, reverse=True)

    def test_a_row_that_begins_afresh_is_a_new_solve(self) -> None:
        """Row 1 goes on from elsewhere; the others are not affected."""
        f, z0 = row_tanh(GAINS[1:5]), torch.full((4, 3), 0.1, dtype=torch.float64)
        row, elsewhere = torch.tensor([1]), 5 * z0[:1]

        def points(
            problem: Any, z: Tensor, steps: int, restart_before: int | None = None
        ) -> Tensor:
            state, found = self.solver.init(z), list[Tensor]()
            for step in range(steps):
                if step == restart_before:
                    z = z.index_copy(0, row, elsewhere)
                    state = self.solver.restart(state, z, row)
                z, state = self.solver.step(z, problem(z), state)
                found.append(z)
            return torch.stack(found)

        new, others = points(take(f, row), elsewhere, 9), [0, 2, 3]
        for before in (1, 2, 7):
            together, undisturbed = (
                points(f, z0, before + 9, restart) for restart in (before, None)
            )
            torch.testing.assert_close(together[before:, row], new, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(
                together[:, others], undisturbed[:, others], rtol=1e-9, atol=1e-12
            )

    def test_it_is_its_configuration(self) -> None:
        name = next(iter(vars(self.solver)), "steps")
        with TestCase().assertRaises(FrozenInstanceError):
            setattr(self.solver, name, 3)
        assert {self.solver: 1}[type(self.solver)(**vars(self.solver))] == 1

    # gradients through the iteration

    def test_unrolled_steps_pass_gradcheck(self) -> None:
        inner = affine(radius=0.6, batch=2, event=(3,))
        z0 = torch.full((2, 3), 0.1, dtype=torch.float64)
        inputs = [x.clone().requires_grad_() for x in (inner.weight, inner.bias, z0)]
        for steps in (1, 5):

            def unrolled(weight: Tensor, bias: Tensor, z0: Tensor, steps: int = steps) -> Tensor:
                def f(z: Tensor) -> Tensor:
                    return torch.tanh(z @ weight.T + bias)

                return fixed_point(
                    f, z0, solver=self.solver, stop=Stop.exactly(steps), gradient=Unrolled()
                ).value

            assert torch.autograd.gradcheck(unrolled, inputs, fast_mode=True)

    def test_gradients_through_freezing_and_removing_are_those_of_each_row_alone(self) -> None:
        gains, event = torch.tensor(GAINS, dtype=torch.float64), (3,)
        z0, stop = (
            torch.full((len(GAINS), *event), 0.1, dtype=torch.float64),
            Stop(rtol=1e-6, max_steps=300),
        )

        def gradient(rows: Tensor) -> Tensor:
            gain = gains[rows].clone().requires_grad_()
            problem = replace(take(row_tanh(GAINS), rows), gain=gain)
            value = self.solve(mapped, z0[rows], stop, args=problem).value
            return torch.autograd.grad(value.square().sum(), gain)[0]

        alone = torch.cat([gradient(torch.tensor([row])) for row in range(len(GAINS))])
        torch.testing.assert_close(gradient(torch.arange(len(GAINS))), alone, rtol=1e-12, atol=0)

    def test_gradients_are_finite_where_a_residual_is_exactly_zero(self) -> None:
        """Row 0 starts at its fixed point and is frozen while row 1 goes on; both share the
        parameter.
        """
        gain = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        offset = torch.tensor([[2.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
        z0 = torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
        solution = self.solve(lambda z: gain * z + offset, z0, Stop(rtol=1e-9, max_steps=100))
        assert solution.stats.residual[0].item() == 0
        (gradient,) = torch.autograd.grad(solution.value[1].sum(), gain)
        assert bool(gradient.isfinite()), (
            "guard divisions by the residual before they are made, not after"
        )
        torch.testing.assert_close(gradient.item(), 4 / (1 - 0.5) ** 2, rtol=1e-6, atol=0)
