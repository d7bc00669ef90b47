"""Reversible gives the gradients of Unrolled, without storing the iteration."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deqseq as dq
from deqseq.testing import GradientContract, SolverContract
from deqseq.testing.gradient_problems import assert_close

ESTIMATORS = (dq.Reversible(), dq.Unrolled())
BLOCKS: dict[str, Callable[[], dq.Backbone[Any]]] = {
    "Mamba2": lambda: dq.Mamba2(dq.Mamba2Config(d_model=8, d_state=4, headdim=4)),
    "Llama": lambda: dq.Llama(dq.LlamaConfig(d_model=8, n_layers=1, n_heads=2, mlp_width=16)),
}


class TestReversible(GradientContract):
    gradient, solver = dq.Reversible(), dq.Coupled(0.8)


class TestCoupled(SolverContract):
    solver = dq.Coupled(0.8)


def problem(rows: int = 3, scale: float = 0.3) -> dict[str, Tensor]:
    """Leaves of a tanh map whose rows converge at different speeds: each has a gain of its own."""
    leaves = {"W": scale * torch.randn(4, 4), "x": torch.randn(rows, 4), "z0": 0.1 * torch.randn(rows, 4)}
    leaves["gain"] = torch.linspace(0.1, 1.0, rows)[:, None]
    return {name: leaf.double().requires_grad_() for name, leaf in leaves.items()}


def f(z: Tensor, args: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, gain, W = args
    return torch.tanh(gain * (z @ W) + x)


class Shared(tuple):
    """Arguments of the map with a weight that all rows share."""

    def take_rows(self, rows: Tensor) -> "Shared":
        return Shared((self[0][rows], self[1][rows], self[2]))


def solved(p: dict[str, Tensor], gradient: dq.Gradient, with_args: bool = True, **options: Any) -> dq.Solution:
    args = Shared((p["x"], p["gain"], p["W"]))
    if with_args:
        return dq.fixed_point(f, p["z0"], args=args, gradient=gradient, **options)
    return dq.fixed_point(lambda z: f(z, args), p["z0"], gradient=gradient, **options)


def assert_equal_to_unrolled(p: dict[str, Tensor], rtol: float = 1e-10, **options: Any) -> dq.Solution:
    ours, theirs = (solved(p, gradient, **options) for gradient in ESTIMATORS)
    torch.testing.assert_close(ours.value, theirs.value, rtol=rtol, atol=rtol)
    assert ours.stats.iterations.tolist() == theirs.stats.iterations.tolist()
    assert ours.stats.evaluations == theirs.stats.evaluations
    weights = torch.randn_like(p["z0"])
    found = [torch.autograd.grad((one.value**2 * weights).sum(), list(p.values())) for one in (ours, theirs)]
    assert_close(*(dict(zip(p, grads, strict=True)) for grads in found), rtol=rtol)
    return ours


@pytest.mark.parametrize("damping", [0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("steps", [2, 3, 24, 150])
def test_a_fixed_number_of_evaluations(damping: float, steps: int) -> None:
    assert_equal_to_unrolled(problem(), solver=dq.Coupled(damping), stop=dq.Stop.exactly(steps))


@pytest.mark.parametrize("with_args", [True, False])
@pytest.mark.parametrize("changes", [{}, {"check_every": 3}, {"per": "batch"}, {"norm": "frobenius"}], ids=str)
def test_rows_that_end_early(with_args: bool, changes: dict[str, Any]) -> None:
    p, stop = problem(rows=6), replace(dq.Stop(rtol=1e-6, max_steps=90), **changes)
    solution = assert_equal_to_unrolled(p, with_args=with_args, solver=dq.Coupled(0.8), stop=stop)
    assert bool(solution.converged.all())
    assert len(set(solution.stats.iterations.tolist())) > (1 if "per" not in changes else 0)


def test_rows_whose_best_value_is_not_their_last() -> None:
    """A weight that expands makes the residual rise and fall; the budget ends the solve somewhere."""
    p = problem(rows=8, scale=2.0)
    stop, trace = dq.Stop(rtol=1e-12, max_steps=40), True
    solution = assert_equal_to_unrolled(p, solver=dq.Coupled(0.5), stop=stop, trace=trace)
    assert solution.stats.trace is not None
    best = solution.stats.trace.argmin(dim=0)
    assert bool((best[~solution.converged] < 38).any())
    assert not bool(solution.converged.all())


def test_rows_that_an_exit_rule_ends() -> None:
    p, found, counts = problem(rows=6), [], []
    for gradient in ESTIMATORS:
        solution = gradient.apply(
            f,
            p["z0"],
            args=Shared((p["x"], p["gain"], p["W"])),
            solver=dq.Coupled(0.8),
            stop=dq.Stop(rtol=1e-9, exit=dq.LogitKL(1e-6)),
            readout=lambda fz, args: fz[:, None] + args[0][:, None],
        )
        assert set(solution.status.tolist()) == {dq.Status.EXITED}
        counts.append(solution.stats.iterations.tolist())
        grads = torch.autograd.grad(solution.value.square().sum(), list(p.values()))
        found.append(dict(zip(p, grads, strict=True)))
    assert counts[0] == counts[1]
    assert len(set(counts[0])) > 1
    assert_close(*found, rtol=1e-10)


def test_a_point_that_does_not_move_counts_as_an_evaluation() -> None:
    z0, slopes = torch.zeros(1, 1, requires_grad=True), []
    for gradient in ESTIMATORS:
        stop = dq.Stop.exactly(4)
        value = dq.fixed_point(lambda z: z / 2, z0, solver=dq.Coupled(0.5), stop=stop, gradient=gradient).value
        slopes.append(torch.autograd.grad(value.sum(), z0)[0].item())
    before, now = 1.0, 1.0
    for _ in range(3):
        before, now = now, before / 2 + now / 4
    assert slopes == [now / 2, now / 2]


def test_a_second_derivative() -> None:
    p = problem()

    def value(W: Tensor) -> Tensor:
        stop = dq.Stop.exactly(12)
        return solved(p | {"W": W}, dq.Reversible(), solver=dq.Coupled(0.8), stop=stop).value[0]

    assert torch.autograd.gradgradcheck(value, p["W"], atol=1e-6, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_numbers_of_a_solve_have_the_dtype_of_any_solve(dtype: torch.dtype) -> None:
    found = []
    for gradient in ESTIMATORS:
        p = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in problem().items()}
        stats = solved(p, gradient, solver=dq.Coupled(0.8), stop=dq.Stop(1e-2), trace=True).stats
        found.append([getattr(stats, name).dtype for name in ("residual", "error", "trace")])
    assert found[0] == found[1]


def test_float32_maps_are_reversed_too() -> None:
    found = {}
    for gradient in ESTIMATORS:
        torch.manual_seed(0)
        p = {name: leaf.detach().float().requires_grad_() for name, leaf in problem().items()}
        solution = solved(p, gradient, solver=dq.Coupled(0.8), stop=dq.Stop.exactly(64), trace=True)
        assert solution.value.dtype == solution.stats.residual.dtype == torch.float32
        grads = torch.autograd.grad(solution.value.square().sum(), [p["W"], p["x"]])
        found[gradient] = dict(zip("Wx", grads, strict=True))
    assert_close(*found.values(), rtol=1e-5)


@pytest.mark.parametrize("stop", [dq.Stop.exactly(12), dq.Stop(rtol=0.1, max_steps=24)], ids=["exactly", "early"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, stop: dq.Stop) -> None:
    backbone = BLOCKS[name]().double()
    x, direction = torch.randn(2, 4, 6, 8, dtype=torch.float64)
    x.requires_grad_()
    mask = torch.arange(6) < torch.tensor([[6], [4], [6], [6]])
    leaves = {"x": x} | {key: p for key, p in backbone.named_parameters() if p.requires_grad}
    found, counts = [], []
    for gradient in ESTIMATORS:
        model = dq.ImplicitModel(backbone, dq.SolveConfig(dq.Coupled(0.8), stop, gradient))
        output = model(x, mask=mask)
        grads = torch.autograd.grad((output.value * direction).sum(), list(leaves.values()), allow_unused=True)
        found.append({key: g for key, g in zip(leaves, grads, strict=True) if g is not None})
        assert output.stats is not None
        counts.append(output.stats.iterations.tolist())
    assert_close(found[0], found[1], rtol=1e-10)
    assert counts[0] == counts[1]
    assert stop.rtol == 0 or len(set(counts[0])) > 1


class Created(TorchDispatchMode):
    """The storages of all tensors that are made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self._storages[reference.cdata] = reference, storage.nbytes()
        return output

    def bytes_alive(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def held(gradient: dq.Gradient, steps: int) -> float:
    """What a solve holds until its backward pass, in states."""
    W, x = torch.randn(64, 64).mul(0.05).requires_grad_(), torch.randn(32, 64)
    with Created() as created:
        value = dq.fixed_point(
            lambda z: torch.tanh(z @ W + x),
            torch.zeros_like(x),
            solver=dq.Coupled(0.5),
            stop=dq.Stop.exactly(steps),
            gradient=gradient,
        ).value
        result = created.bytes_alive() / (x.nbytes)
    value.sum().backward()
    return result


def test_memory_does_not_follow_the_number_of_evaluations() -> None:
    assert held(dq.Unrolled(), 22) - held(dq.Unrolled(), 4) > 2 * 17
    assert held(dq.Unrolled(checkpoint=True), 22) - held(dq.Unrolled(checkpoint=True), 4) > 17
    assert held(dq.Reversible(), 22) - held(dq.Reversible(), 4) < 0.1
    assert held(dq.Reversible(), 220) - held(dq.Reversible(), 22) < 9 * 2 + 1  # int64: two states in float32


def test_dropout_inside_the_map_is_drawn_again() -> None:
    p, found = problem(), []
    for gradient in ESTIMATORS:
        torch.manual_seed(1)
        value = dq.fixed_point(
            lambda z: torch.dropout(torch.tanh(z @ p["W"] + p["x"]), 0.5, True),
            p["z0"],
            solver=dq.Coupled(0.8),
            stop=dq.Stop.exactly(20),
            gradient=gradient,
        ).value
        grads = torch.autograd.grad(value.square().sum(), [p["W"], p["x"]])
        found.append(dict(zip("Wx", grads, strict=True)))
    assert_close(*found, rtol=1e-10)


def test_a_map_that_changes_its_values_is_an_error() -> None:
    p, calls = problem(), count()

    def drifting(z: Tensor) -> Tensor:
        return torch.tanh(z @ p["W"] + p["x"] + 0.01 * next(calls))

    stop = dq.Stop.exactly(12)
    value = dq.fixed_point(drifting, p["z0"], solver=dq.Coupled(0.8), stop=stop, gradient=dq.Reversible()).value
    with pytest.raises(RuntimeError, match=r"12 evaluations with damping 0.8: .*deterministic.*checkpoint=True"):
        value.sum().backward()
    assert p["W"].grad is None


def test_what_cannot_be_reversed_is_refused() -> None:
    p = problem()
    with pytest.raises(ValueError, match=r"Reversible needs solver=dq.Coupled\(damping\).*got Relaxed"):
        solved(p, dq.Reversible(), solver=dq.Relaxed(0.8))
    with pytest.raises(ValueError, match=r'Reversible needs Stop.per="row"'):
        solved(p, dq.Reversible(), solver=dq.Coupled(0.8), stop=dq.Stop(per="token"))
    model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(dq.Coupled(0.8), gradient=dq.Reversible()))
    with pytest.raises(ValueError, match=r"Reversible .* needs the Simultaneous sweep"):
        model(torch.ones(1, 3, 4), sweep=dq.Sequential())
    for damping in (0.0, 1.0, 1.2):
        with pytest.raises(ValueError, match=r"Coupled\.damping"):
            dq.Coupled(damping)


def test_a_solve_is_explained_with_the_solver_that_was_given() -> None:
    p = problem(scale=2.0)
    solution = solved(p, dq.Reversible(), solver=dq.Coupled(0.8), stop=dq.Stop(rtol=1e-9, max_steps=4))
    assert solution.problem is not None
    assert solution.problem.solver == dq.Coupled(0.8)
    assert "Remedy" in str(solution.explain())
    solution.value.sum().backward()  # what was tried out has not been recorded
