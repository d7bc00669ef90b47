"""Plain iteration."""

import torch

from deqseq import Naive, Status, Stop, solve
from deqseq.testing import SolverContract
from deqseq.testing.problems import Recorded, affine, limit_cycle


class TestNaive(SolverContract):
    solver = Naive()

    def test_visits_the_powers_of_the_map(self):
        f = Recorded(affine())
        solve(f, torch.ones(3, 4, dtype=torch.float64), solver=Naive(), stop=Stop.exactly(4))
        for before, after in zip(f.calls, f.calls[1:], strict=False):
            assert torch.equal(after.z, before.fz)

    def test_stays_in_a_limit_cycle(self):
        solution = solve(limit_cycle, torch.zeros(1, 2), solver=Naive(), stop=Stop(max_steps=29))
        assert solution.status.tolist() == [Status.MAX_STEPS_REACHED]
        assert solution.stats.residual.tolist() == [1.0]
