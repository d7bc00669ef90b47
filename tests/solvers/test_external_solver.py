"""Solvers of other libraries: one evaluation of ours at their result."""

from dataclasses import dataclass

import pytest
import torch

from deqseq import Affine as Backbone
from deqseq import (
    Chunked,
    ExternalSolver,
    ImplicitModel,
    Sequential,
    Simultaneous,
    Sliding,
    Status,
    Stop,
    solve,
)
from deqseq.testing.problems import Recorded


@dataclass(frozen=True)
class Outside(ExternalSolver):
    """Plain iteration, of as many evaluations as the budget allows or fewer."""

    evaluations: int = 100

    def run(self, f, z0, stop):
        for _ in range(min(self.evaluations, stop.max_steps - 1)):
            z0 = f(z0)
        return z0


class TestExternalSolver:
    @pytest.mark.parametrize(
        ("evaluations", "budget"), [(0, 9), (1, 9), (7, 9), (100, 9), (100, 40)]
    )
    @pytest.mark.parametrize("check_every", [1, 4])
    def test_one_evaluation_of_ours_gives_value_residual_status_and_aux(
        self, evaluations, budget, check_every
    ):
        """Row 0 converges slowly, row 1 swings, and row 2 grows."""
        rate = torch.tensor([[0.5], [-1.0], [3.0]], dtype=torch.float64)
        f = Recorded(lambda z, rate: (rate * z + 1, 10 * z))
        stop = Stop(rtol=1e-3, max_steps=budget, check_every=check_every)
        z0, call = (
            torch.full((3, 1), 0.25, dtype=torch.float64),
            {"args": rate, "has_aux": True, "stop": stop},
        )
        solution = solve(f, z0, solver=Outside(evaluations), **call)
        made = min(evaluations, budget - 1) + 1
        assert f.evaluations == solution.stats.evaluations == made
        assert solution.stats.updates.tolist() == [made] * 3
        z, fz = f.calls[-1]
        passed = bool((fz - z)[0].abs() <= 1e-3 * fz[0].abs())
        assert passed == (made == 40)
        assert solution.status.tolist() == [
            1 - passed,
            Status.MAX_STEPS_REACHED,
            Status.MAX_STEPS_REACHED,
        ]
        assert torch.equal(solution.value, fz)
        assert torch.equal(solution.aux, 10 * z)
        assert torch.equal(solution.stats.residual, ((fz - z) / fz).abs()[:, 0])

    def test_a_start_that_is_changed_in_place_is_refused(self):
        class Bad(ExternalSolver):
            def run(self, f, z0, stop):
                return z0.add_(1)

        with pytest.raises(ValueError, match=r"Bad\.run must not change z0 in place"):
            solve(torch.cos, torch.zeros(2, 3), solver=Bad(), stop=Stop())

    @pytest.mark.parametrize("sweep", [Simultaneous(), Chunked(3), Sequential()], ids=str)
    def test_solves_blocks_of_tokens_one_after_another(self, sweep):
        model, x = ImplicitModel(Backbone(4)).double(), torch.randn(2, 7, 4, dtype=torch.float64)
        evaluations = []
        model.backbone.register_forward_hook(lambda *_: evaluations.append(1))
        with torch.no_grad():
            output = model(x, solver=Outside(), sweep=sweep, stop=Stop(rtol=1e-9))
        assert bool(output.converged.all())
        torch.testing.assert_close(output.value, model.backbone.solution(x), rtol=0, atol=1e-7)
        assert output.stats.evaluations == len(evaluations) == 64 * -(-7 // (sweep.block or 7))

    def test_a_window_is_refused(self):
        with pytest.raises(ValueError, match=r"Outside.*window of 3 blocks: take Simultaneous\(\)"):
            ImplicitModel(Backbone(4))(torch.ones(1, 7, 4), solver=Outside(), sweep=Sliding(3))
