"""Solvers of other libraries: one evaluation of ours at their result."""

from dataclasses import dataclass

import pytest
import torch
from small_models import affine, embedded

import deqseq as dq
from deqseq import Status, Stop
from deqseq.testing.problems import Recorded


@dataclass(frozen=True)
class Outside(dq.ExternalSolver):
    """Plain iteration, of as many evaluations as the budget allows or fewer."""

    evaluations: int = 100

    def run(self, f, z0, stop):
        for _ in range(min(self.evaluations, stop.max_steps - 1)):
            z0 = f(z0)
        return z0


@pytest.mark.parametrize(("evaluations", "budget"), [(0, 9), (7, 9), (100, 9), (100, 40)])
@pytest.mark.parametrize("check_every", [1, 4])
def test_one_evaluation_of_ours_gives_value_residual_status_and_aux(
    evaluations, budget, check_every
):
    """Row 0 converges slowly, row 1 swings, and row 2 grows."""
    rate = torch.tensor([[0.5], [-1.0], [3.0]], dtype=torch.float64)
    f = Recorded(lambda z, rate: (rate * z + 1, 10 * z))
    stop = Stop(rtol=1e-3, max_steps=budget, check_every=check_every)
    z0 = torch.full_like(rate, 0.25)
    solution = dq.solve(f, z0, solver=Outside(evaluations), stop=stop, args=rate, has_aux=True)
    made = min(evaluations, budget - 1) + 1
    assert f.evaluations == solution.stats.evaluations == made
    assert solution.stats.updates.tolist() == [made] * 3
    first = Status.CONVERGED if made == 40 else Status.MAX_STEPS_REACHED
    assert solution.status.tolist() == [first, *[Status.MAX_STEPS_REACHED] * 2]
    z, fz = f.calls[-1]
    expected = torch.where(solution.converged[:, None], z, fz)
    assert torch.equal(solution.value, expected)
    assert torch.equal(solution.aux, 10 * z)
    assert torch.equal(solution.stats.residual, ((fz - z) / fz).abs()[:, 0])


def test_a_start_that_is_changed_in_place_is_refused():
    class Bad(dq.ExternalSolver):
        def run(self, f, z0, stop):
            return z0.add_(1)

    with pytest.raises(ValueError, match=r"Bad\.run must not change z0 in place"):
        dq.solve(torch.cos, torch.zeros(2, 3), solver=Bad(), stop=Stop())


@pytest.mark.parametrize(
    ("sweep", "blocks"), [(dq.Simultaneous(), 1), (dq.Chunked(3), 3), (dq.Sequential(), 7)], ids=str
)
def test_solves_blocks_of_tokens_one_after_another(sweep, blocks):
    """Each within the 64 evaluations of its budget."""
    model = dq.ImplicitModel(dq.Affine(4)).double()
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    calls = []
    model.backbone.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        output = model(x, solver=Outside(), sweep=sweep, stop=Stop(rtol=1e-9))
    assert output.converged.all()
    torch.testing.assert_close(output.value, model.backbone.solution(x), rtol=0, atol=1e-7)
    assert output.stats.evaluations == len(calls) == 64 * blocks


def test_a_window_is_refused():
    model = dq.ImplicitModel(dq.Affine(4))
    with pytest.raises(ValueError, match=r"Outside.*window of 3 blocks: take Simultaneous\(\)"):
        model(torch.ones(1, 7, 4), solver=Outside(), sweep=dq.Sliding(3))


def test_every_block_of_a_longer_row_is_solved():
    """A row that has ended stays in the batch, because its cache is returned."""
    stop = dq.Stop(rtol=1e-6, max_steps=60)
    config = dq.SolveConfig(Outside(), stop, sweep=dq.Chunked(2))
    model, x = dq.ImplicitModel(affine(), config).eval(), embedded(2, 6)
    mask = torch.arange(6) < torch.tensor([[2], [6]])
    with torch.no_grad():
        output = model(x, mask=mask, return_cache=True)
    assert output.converged.all()
    assert torch.allclose(output.value[1], model.backbone.solution(x)[1], atol=1e-5)


class InPlace(dq.ExternalSolver):
    """Plain iteration in one tensor."""

    def run(self, f, z0, stop):
        z = z0.clone()
        for _ in range(stop.max_steps - 1):
            z.copy_(f(z))
        return z


@pytest.mark.parametrize("solver", [Outside(100), InPlace()], ids=["new points", "one point"])
def test_drift_in_a_loop_of_another_library_has_not_converged(solver):
    """The last evaluation there and the one here are told apart."""
    stop = Stop(rtol=0.1, max_steps=50)
    with pytest.warns(dq.ConvergenceWarning):
        drifting = dq.solve(lambda z: z + 1, torch.zeros(1, 1), solver=solver, stop=stop)
    assert drifting.stats.residual.item() < 0.1
    assert not drifting.converged.any()
    settled = dq.solve(lambda z: z / 2 + 1, torch.zeros(1, 1), solver=solver, stop=stop)
    assert settled.converged.all()


@pytest.mark.usefixtures("unchecked")
def test_a_point_unlike_the_start_is_refused_before_the_map_sees_it():
    class Flat(dq.ExternalSolver):
        def run(self, f, z0, stop):
            return f(z0.flatten()).reshape(z0.shape)

    with pytest.raises(ValueError, match=r"the argument of f in Flat\.run must keep the shape"):
        dq.solve(torch.cos, torch.zeros(2, 3), solver=Flat(), stop=Stop())
