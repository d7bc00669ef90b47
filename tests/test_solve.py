"""The iteration loop: freezing and removing rows, divergence, checks, bad input."""

import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import deqseq as dq
from deqseq import Naive, Progress, Relaxed, Status, Stop, fixed_point, solve, take
from deqseq.evaluate import check_start
from deqseq.testing.problems import (
    Recorded,
    RowAffine,
    diverging,
    limit_cycle,
    logistic,
    mapped,
    row_affine,
    staircase,
)
from deqseq.testing.solvers import assert_same_rows


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


class TestFreezingAndRemoving:
    @pytest.mark.parametrize(
        ("targets", "check_every", "rows"),
        [
            ([1, 2, 3, 4, 5, 6, 7, 8], 1, [8, 8, 8, 6, 6, 4, 3, 2, 1]),
            ([1, 2, 3, 4, 5, 6, 7, 8], 2, [8, 8, 8, 8, 5, 5, 3, 3, 1, 1]),
            ([5, 1, 5, 5], 1, [4, 4, 3, 3, 3, 3]),
            ([5, 1, 5, 5, 5], 1, [5] * 6),
            ([3, 3, 3], 1, [3] * 4),
            ([1, 9], 4, [2, 2, 2, 2] + [1] * 8),
        ],
    )
    def test_rows_are_removed_when_a_quarter_has_ended(self, targets, check_every, rows):
        f, stop = Recorded(mapped), Stop(rtol=0.0, max_steps=50, check_every=check_every)
        solution = solve(f, zeros(len(targets), 1), solver=Naive(), stop=stop, args=staircase(targets))
        assert f.rows == rows
        checked = [-(-(target + 1) // check_every) * check_every for target in targets]
        assert solution.stats.iterations.tolist() == checked
        assert solution.stats.evaluations == len(rows)
        assert solution.stats.updates.sum() == sum(rows)
        assert solution.value[:, 0].tolist() == targets
        assert solution.converged.all()
        assert solution.stats.residual.tolist() == [0.0] * len(targets)

    def test_without_args_all_rows_stay_and_ended_ones_stand_still(self):
        f = Recorded(staircase([2, 5, 1]))
        solve(f, zeros(3, 1), solver=Relaxed(0.75), stop=Stop(rtol=0.3, max_steps=50))
        assert f.rows == [3] * f.evaluations
        for row in range(3):
            visited = [call.z_copy[row].item() for call in f.calls]
            values = [call.fz_copy[row].item() for call in f.calls]
            passed = [fz - z <= 0.3 * fz for z, fz in zip(visited, values, strict=True)]
            ended = passed.index(True)
            assert visited[ended:] == [visited[ended]] * (len(visited) - ended)
            assert all(later > earlier for earlier, later in pairwise(visited[: ended + 1]))

    def test_the_rows_of_a_batch_end_together_per_batch(self):
        f, stop = Recorded(mapped), Stop(rtol=0.0, per="batch")
        solution = solve(f, zeros(3, 1), solver=Naive(), stop=stop, args=staircase([1, 6, 2]))
        assert f.rows == [3] * 7
        assert solution.stats.iterations.tolist() == [7, 7, 7]


class TestDivergence:
    F = row_affine([0.5, 2.0, -0.4], event=(2, 3), ceilings=[torch.inf, 40.0, torch.inf])

    @pytest.mark.parametrize("per", ["row", "token"])
    @pytest.mark.parametrize("remove", [False, True])
    def test_a_row_that_becomes_nan_leaves_the_others_alone(self, per, remove):
        stop = Stop(rtol=1e-12, max_steps=100, per=per)
        f, args = (mapped, self.F) if remove else (self.F, None)
        solution = solve(f, zeros(3, 2, 3), solver=Naive(), stop=stop, args=args)
        assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED, Status.CONVERGED]
        for row in range(3):
            one = torch.tensor([row])
            alone = solve(take(self.F, one), zeros(1, 2, 3), solver=Naive(), stop=stop)
            assert_same_rows(solution, one, alone)

    @pytest.mark.parametrize("per", ["row", "token"])
    def test_a_row_that_becomes_nan_keeps_its_best_value_and_stands_still(self, per):
        f, stop = Recorded(self.F), Stop(rtol=1e-12, max_steps=100, per=per)
        solution = solve(f, zeros(3, 2, 3), solver=Naive(), stop=stop)
        finite = [call.fz_copy[1] for call in f.calls if bool(call.fz_copy[1].isfinite().all())]
        assert torch.equal(solution.value[1], finite[-1])  # the relative residual falls to 1/2 from above
        assert solution.stats.iterations[1].max().item() == len(finite) + 1
        assert 0.5 < solution.stats.residual[1].max().item() < 0.6
        assert len(f.calls) > len(finite) + 9
        assert all(torch.equal(call.z_copy[1], finite[-1]) for call in f.calls[len(finite) :])

    def test_growth_ends_a_row(self):
        """Residuals 1, 2, 4 ...; 2^14 is the first beyond 10^4 times the start's scale of 1."""
        solution = solve(diverging, zeros(1, 1), solver=Naive(), stop=Stop(max_steps=100))
        assert solution.status.tolist() == [Status.DIVERGED]
        assert solution.stats.iterations.tolist() == [15]
        assert solution.value.item() == 2**14 - 1
        assert solution.stats.residual.item() == 2**13 / (2**14 - 1)

    @pytest.mark.parametrize(("divergence", "steps"), [(1.5, 2), (100.0, 8), (1e6, 21)])
    def test_growth_is_measured_against_the_start(self, divergence, steps):
        stop = Stop(max_steps=100, divergence=divergence)
        assert solve(diverging, zeros(1, 1), solver=Naive(), stop=stop).stats.iterations.tolist() == [steps]

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("per", ["batch", "row", "token"])
    def test_a_first_value_that_is_not_finite_has_diverged(self, bad, per):
        """Against an infinite scale every residual is small."""
        z0 = torch.ones(1, 2, 3)
        solution = solve(lambda z: z + bad, z0, solver=Naive(), stop=Stop(per=per))
        assert solution.status.tolist() == [Status.DIVERGED]
        assert solution.stats.residual.isinf().all()
        assert torch.equal(solution.value, z0)

    @pytest.mark.parametrize(("start", "divergence"), [(1e35, 1e4), (1.0, torch.inf)])
    def test_overflow_is_no_convergence(self, start, divergence):
        """The limit overflows too, or is infinite: infinity compared with infinity must not pass."""
        z0 = torch.full((2, 1), start)
        stop = Stop(max_steps=200, divergence=divergence)
        solution = solve(lambda z: 3 * z, z0, solver=Naive(), stop=stop)
        assert solution.status.tolist() == [Status.DIVERGED] * 2
        assert solution.value.isfinite().all()

    def test_one_bad_row_ends_the_batch_per_batch(self):
        solution = solve(self.F, zeros(3, 2, 3), solver=Naive(), stop=Stop(per="batch"))
        assert solution.status.tolist() == [Status.DIVERGED] * 3
        assert solution.value.isfinite().all()

    @pytest.mark.parametrize("grad", [True, False])
    def test_the_functional_entry_returns_a_finite_value_in_either_mode(self, grad):
        gain = self.F.gain.clone().requires_grad_()
        with torch.set_grad_enabled(grad):
            f = RowAffine(gain, self.F.offset, self.F.ceiling)
            solution = fixed_point(f, zeros(3, 2, 3), solver=Naive(), stop=Stop(rtol=1e-10, max_steps=100))
        assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED, Status.CONVERGED]
        assert solution.value.isfinite().all()


