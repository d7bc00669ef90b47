"""Broyden's method."""

from dataclasses import replace

import pytest
import torch
from problems import expansive, row_affine

from deqseq import Broyden, Naive, Relaxed, Stop, solve
from deqseq.testing import SolverContract
from deqseq.testing.problems import affine


class TestBroyden(SolverContract):
    solver = Broyden()

    @pytest.mark.parametrize("dim", [1, 4, 6])
    def test_finds_a_fixed_point_that_repels(self, dim):
        """In 2 d steps on an affine problem (Gay 1979)."""
        f = expansive(dim)
        z0 = torch.zeros(3, dim, dtype=torch.float64)
        stop = Stop(rtol=1e-11, max_steps=100)
        for solver in (Naive(), Relaxed(0.5)):
            assert not solve(f, z0, solver=solver, stop=stop).converged.any()
        solution = solve(f, z0, solver=Broyden(), stop=stop)
        torch.testing.assert_close(solution.value, f.fixed_point(), rtol=0, atol=1e-10)
        assert solution.stats.iterations.max() <= 2 * dim + 2

    def test_a_scalar_affine_map_takes_three_evaluations_and_one_that_confirms(self):
        z0 = torch.zeros(2, 1)
        solution = solve(lambda z: 2 * z + 1, z0, solver=Broyden(), stop=Stop(rtol=1e-6))
        assert solution.stats.iterations.tolist() == [4, 4]
        assert solution.value.tolist() == [[-1.0], [-1.0]]

    @pytest.mark.parametrize("memory", [1, 3, 16])
    def test_a_row_that_begins_afresh_within_a_graph(self, memory):
        """Its memory wraps round: where a graph is made, it is copied instead of written."""
        solver = Broyden(memory=memory)
        f = affine()
        row = torch.tensor([1])
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
        solver = Broyden(memory=memory)
        f = affine()
        z = torch.zeros(3, 4, dtype=torch.float64)
        state = solver.init(z)
        kept = []
        for _ in range(8):
            z, state = solver.step(z, f(z), state)
            kept.append(state.pairs)
        assert kept == [0] + [1 + step % memory for step in range(7)]

    def test_satisfies_the_secant_equation(self):
        """After the update H y = s for the newest pair, which is what makes it Broyden's method."""
        solver = Broyden()
        f = affine(batch=1)
        z = torch.zeros(1, 4, dtype=torch.float64)
        state = solver.init(z)
        points = []
        residuals = []
        for _ in range(4):
            points.append(z)
            residuals.append(f(z) - z)
            z, state = solver.step(z, f(z), state)
        H = -torch.eye(4, dtype=torch.float64)
        for pair in range(state.pairs):
            H = H + state.scale[:, pair] * state.left[:, pair].T @ state.right[:, pair]
        change = residuals[-1] - residuals[-2]
        moved = points[-1] - points[-2]
        torch.testing.assert_close(change @ H.T, moved, rtol=1e-10, atol=1e-12)

    def test_half_precision_uses_its_memory_at_any_scale(self):
        """Inner products are accumulated in float32: squares of a few hundred overflow float16."""
        f = row_affine([-0.95], dtype=torch.float16)
        f = replace(f, offset=300 * f.offset)
        z0 = torch.zeros(1, 3, dtype=torch.float16)
        solution = solve(f, z0, solver=Broyden(), stop=Stop(rtol=5e-3, max_steps=10))
        assert solution.converged.all()
