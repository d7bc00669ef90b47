"""Damping found on the way."""

import math
from dataclasses import replace

import pytest
import torch
from problems import Tanh, row_affine, tanh_contraction

from deqseq import Adaptive, Naive, Relaxed, Simultaneous, Sliding, Stop, load_example, solve
from deqseq.tasks import WordProblem, generators, parse_group
from deqseq.testing import SolverContract
from deqseq.testing.problems import Affine, affine, symmetric


def limits_after(residuals, limit=1.0):
    """The limits of rows after each of these residuals, from the given limit on."""
    limits = []
    for residual in residuals:
        if not limits:
            state = Adaptive().init(residual)
            state = state._replace(limit=limit * torch.ones_like(state.limit))
        one = torch.ones_like(residual)
        _, state = Adaptive().step(one - residual, one, state)
        limits.append(state.limit)
    return limits


class TestAdaptive(SolverContract):
    solver = Adaptive()

    @pytest.mark.parametrize(
        "gains", [(-0.5, -1.0), (-3.0, 0.0), (-0.9, -20.0), (0.5, 0.6), (-2.0, 0.66)]
    )
    @pytest.mark.parametrize("each", ["row", "token"])
    def test_one_step_finds_the_damping_of_a_map_that_turns_back_or_creeps(self, gains, each):
        """With f(z) = a + g z the right damping is 1 / (1 - g): two evaluations to see it, one that
        lands.
        """
        gain = torch.tensor(gains, dtype=torch.float64)
        gain = gain[:, None, None] if each == "row" else gain[None, :, None]
        offset = 1 + torch.rand(2, 2, 3, dtype=torch.float64)
        z0 = torch.zeros_like(offset)
        solution = solve(lambda z: gain * z + offset, z0, solver=Adaptive(), stop=Stop(rtol=1e-12))
        assert solution.converged.all()
        assert solution.stats.evaluations == 3
        torch.testing.assert_close(solution.value, offset / (1 - gain), rtol=1e-12, atol=0)

    def test_takes_less_than_half_of_plain_iteration_where_residuals_keep_their_direction(self):
        f = Affine(symmetric(torch.linspace(0.1, 0.95, 4)), affine().bias)
        z0 = torch.ones(3, 4, dtype=torch.float64)
        stop = Stop(rtol=1e-10, max_steps=900)
        adaptive, plain = (solve(f, z0, solver=s, stop=stop) for s in (Adaptive(), Naive()))
        assert (2 * adaptive.stats.iterations < plain.stats.iterations).all()
        torch.testing.assert_close(adaptive.value, f.fixed_point(), rtol=1e-8, atol=0)

    @pytest.mark.parametrize("make", [affine, tanh_contraction])
    @pytest.mark.parametrize("dim", [4, 64])
    def test_costs_no_more_than_plain_iteration_on_contractions(self, make, dim):
        f = make(event=(dim,))
        z0 = torch.zeros(3, dim, dtype=torch.float64)
        stop = Stop(rtol=1e-8, max_steps=900)
        plain = solve(f, z0, solver=Naive(), stop=stop)
        adaptive = solve(f, z0, solver=Adaptive(), stop=stop)
        assert (adaptive.stats.iterations <= plain.stats.iterations + 1).all()

    def test_the_limit_stays_where_residuals_grow_along_themselves(self):
        """No damping helps there: the map expands along a direction that it keeps, or an earlier
        token still moves.
        """
        growing = (torch.full((1, 2, 1), 1.0 + step) for step in range(20))
        assert limits_after(growing)[-1] == 1

    @pytest.mark.parametrize(
        ("scale", "degrees", "budget"),
        [(1.5, 90, 250), (3.0, 90, 700), (1.5, 110, 250), (3.0, 110, 250)],
    )
    def test_settles_where_the_map_rotates_and_expands(self, scale, degrees, budget):
        """No residual points back at the last: the limit of the row has to fall."""
        angle = math.radians(degrees)
        cos = math.cos(angle)
        sin = math.sin(angle)
        turn = torch.tensor([[cos, -sin], [sin, cos]]).double()
        f = Tanh(Affine(scale * turn, 0.3 * torch.randn(64, 2, dtype=torch.float64)))
        z0 = torch.randn(64, 2, dtype=torch.float64)
        stop = Stop(rtol=1e-6, max_steps=100)
        assert not solve(f, z0, solver=Relaxed(0.8), stop=stop).converged.any()
        solution = solve(f, z0, solver=Adaptive(), stop=replace(stop, max_steps=budget))
        assert solution.converged.all()
        torch.testing.assert_close(solution.value, f.fixed_point(), rtol=0, atol=1e-5)

    def test_the_limit_of_a_row_falls_to_the_damping_of_the_shortest_residual_and_recovers(self):
        """Maps that turn by 90 degrees times a gain: 1 / (1 + gain^2) is the best damping, and no
        residual points back.

        Row 0 grows; row 1 grows and would need less than the least limit; row 2 shrinks.
        """
        gain = torch.tensor([[1.5], [10.0], [0.5]], dtype=torch.float64)
        offset = torch.tensor([[0.0], [0.0], [1.0]], dtype=torch.float64)
        z = torch.ones(3, 2, dtype=torch.float64)
        state = Adaptive().init(z)
        limits = []
        for _ in range(8):
            turned = torch.stack((-z[:, 1], z[:, 0]), dim=1)
            z, state = Adaptive().step(z, gain * turned + offset, state)
            limits.append(state.limit[:, 0])
        fallen = 1 / (1 + 1.5**2)
        expected = torch.tensor([[3.0, 3.0, 3.0]] * 5 + [[fallen, 0.05, 3.0]] * 3).double()
        torch.testing.assert_close(torch.stack(limits), expected, rtol=1e-5, atol=0)

    def test_the_limit_of_a_row_is_reconsidered_at_every_fifth_iteration(self):
        """It grows where the residual is lower than five iterations before, whatever it was between
        them; 0.499 is less than 1 % below 0.5.
        """
        sizes = [1.0, *[9.0] * 4, 0.5, *[0.1] * 4, 0.499, *[0.1] * 4, 0.4]
        limits = limits_after((torch.full((1, 1, 1), size) for size in sizes), limit=0.5)
        limits = [limit.item() for limit in limits]
        first = 1.15 * 0.5
        second = 1.15**2 * 0.5
        third = limits[10]
        expected = [first] * 5 + [second] * 5 + [third] * 5 + [1.15 * third]
        assert limits == pytest.approx(expected)
        assert third <= limits[9]

    def test_a_residual_below_the_precision_is_not_progress(self):
        """Of two tokens one has settled: whether its residual is the last bit or zero says nothing
        of the row.
        """
        lasts = [*[2.0**-24] * 5, 0.0]  # the row is looked at first and last
        limits = limits_after((torch.tensor([[[0.5], [last]]]) for last in lasts), limit=0.5)
        assert limits[-1] == limits[0]

    def test_a_row_makes_progress_while_some_of_its_tokens_settle(self):
        """The residual of later tokens grows until the earlier ones are exact; damping would only
        delay them.
        """
        x = 1 + torch.rand(2, 24, 3, dtype=torch.float64)

        def chain(z):
            """Token t is exact once token t - 1 is: one more token per evaluation."""
            return x + 1.3 * torch.cat([0 * z[:, :1], z[:, :-1]], dim=1)

        stop = Stop(rtol=1e-9, max_steps=200)
        plain = solve(chain, 0 * x, solver=Naive(), stop=stop)
        adaptive = solve(chain, 0 * x, solver=Adaptive(), stop=stop)
        assert plain.stats.iterations.tolist() == [25, 25]
        assert (adaptive.stats.iterations <= 27).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_keeps_its_damping_in_float32(self, dtype):
        """Squares of a few hundred overflow float16."""
        z0 = torch.zeros(2, 3, dtype=dtype)
        f = row_affine([-1.0, -2.0], dtype=dtype)
        f = replace(f, offset=300 * f.offset)
        solution = solve(f, z0, solver=Adaptive(), stop=Stop(rtol=2e-2, max_steps=8))
        assert solution.converged.all()

    @pytest.mark.parametrize(("sweep", "best"), [(Simultaneous(), 0.9), (Sliding(8), 0.8)], ids=str)
    def test_needs_fewer_updates_than_the_best_constant_damping_on_a_trained_model(
        self, sweep, best
    ):
        a5 = parse_group("A5")
        inputs = WordProblem(a5, generators(a5, 2)).fixed(8, 64, seed=0).inputs
        lm = load_example("a5")
        call = {"sweep": sweep, "stop": Stop(rtol=1e-2, max_steps=256)}
        updates = []
        for solver in (Adaptive(), Relaxed(best)):
            with torch.no_grad():
                output = lm(inputs, solver=solver, **call)
            assert output.converged.all()
            updates.append(output.stats.updates.sum())
        assert updates[0] < updates[1]


def test_a_token_at_zero_does_not_slow_its_row_down():
    """Its relative residual is infinite, which is no reason to damp the first step."""
    mask = torch.tensor([[[1.0], [0.0]]])
    z0 = (1 - mask).expand(1, 2, 64)
    stop = Stop(atol=1e-3)
    solution = solve(lambda z: mask * (z / 2 + 1), z0, solver=Adaptive(), stop=stop)
    assert solution.converged.all() and solution.stats.iterations.max() < 20
