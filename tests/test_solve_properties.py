"""Every row of a batch, whatever the others do, is a plain loop over that row alone, to the last
bit.
"""

import math

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from problems import RowAffine
from torch import Tensor

from deqseq import Naive, Relaxed, Status, Stop, solve, take
from deqseq.testing.problems import mapped

# the same examples in every run; phases: without the slow explanation of a failure
PROPERTY = settings(
    deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink)
)


@st.composite
def maps(draw) -> tuple[RowAffine, Tensor]:
    """Rows that converge, alternate, grow or become NaN here and there, and where each of them
    starts.
    """
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


STOPS = (
    st.fixed_dictionaries(  # made into a Stop by the test: the checks of types draw random numbers
        {
            "rtol": st.sampled_from([0.0, 1e-12, 1e-6, 1e-2, 0.3]),
            "atol": st.sampled_from([0.0, 0.0, 1e-9, 0.05]),
            "max_steps": st.integers(1, 40),
            "norm": st.sampled_from(["token", "row"]),
            "check_every": st.sampled_from([1, 1, 2, 3, 7]),
            "divergence": st.sampled_from([1.5, 100.0, 1e4]),
        }
    )
)
SOLVERS = st.sampled_from([Naive(), Relaxed(0.8), Relaxed(0.5), Relaxed(1.3), Relaxed(1.0)])


def one_row(
    f: RowAffine, start: Tensor, damping: float, stop: Stop
) -> tuple[Tensor, Status, int, Tensor]:
    """One row by the documented rules alone: its value, status, iterations and residual."""
    z, limit, bound = start, math.nan, None
    for step in range(1, stop.max_steps + 1):
        fz = f(z)
        checked = step % stop.check_every == 0 or step == stop.max_steps
        if checked or (step == 1 and stop.has_tolerance):
            d, s = (
                x.abs() if x.ndim == 1 else torch.linalg.vector_norm(x, dim=-1).flatten()
                for x in (fz - z, fz)
            )
            if stop.norm == "row" and len(d) > 1:
                d, s = d.norm()[None], s.norm()[None]
            limit = (
                stop.divergence * max(1.0, d.max().item(), s.max().item())
                if math.isnan(limit)
                else limit
            )
            bound = torch.maximum(stop.rtol * s if bound is None else bound, d / 2)
            residual = (d / s.clamp_min(torch.finfo(s.dtype).tiny)).nan_to_num(nan=math.inf).max()
            if checked and not d.max().item() <= limit:
                return z if z.isfinite().all() else start, Status.DIVERGED, step, residual
            if checked and bool((d <= stop.atol + torch.minimum(stop.rtol * s, bound)).all()):
                return fz, Status.CONVERGED, step, residual
        z = torch.lerp(z, fz, damping)
    return fz, Status.MAX_STEPS_REACHED, stop.max_steps, residual


@settings(PROPERTY, max_examples=120)
@given(problem=maps(), rule=STOPS, solver=SOLVERS, remove=st.booleans())
def test_every_row_follows_the_rules_to_the_last_bit(problem, rule, solver, remove):
    (f, z0), stop = problem, Stop(**rule)
    solution = solve(
        mapped if remove else f, z0, solver=solver, stop=stop, args=f if remove else None
    )
    damping, longest = solver.damping if isinstance(solver, Relaxed) else 1.0, 0
    for row in range(len(z0)):
        one = torch.tensor([row])
        value, status, steps, residual = one_row(take(f, one), z0[one], damping, stop)
        assert torch.equal(solution.value[one], value)
        assert solution.status[row].item() == status
        assert solution.stats.iterations[row].item() == steps
        assert solution.stats.residual[row].item() == residual
        longest = max(longest, steps)
    assert solution.stats.evaluations == longest
