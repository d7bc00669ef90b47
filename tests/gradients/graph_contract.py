"""What the graph of every gradient estimator must withstand: autocast, checkpointing, hooks,
threads, repetition.
"""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from gradient_problems import (
    PROBLEMS,
    Case,
    Map,
    assert_close,
    dense_fixed_point,
    exact,
    gradients,
    make,
)
from torch import Tensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from deqseq.fixed_point import fixed_point
from deqseq.gradients import Gradient
from deqseq.solution import Solution
from deqseq.solvers import Naive, Solver
from deqseq.stop import Stop

problems = pytest.mark.parametrize("problem", PROBLEMS)
two_problems = pytest.mark.parametrize("problem", ["affine-rows", "tanh-tokens"])


class GraphContract:
    """The part of :class:`GradientContract` that is about graphs; see there for the attributes."""

    gradient: ClassVar[Gradient]
    coarse: ClassVar[Gradient | None] = None
    solver: ClassVar[Solver[Any]] = Naive()
    stop: ClassVar[Stop] = Stop(rtol=1e-12, max_steps=200)

    def adjoint(self, jacobian: Tensor, grad: Tensor) -> Tensor:
        """What the backward pass makes of an incoming gradient: by default the exact ``(I - J)^-T
        g``.

        Rows and tokens are flattened: ``jacobian`` is ``(size, size)``, ``grad`` and the value
        ``(size,)``.
        """
        return exact(jacobian, grad)

    def solved(self, f: Callable[..., Tensor], z0: Tensor, **changes: Any) -> Solution:
        options: dict[str, Any] = {
            "solver": self.solver,
            "stop": self.stop,
            "gradient": self.gradient,
            "throw": True,
        }
        return fixed_point(f, z0, **(options | changes))

    def ours(self, f: Map, z0: Tensor) -> Tensor:
        return self.solved(f, z0).value

    def dense(self, f: Map, z0: Tensor) -> Tensor:
        return dense_fixed_point(f, z0, self.adjoint)

    def value(self, case: Case) -> Tensor:
        return self.ours(case.f(case.injection()), case.z0)

    def gradients(self, case: Case) -> dict[str, Tensor]:
        return gradients(case.loss(self.value(case)), case.leaves)

    def expected(self, case: Case) -> dict[str, Tensor]:
        return gradients(case.loss(self.dense(case.f(case.injection()), case.z0)), case.leaves)

    @two_problems
    def test_no_graph_where_gradients_are_off(self, problem: str) -> None:
        case = make(problem)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                value = self.value(case)
                torch.testing.assert_close(value, case.z_star, rtol=1e-9, atol=1e-9)
            assert not value.requires_grad

    @problems
    def test_bfloat16_autocast(self, problem: str) -> None:
        case = make(problem, torch.float32)
        leaves = {key: case.leaves[key] for key in ("W", "U", "b", "source")}
        found = {}
        for enabled in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                f = case.f(case.injection())
                value = self.solved(
                    f, case.z0, stop=Stop(rtol=1e-2), gradient=self.coarse or self.gradient
                ).value
            assert value.dtype == torch.float32
            found[enabled] = gradients(case.loss(value), leaves)
        assert {grad.dtype for grad in found[True].values()} == {torch.float32}
        assert_close(found[True], found[False], rtol=0.05)

    @two_problems
    def test_backward_twice_and_accumulation(self, problem: str) -> None:
        case = make(problem)
        loss = case.loss(self.value(case))
        once = self.gradients(case)
        loss.backward(retain_graph=True)
        assert_close({key: leaf.grad for key, leaf in case.leaves.items()}, once, rtol=1e-13)
        loss.backward()
        case.loss(self.value(case)).backward()
        thrice = {key: 3 * grad for key, grad in once.items()}
        assert_close({key: leaf.grad for key, leaf in case.leaves.items()}, thrice, rtol=1e-13)

    @two_problems
    def test_nothing_outlives_the_graph(self, problem: str) -> None:
        case = make(problem)
        born = []

        def run(backward: bool) -> None:
            x = case.injection()
            plain = case.f(x)

            def f(z: Tensor) -> Tensor:
                fz = plain(z)
                born.append(weakref.ref(fz))
                return fz

            value = self.ours(f, case.z0)
            born.extend([weakref.ref(x), weakref.ref(value)])
            if backward:
                case.loss(value).backward()

        run(True)  # torch imports some of itself in its first checkpoint
        gc.disable()
        try:
            for backward in (True, False):
                born.clear()
                run(backward)
                assert len(born) > 3
                assert [ref() for ref in born if ref() is not None] == []
        finally:
            gc.enable()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_inside_a_checkpoint(self, reentrant: bool) -> None:
        case = make("tanh-tokens")
        value = checkpoint(
            lambda x: self.ours(case.f(x), case.z0), case.injection(), use_reentrant=reentrant
        )
        case.loss(value).backward()
        assert_close({key: leaf.grad for key, leaf in case.leaves.items()}, self.gradients(case))

    def test_with_saved_tensor_hooks(self) -> None:
        case = make("tanh-tokens")
        plain = self.gradients(case)
        with torch.autograd.graph.save_on_cpu():
            value = self.value(case)
        assert_close(gradients(case.loss(value), case.leaves), plain, rtol=0.0)

    def test_in_other_threads(self) -> None:
        case = make("tanh-rows")
        loss = case.loss(self.value(case))
        plain = self.gradients(case)
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(lambda _: gradients(loss, case.leaves, retain_graph=True), range(4))
            )
        for grads in found:
            assert_close(grads, plain, rtol=0.0)

    def test_cached_parametrizations_keep_their_gradients(self) -> None:
        """A map may cache what it computes from its parameters at the first call;
        weight norm does.
        """
        torch.manual_seed(0)
        x = torch.randn(2, 3, dtype=torch.float64)
        found = []
        linear: Any = weight_norm(torch.nn.Linear(3, 3, dtype=torch.float64))
        with torch.no_grad():
            linear.parametrizations.weight.original0.fill_(0.4)
        for cached in (False, True):
            linear.zero_grad()
            with parametrize.cached() if cached else torch.enable_grad():
                # what is cached inside a checkpoint cannot be recomputed
                if getattr(self.gradient, "checkpoint", False):
                    assert linear.weight.requires_grad
                self.ours(
                    lambda z: torch.tanh(linear(z) + x), torch.zeros_like(x)
                ).square().sum().backward()
            found.append(
                {name: p.grad for name, p in linear.named_parameters() if p.grad is not None}
            )
        assert_close(found[1], found[0], rtol=1e-12)

    def test_the_value_may_be_changed_in_place(self) -> None:
        case = make("affine-rows")
        plain = gradients(case.loss(1 + self.value(case)), case.leaves)
        value = self.value(case)
        value += 1
        assert_close(gradients(case.loss(value), case.leaves), plain, rtol=1e-13)
