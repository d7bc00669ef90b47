"""Properties of the loop: against a plain one-row reference, in any batch, and token by token."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deqseq import Naive, Relaxed, Solution, Status, Stop, solve, take
from deqseq.testing.problems import CausalChain, Recorded, RowAffine, causal_chain, mapped
from deqseq.testing.solvers import assert_same_rows

# the same examples in every run; phases: without the slow explanation of a failure
PROPERTY = settings(deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


@st.composite
def maps(draw) -> tuple[RowAffine, Tensor]:
    """Rows that converge, alternate, grow or become NaN here and there, and where each of them starts."""
    batch = draw(st.integers(1, 9))
    event = draw(st.sampled_from([(), (1,), (3,), (2, 3), (4, 1), (2, 2, 2)]))
    gains = st.sampled_from([0.0, 0.1, 0.5, -0.5, 0.9, -0.97, -1.0, 1.0, 1.2, -1.6, 3.0, 40.0])
    ceilings = st.sampled_from([math.inf, math.inf, math.inf, 2.5, 30.0])
    elements = st.floats(-3, 3, width=16)
    count = batch * math.prod(event)

    def tensor(strategy: st.SearchStrategy[float], size: int) -> Tensor:
        values = draw(st.lists(strategy, min_size=size, max_size=size))
        return torch.tensor(values, dtype=torch.float64)

    offset, start = (tensor(elements, count).reshape(batch, *event) for _ in range(2))
    return RowAffine(tensor(gains, batch), offset, tensor(ceilings, batch)), start


STOPS = st.fixed_dictionaries(  # made into a Stop by the test: the checks of types draw random numbers
    {
        "rtol": st.sampled_from([0.0, 1e-12, 1e-6, 1e-2, 0.3]),
        "atol": st.sampled_from([0.0, 0.0, 1e-9, 0.05]),
        "max_steps": st.integers(1, 40),
        "per": st.sampled_from(["row", "token"]),
        "check_every": st.sampled_from([1, 1, 2, 3, 7]),
        "divergence": st.sampled_from([1.5, 100.0, 1e4]),
    }
)
SOLVERS = st.sampled_from([Naive(), Relaxed(0.8), Relaxed(0.5), Relaxed(1.3)])


def reference(f: RowAffine, z: Tensor, damping: float, stop: Stop) -> tuple[Tensor, Status, Tensor, Tensor]:
    """One row by the documented rules alone: its value, status, and steps and residual a token."""
    best, best_residual, limit, status = z, torch.tensor(math.inf), None, Status.MAX_STEPS_REACHED
    passed, dates, step = torch.zeros(z.shape[:-1] or 1, dtype=torch.bool).flatten(), torch.zeros(1), 0
    while status == Status.MAX_STEPS_REACHED and step < stop.max_steps:
        step += 1
        fz = f(z)
        if stop.checks(step):
            d, s = (x.abs() if x.ndim == 1 else torch.linalg.vector_norm(x, dim=-1).flatten() for x in (fz - z, fz))
            residual, before = d / s.clamp_min(torch.finfo(s.dtype).tiny), passed
            passed = d <= stop.atol + stop.rtol * s
            dates = torch.where(passed & before, dates, step)
            limit = stop.divergence * max(1.0, d.max().item(), s.max().item()) if limit is None else limit
            if not d.max().item() <= limit:
                status = Status.DIVERGED
            elif bool(passed.all()):
                status, best, best_residual = Status.CONVERGED, fz, residual
            elif residual.max() <= best_residual.max():
                best, best_residual = fz, residual
        moved = torch.lerp(z, fz, damping)
        stay = passed.reshape(z.shape[:1] if z.ndim == 1 else (*z.shape[:-1], 1))
        z = torch.where(stay, z, moved) if stop.per == "token" else moved
    dates = dates if stop.per == "token" else torch.tensor([step])
    return best, status, dates, best_residual.expand(passed.shape)


def solve_both_ways(f: RowAffine, z0: Tensor, solver: Naive | Relaxed, stop: Stop) -> Solution:
    """With and without removing finished rows, which must not differ in any bit."""
    removing = solve(mapped, z0, solver=solver, stop=stop, args=f, trace=True)
    keeping = solve(f, z0, solver=solver, stop=stop, trace=True)
    assert_same_rows(keeping, slice(None), removing)
    torch.testing.assert_close(keeping.stats.trace, removing.stats.trace, rtol=0, atol=0, equal_nan=True)
    assert keeping.stats.evaluations == removing.stats.evaluations
    return removing


@settings(PROPERTY, max_examples=120)
@given(problem=maps(), rule=STOPS, solver=SOLVERS)
def test_every_row_follows_the_rules_to_the_last_bit(problem, rule, solver):
    (f, z0), stop = problem, Stop(**rule)
    solution = solve_both_ways(f, z0, solver, stop)
    damping = solver.damping if isinstance(solver, Relaxed) else 1.0
    for row in range(len(z0)):
        one = torch.tensor([row])
        value, status, steps, residual = reference(take(f, one), z0[one], damping, stop)
        torch.testing.assert_close(solution.value[one], value, rtol=0, atol=0, equal_nan=True)
        assert solution.status[row].item() == status
        assert solution.stats.iterations[row].tolist() == (steps.tolist() if stop.per == "token" else steps.item())
        worst = residual.tolist() if stop.per == "token" else residual.max().item()
        assert solution.stats.residual[row].tolist() == worst


@settings(PROPERTY, max_examples=60)
@given(problem=maps(), rule=STOPS, solver=SOLVERS, data=st.data())
def test_a_row_is_the_same_in_any_batch(problem, rule, solver, data):
    """Any choice of the rows, in any order, some of them twice; the traces agree while both solves run."""
    (f, z0), stop = problem, Stop(**rule)
    together = solve_both_ways(f, z0, solver, stop)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(z0) - 1), min_size=1, max_size=12)))
    others = solve_both_ways(take(f, chosen), z0[chosen], solver, stop)
    assert_same_rows(together, chosen, others)
    assert together.stats.trace is not None
    assert others.stats.trace is not None
    checks = len(others.stats.trace)
    expected = together.stats.trace[:, chosen]
    torch.testing.assert_close(others.stats.trace, expected[:checks], rtol=0, atol=0, equal_nan=True)
    rest = expected[checks:]
    torch.testing.assert_close(rest, others.stats.trace[-1:].expand_as(rest), rtol=0, atol=0, equal_nan=True)


@settings(PROPERTY, max_examples=60)
@given(
    problem=maps(),
    rule=STOPS,
    solver=SOLVERS,
    per=st.sampled_from(["batch", "row", "token"]),
    half=st.booleans(),
)
def test_invariants(problem, rule, solver, per, half):
    dtype = torch.float32 if half else torch.float64
    f, z0 = problem
    f = RowAffine(f.gain.to(dtype), f.offset.to(dtype), f.ceiling.to(dtype))
    stop = Stop(**rule | {"per": per, "atol": 0.0})
    recorded, told = Recorded(f), []
    solution = solve(recorded, z0.to(dtype), solver=solver, stop=stop, callback=told.append)
    steps, residual = solution.stats.iterations.reshape(len(z0), -1), solution.stats.residual.reshape(len(z0), -1)
    assert solution.value.dtype == solution.stats.residual.dtype == dtype
    assert solution.value.shape == z0.shape
    assert solution.value.isfinite().all()
    assert 1 <= solution.stats.evaluations == recorded.evaluations <= stop.max_steps
    assert steps.min() >= min(stop.check_every, stop.max_steps)
    assert steps.max().item() == solution.stats.evaluations
    assert [p.iteration for p in told] == [s for s in range(1, recorded.evaluations + 1) if stop.checks(s)]
    slack = 1 + 4 * torch.finfo(dtype).eps  # d <= rtol s and d / s <= rtol may differ in the last bit
    worst = residual.amax(dim=1)
    assert (worst[solution.converged] <= stop.rtol * slack).all()
    assert (worst[~solution.converged] >= stop.rtol / slack).all()
    assert (steps[solution.status == Status.MAX_STEPS_REACHED].amax(dim=1) == stop.max_steps).all()


class TestPerToken:
    def test_one_more_token_passes_at_each_evaluation(self):
        f = causal_chain(length=6)
        solution = solve(f, zeros(2, 6, 3), solver=Naive(), stop=Stop(rtol=0.0, per="token"))
        assert solution.stats.iterations.tolist() == [[2, 3, 4, 5, 6, 7]] * 2
        assert torch.equal(solution.value, f.fixed_point())
        assert solution.stats.evaluations == 7

    def test_tokens_that_pass_are_frozen_until_their_residual_rises_again(self):
        """All tokens but the first start at rest; the signal reaches token t at evaluation t + 1."""
        chain = causal_chain(batch=1, length=6, own=0.4)
        x = chain.x.clone()
        x[:, 1:] = 0
        f, stop = Recorded(CausalChain(x, own=0.4)), Stop(rtol=0.02, per="token")
        solution = solve(f, zeros(1, 6, 3), solver=Naive(), stop=stop)
        last_moved, resumed = torch.zeros(6, dtype=torch.int64), 0
        for step, (_, _, z, fz) in enumerate(f.calls, start=1):
            passed = ((fz - z).norm(dim=-1) <= 0.02 * fz.norm(dim=-1))[0]
            last_moved[~passed] = step
            if step < f.evaluations:
                following = f.calls[step].z_copy[0]
                assert torch.equal(following[passed], z[0][passed])
                assert torch.equal(following[~passed], fz[0][~passed])
                resumed += int((passed & (last_moved > 0)).sum())
        assert solution.stats.iterations[0].tolist() == (last_moved + 1).tolist()
        assert sorted(last_moved.tolist()) == last_moved.tolist()
        assert solution.stats.iterations[0, -1].item() == solution.stats.evaluations
        assert resumed > 0
        assert solution.converged.all()

    @pytest.mark.parametrize("check_every", [1, 4, 5])
    def test_tokens_that_pass_at_the_first_check_are_dated_by_it(self, check_every):
        stop = Stop(rtol=0.0, per="token", check_every=check_every, max_steps=20)
        f = CausalChain(zeros(1, 3, 2) + 1, coupling=0.0)
        solution = solve(f, zeros(1, 3, 2), solver=Naive(), stop=stop)
        assert solution.stats.iterations.tolist() == [[max(2, check_every)] * 3]

    def test_spent_budgets_date_the_tokens_that_passed(self):
        f = causal_chain(length=6)
        solution = solve(f, zeros(2, 6, 3), solver=Naive(), stop=Stop(rtol=0.0, per="token", max_steps=4))
        assert solution.stats.iterations.tolist() == [[2, 3, 4, 4, 4, 4]] * 2
        assert solution.status.tolist() == [Status.MAX_STEPS_REACHED] * 2
