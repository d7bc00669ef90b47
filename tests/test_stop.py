"""The stopping rule: what it refuses, when it checks, residuals worked out by hand, and a rule of
one's own.
"""

import math

import pytest
import torch

import deqseq as dq
from deqseq import Stop
from deqseq.stop import relative, token_norms


@pytest.mark.parametrize("steps", [1, 7])
def test_exactly_checks_once_at_the_end(steps):
    assert Stop.exactly(steps) == Stop(rtol=0.0, atol=0.0, max_steps=steps, check_every=steps)


# residuals

Z = torch.tensor([[[0.0, 0.0], [0.0, 0.5]], [[6.0, 7.0], [0.0, 0.0]]])
FZ = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[6.0, 8.0], [0.0, 0.0]]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (3, 1000)])
def test_half_precision_accumulates_in_float32(dtype, shape):
    """Squares of 300 overflow float16, and a thousand of them lose digits in bfloat16."""
    expected = torch.full((3, 1), 300.0 * (1 if len(shape) == 1 else 1000**0.5))
    torch.testing.assert_close(
        token_norms(torch.full(shape, 300.0, dtype=dtype)), expected, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("stop", "block", "residual", "passed"),
    [
        (Stop(rtol=0.1), 2, [[1.0, 0.5], [0.1, 0.0]], [[False, False], [True, True]]),
        (Stop(rtol=0.1, atol=0.4), 2, [[1.0, 0.5], [0.1, 0.0]], [[False, True], [True, True]]),
        (
            Stop(rtol=0.1, norm="row"),
            2,
            [[(25.25 / 26) ** 0.5] * 2, [0.1] * 2],
            [[False] * 2, [True] * 2],
        ),
        (Stop(rtol=0.1, norm="row"), 1, [[1.0, 0.5], [0.1, 0.0]], [[False, False], [True, True]]),
    ],
    ids=["token", "atol", "row", "row of one"],
)
def test_residuals_and_verdicts(stop, block, residual, passed):
    numbers = stop.distances(Z.clone().requires_grad_(), FZ, block)
    torch.testing.assert_close(relative(numbers), torch.tensor(residual))
    assert stop.judge(numbers.numpy(), 0.0, 0.0, True).passed.tolist() == passed


@pytest.mark.parametrize(
    ("z", "fz", "passes"), [(0.0, 0.0, True), (1.0, 0.0, False), (0.0, math.nan, False)]
)
def test_zero_and_nan(z, fz, passes):
    stop = Stop(rtol=0.0)
    numbers = stop.distances(torch.full((1, 3, 2), z), torch.full((1, 3, 2), fz), 3)
    assert stop.judge(numbers.numpy(), 0.0, 0.0, True).passed.tolist() == [[passes] * 3]
    residual = relative(numbers)[0, 0].item()
    assert residual == 0 if passes else not residual < 1e30


# a rule of one's own


class LogitKL(dq.Rule):
    def __init__(self, head):
        self.head = head

    def residual(self, z, fz):
        old, new = self.head(z).log_softmax(-1), self.head(fz).log_softmax(-1)
        return (new.exp() * (new - old)).sum(-1)


@pytest.mark.parametrize(
    "sweep", [dq.Simultaneous(), dq.Chunked(3), dq.Sliding(4), dq.Sequential()], ids=str
)
def test_a_rule_of_ones_own_ends_the_solve(sweep):
    """The predictions of the parity example are right long before its states have settled."""
    lm, ids = (
        dq.load_example("parity"),
        torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0, 0, 1, 0, 0, 1, 0]]),
    )
    stop, called = Stop(rtol=1e-3, norm=LogitKL(lm.logits)), []
    with torch.no_grad():
        output = lm(ids, stop=stop, sweep=sweep, callback=called.append)
        loose = lm(ids, stop=Stop(rtol=1e-6), sweep=sweep)
    assert output.converged.all()
    assert torch.equal(output.logits.argmax(-1), ids.cumsum(dim=1) % 2)
    assert output.stats.residual.max() <= 1e-3
    assert output.stats.evaluations < loose.stats.evaluations
    assert called[-1].residual.shape == (2, 7)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "bad",
    [
        lambda z: z.norm(dim=(1, 2)),
        lambda z: z,
        lambda z: z.norm(dim=-1) < 1,
        lambda z: 0.0,
        lambda z: None,
    ],
    ids=["rows", "states", "bool", "number", "None"],
)
def test_a_rule_that_returns_no_number_per_token_is_refused(bad):
    class Own(dq.Rule):
        def residual(self, z, fz):
            return bad(fz - z)

    with pytest.raises(TypeError, match=r"Own\.residual must return floating-point \(2, 3\), got"):
        dq.solve(torch.cos, torch.zeros(2, 3, 4), solver=dq.Naive(), stop=Stop(norm=Own()))


