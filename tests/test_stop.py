"""The stopping rule: residuals worked out by hand, a rule of one's own, and drift."""

import math

import numpy as np
import pytest
import torch

import deqseq as dq
from deqseq import Naive, Status, Stop


@pytest.mark.parametrize("steps", [1, 7])
def test_exactly_checks_once_at_the_end(steps):
    assert Stop.exactly(steps) == Stop(rtol=0.0, atol=0.0, max_steps=steps, check_every=steps)


# residuals


def evaluated(z, fz, **rule):
    """A solve of one evaluation, and the residual of each token."""
    told = []
    stop = Stop(max_steps=1, **rule)
    solution = dq.solve(lambda z: fz, z, solver=Naive(), stop=stop, callback=told.append)
    return solution, told[0].residual


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (3, 1000)])
def test_half_precision_accumulates_in_float32(dtype, shape):
    """Squares of 300 overflow float16, and a thousand of them lose digits in bfloat16."""
    z, fz = (torch.full(shape, size, dtype=dtype) for size in (298.0, 300.0))
    _, residual = evaluated(z, fz)
    torch.testing.assert_close(residual, torch.full((3, 1), 1 / 150), rtol=1e-6, atol=0)


TOKENS = [[1.0, 0.5], [0.1, 0.0]]
CASES = {
    "token": ({}, TOKENS, [1, 0]),
    "atol": ({"atol": 4.5}, TOKENS, [0, 0]),  # together with rtol it is just enough
    "row": ({"norm": "row"}, [[(25.25 / 26) ** 0.5] * 2, [0.1] * 2], [1, 0]),
}


@pytest.mark.parametrize("case", CASES)
def test_residuals_and_verdicts(case):
    """Differences are 5 and 0.5 of norms 5 and 1, then 1 and 0 of norms 10 and 0."""
    rule, residuals, status = CASES[case]
    z = torch.tensor([[[0.0, 0.0], [0.0, 0.5]], [[6.0, 7.0], [0.0, 0.0]]])
    fz = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[6.0, 8.0], [0.0, 0.0]]])
    solution, residual = evaluated(z, fz, rtol=0.1, **rule)
    torch.testing.assert_close(residual, torch.tensor(residuals))
    assert solution.status.tolist() == status


@pytest.mark.parametrize(
    ("z", "fz", "status"),
    [
        (0.0, 0.0, Status.CONVERGED),
        (1.0, 0.0, Status.MAX_STEPS_REACHED),
        (0.0, math.nan, Status.DIVERGED),
    ],
)
def test_zero_and_nan(z, fz, status):
    solution, residual = evaluated(*(torch.full((1, 3, 2), x) for x in (z, fz)), rtol=0.0)
    assert solution.status == status
    assert (residual == 0).all() if status == Status.CONVERGED else (residual > 1e30).all()


def test_an_infinite_state_does_not_pass_although_its_tolerance_is_infinite():
    infinite, first = np.full((2, 1, 1), np.inf), np.ones((1, 1), dtype=bool)
    passed, sound, _ = Stop().judge(infinite, np.zeros((1, 1)), first)
    assert not passed.any() and not sound.any()


# a rule of one's own


class LogitKL(dq.Rule):
    def __init__(self, head):
        self.head = head

    def residual(self, z, fz):
        old = self.head(z).log_softmax(-1)
        new = self.head(fz).log_softmax(-1)
        return (new.exp() * (new - old)).sum(-1)


@pytest.mark.parametrize(
    "sweep", [dq.Simultaneous(), dq.Chunked(3), dq.Sliding(4), dq.Sequential()], ids=str
)
def test_a_rule_of_ones_own_ends_the_solve(sweep):
    """The predictions of the parity example are right long before its states have settled."""
    lm = dq.load_example("parity")
    ids = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 1]])
    with torch.no_grad():
        output = lm(ids, stop=Stop(rtol=1e-3, norm=LogitKL(lm.logits)), sweep=sweep)
        states = lm(ids, stop=Stop(rtol=1e-6), sweep=sweep)
    assert output.converged.all()
    assert torch.equal(output.logits.argmax(-1), ids.cumsum(dim=1) % 2)
    assert output.stats.residual.max() <= 1e-3
    assert output.stats.evaluations < states.stats.evaluations


class Function(dq.Rule):
    """A rule made of a function of the difference."""

    def __init__(self, function):
        self.function = function

    def residual(self, z, fz):
        return self.function(fz - z)


