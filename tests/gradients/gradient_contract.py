"""What every gradient estimator must do."""

import math

import pytest
import torch
from gradient_problems import assert_close, gradients, make
from graph_contract import GraphContract, problems, two_problems

from deqseq.gradients import AttachedGradient
from deqseq.solution import ConvergenceWarning, Status
from deqseq.stop import Stop


class GradientContract(GraphContract):
    """Gradients in float64 against dense ones that share no code with deqseq.

    Subclass it as ``TestName``, and set ``gradient``, as precise as it can be; ``coarse``, its form
    for bfloat16 if it has tolerances of its own; ``solver`` and ``stop`` of the forward pass. An
    estimator that is not exact says what it is by ``adjoint``.
    """

    @problems
    def test_closure_tensors_and_an_injection_with_its_own_graph(self, problem):
        case = make(problem)
        assert_close(self.gradients(case), self.expected(case))

    @problems
    def test_value_is_the_fixed_point_and_the_start_is_untouched(self, problem):
        case = make(problem)
        z0 = make(problem, seed=1).z_star
        before = z0.clone()
        value = self.ours(case.f(case.injection()), z0)
        torch.testing.assert_close(value, case.z_star, rtol=1e-9, atol=1e-9)
        case.loss(value).backward()
        if isinstance(self.gradient, AttachedGradient):
            self.gradient.attach(case.f(case.injection()), z0).sum().backward()
        assert torch.equal(z0, before)

    @problems
    def test_a_solve_fed_by_another(self, problem):
        case = make(problem)
        other = make(problem, seed=1)

        def loss(find):
            first = find(case.f(case.injection()), case.z0)
            second = find(other.f(torch.sin(first)), case.z0)
            return case.loss(second) + case.loss(first)  # the first is used twice

        leaves = case.leaves | {f"second {key}": other.leaves[key] for key in "WUb"}
        assert_close(gradients(loss(self.ours), leaves), gradients(loss(self.dense), leaves))

    def test_a_second_derivative_is_right_or_an_error(self):
        if type(self).adjoint is not GraphContract.adjoint:
            pytest.skip("an estimator that is not exact: neither is the derivative of its gradient")
        a = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        z0 = torch.zeros(2, 1, dtype=torch.float64)

        def first(a):
            value = self.ours(lambda z: torch.tanh(a * z) + 1, z0)
            return torch.autograd.grad(value.sum(), a, create_graph=True)[0]

        try:
            (second,) = torch.autograd.grad(first(a), a)
        except RuntimeError:
            return  # an error is fine: a wrong number is not
        slope = (first(a + 1e-5) - first(a - 1e-5)) / 2e-5
        torch.testing.assert_close(second, slope, rtol=1e-6, atol=0)

    @two_problems
    def test_frozen_parameters(self, problem):
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
    def test_untouched_rows_and_tokens_get_exact_zeros(self, problem):
        case = make(problem)
        touched = (1, 2) if "tokens" in problem else (1,)
        value = self.value(case)
        grad = gradients(value[touched].square().sum(), {"source": case.leaves["source"]})["source"]
        assert (grad[touched] != 0).all()
        assert not grad[[0, 2]].any()
        if "tokens" in problem:  # the mixing is causal: token 3 comes after the one touched
            assert not grad[1, 3].any()

    def test_an_infinite_incoming_gradient_reaches_the_parameters_and_spares_other_rows(self):
        case = make("affine-rows")
        leaves = [case.leaves["source"], case.leaves["b"]]
        value = self.value(case)
        incoming = torch.ones_like(value)
        plain, _ = torch.autograd.grad(value, leaves, incoming, retain_graph=True)
        incoming[1, 0] = torch.inf
        source, b = torch.autograd.grad(value, leaves, incoming)
        assert not source[1].isfinite().all()
        assert not b.isfinite().all()
        torch.testing.assert_close(source[::2], plain[::2], rtol=1e-9, atol=0)

    @pytest.mark.parametrize("exponent", [-90, 70])
    def test_gradients_scale_with_the_loss(self, exponent):
        case = make("affine-rows", torch.float32)
        source = case.leaves["source"]
        options = {"stop": Stop(rtol=1e-5), "gradient": self.coarse or self.gradient}
        loss = case.loss(self.solved(case.f(case.injection()), case.z0, **options).value)
        (plain,) = torch.autograd.grad(loss, source, retain_graph=True)
        (scaled,) = torch.autograd.grad(loss * 2.0**exponent, source)
        unscaled = scaled.double() * 2.0**-exponent
        assert_close({"source": unscaled}, {"source": plain.double()}, rtol=0.02)

    @pytest.mark.parametrize("rate", [-1.0, 3.0, 1e308], ids=["cycles", "diverges", "overflows"])
    @pytest.mark.parametrize("with_args", [False, True], ids=["closure", "args"])
    def test_failed_rows_do_not_touch_the_gradients_of_the_others(self, rate, with_args):
        rates = torch.tensor([[0.5], [rate], [-0.3]], dtype=torch.float64)
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        x = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
        z0 = torch.zeros_like(rates)

        def f(z, args):
            rates, x = args
            return rates * scale * z * (1 + 0.1 * z) + x / 5

        if with_args:
            solution = self.solved(f, z0, args=(rates, x), throw=False)
        else:
            solution = self.solved(lambda z: f(z, (rates, x)), z0, throw=False)
        failure = Status.MAX_STEPS_REACHED if rate == -1 else Status.DIVERGED
        assert solution.status.tolist() == [Status.CONVERGED, failure, Status.CONVERGED]
        alone = self.ours(lambda z: f(z, (rates[::2], x[::2])), z0[::2])
        found = torch.autograd.grad(solution.value[::2].sum(), (scale, x))
        expected = torch.autograd.grad(alone.sum(), (scale, x))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        if isinstance(self.gradient, AttachedGradient):
            assert solution.value.isfinite().all()

    @two_problems
    def test_args_are_differentiated_where_their_finished_rows_are_removed(self, problem):
        """Row 0 has a fixed point of zero, and is removed while the others are solved."""
        case = make(problem)
        case.leaves["b"].data.zero_()
        case.leaves["source"].data[0] = 0
        rows = []

        def f(z, x):
            rows.append(len(z))
            return case.f(x)(z)

        value = self.solved(f, case.z0, args=case.injection()).value
        assert 2 in rows
        assert_close(gradients(case.loss(value), case.leaves), self.expected(case))

    @pytest.mark.parametrize("rate", [3.0, 1e308, math.inf], ids=str)
    def test_where_every_row_fails_gradients_are_zero_or_absent(self, rate):
        """Absent where nothing was finite."""
        if not isinstance(self.gradient, AttachedGradient):
            pytest.skip("an estimator that differentiates the iteration itself")
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        z0 = torch.zeros(2, 1, dtype=torch.float64)
        with pytest.warns(ConvergenceWarning, match="failed for 2 of 2 rows"):
            value = self.solved(lambda z: rate * scale * (1 + z), z0, throw=False).value
        assert value.isfinite().all()
        assert value.requires_grad == math.isfinite(rate)
        if value.requires_grad:
            assert torch.autograd.grad(value.sum(), scale)[0] == 0

    def test_nothing_to_differentiate_is_an_error(self):
        z0 = torch.zeros(2, 1)
        a = torch.tensor(0.5)
        words = r"finds nothing to differentiate.*Leave gradient out"
        with pytest.raises(ValueError, match=words):
            self.solved(lambda z: a * z + 1, z0)
        assert not self.solved(lambda z: a * z + 1, z0, gradient=None).value.requires_grad

    def test_a_map_that_is_a_leaf_is_differentiated(self):
        b = torch.ones(2, 1, requires_grad=True)
        (found,) = torch.autograd.grad(self.ours(lambda z: b, torch.zeros(2, 1)).sum(), b)
        torch.testing.assert_close(found[:, 0], self.adjoint(torch.zeros(2, 2), torch.ones(2)))
