"""Damping found on the way."""

import math
from dataclasses import replace

import pytest
import torch
from problems import CausalChain, Tanh, row_affine, tanh_contraction

from deqseq import Adaptive, Naive, Relaxed, Simultaneous, Sliding, Stop, load_example, solve
from deqseq.tasks import WordProblem, generators, parse_group
from deqseq.testing import SolverContract
from deqseq.testing.problems import Affine, Recorded, affine, symmetric
from deqseq.testing.solvers import assert_same_rows


class TestAdaptive(SolverContract):
    solver = Adaptive()

    @pytest.mark.parametrize("gains", [(-0.5, -1.0), (-3.0, 0.0), (-0.9, -20.0)])
    @pytest.mark.parametrize("each", ["row", "token"])
    def test_one_step_finds_the_damping_of_a_map_that_turns_back(self, gains, each):
        """With f(z) = a - g z the right damping is 1 / (1 + g): two evaluations to see it, one that
        lands.
        """
        gain = torch.tensor(gains, dtype=torch.float64)
        gain = gain[:, None, None] if each == "row" else gain[None, :, None]
        offset = 1 + torch.rand(2, 2, 3, dtype=torch.float64)
        f, z0 = Recorded(lambda z: gain * z + offset), torch.zeros(2, 2, 3, dtype=torch.float64)
        solution = solve(f, z0, solver=Adaptive(), stop=Stop(rtol=1e-12))
        assert solution.converged.all()
        assert f.evaluations == 3
        torch.testing.assert_close(solution.value, offset / (1 - gain), rtol=1e-12, atol=0)

    def test_is_plain_iteration_where_residuals_keep_their_direction(self):
        f = Affine(symmetric(torch.linspace(0.1, 0.95, 4)), affine().bias)
        z0, stop = torch.ones(3, 4, dtype=torch.float64), Stop(rtol=1e-10, max_steps=900)
        adaptive = solve(f, z0, solver=Adaptive(), stop=stop)
        assert_same_rows(adaptive, slice(None), solve(f, z0, solver=Naive(), stop=stop))

    @pytest.mark.parametrize("make", [affine, tanh_contraction])
    @pytest.mark.parametrize("dim", [4, 16, 64])
    def test_costs_no_more_than_plain_iteration_on_contractions(self, make, dim):
        f, z0, stop = (
            make(event=(dim,)),
            torch.zeros(3, dim, dtype=torch.float64),
            Stop(rtol=1e-8, max_steps=900),
        )
        plain, adaptive = (
            solve(f, z0, solver=solver, stop=stop).stats.iterations
            for solver in (Naive(), Adaptive())
        )
        assert bool((adaptive <= plain + 1).all())

    def test_the_limit_stays_where_residuals_grow_along_themselves(self):
        """No damping helps there: the map expands along a direction that it keeps, or an earlier
        token still moves.
        """
        z = torch.zeros(1, 2, 1)
        state = Adaptive().init(z)
        for step in range(20):
            state = Adaptive().step(z, torch.full((1, 2, 1), 1.0 + step), state)[1]
        assert state.limit.item() == 1

    @pytest.mark.parametrize(
        ("scale", "degrees", "budget"),
        [(1.5, 90, 250), (3.0, 90, 700), (1.5, 110, 250), (3.0, 110, 250)],
    )
    def test_settles_where_the_map_rotates_and_expands(self, scale, degrees, budget):
        """No residual points back at the last: the limit of the row has to fall."""
        angle = math.radians(degrees)
        turn = torch.tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        ).double()
        f = Tanh(Affine(scale * turn, 0.3 * torch.randn(64, 2, dtype=torch.float64)))
        z0, stop = torch.randn(64, 2, dtype=torch.float64), Stop(rtol=1e-6, max_steps=budget)
        assert not bool(
            solve(f, z0, solver=Relaxed(0.8), stop=replace(stop, max_steps=100)).converged.any()
        )
        solution = solve(f, z0, solver=Adaptive(), stop=stop)
        assert bool(solution.converged.all())
        torch.testing.assert_close(solution.value, f.fixed_point(), rtol=0, atol=1e-5)

    def test_the_limit_of_a_row_falls_to_the_damping_of_the_shortest_residual_and_recovers(self):
        """Maps that turn by 90 degrees times a gain: 1 / (1 + gain^2) is the best damping, and no
        residual points back.

        Row 0 grows; row 1 grows and would need less than the least limit; row 2 shrinks.
        """
        gain, offset = torch.tensor([[1.5, 10.0, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)[
            :, :, None
        ]
        z = torch.ones(3, 2, dtype=torch.float64)
        state, limits = Adaptive().init(z), []
        for _ in range(8):
            z, state = Adaptive().step(
                z, gain * torch.stack((-z[:, 1], z[:, 0]), dim=1) + offset, state
            )
            limits.append(state.limit[:, 0])
        fallen = 1 / (1 + 1.5**2)
        expected = [[1.0] * 5 + [fallen] * 3, [1.0] * 5 + [0.05] * 3, [1.0] * 8]
        torch.testing.assert_close(
            torch.stack(limits, dim=1), torch.tensor(expected).double(), rtol=1e-5, atol=0
        )

    def test_the_limit_of_a_row_is_reconsidered_at_every_fifth_iteration(self):
        """It grows where the residual is lower than five iterations before, whatever it was between
        them.
        """
        z = torch.zeros(1, 1, 1)
        state, limits = Adaptive().init(z)._replace(limit=torch.tensor([[0.5]])), []
        for size in (
            1.0,
            9.0,
            9.0,
            9.0,
            9.0,
            0.5,
            0.1,
            0.1,
            0.1,
            0.1,
            0.499,
            0.1,
            0.1,
            0.1,
            0.1,
            0.4,
        ):
            state = Adaptive().step(1 - torch.full((1, 1, 1), size), torch.ones(1, 1, 1), state)[1]
            limits.append(state.limit.item())
        first = 1.15 * 0.5
        assert limits == pytest.approx(
            [first] * 5 + [1.15 * first] * 5 + [limits[10]] * 5 + [1.15 * limits[10]]
        )
        assert limits[10] <= limits[9]  # 0.499 is less than 1 % below 0.5

    def test_a_residual_below_the_precision_is_no_progress(self):
        """Of two tokens one has settled: whether its residual is the last bit or zero says nothing
        of the row.
        """
        state, limits = (
            Adaptive().init(torch.zeros(1, 2, 1))._replace(limit=torch.tensor([[0.5]])),
            [],
        )
        for last in (*[2.0**-24] * 5, 0.0):  # the row is looked at first and last
            z = torch.tensor([[[0.5], [1 - last]]])
            state = Adaptive().step(z, torch.ones(1, 2, 1), state)[1]
            limits.append(state.limit.item())
        assert limits[-1] == limits[0]

    def test_a_row_that_begins_afresh_has_the_memory_of_a_new_solve(self):
        z, rows = torch.randn(3, 4, 2), torch.tensor([2, 0])
        state = Adaptive().init(z)
        for _ in range(7):
            state = Adaptive().step(z, torch.tanh(z), state)[1]
        again = Adaptive().restart(state, z, rows)
        for name, first in Adaptive().init(z)._asdict().items():
            assert torch.equal(getattr(again, name)[rows], first[rows])
            assert torch.equal(getattr(again, name)[1], getattr(state, name)[1])

    def test_a_row_makes_progress_while_some_of_its_tokens_settle(self):
        """The residual of later tokens grows until the earlier ones are exact; damping would only
        delay them.
        """
        f = CausalChain(1 + torch.rand(2, 24, 3, dtype=torch.float64), coupling=1.3)
        z0, stop = torch.zeros(2, 24, 3, dtype=torch.float64), Stop(rtol=1e-9, max_steps=200)
        assert solve(f, z0, solver=Naive(), stop=stop).stats.iterations.tolist() == [25, 25]
        solution = solve(f, z0, solver=Adaptive(), stop=stop)
        assert bool((solution.stats.iterations <= 27).all())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_keeps_its_damping_in_float32(self, dtype):
        f, z0 = row_affine([-1.0, -2.0], dtype=dtype), torch.zeros(2, 3, dtype=dtype)
        f = type(f)(f.gain, f.offset * 300, f.ceiling)  # squares of a few hundred overflow float16
        solution = solve(f, z0, solver=Adaptive(), stop=Stop(rtol=2e-2, max_steps=8))
        assert bool(solution.converged.all())
        state = Adaptive().step(z0, f(z0), Adaptive().init(z0))[1]
        assert [x.dtype for x in state] == [dtype, *[torch.float32] * 5]

    @pytest.mark.parametrize(("sweep", "best"), [(Simultaneous(), 0.9), (Sliding(8), 0.8)], ids=str)
    def test_needs_fewer_updates_than_the_best_constant_damping_on_a_trained_model(
        self, sweep, best
    ):
        a5 = parse_group("A5")
        inputs = WordProblem(a5, generators(a5, 2)).fixed(8, 64, seed=0).inputs
        lm, stop, updates = load_example("a5"), Stop(rtol=1e-2, max_steps=256), {}
        for solver in (Adaptive(), Relaxed(best)):
            with torch.no_grad():
                output = lm(inputs, solver=solver, sweep=sweep, stop=stop)
            assert bool(output.converged.all())
            updates[solver] = output.stats.updates.double().mean().item()
        assert updates[Adaptive()] < updates[Relaxed(best)]
