"""Every row of a batch, whatever the others do, is a plain loop over that row alone, to the last bit."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import RowAffine
from reference_loop import PROPERTY, one_row
from torch import Tensor

from deqseq import Naive, Relaxed, Stop, solve, take
from deqseq.testing.problems import mapped


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
        "norm": st.sampled_from(["token", "row"]),
        "check_every": st.sampled_from([1, 1, 2, 3, 7]),
        "divergence": st.sampled_from([1.5, 100.0, 1e4]),
    }
)
SOLVERS = st.sampled_from([Naive(), Relaxed(0.8), Relaxed(0.5), Relaxed(1.3), Relaxed(1.0)])


@settings(PROPERTY, max_examples=120)
@given(problem=maps(), rule=STOPS, solver=SOLVERS, remove=st.booleans())
def test_every_row_follows_the_rules_to_the_last_bit(problem, rule, solver, remove):
    (f, z0), stop = problem, Stop(**rule)
    solution = solve(mapped if remove else f, z0, solver=solver, stop=stop, args=f if remove else None)
    longest, dim = 0, z0.shape[-1] if z0.ndim > 1 else 1
    for row in range(len(z0)):
        one = torch.tensor([row])
        plain, start = take(f, one), z0[one].reshape(-1, dim)
        loop = lambda z, here, last, plain=plain: plain(z.reshape(z0[:1].shape)).reshape(z.shape)  # noqa: E731
        value, steps, residual, _, status, _ = one_row(loop, start, len(start), 1, stop, solver)
        assert torch.equal(solution.value[row].reshape(-1, dim), value)
        assert solution.status[row].item() == status
        assert solution.stats.iterations[row].item() == steps.max()
        assert solution.stats.residual[row].item() == residual.max()
        longest = max(longest, steps.max().item())
    assert solution.stats.evaluations == longest
