"""Anderson acceleration."""

import pytest
import torch
from problems import expansive

from deqseq import Anderson, Stop, solve
from deqseq.testing import SolverContract
from deqseq.testing.problems import Affine, affine


class TestAnderson(SolverContract):
    solver = Anderson()

    @pytest.mark.parametrize("dim", [2, 4, 6])
    @pytest.mark.parametrize(
        "make", [lambda dim: affine(event=(dim,)), lambda dim: expansive(dim=dim)]
    )
    def test_solves_an_affine_problem_of_dim_d_in_about_d_evaluations(self, make, dim):
        """With memory for the whole space it is exact: d + 1 points, one that lands, one that
        checks.
        """
        f, stop = make(dim), Stop(rtol=1e-8, max_steps=50)
        z0 = torch.zeros(3, dim, dtype=torch.float64)
        solution = solve(f, z0, solver=Anderson(memory=dim + 2, ridge=1e-15), stop=stop)
        assert solution.converged.tolist() == [True] * 3
        assert max(solution.stats.iterations.tolist()) <= dim + 3
        torch.testing.assert_close(solution.value, f.fixed_point(), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
    def test_does_not_stall_whatever_the_scale(self, scale):
        """An absolute ridge stalls near its own square root; ours is relative to the residuals."""
        f = affine(radius=0.9, event=(4,))
        f = Affine(f.weight, f.bias * scale)
        z0 = torch.zeros(3, 4, dtype=torch.float64)
        solution = solve(f, z0, solver=Anderson(memory=6), stop=Stop(rtol=0.0, max_steps=20))
        assert max(solution.stats.residual.tolist()) <= 1e-11
        torch.testing.assert_close(solution.value, f.fixed_point(), rtol=0, atol=2e-10 * scale)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_default_ridge_is_ten_times_the_epsilon_of_the_state(self, dtype):
        f, z0, stop = (
            affine(radius=0.9, dtype=dtype),
            torch.zeros(3, 4, dtype=dtype),
            Stop.exactly(5),
        )
        named = Anderson(ridge=10 * torch.finfo(dtype).eps)
        default = solve(f, z0, solver=Anderson(), stop=stop).value
        assert torch.equal(default, solve(f, z0, solver=named, stop=stop).value)
        assert not torch.equal(default, solve(f, z0, solver=Anderson(ridge=1e-3), stop=stop).value)

    @pytest.mark.parametrize("memory", [2, 4, 7])
    def test_keeps_no_more_than_its_memory_and_the_products_of_the_residuals_in_it(self, memory):
        solver, f = Anderson(memory=memory), affine()
        z = torch.zeros(3, 4, dtype=torch.float64)
        state = solver.init(z)
        for step in range(1, 10):
            z, state = solver.step(z, f(z), state)
            assert len(state.values) == len(state.residuals) == min(step, memory - 1)
            stacked = torch.stack(state.residuals, dim=1)
            torch.testing.assert_close(state.gram, stacked @ stacked.mT, rtol=1e-13, atol=0)

    def test_mixing_moves_towards_the_points(self):
        f, z = affine(), torch.ones(3, 4, dtype=torch.float64)
        solver = Anderson(mixing=0.25)
        proposal, _ = solver.step(z, f(z), solver.init(z))
        torch.testing.assert_close(proposal, 0.75 * z + 0.25 * f(z), rtol=0, atol=1e-15)

    def test_a_row_without_information_takes_its_newest_value(self):
        """Equal residuals and a ridge that is lost: the normal equations are singular, and the row
        falls back alone.
        """
        solver = Anderson(ridge=1e-300)
        z = torch.zeros(2, 2, dtype=torch.float64)
        fz = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        _, state = solver.step(z, fz, solver.init(z))
        newer = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        proposal, _ = solver.step(z, newer, state)
        torch.testing.assert_close(
            proposal, torch.tensor([[3.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
        )
