"""Every row of a batch, whatever the others do, is a plain loop over that row, to the last bit."""

import math

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from problems import RowAffine

from deqseq import Naive, Relaxed, Status, Stop, solve, take
from deqseq.testing.problems import mapped

# the same examples in every run; phases: without the slow explanation of a failure
PROPERTY = settings(
    deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink)
)


def tensor_of(numbers, *shape):
    """Tensors of drawn numbers."""
    size = math.prod(shape)
    lists = st.lists(numbers, min_size=size, max_size=size)
    return lists.map(lambda drawn: torch.tensor(drawn, dtype=torch.float64).reshape(shape))


@st.composite
def maps(draw):
    """Rows that converge, alternate, grow or become NaN here and there, and where they start."""
    batch = draw(st.integers(1, 9))
    event = draw(st.sampled_from([(), (1,), (3,), (2, 3), (4, 1), (2, 2, 2)]))
    gains = st.sampled_from([0.0, 0.1, 0.5, -0.5, 0.9, -0.97, -1.0, 1.0, 1.2, -1.6, 3.0, 40.0])
    ceilings = st.sampled_from([math.inf, math.inf, math.inf, 2.5, 30.0])
    states = tensor_of(st.floats(-3, 3, width=16), batch, *event)
    offset = draw(states)
    start = draw(states)
    return RowAffine(draw(tensor_of(gains, batch)), offset, draw(tensor_of(ceilings, batch))), start


# made into a Stop by the test: the checks of types draw random numbers
STOPS = st.fixed_dictionaries(
    {
        "rtol": st.sampled_from([0.0, 1e-12, 1e-6, 1e-2, 0.3]),
        "atol": st.sampled_from([0.0, 0.0, 1e-9, 0.05]),
        "max_steps": st.integers(1, 40),
        "norm": st.sampled_from(["token", "row"]),
        "check_every": st.sampled_from([1, 1, 2, 3, 7]),
        "divergence": st.sampled_from([1.5, 100.0, 1e4]),
    }
)
SOLVERS = st.sampled_from([Naive(), Relaxed(0.8), Relaxed(0.5), Relaxed(1.3), Relaxed(1.0)])


def norms(x, rule):
    """One number per token, or one for the row."""
    tokens = x.abs() if x.ndim == 1 else torch.linalg.vector_norm(x, dim=-1).flatten()
    return tokens.norm()[None] if rule == "row" and len(tokens) > 1 else tokens


def one_row(f, z0, solver, stop):
    """One row by the documented rules: its value, status, iterations and residual."""
    z = z0
    limit = None
    point = residual_there = None
    for step in range(1, stop.max_steps + 1):
        fz = f(z)
        checked = step % stop.check_every == 0 or step == stop.max_steps
        if checked or (step == 1 and stop.has_tolerance):
            difference = norms(fz - z, stop.norm)
            size = norms(fz, stop.norm)
            if limit is None:
                largest = max(1.0, difference.max().item(), size.max().item())
                limit = stop.divergence * largest
            near = torch.ones_like(difference, dtype=torch.bool)
            if point is not None:
                way = norms(z - point, stop.norm)
                change = norms(fz - z - residual_there, stop.norm)
                near = difference / (stop.rtol * size + stop.atol) * way <= 100 * change
                near = near | (difference <= 8 * torch.finfo(size.dtype).eps * size)
            if stop.has_tolerance:
                point, residual_there = z, fz - z
            relative = difference / size.clamp_min(torch.finfo(size.dtype).tiny)
            residual = relative.nan_to_num(nan=math.inf).max()
        if checked:
            if not difference.max() <= limit:
                return z if z.isfinite().all() else z0, Status.DIVERGED, step, residual
            if ((difference <= stop.atol + stop.rtol * size) & near).all():
                return z, Status.CONVERGED, step, residual
        z, _ = solver.step(z, fz, None)
    return fz, Status.MAX_STEPS_REACHED, stop.max_steps, residual


@settings(PROPERTY, max_examples=120)
@given(problem=maps(), rule=STOPS, solver=SOLVERS, remove=st.booleans())
def test_every_row_follows_the_rules_to_the_last_bit(problem, rule, solver, remove):
    (f, z0), stop, longest = problem, Stop(**rule), 0
    if remove:
        solution = solve(mapped, z0, solver=solver, stop=stop, args=f)
    else:
        solution = solve(f, z0, solver=solver, stop=stop)
    for row in range(len(z0)):
        rows = torch.tensor([row])
        value, status, steps, residual = one_row(take(f, rows), z0[rows], solver, stop)
        assert torch.equal(solution.value[rows], value)
        assert solution.status[row] == status
        assert solution.stats.iterations[row] == steps
        assert solution.stats.residual[row] == residual
        longest = max(longest, steps)
    alone = solution.stats.evaluations - longest  # of rows without those that are removed
    assert alone in (0, int(remove))
