"""What the graph of every gradient estimator must withstand: autocast, checkpointing, hooks,
threads, repetition.
"""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from gradient_problems import (
    PROBLEMS,
    assert_close,
    dense_fixed_point,
    exact,
    gradients,
    make,
)
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from deqseq.fixed_point import fixed_point
from deqseq.gradients import Gradient
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

    def adjoint(self, jacobian, grad):
        """What the backward pass makes of an incoming gradient: by default the exact ``(I - J)^-T
        g``.

        Rows and tokens are flattened: ``jacobian`` is ``(size, size)``, ``grad`` and the value
        ``(size,)``.
        """
        return exact(jacobian, grad)

    def solved(self, f, z0, **changes):
        options: dict[str, Any] = {
            "solver": self.solver,
            "stop": self.stop,
            "gradient": self.gradient,
            "throw": True,
        }
        return fixed_point(f, z0, **(options | changes))

    def ours(self, f, z0):
        return self.solved(f, z0).value

    def dense(self, f, z0):
        return dense_fixed_point(f, z0, self.adjoint)

    def value(self, case):
        return self.ours(case.f(case.injection()), case.z0)

    def gradients(self, case):
        return gradients(case.loss(self.value(case)), case.leaves)

    def expected(self, case):
        return gradients(case.loss(self.dense(case.f(case.injection()), case.z0)), case.leaves)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_no_graph_where_gradients_are_off(self, mode):
        case = make("tanh-tokens")
        with mode():
            value = self.value(case)
            torch.testing.assert_close(value, case.z_star, rtol=1e-9, atol=1e-9)
        assert not value.requires_grad

    @problems
    def test_bfloat16_autocast(self, problem):
        case = make(problem, torch.float32)
        leaves = {key: case.leaves[key] for key in ("W", "U", "b", "source")}
        options = {"stop": Stop(rtol=1e-2), "gradient": self.coarse or self.gradient}

        def found(enabled):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                value = self.solved(case.f(case.injection()), case.z0, **options).value
            assert value.dtype == torch.float32
            return gradients(case.loss(value), leaves)

        half = found(True)
        assert {grad.dtype for grad in half.values()} == {torch.float32}
        assert_close(half, found(False), rtol=0.05)

    @two_problems
    def test_backward_twice_and_accumulation(self, problem):
        case = make(problem)
        once = self.gradients(case)
        loss = case.loss(self.value(case))
        loss.backward(retain_graph=True)
        assert_close(case.accumulated, once, rtol=1e-13)
        loss.backward()
        case.loss(self.value(case)).backward()
        assert_close(case.accumulated, {key: 3 * grad for key, grad in once.items()}, rtol=1e-13)

    @two_problems
    def test_nothing_outlives_the_graph(self, problem):
        case = make(problem)
        born = []

        def run(backward):
            x = case.injection()
            plain = case.f(x)

            def f(z):
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
                assert all(ref() is None for ref in born)
        finally:
            gc.enable()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_inside_a_checkpoint(self, reentrant):
        case = make("tanh-tokens")
        value = checkpoint(
            lambda x: self.ours(case.f(x), case.z0), case.injection(), use_reentrant=reentrant
        )
        case.loss(value).backward()
        assert_close(case.accumulated, self.gradients(case))

    def test_with_saved_tensor_hooks(self):
        case = make("tanh-tokens")
        with torch.autograd.graph.save_on_cpu():
            value = self.value(case)
        assert_close(gradients(case.loss(value), case.leaves), self.gradients(case), rtol=0.0)

    def test_in_other_threads(self):
        case = make("tanh-rows")
        loss = case.loss(self.value(case))
        plain = self.gradients(case)
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(gradients, loss, case.leaves, retain_graph=True) for _ in range(4)]
        for run in runs:
            assert_close(run.result(), plain, rtol=0.0)

    def test_cached_parametrizations_keep_their_gradients(self):
        """A map may cache what it computes from its parameters at the first call, as weight norm
        does; what is cached inside a checkpoint cannot be recomputed.
        """
        x = torch.randn(2, 3, dtype=torch.float64)
        linear: Any = weight_norm(torch.nn.Linear(3, 3, dtype=torch.float64))
        linear.parametrizations.weight.original0.data.fill_(0.4)
        leaves = dict(linear.named_parameters())

        def found():
            if getattr(self.gradient, "checkpoint", False):
                assert linear.weight.requires_grad
            value = self.ours(lambda z: torch.tanh(linear(z) + x), torch.zeros_like(x))
            return gradients(value.square().sum(), leaves)

        plain = found()
        with parametrize.cached():
            assert_close(found(), plain, rtol=1e-12)

    def test_the_value_may_be_changed_in_place(self):
        case = make("affine-rows")
        plain = gradients(case.loss(1 + self.value(case)), case.leaves)
        value = self.value(case)
        value += 1
        assert_close(gradients(case.loss(value), case.leaves), plain, rtol=1e-13)