def test_what_a_rule_returns_is_the_residual_and_nan_has_diverged():
    class Largest(dq.Rule):
        def residual(self, z, fz):
            return (fz - z).abs().amax(dim=-1)

    slope, stop = torch.tensor([0.5, torch.nan])[:, None, None], Stop(rtol=0.1, norm=Largest())
    solution = dq.solve(lambda z: slope * z + 1, torch.zeros(2, 3, 4), solver=dq.Naive(), stop=stop)
    assert solution.status.tolist() == [dq.Status.CONVERGED, dq.Status.DIVERGED]
    assert solution.stats.iterations.tolist() == [5, 1]
    assert solution.stats.residual.tolist() == [1 / 16, math.inf]


class Relative(dq.stop.Rule):
    """What one would write first: 0 / 0 at padding, and in float64."""

    def residual(self, z, fz):
        return (fz - z).double().norm(dim=-1) / fz.double().norm(dim=-1)


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Chunked(4), dq.Sliding(4)], ids=str)
def test_a_relative_rule_in_another_dtype_is_not_disturbed_by_padding(sweep):
    model, x = dq.ImplicitModel(dq.Affine(4)).eval(), torch.randn(2, 6, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    own, ours = (
        model(x, mask=mask, sweep=sweep, stop=dq.Stop(1e-4, norm=norm))
        for norm in (Relative(), "token")
    )
    assert own.converged.all()
    assert torch.equal(own.stats.iterations, ours.stats.iterations)
    assert torch.equal(own.value, ours.value)


# drift


@pytest.mark.parametrize("solver", [dq.Naive(), dq.Adaptive(), dq.Relaxed(0.5)])
@pytest.mark.parametrize("rtol", [1e-3, 0.03])
@pytest.mark.parametrize("check_every", [1, 100])
@pytest.mark.parametrize("start", [0.0, 1.0, 30.0])
def test_a_state_that_runs_away_has_not_converged(solver, rtol, check_every, start):
    """The difference stays 1 while the norm grows, until their ratio is within any tolerance."""
    z0, stop = torch.full((2, 3), start), Stop(rtol=rtol, max_steps=2048, check_every=check_every)
    solution = dq.solve(lambda z: z + 1, z0, solver=solver, stop=stop)
    assert solution.status.tolist() == [dq.Status.MAX_STEPS_REACHED] * 2
    assert solution.stats.residual.max() < rtol
    with pytest.raises(dq.ConvergenceError):
        dq.fixed_point(
            lambda z: z + 1, torch.zeros(2, 3), solver=solver, stop=Stop(rtol=rtol), throw=True
        )


@pytest.mark.parametrize(
    ("f", "start"),
    [
        (lambda z: 0.9 * z + 1e5, torch.zeros(2, 3)),  # the fixed point is a million
        (lambda z: 0.9 * z + 1e-5, torch.zeros(2, 3)),
        (lambda z: 0.9 * z + 1e-5, torch.full((2, 3), 1e4)),
        (lambda z: 0.9 * z + 1e5, torch.full((2, 3), 1e6)),  # a start at the fixed point
    ],
)
def test_large_and_small_fixed_points_are_no_drift(f, start):
    solution = dq.solve(f, start, solver=dq.Naive(), stop=Stop(rtol=1e-3, max_steps=400))
    assert bool(solution.converged.all())
