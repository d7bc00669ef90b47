"""Damped iteration."""

import pytest
import torch

from deqseq import Naive, Relaxed, Stop, solve
from deqseq.testing import SolverContract
from deqseq.testing.problems import Recorded, affine, limit_cycle


class TestRelaxed(SolverContract):
    solver = Relaxed(0.7)

    def test_damping_one_is_plain_iteration(self):
        f, z0, stop = affine(), torch.ones(3, 4, dtype=torch.float64), Stop(rtol=1e-10)
        damped = solve(f, z0, solver=Relaxed(1.0), stop=stop)
        plain = solve(f, z0, solver=Naive(), stop=stop)
        assert torch.equal(damped.value, plain.value)
        assert torch.equal(damped.stats.iterations, plain.stats.iterations)

    @pytest.mark.parametrize("damping", [0.25, 0.8, 1.5])
    def test_moves_the_given_part_of_the_way(self, damping):
        f = Recorded(affine())
        solve(f, torch.ones(3, 4, dtype=torch.float64), solver=Relaxed(damping), stop=Stop.exactly(2))
        first, second = f.calls
        expected = (1 - damping) * first.z + damping * first.fz
        torch.testing.assert_close(second.z, expected, rtol=0, atol=1e-15)

    @pytest.mark.parametrize("damping", [0.2, 0.5, 0.8, 0.95])
    def test_cures_a_limit_cycle(self, damping):
        z0 = torch.zeros(2, 3, dtype=torch.float64)
        solution = solve(limit_cycle, z0, solver=Relaxed(damping), stop=Stop(rtol=1e-10, max_steps=400))
        torch.testing.assert_close(solution.value, torch.full_like(z0, 0.5), rtol=0, atol=1e-9)
