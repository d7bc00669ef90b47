"""Every solver: the common contract, what is special about each, and solvers from outside."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from deqseq import (
    Adaptive,
    Anderson,
    Broyden,
    ExternalSolver,
    Naive,
    Relaxed,
    Status,
    Stop,
    load_example,
    solve,
)
from deqseq.sweeps import Simultaneous, Sliding
from deqseq.tasks import WordProblem, alternating, generators
from deqseq.testing import SolverContract
from deqseq.testing.problems import (
    Affine,
    CausalChain,
    Recorded,
    Tanh,
    affine,
    diverging,
    expansive,
    limit_cycle,
    row_affine,
    staircase,
    symmetric,
    tanh_contraction,
)
from deqseq.testing.solvers import assert_same_rows


class TestNaive(SolverContract):
    solver = Naive()

    def test_visits_the_powers_of_the_map(self):
        f = Recorded(affine())
        solve(f, torch.ones(3, 4, dtype=torch.float64), solver=Naive(), stop=Stop.exactly(4))
        for before, after in zip(f.calls, f.calls[1:], strict=False):
            assert torch.equal(after.z_copy, before.fz_copy)

    def test_stays_in_a_limit_cycle(self):
        solution = solve(limit_cycle, torch.zeros(1, 2), solver=Naive(), stop=Stop(max_steps=30))
        assert solution.status.tolist() == [Status.MAX_STEPS_REACHED]
        assert solution.stats.residual.tolist() == [1.0]


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
        expected = (1 - damping) * first.z_copy + damping * first.fz_copy
        torch.testing.assert_close(second.z_copy, expected, rtol=0, atol=1e-15)

    @pytest.mark.parametrize("damping", [0.2, 0.5, 0.8, 0.95])
    def test_cures_a_limit_cycle(self, damping):
        z0 = torch.zeros(2, 3, dtype=torch.float64)
        solution = solve(limit_cycle, z0, solver=Relaxed(damping), stop=Stop(rtol=1e-10, max_steps=400))
        torch.testing.assert_close(solution.value, torch.full_like(z0, 0.5), rtol=0, atol=1e-9)

    @pytest.mark.parametrize("damping", [0.0, 2.0, -0.5, float("nan")])
    def test_refuses_a_damping_out_of_range(self, damping):
        with pytest.raises(ValueError, match=r"Relaxed\.damping must .*\(0, 2\)"):
            Relaxed(damping)


class TestAdaptive(SolverContract):
    solver = Adaptive()

    @pytest.mark.parametrize("gains", [(-0.5, -1.0), (-3.0, 0.0), (-0.9, -20.0)])
    @pytest.mark.parametrize("per", ["row", "token"])
    def test_one_step_finds_the_damping_of_a_map_that_turns_back(self, gains, per):
        """With f(z) = a - g z the right damping is 1 / (1 + g): two evaluations to see it, one that lands."""
        gain = torch.tensor(gains, dtype=torch.float64)
        gain = gain[:, None, None] if per == "row" else gain[None, :, None]
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
        f, z0, stop = make(event=(dim,)), torch.zeros(3, dim, dtype=torch.float64), Stop(rtol=1e-8, max_steps=900)
        plain, adaptive = (solve(f, z0, solver=solver, stop=stop).stats.iterations for solver in (Naive(), Adaptive()))
        assert bool((adaptive <= plain + 1).all())

    def test_the_limit_stays_where_residuals_grow_along_themselves(self):
        """No damping helps there: the map expands along a direction that it keeps, or an earlier token still moves."""
        z = torch.zeros(1, 2, 1)
        state = Adaptive().init(z)
        for step in range(20):
            state = Adaptive().step(z, torch.full((1, 2, 1), 1.0 + step), state)[1]
        assert state.limit.item() == 1

    @pytest.mark.parametrize(
        ("scale", "degrees", "budget"), [(1.5, 90, 250), (3.0, 90, 700), (1.5, 110, 250), (3.0, 110, 250)]
    )
    def test_settles_where_the_map_rotates_and_expands(self, scale, degrees, budget):
        """No residual points back at the last: the limit of the row has to fall."""
        angle = math.radians(degrees)
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
        f = Tanh(Affine(scale * turn, 0.3 * torch.randn(64, 2, dtype=torch.float64)))
        z0, stop = torch.randn(64, 2, dtype=torch.float64), Stop(rtol=1e-6, max_steps=budget)
        assert not bool(solve(f, z0, solver=Relaxed(0.8), stop=replace(stop, max_steps=100)).converged.any())
        solution = solve(f, z0, solver=Adaptive(), stop=stop)
        assert bool(solution.converged.all())
        torch.testing.assert_close(solution.value, f.fixed_point(), rtol=0, atol=1e-5)

    def test_the_limit_of_a_row_falls_to_the_damping_of_the_shortest_residual_and_recovers(self):
        """Maps that turn by 90 degrees times a gain: 1 / (1 + gain^2) is the best damping, and no residual points back.

        Row 0 grows; row 1 grows and would need less than the least limit; row 2 shrinks.
        """
        gain, offset = torch.tensor([[1.5, 10.0, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)[:, :, None]
        z = torch.ones(3, 2, dtype=torch.float64)
        state, limits = Adaptive().init(z), []
        for _ in range(8):
            z, state = Adaptive().step(z, gain * torch.stack((-z[:, 1], z[:, 0]), dim=1) + offset, state)
            limits.append(state.limit[:, 0])
        fallen = 1 / (1 + 1.5**2)
        expected = [[1.0] * 5 + [fallen] * 3, [1.0] * 5 + [0.05] * 3, [1.0] * 8]
        torch.testing.assert_close(torch.stack(limits, dim=1), torch.tensor(expected).double(), rtol=1e-5, atol=0)

    def test_the_limit_of_a_row_grows_with_each_iteration_that_lowers_its_residual(self):
        z = torch.zeros(1, 1, 1)
        state = Adaptive().init(z)._replace(limit=torch.tensor([[0.5]]))
        for size, limit in ((1.0, 0.525), (0.5, 0.55125), (0.499, 0.55125), (0.2, 0.5788125)):
            residual = torch.full((1, 1, 1), size)
            state = Adaptive().step(1 - residual, torch.ones(1, 1, 1), state)[1]
            assert state.limit.item() == pytest.approx(limit)

    def test_after_the_limit_has_fallen_progress_is_measured_from_the_least_residual_since(self):
        z = torch.zeros(1, 1, 1)
        state = Adaptive().init(z)._replace(limit=torch.tensor([[0.5]]))
        for size in (1.0, 2.0, 3.0, 2.5, 2.2, 2.1):  # five without progress
            state = Adaptive().step(1 - torch.full((1, 1, 1), size), torch.ones(1, 1, 1), state)[1]
        fallen = state.limit.item()
        state = Adaptive().step(1 - torch.full((1, 1, 1), 1.9), torch.ones(1, 1, 1), state)[1]
        assert state.limit.item() == pytest.approx(1.05 * fallen)

    def test_a_residual_below_the_precision_is_no_progress(self):
        """Of two tokens one has settled: whether its residual is the last bit or zero says nothing of the row."""
        state, limits = Adaptive().init(torch.zeros(1, 2, 1))._replace(limit=torch.tensor([[0.5]])), []
        for last in (2.0**-24, 0.0):
            z = torch.tensor([[[0.5], [1 - last]]])
            state = Adaptive().step(z, torch.ones(1, 2, 1), state)[1]
            limits.append(state.limit.item())
        assert limits[0] == limits[1]

    def test_a_row_makes_progress_while_some_of_its_tokens_settle(self):
        """The residual of later tokens grows until the earlier ones are exact; damping would only delay them."""
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
        assert [x.dtype for x in state] == [dtype, *[torch.float32] * 6]

    @pytest.mark.parametrize(("sweep", "best"), [(Simultaneous(), 0.9), (Sliding(8), 0.8)], ids=str)
    def test_needs_fewer_updates_than_the_best_constant_damping_on_a_trained_model(self, sweep, best):
        a5 = alternating(5)
        inputs = WordProblem(a5, generators(a5, 2)).fixed(8, 64, seed=0).inputs
        lm, stop, updates = load_example("a5"), Stop(rtol=1e-2, max_steps=256), {}
        for solver in (Adaptive(), Relaxed(best)):
            with torch.no_grad():
                output = lm(inputs, solver=solver, sweep=sweep, stop=stop)
            assert bool(output.converged.all())
            updates[solver] = output.stats.updates.double().mean().item()
        assert updates[Adaptive()] < updates[Relaxed(best)]


class TestAnderson(SolverContract):
    solver = Anderson()

    @pytest.mark.parametrize("dim", [2, 4, 6])
    @pytest.mark.parametrize("make", [lambda dim: affine(event=(dim,)), lambda dim: expansive(dim=dim)])
    def test_solves_an_affine_problem_of_dim_d_in_about_d_evaluations(self, make, dim):
        """With memory for the whole space it is exact: d + 1 points, one that lands, one that checks."""
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
        f, z0, stop = affine(radius=0.9, dtype=dtype), torch.zeros(3, 4, dtype=dtype), Stop.exactly(5)
        named = Anderson(ridge=10 * torch.finfo(dtype).eps)
        default = solve(f, z0, solver=Anderson(), stop=stop).value
        assert torch.equal(default, solve(f, z0, solver=named, stop=stop).value)
        assert not torch.equal(default, solve(f, z0, solver=Anderson(ridge=1e-3), stop=stop).value)

    def test_needs_fewer_evaluations_than_plain_iteration(self):
        f, z0, stop = (
            affine(radius=0.95),
            torch.zeros(3, 4, dtype=torch.float64),
            Stop(rtol=1e-9, max_steps=900),
        )
        steps = {solver: solve(f, z0, solver=solver, stop=stop).stats.iterations for solver in (Naive(), Anderson())}
        assert bool((steps[Anderson()] * 5 < steps[Naive()]).all())

    @pytest.mark.parametrize("memory", [2, 3, 7])
    def test_keeps_no_more_than_its_memory(self, memory):
        solver, f = Anderson(memory=memory), affine()
        z = torch.zeros(3, 4, dtype=torch.float64)
        state, kept = solver.init(z), []
        for _ in range(9):
            z, state = solver.step(z, f(z), state)
            assert len(state.values) == len(state.residuals) == state.gram.shape[1] == state.gram.shape[2]
            kept.append(len(state.values))
        assert kept == [min(step, memory - 1) for step in range(1, 10)]

    def test_the_gram_matrix_is_that_of_the_residuals_it_keeps(self):
        solver, f = Anderson(memory=4), affine()
        z = torch.zeros(3, 4, dtype=torch.float64)
        state = solver.init(z)
        for _ in range(7):
            z, state = solver.step(z, f(z), state)
        stacked = torch.stack(state.residuals, dim=1)
        torch.testing.assert_close(state.gram, stacked @ stacked.mT, rtol=1e-13, atol=0)

    def test_mixing_moves_towards_the_points(self):
        f, z = affine(), torch.ones(3, 4, dtype=torch.float64)
        solver = Anderson(mixing=0.25)
        proposal, _ = solver.step(z, f(z), solver.init(z))
        torch.testing.assert_close(proposal, 0.75 * z + 0.25 * f(z), rtol=0, atol=1e-15)

    def test_a_row_without_information_takes_its_newest_value(self):
        """Equal residuals and a ridge that is lost: the normal equations are singular, and the row falls back alone."""
        solver = Anderson(ridge=1e-300)
        z = torch.zeros(2, 2, dtype=torch.float64)
        fz = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        _, state = solver.step(z, fz, solver.init(z))
        newer = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        proposal, _ = solver.step(z, newer, state)
        torch.testing.assert_close(proposal, torch.tensor([[3.0, 0.0], [0.5, 0.5]], dtype=torch.float64))

    @pytest.mark.parametrize(
        ("name", "value"), [("memory", 1), ("mixing", 0.0), ("mixing", 1.5), ("ridge", 0.0), ("ridge", -1e-8)]
    )
    def test_refuses_arguments_out_of_range(self, name, value):
        with pytest.raises(ValueError, match=rf"Anderson\.{name} must"):
            Anderson(**{name: value})


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
        assert max(solution.stats.iterations.tolist()) <= 2 * dim + 2  # Gay 1979: 2 d steps on an affine problem

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
        """Squares of a few hundred overflow float16: inner products must be accumulated in float32."""
        f, z0 = row_affine([-0.95], dtype=torch.float16), torch.zeros(1, 3, dtype=torch.float16)
        f = type(f)(f.gain, f.offset * 300, f.ceiling)
        solution = solve(f, z0, solver=Broyden(), stop=Stop(rtol=5e-3, max_steps=10))
        assert solution.status.tolist() == [Status.CONVERGED]

    @pytest.mark.parametrize("memory", [0, -2])
    def test_refuses_a_memory_below_one(self, memory):
        with pytest.raises(ValueError, match=r"Broyden\.memory must be .*>= 1"):
            Broyden(memory)


Z3 = torch.zeros(3, 1, dtype=torch.float64)


@dataclass(frozen=True)
class Outside(ExternalSolver):
    """Plain iteration for a number of evaluations of its own choice."""

    evaluations: int

    def run(self, f: Callable[[Tensor], Tensor], z0: Tensor, max_steps: int) -> None:
        for _ in range(self.evaluations):
            z0 = f(z0)


class TestExternalSolver:
    def test_is_observed_like_any_other(self):
        stop = Stop(rtol=0.0, max_steps=50)
        f, target = Recorded(staircase([1, 4, 2])), Recorded(staircase([1, 4, 2]))
        outside = solve(f, Z3, solver=Outside(99), stop=stop, trace=True)
        ours = solve(target, Z3, solver=Naive(), stop=stop, trace=True)
        assert_same_rows(outside, slice(None), ours)
        assert f.evaluations == target.evaluations == 5
        assert outside.stats.trace is not None
        assert torch.equal(outside.stats.trace, torch.as_tensor(ours.stats.trace))

    def test_aux_belongs_to_the_value(self):
        """Row 0 moves on after it has converged; row 1 swings, and is evaluated once more at its best value."""

        def f(z: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
            return rate * z + 1, 10 * z

        rate = torch.tensor([[0.5], [-1.0]], dtype=torch.float64)
        start, stop = torch.tensor([[0.0], [0.25]], dtype=torch.float64), Stop(rtol=1e-3, max_steps=40)
        solution = solve(f, start, solver=Outside(99), stop=stop, args=rate, has_aux=True)
        assert solution.status.tolist() == [Status.CONVERGED, Status.MAX_STEPS_REACHED]
        point, value = solution.aux / 10, solution.value
        assert 0.5 * point[0] + 1 == value[0] or point[0] == value[0]
        assert point[1] == value[1] == 0.75
        assert solution.stats.evaluations == 41

    def test_is_held_to_the_budget(self):
        f = Recorded(limit_cycle)
        solution = solve(f, Z3, solver=Outside(99), stop=Stop(max_steps=6))
        assert f.evaluations == solution.stats.evaluations == 6
        assert solution.status.tolist() == [Status.MAX_STEPS_REACHED] * 3

    @pytest.mark.parametrize("check_every", [1, 2, 4, 40])
    def test_may_return_early(self, check_every):
        """Its last evaluation is checked, whether or not a check was due."""
        stop = Stop(max_steps=50, check_every=check_every)
        solution = solve(staircase([9]), Z3[:1], solver=Outside(3), stop=stop)
        assert (solution.stats.evaluations, solution.stats.iterations.tolist()) == (3, [3])
        assert solution.value.tolist() == [[3.0]]
        assert solution.stats.residual.tolist() == [1 / 3]

    def test_must_evaluate_the_map(self):
        with pytest.raises(RuntimeError, match=r"Outside.* returned without evaluating the map"):
            solve(limit_cycle, Z3[:1], solver=Outside(0), stop=Stop())