BAD_RULES = {
    "rows": lambda difference: difference.norm(dim=(1, 2)),
    "states": lambda difference: difference,
    "bool": lambda difference: difference.norm(dim=-1) < 1,
    "number": lambda difference: 0.0,
    "None": lambda difference: None,
    "sparse": lambda difference: difference.norm(dim=-1).to_sparse(),
    "another device": lambda difference: difference.norm(dim=-1).to("meta"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bad", BAD_RULES)
def test_a_rule_that_does_not_return_a_number_per_token_is_refused(bad):
    stop = Stop(norm=Function(BAD_RULES[bad]))
    with pytest.raises(
        TypeError, match=r"Function\.residual must return floating-point \(2, 3\), got"
    ):
        dq.solve(torch.cos, torch.zeros(2, 3, 4), solver=Naive(), stop=stop)


def test_what_a_rule_returns_is_the_residual_and_nan_has_diverged():
    slope = torch.tensor([0.5, torch.nan])[:, None, None]
    stop = Stop(rtol=0.1, norm=Function(lambda difference: difference.abs().amax(dim=-1)))
    solution = dq.solve(lambda z: slope * z + 1, torch.zeros(2, 3, 4), solver=Naive(), stop=stop)
    assert solution.status.tolist() == [Status.CONVERGED, Status.DIVERGED]
    assert solution.stats.iterations.tolist() == [5, 1]
    assert solution.stats.residual.tolist() == [1 / 16, math.inf]


class Relative(dq.Rule):
    """What one would write first: 0 / 0 at padding, and in float64."""

    def residual(self, z, fz):
        return (fz - z).double().norm(dim=-1) / fz.double().norm(dim=-1)


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Chunked(4), dq.Sliding(4)], ids=str)
def test_a_relative_rule_in_another_dtype_is_not_disturbed_by_padding(sweep):
    model = dq.ImplicitModel(dq.Affine(4)).eval()
    x = torch.randn(2, 6, 4)
    call = {"mask": torch.arange(6) < torch.tensor([[6], [3]]), "sweep": sweep}
    relative = model(x, stop=Stop(1e-4, norm=Relative()), **call)
    default = model(x, stop=Stop(1e-4), **call)
    assert relative.converged.all()
    assert torch.equal(relative.stats.iterations, default.stats.iterations)
    assert torch.equal(relative.value, default.value)


# drift


@pytest.mark.parametrize("solver", [Naive(), dq.Adaptive(), dq.Relaxed(0.5)], ids=str)
@pytest.mark.parametrize("rtol", [1e-3, 0.03])
@pytest.mark.parametrize("check_every", [1, 100])
@pytest.mark.parametrize("start", [0.0, 30.0])
def test_a_state_that_runs_away_has_not_converged(solver, rtol, check_every, start):
    """The difference stays 1 while the norm grows, until their ratio is within any tolerance."""
    z0 = torch.full((2, 3), start)
    stop = Stop(rtol=rtol, max_steps=2048, check_every=check_every)
    solution = dq.solve(lambda z: z + 1, z0, solver=solver, stop=stop)
    assert solution.status.tolist() == [Status.MAX_STEPS_REACHED] * 2
    assert solution.stats.residual.max() < rtol


@pytest.mark.parametrize(
    ("offset", "start"),
    [(1e5, 0.0), (1e-5, 0.0), (1e-5, 1e4), (1e5, 1e6)],  # the last start is the fixed point
)
def test_large_and_small_fixed_points_are_not_drift(offset, start):
    z0 = torch.full((2, 3), start)
    stop = Stop(rtol=1e-3, max_steps=400)
    solution = dq.solve(lambda z: 0.9 * z + offset, z0, solver=Naive(), stop=stop)
    assert solution.converged.all()


def test_a_state_that_begins_tiny_may_grow_to_one():
    """From 1e-6 it doubles until it settles; 1e4 times its first size is too small a limit."""
    z0 = torch.full((1, 1), 1e-6)
    stop = Stop(rtol=1e-6)
    solution = dq.solve(lambda z: 2 * z / (1 + z), z0, solver=Naive(), stop=stop)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value, torch.ones(1, 1))


def test_an_infinite_limit_lets_a_state_grow_as_far_as_its_dtype():
    stop = dq.Stop(divergence=math.inf, max_steps=60)
    z0 = torch.ones(1, 1, dtype=torch.float64)
    solution = dq.solve(lambda z: 10 * z, z0, solver=dq.Naive(), stop=stop)
    assert solution.status == dq.Status.MAX_STEPS_REACHED
    torch.testing.assert_close(solution.value, 1e60 * z0)
