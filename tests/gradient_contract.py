"""What every gradient estimator must do: inherit, and name the dense adjoint that it equals."""

import gc
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from gradient_problems import PROBLEMS, Block, Case, Map, assert_close, dense_fixed_point, gradients, make
from torch import Tensor
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from deqseq import AttachedGradient, Gradient, Naive, Solver, Status, Stop, fixed_point
from deqseq.solution import ConvergenceWarning, Solution

problems = pytest.mark.parametrize("problem", PROBLEMS)
two_problems = pytest.mark.parametrize("problem", ["affine-rows", "tanh-tokens"])


class GradientContract:
    """The suite; a subclass gives the estimator, the adjoint it equals, and its form for bfloat16."""

    gradient: ClassVar[Gradient]
    coarse: ClassVar[Gradient]
    solver: ClassVar[Solver] = Naive()
    stop: ClassVar[Stop] = Stop(rtol=1e-12, max_steps=200)

    def adjoint(self, jacobian: Tensor, grad: Tensor) -> Tensor:
        """What the backward pass makes of an incoming gradient, from the dense Jacobian."""
        raise NotImplementedError

    def solved(self, f: Map, z0: Tensor, **changes: object) -> Solution:
        options = {"solver": self.solver, "stop": self.stop, "gradient": self.gradient, "throw": True}
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

    @problems
    def test_closure_tensors_and_an_injection_with_its_own_graph(self, problem: str) -> None:
        case = make(problem)
        assert_close(self.gradients(case), self.expected(case))

    @problems
    @pytest.mark.parametrize("training", [True, False])
    def test_module_parameters_in_either_mode(self, problem: str, training: bool) -> None:
        case = make(problem)
        block = Block(case).train(training)
        x = case.injection().detach()
        case.loss(self.ours(lambda z: block(z, x), case.z0)).backward()
        expected = gradients(case.loss(self.dense(case.f(x), case.z0)), {k: case.leaves[k] for k in "WUb"})
        assert_close({name: p.grad for name, p in block.named_parameters()}, expected)

    @problems
    def test_value_is_the_fixed_point_and_the_start_is_untouched(self, problem: str) -> None:
        case, z0 = make(problem), make(problem, seed=1).z_star
        before, version = z0.clone(), z0._version
        value = self.ours(case.f(case.injection()), z0)
        torch.testing.assert_close(value, case.z_star, rtol=1e-9, atol=1e-9)
        case.loss(value).backward()
        if isinstance(self.gradient, AttachedGradient):
            self.gradient.attach(case.f(case.injection()), z0).sum().backward()
        assert torch.equal(z0, before)
        assert z0._version == version

    @problems
    def test_sum_of_two_solves(self, problem: str) -> None:
        case, other = make(problem), make(problem, seed=1)
        shared = case.leaves | {"source": other.leaves["source"]}

        def loss(find) -> Tensor:
            first = find(case.f(case.injection()), case.z0)
            second = find(other.f(shared["gain"] * shared["source"], shared), case.z0)
            return case.loss(first + second)

        leaves = case.leaves | {"second": other.leaves["source"]}
        assert_close(gradients(loss(self.ours), leaves), gradients(loss(self.dense), leaves))

    @problems
    def test_a_solve_fed_by_another(self, problem: str) -> None:
        case, other = make(problem), make(problem, seed=1)

        def loss(find) -> Tensor:
            first = find(case.f(case.injection()), case.z0)
            second = find(other.f(torch.sin(first)), case.z0)
            return case.loss(second) + case.loss(first)  # the first is used twice

        leaves = case.leaves | {f"second {key}": other.leaves[key] for key in "WUb"}
        assert_close(gradients(loss(self.ours), leaves), gradients(loss(self.dense), leaves))

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
                value = self.solved(f, case.z0, stop=Stop(rtol=1e-2), gradient=self.coarse).value
            assert value.dtype == torch.float32
            found[enabled] = gradients(case.loss(value), leaves)
        assert {grad.dtype for grad in found[True].values()} == {torch.float32}
        assert_close(found[True], found[False], rtol=0.05)

    @two_problems
    def test_backward_twice_and_accumulation(self, problem: str) -> None:
        case = make(problem)
        loss, once = case.loss(self.value(case)), self.gradients(case)
        loss.backward(retain_graph=True)
        assert_close({key: leaf.grad for key, leaf in case.leaves.items()}, once, rtol=1e-13)
        loss.backward()
        case.loss(self.value(case)).backward()
        thrice = {key: 3 * grad for key, grad in once.items()}
        assert_close({key: leaf.grad for key, leaf in case.leaves.items()}, thrice, rtol=1e-13)

    @two_problems
    def test_frozen_parameters(self, problem: str) -> None:
        case = make(problem)
        expected = self.expected(case)
        for frozen in (("W", "gain", "source"), ("U", "b"), ("W", "U", "b", "gain")):
            for key, leaf in case.leaves.items():
                leaf.grad = None
                leaf.requires_grad_(key not in frozen)
            case.loss(self.value(case)).backward()
            free = {key: leaf.grad for key, leaf in case.leaves.items() if key not in frozen}
            assert_close(free, {key: expected[key] for key in free})
            assert all(case.leaves[key].grad is None for key in frozen)

    @problems
    def test_untouched_rows_and_tokens_get_exact_zeros(self, problem: str) -> None:
        case = make(problem)
        touched = (1, 2) if "tokens" in problem else (1,)
        value = self.value(case)
        grad = gradients(value[touched].square().sum(), {"source": case.leaves["source"]})["source"]
        assert bool((grad[touched] != 0).all())
        assert not bool(grad[[0, 2]].any())
        if "tokens" in problem:  # the mixing is causal: token 3 comes after the one touched
            assert not bool(grad[1, 3].any())

    @problems
    def test_rows_are_independent(self, problem: str) -> None:
        together, alone = make(problem), make(problem)
        grad, row = self.gradients(together), slice(1, 2)
        alone.weights = alone.weights[row]
        value = self.ours(alone.f(alone.injection()[row]), alone.z0[row])
        alone_grad = gradients(alone.loss(value), {"source": alone.leaves["source"]})["source"]
        torch.testing.assert_close(grad["source"][row], alone_grad[row], rtol=1e-9, atol=1e-12)

    @two_problems
    def test_nothing_outlives_the_graph(self, problem: str) -> None:
        case, born = make(problem), []
        block = Block(case)

        def run(backward: bool) -> None:
            x = case.injection()

            def f(z: Tensor) -> Tensor:
                fz = block(z, x)
                born.append(weakref.ref(fz))
                return fz

            value = self.ours(f, case.z0)
            born.extend([weakref.ref(x), weakref.ref(value)])
            if backward:
                case.loss(value).backward()

        run(True)  # torch imports some of itself in its first checkpoint
        gc.collect()
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
        value = checkpoint(lambda x: self.ours(case.f(x), case.z0), case.injection(), use_reentrant=reentrant)
        case.loss(value).backward()
        assert_close({key: leaf.grad for key, leaf in case.leaves.items()}, self.gradients(case))

    def test_with_saved_tensor_hooks(self) -> None:
        case = make("tanh-tokens")
        plain = self.gradients(case)
        with torch.autograd.graph.save_on_cpu():
            value = self.value(case)
        assert_close(gradients(case.loss(value), case.leaves), plain, rtol=0)

    def test_in_other_threads(self) -> None:
        case = make("tanh-rows")
        loss = case.loss(self.value(case))
        plain = self.gradients(case)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: gradients(loss, case.leaves, retain_graph=True), range(4)))
        for grads in found:
            assert_close(grads, plain, rtol=0)

    def test_cached_parametrizations_keep_their_gradients(self) -> None:
        """A map may cache what it computes from its parameters at the first call; weight norm does."""
        torch.manual_seed(0)
        x, found = torch.randn(2, 3, dtype=torch.float64), []
        linear = weight_norm(torch.nn.Linear(3, 3, dtype=torch.float64))
        with torch.no_grad():
            linear.parametrizations.weight.original0.fill_(0.4)
        for cached in (False, True):
            linear.zero_grad()
            with parametrize.cached() if cached else torch.enable_grad():
                if self.gradient.recomputes:  # what is cached inside a checkpoint cannot be recomputed
                    assert linear.weight.requires_grad
                self.ours(lambda z: torch.tanh(linear(z) + x), torch.zeros_like(x)).square().sum().backward()
            found.append({name: p.grad for name, p in linear.named_parameters() if p.grad is not None})
        assert_close(found[1], found[0], rtol=1e-12)

    def test_the_value_may_be_changed_in_place(self) -> None:
        case = make("affine-rows")
        plain, value = gradients(case.loss(1 + self.value(case)), case.leaves), self.value(case)
        value += 1
        assert_close(gradients(case.loss(value), case.leaves), plain, rtol=1e-13)

    def test_an_infinite_incoming_gradient_reaches_the_parameters_and_spares_other_rows(self) -> None:
        case = make("affine-rows")
        wanted = [case.leaves["source"], case.leaves["b"]]
        value = self.value(case)
        incoming = torch.ones_like(value)
        plain, _ = torch.autograd.grad(value, wanted, incoming, retain_graph=True)
        incoming[1, 0] = torch.inf
        source, b = torch.autograd.grad(value, wanted, incoming)
        assert not bool(torch.isfinite(source[1]).all())
        assert not bool(torch.isfinite(b).all())
        torch.testing.assert_close(source[::2], plain[::2], rtol=1e-9, atol=0)

    @pytest.mark.parametrize("exponent", [-90, 70])
    def test_gradients_scale_with_the_loss(self, exponent: int) -> None:
        case = make("affine-rows", torch.float32)
        leaves, f, stop = {"source": case.leaves["source"]}, case.f(case.injection()), Stop(rtol=1e-5)
        loss = case.loss(self.solved(f, case.z0, stop=stop, gradient=self.coarse).value)
        plain = gradients(loss, leaves, retain_graph=True)["source"]
        scaled = gradients(loss * 2.0**exponent, leaves)["source"].double() * 2.0**-exponent
        assert_close({"source": scaled}, {"source": plain.double()}, rtol=0.02)

    @pytest.mark.parametrize("rate", [-1.0, 3.0, 1e308], ids=["cycles", "diverges", "overflows"])
    def test_failed_rows_do_not_touch_the_gradients_of_the_others(self, rate: float) -> None:
        good = [0, 2]
        rates = torch.tensor([[0.5], [rate], [-0.3]], dtype=torch.float64)
        scale, x = (torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in ((), (3, 1)))
        f = lambda z: rates * scale * z * (1 + 0.1 * z) + x / 5  # noqa: E731
        solution = self.solved(f, torch.zeros(3, 1, dtype=torch.float64), throw=False)
        failure = Status.BUDGET_SPENT if rate == -1 else Status.DIVERGED
        assert solution.status.tolist() == [Status.CONVERGED, failure, Status.CONVERGED]
        found = torch.autograd.grad(solution.value[good].sum(), (scale, x))
        f = lambda z: rates[good] * scale * z * (1 + 0.1 * z) + x[good] / 5  # noqa: E731
        expected = torch.autograd.grad(self.ours(f, torch.zeros(2, 1, dtype=torch.float64)).sum(), (scale, x))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        if isinstance(self.gradient, AttachedGradient):
            assert bool(torch.isfinite(solution.value).all())

    @pytest.mark.parametrize("rate", [3.0, 1e308, math.inf], ids=["diverges", "overflows", "is not finite"])
    def test_where_every_row_fails_gradients_are_zero_or_absent(self, rate: float) -> None:
        if not isinstance(self.gradient, AttachedGradient):
            return
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        with pytest.warns(ConvergenceWarning, match="failed for 2 of 2 rows"):
            z0 = torch.zeros(2, 1, dtype=torch.float64)
            value = self.solved(lambda z: rate * scale * (1 + z), z0, throw=False).value
        if math.isinf(rate):  # not even finite at the start
            assert not value.requires_grad
        else:
            assert torch.autograd.grad(value.sum(), scale)[0] == 0
        assert bool(value.isfinite().all())

    def test_nothing_to_differentiate_is_an_error(self) -> None:
        z0, a = torch.zeros(2, 1), torch.tensor(0.5, requires_grad=True)
        for f in (lambda z: z / 2 + 1, lambda z: a.detach() * z + 1):
            with pytest.raises(ValueError, match="finds nothing to differentiate") as error:
                self.solved(f, z0)
            assert str(error.value) == (
                f"gradient={self.gradient} finds nothing to differentiate: f(z) depends on no tensor that "
                "requires a gradient (frozen parameters? a no_grad or detach inside f?). Leave gradient out, "
                "or solve under torch.no_grad()"
            )
            assert not self.solved(f, z0, gradient=None).value.requires_grad

    def test_a_map_that_is_a_leaf_is_differentiated(self) -> None:
        b = torch.ones(2, 1, requires_grad=True)
        (found,) = torch.autograd.grad(self.ours(lambda z: b, torch.zeros(2, 1)).sum(), b)
        torch.testing.assert_close(found[:, 0], self.adjoint(torch.zeros(2, 2), torch.ones(2)))
