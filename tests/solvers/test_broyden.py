"""Broyden's method."""

import pytest
import torch
from problems import diverging, expansive, row_affine

from deqseq import Broyden, Naive, Relaxed, Status, Stop, solve
from deqseq.testing import SolverContract
from deqseq.testing.problems import affine


class TestBroyden(SolverContract):
    solver = Broyden()

    @pytest.mark.parametrize("dim", [1, 4, 6])
    def test_finds_a_fixed_point_that_repels(self, dim):
        f, z0 = expansive(dim=dim), torch.zeros(3, dim, dtype=torch.float64)
        stop = Stop(rtol=1e-11, max_steps=100)
        assert not bool(solve(f, z0, solver=Naive(), stop=stop).converged.any())
        assert not bool(solve(f, z0, solver=Relaxed(0.5), stop=stop).converged.any())
        solution = solve(f, z0, solver=Broyden(), stop=stop)
        torch.testing.assert_close(solution.value, f.fixed_point(), rtol=0, atol=1e-10)
        assert (
            max(solution.stats.iterations.tolist()) <= 2 * dim + 2
        )  # Gay 1979: 2 d steps on an affine problem

    def test_a_scalar_affine_map_takes_three_evaluations(self):
        solution = solve(diverging, torch.zeros(2, 1), solver=Broyden(), stop=Stop(rtol=1e-6))
        assert solution.stats.iterations.tolist() == [3, 3]
        assert solution.value.tolist() == [[-1.0], [-1.0]]

    @pytest.mark.parametrize("memory", [1, 3, 16])
    def test_a_row_that_begins_afresh_within_a_graph(self, memory):
        """Its memory wraps round: where a graph is made, it is copied instead of written."""
        solver, f, row = Broyden(memory=memory), affine(), torch.tensor([1])
        found = []
        for graph in (False, True):
            z = torch.zeros(3, 4, dtype=torch.float64, requires_grad=graph)
            state = solver.init(z)
            for step in range(12):
                if step == 2:
                    state = solver.restart(state, z, row)
                z, state = solver.step(z, f(z), state)
            assert z.requires_grad == graph
            found.append(z.detach())
        torch.testing.assert_close(*found)

    @pytest.mark.parametrize("memory", [1, 3])
    def test_starts_afresh_when_its_memory_is_full(self, memory):
        solver, f = Broyden(memory=memory), affine()
        z = torch.zeros(3, 4, dtype=torch.float64)
        state, kept = solver.init(z), []
        for _ in range(8):
            z, state = solver.step(z, f(z), state)
            kept.append(state.pairs)
        assert kept == [0] + [1 + step % memory for step in range(7)]

    def test_satisfies_the_secant_equation(self):
        """After the update H y = s for the newest pair, which is what makes it Broyden's method."""
        solver, f = Broyden(), affine(batch=1)
        z = torch.zeros(1, 4, dtype=torch.float64)
        state = solver.init(z)
        points, residuals = [], []
        for _ in range(4):
            points.append(z)
            residuals.append(f(z) - z)
            z, state = solver.step(z, f(z), state)
        H = -torch.eye(4, dtype=torch.float64)
        for pair in range(state.pairs):
            H = H + state.scale[:, pair] * state.left[:, pair].T @ state.right[:, pair]
        change, moved = residuals[-1] - residuals[-2], points[-1] - points[-2]
        torch.testing.assert_close(change @ H.T, moved, rtol=1e-10, atol=1e-12)

    def test_half_precision_uses_its_memory_at_any_scale(self):
        """Squares of a few hundred overflow float16: inner products must be accumulated
        in float32.
        """
        f, z0 = row_affine([-0.95], dtype=torch.float16), torch.zeros(1, 3, dtype=torch.float16)
        f = type(f)(f.gain, f.offset * 300, f.ceiling)
        solution = solve(f, z0, solver=Broyden(), stop=Stop(rtol=5e-3, max_steps=10))
        assert solution.status.tolist() == [Status.CONVERGED]