class OnDevice(torch.Tensor):
    """A tensor that counts what would make an accelerator wait: reading it on the host."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        reads = {"__bool__", "__float__", "__int__", "item", "tolist", "cpu", "nonzero"}
        result = super().__torch_function__(function, types, args, kwargs or {})
        if getattr(function, "__name__", "") not in reads:
            return result
        OnDevice.waits += 1
        return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result


class TestChecks:
    @pytest.mark.parametrize("remove", [False, True])
    @pytest.mark.parametrize("per", ["row", "token"])
    def test_the_trace_is_the_residual_at_each_check(self, remove, per):
        """Row 0 ends early, row 1 diverges late, row 2 swings, row 3 takes long."""
        problem = row_affine([0.1, 1.3, -1.1, 0.8], event=(2, 3))
        f, args = (mapped, problem) if remove else (problem, None)
        stop = Stop(rtol=1e-6, max_steps=30, per=per, check_every=3, divergence=300.0)
        solution = solve(f, zeros(4, 2, 3), solver=Relaxed(0.9), stop=stop, args=args, trace=True)
        assert solution.stats.trace is not None
        assert solution.stats.trace.shape == ((10, 4, 2) if per == "token" else (10, 4))
        for row in range(4):
            alone = Recorded(take(problem, torch.tensor([row])))
            solve(alone, zeros(1, 2, 3), solver=Relaxed(0.9), stop=stop)
            for check in range(10):
                _, _, z, fz = alone.calls[min(3 * check + 2, len(alone.calls) - 1)]
                expected = ((fz - z).norm(dim=-1) / fz.norm(dim=-1))[0]
                expected = expected if per == "token" else expected.amax()
                torch.testing.assert_close(solution.stats.trace[check, row], expected, rtol=1e-12, atol=0)

    def test_the_trace_shows_a_residual_that_rises(self):
        start = torch.tensor([[0.25]], dtype=torch.float64)
        solution = solve(limit_cycle, start, solver=Naive(), stop=Stop(max_steps=4), trace=True)
        assert solution.stats.trace is not None
        assert solution.stats.trace[:, 0].tolist() == [0.5 / 0.75, 2.0, 0.5 / 0.75, 2.0]
        assert solution.stats.residual.tolist() == [0.5 / 0.75]

    def test_no_trace_unless_asked_for(self):
        assert solve(limit_cycle, zeros(1, 1), solver=Naive(), stop=Stop(max_steps=3)).stats.trace is None

    def test_the_callback_is_told_at_each_check(self):
        told: list[Progress] = []
        stop = Stop(rtol=0.0, max_steps=7, check_every=2)
        solve(mapped, zeros(3, 1), solver=Naive(), stop=stop, args=staircase([1, 2, 9]), callback=told.append)
        seen = [(p.iteration, p.max_steps, p.active_rows) for p in told]
        assert seen == [(2, 7, 2), (4, 7, 1), (6, 7, 1), (7, 7, 1)]
        residuals = [[0.0, 0.5, 0.5], [0.0, 0.0, 1 / 4], [0.0, 0.0, 1 / 6], [0.0, 0.0, 1 / 7]]
        assert [p.residual.tolist() for p in told] == residuals

    def test_the_callback_sees_the_latest_residual_not_the_best(self):
        told: list[float] = []
        start = torch.tensor([[0.1]], dtype=torch.float64)
        f = Recorded(logistic)
        solve(
            f,
            start,
            solver=Naive(),
            stop=Stop(max_steps=20),
            callback=lambda p: told.append(p.residual.item()),
        )
        expected = [((call.fz_copy - call.z_copy).abs() / call.fz_copy.abs()).item() for call in f.calls]
        assert told == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize(("check_every", "checks"), [(1, 20), (8, 3), (20, 1)])
    def test_the_host_is_waited_for_at_the_start_and_once_a_check(self, check_every, checks):
        OnDevice.waits, told = 0, []
        f = row_affine([0.0, 0.5, 0.95, 0.97])
        stop = Stop(rtol=1e-10, max_steps=20, check_every=check_every)
        z0 = zeros(4, 3).as_subclass(OnDevice)
        solution = solve(Recorded(f), z0, solver=Relaxed(0.9), stop=stop, callback=told.append)
        assert (len(told), told[-1].iteration, solution.stats.evaluations) == (checks, 20, 20)
        assert OnDevice.waits == 1 + checks

    def test_exactly_returns_the_last_value_even_if_it_is_not_the_best(self):
        f = Recorded(logistic)
        solution = solve(f, zeros(1, 1) + 0.1, solver=Naive(), stop=Stop.exactly(6))
        assert torch.equal(solution.value, f.calls[5].fz_copy)
        assert (f.evaluations, solution.stats.iterations.tolist()) == (6, [6])


class TestBadInput:
    @pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), ()])
    def test_a_start_without_elements(self, shape):
        with pytest.raises(ValueError, match="z0 must have at least one row and one element"):
            check_start("z0", torch.zeros(shape))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
    def test_a_start_that_is_not_floating_point(self, dtype):
        with pytest.raises(TypeError, match=f"z0 must be a floating-point tensor.* got {dtype}"):
            check_start("z0", torch.zeros(2, 3, dtype=dtype))

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_a_start_that_is_not_finite(self, bad):
        with pytest.raises(ValueError, match="z0 must be finite"):
            solve(limit_cycle, torch.tensor([[0.0], [bad]]), solver=Naive(), stop=Stop())

    @pytest.mark.parametrize(
        ("f", "kind", "text"),
        [
            (lambda z: (z, None), TypeError, "must be a tensor of the shape of z, got tuple"),
            (lambda z: None, TypeError, "must be a tensor of the shape of z, got NoneType"),
            (lambda z: z.half(), TypeError, "keep the dtype of z outside autocast: got torch.float16"),
            (lambda z: z[:1], ValueError, r"keep the shape and device of z: got \(1, 3\)"),
            (lambda z: z[:, :1], ValueError, r"keep the shape and device of z: got \(2, 1\)"),
            (lambda z: z.to("meta"), ValueError, r"keep the shape and device of z: got \(2, 3\) on meta"),
        ],
    )
    def test_a_map_that_breaks_its_contract(self, f, kind, text):
        with pytest.raises(kind, match=text):
            solve(f, torch.zeros(2, 3), solver=Naive(), stop=Stop())

    @pytest.mark.parametrize("f", [lambda z: z, lambda z: (z, z, z)])
    def test_a_map_without_the_aux_that_was_asked_for(self, f):
        with pytest.raises(TypeError, match="has_aux=True"):
            solve(f, torch.zeros(2, 3), solver=Naive(), stop=Stop(), has_aux=True)


def test_autocast_values_come_back_in_the_dtype_of_the_state():
    weight, modes = torch.eye(4) / 2, []

    def f(z: Tensor) -> Tensor:
        value = z @ weight + 1
        modes.append(value.dtype)
        return value

    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = solve(f, torch.zeros(2, 4), solver=Relaxed(0.5), stop=Stop(rtol=1e-2))
    assert (set(modes), solution.value.dtype) == ({torch.bfloat16}, torch.float32)
    torch.testing.assert_close(solution.value, torch.full((2, 4), 2.0), rtol=0, atol=0.06)


class Halves(torch.nn.Module):
    """A map that writes its result into its argument, as ``ReLU(inplace=True)`` does."""

    def forward(self, z):
        return z.mul_(0.5).add_(1)


@pytest.mark.parametrize("gradient", [dq.Phantom(2), dq.OneStep(), dq.Implicit(), dq.Unrolled()])
def test_a_map_that_changes_z_in_place_is_refused(gradient):
    z0 = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"f must not change z in place.*z\.clone\(\)"):
        dq.fixed_point(Halves(), z0, gradient=gradient)
    with pytest.raises(ValueError, match="f must not change z in place"):
        dq.solve(torch.nn.ReLU(inplace=True), z0, solver=dq.Naive(), stop=dq.Stop())


@pytest.mark.parametrize("solver", [dq.Naive(), dq.Adaptive(), dq.Anderson(), dq.Broyden()], ids=str)
def test_in_inference_mode_a_map_that_changes_z_in_place_has_its_own_copy(solver):
    """There torch does not count changes."""
    with torch.inference_mode():
        solution = dq.solve(Halves(), torch.zeros(2, 3), solver=solver, stop=dq.Stop(rtol=1e-6))
        assert bool(solution.converged.all())
        torch.testing.assert_close(solution.value, torch.full((2, 3), 2.0))


def test_objects_that_hide_tensors_are_refused():
    slope = torch.tensor([0.1, 0.9])
    hidden = SimpleNamespace(slope=slope), UserDict(slope=slope), {1, 2}, slope.numpy(), SimpleNamespace(slope=[slope])
    for args in (*hidden, [0.1, 0.9]):
        with pytest.raises(TypeError, match=rf"args must be tensors, in .* got a {type(args).__name__}"):
            dq.solve(lambda z, a: z / 2, torch.ones(2, 1), args=args, solver=dq.Naive(), stop=dq.Stop())
    for aux in (torch.zeros(7), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="aux must have one row per row of z0, 2"):
            dq.solve(lambda z, aux=aux: (z, aux), torch.ones(2, 1), has_aux=True, solver=dq.Naive(), stop=dq.Stop())


def test_rows_of_args_are_counted():
    with pytest.raises(ValueError, match=r"args must have .*z0.* got .* \(3, 1\)"):
        dq.solve(lambda z, x: x, torch.zeros(2, 1), args=torch.ones(3, 1), solver=dq.Naive(), stop=dq.Stop())


@dataclass(frozen=True)
class Step(dq.Solver):
    """A solver whose step is a function."""

    next: Callable[[Tensor, Tensor], Any]

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        return self.next(z, fz)


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (lambda z, fz: fz, TypeError, r"Step.step must return a pair \(next point, state\), got Tensor"),
        (lambda z, fz: (None, None), TypeError, "must return a pair"),
        (lambda z, fz: (fz.float(), None), TypeError, "keep the dtype of z, torch.float64, got torch.float32"),
        (lambda z, fz: (fz[:, :1], None), ValueError, r"\(2, 3\) on cpu, got \(2, 1\) on cpu"),
        (lambda z, fz: (z.lerp_(fz, 0.5), None), ValueError, "must not change z in place"),
        (lambda z, fz: (fz.sub_(z), None), ValueError, "a value that f had returned was changed in place"),
        (lambda z, fz: (fz, torch.zeros(())), ValueError, "the state of Step must have one row per row of z0, 2"),
    ],
)
def test_a_solver_that_breaks_its_contract(step, error, words):
    with pytest.raises(error, match=words):
        solve(lambda z, x: z / 2 + x, zeros(2, 3), args=zeros(2, 3) + 1, solver=Step(step), stop=Stop())


def test_another_librarys_solver_that_writes_into_values_is_refused():
    class Writes(dq.ExternalSolver):
        def run(self, f, z0, max_steps):
            z = z0.clone()
            for _ in range(max_steps):
                z = z + f(z).sub_(z) / 2

    slope = torch.tensor([[0.0], [0.9]])
    with pytest.raises(ValueError, match="changed in place"):
        solve(lambda z: slope * z + 1, torch.zeros(2, 1), solver=Writes(), stop=Stop(max_steps=300))


def test_a_map_that_fills_one_buffer_again_is_refused():
    buffer = torch.empty(1, 1)
    with pytest.raises(ValueError, match="changed in place"):
        solve(lambda z: torch.mul(z, 0.5, out=buffer), torch.ones(1, 1), solver=Relaxed(), stop=Stop())


def test_the_norm_of_a_value_that_overflows_is_no_convergence():
    start = torch.full((2, 3), 1.9e20)
    solution = solve(lambda z: 0.5 * z + 1e20, start, solver=Naive(), stop=Stop())
    assert (solution.status == Status.DIVERGED).all() and torch.equal(solution.value, start)


@pytest.mark.usefixtures("unchecked")
def test_a_compiled_solve_leaves_gradients_enabled():
    weight = torch.nn.Parameter(torch.eye(3) / 2)

    def layer(x):
        return solve(lambda z: torch.tanh(z @ weight + x), torch.zeros(2, 3), solver=Naive(), stop=Stop()).value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(layer, backend="eager")(torch.ones(2, 3))
    assert torch.is_grad_enabled()
    torch.testing.assert_close(compiled, layer(torch.ones(2, 3)))


@pytest.mark.parametrize(
    "start",
    [torch.zeros(2, 3).to_sparse(), torch.zeros(2, 3, dtype=torch.float8_e4m3fn), torch.zeros(2, 3, device="meta")],
    ids=["sparse", "float8", "meta"],
)
def test_a_start_that_cannot_be_computed_with(start):
    with pytest.raises((TypeError, ValueError), match="z0 must be"):
        solve(lambda z: z / 2, start, solver=Naive(), stop=Stop())


def test_taken_rows_of_a_solution_have_their_own_trace():
    x = torch.tensor([[0.0], [0.5], [0.9]])
    solution = solve(lambda z, x: x * z + 1, x * 0, args=x, solver=Naive(), stop=Stop(max_steps=20), trace=True)
    row = take(solution, torch.tensor([2]))
    assert torch.equal(row.stats.trace, solution.stats.trace[:, 2:])
    assert row.stats.iterations.tolist() == [20]
    with pytest.raises(ValueError, match="the outcome of a whole solve, got rows of one"):
        row.explain()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
class TestTorchFunc:
    """Transforms that a solve cannot run under are refused by name; ``grad`` works where the estimator is a graph."""

    def value(self, a, gradient=None):
        z0 = torch.zeros(2, 1, dtype=torch.float64)
        stop = dq.Stop(rtol=1e-10)
        return dq.fixed_point(lambda z: a * torch.tanh(z) + 1, z0, stop=stop, gradient=gradient).value.sum()

    def test_vmap(self):
        with pytest.raises(TypeError, match=r"torch\.func's vmap.*rows of z0"):
            torch.func.vmap(self.value)(torch.tensor([0.1, 0.2], dtype=torch.float64))

    def test_gradients_of_samples(self):
        with pytest.raises(TypeError, match=r"torch\.func's vmap.*rows of z0"):
            a = torch.tensor([0.1, 0.2], dtype=torch.float64)
            torch.func.vmap(torch.func.grad(lambda a: self.value(a, dq.Unrolled())))(a)

    def test_forward_mode(self):
        a = torch.tensor(0.5, dtype=torch.float64)
        with pytest.raises(TypeError, match=r"torch\.func's jvp.*backward"):
            torch.func.jvp(self.value, (a,), (torch.ones_like(a),))
        with torch.autograd.forward_ad.dual_level(), pytest.raises(TypeError, match="jvp"):
            self.value(torch.autograd.forward_ad.make_dual(a, torch.ones_like(a)))

    @pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
    def test_reverse_mode(self, transform):
        a = torch.tensor(0.5, dtype=torch.float64)
        with pytest.raises(TypeError, match=r"torch\.func's grad; Implicit.*Unrolled"):
            transform(self.value)(a)
        with pytest.raises(TypeError, match=r"torch\.func's grad; .*Reversible"):
            stop = dq.Stop(max_steps=4)
            call = {"solver": dq.Coupled(), "stop": stop, "gradient": dq.Reversible()}
            transform(lambda a: dq.fixed_point(lambda z: a * z + 1, torch.zeros(1, 1).double(), **call).value.sum())(a)
        b = a.clone().requires_grad_()
        self.value(b, dq.Implicit(stop=dq.Stop(rtol=1e-12))).backward()
        assert transform(lambda a: self.value(a, dq.Unrolled()))(a).item() == pytest.approx(b.grad.item(), rel=1e-7)


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Chunked(2), dq.Sliding(2), dq.Sequential()])
@pytest.mark.parametrize("mask", [None, torch.tensor([[True, True, False], [True, True, True]])])
def test_models_under_torch_func(sweep, mask):
    model = dq.ImplicitModel(dq.Affine(4)).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 3, 4)

    def value(x):
        return (model(x, sweep=sweep, mask=mask).value * weights).sum()

    known = x.clone().requires_grad_()
    value(known).backward()
    torch.testing.assert_close(torch.func.grad(value)(x), known.grad)
