"""Windows: each row of a batch walks at its own pace, as in a plain loop over that row alone, to the last bit."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loop import PROPERTY, one_row
from small_models import affine, embedded

import deqseq as dq


@dataclass(frozen=True)
class Blocks(dq.Sweep):
    """Any two numbers."""

    block: int | None
    window: int


@dataclass(frozen=True)
class Last(dq.Cache):
    previous: torch.Tensor


class Elementwise(dq.Backbone):
    """f(z)_t = rate_t z_t + z_{t-1} / 4 + x_t with rate_t the first number of x_t: the same bits in any batch."""

    d_model = 3

    def prepare(self, x, cache=None, mask=None):
        return x[..., :1], x

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        rate, x = inputs
        before = torch.zeros_like(z[:, :1]) if cache is None else cache.previous[:, None]
        states = torch.cat([before, z], dim=1)
        return rate * z + states[:, :-1] / 4 + x, states

    def advance(self, cache, aux, tokens, counts=None):
        last = torch.full((len(aux),), tokens) if counts is None else counts
        return Last(aux[torch.arange(len(aux)), last])


def map_of(x):
    """The map of one row, after a committed point."""
    f = Elementwise()
    return lambda z, here, last: f(z[None], f.prepare(x[None, here]), None if last is None else Last(last[None]))[0][0]


@dataclass(frozen=True)
class Points(dq.Solver[None]):
    """Half of the way; rows that converge return the point that was tested."""

    returns_point = True

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        return torch.lerp(z, fz, 0.5), None


@st.composite
def batches(draw):
    """Rows of unequal length, whose tokens converge at once, slowly, from side to side, or not at all."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    rates = st.sampled_from([0.0, 0.0, 0.3, 0.3, -0.6, 0.9, 1.0, 40.0])
    numbers = st.sampled_from([0.0, 0.5, -1.0, 3.0, 1e3, 1e-3])
    shape = (len(lengths), max(lengths))
    made = [
        draw(st.lists(each, min_size=math.prod(shape), max_size=math.prod(shape))) for each in (rates, *[numbers] * 2)
    ]
    x = torch.tensor(made, dtype=torch.float64).reshape(3, *shape).permute(1, 2, 0).contiguous()
    if draw(st.integers(0, 3)) == 0:
        x[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1)), 1] = torch.inf
    return x, torch.arange(shape[1]) < torch.tensor(lengths)[:, None]


STOPS = st.fixed_dictionaries(  # made into a Stop by the test: the checks of types draw random numbers
    {
        "rtol": st.sampled_from([1e-1, 1e-3, 1e-9]),
        "max_steps": st.integers(1, 25),
        "check_every": st.sampled_from([1, 1, 2, 3]),
        "norm": st.sampled_from(["token", "row"]),
        "divergence": st.sampled_from([1.5, 30.0, 1e4]),
    }
)


@settings(PROPERTY, max_examples=100)
@given(
    batches(),
    st.sampled_from([None, 1, 2, 3]),
    st.integers(1, 4),
    STOPS,
    st.sampled_from([dq.Naive(), dq.Relaxed(0.5), Points()]),
    st.booleans(),
)
def test_every_row_of_a_batch_is_the_loop_over_it_alone(batch, block, window, rule, solver, keep):
    (x, mask), stop, seen = batch, dq.Stop(**rule), []
    model = dq.ImplicitModel(Elementwise(), dq.SolveConfig(solver, stop, sweep=Blocks(block, window)))
    model.backbone.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:2].numel()))
    with torch.no_grad():
        output = model(x, mask=mask, return_cache=keep)
    stats = output.stats
    assert (stats.evaluations, stats.updates.sum()) == (len(seen), sum(seen))
    pace = (block, window) if block else (mask.shape[1], 1)
    for row, real in enumerate(mask):
        own = x[row, real]
        value, steps, residual, forced, status, last = one_row(map_of(own), torch.zeros_like(own), *pace, stop, solver)
        assert output.status[row] == status
        assert torch.equal(output.value[row, real], value)
        for name, expected in (("iterations", steps), ("forced", forced)):
            assert torch.equal(getattr(stats, name)[row, real], expected), name
            assert not getattr(stats, name)[row, ~real].any()
        # a norm over a row is summed in another order where the row is padded
        torch.testing.assert_close(stats.residual[row, real], residual, rtol=1e-12, atol=0)
        if keep and last is not None:
            assert torch.equal(output.cache.previous[row], last)


def test_statistics_worked_out_by_hand():
    """With rate 0 and no tolerance token t passes one evaluation after token t - 1; the second row has one token."""
    x = torch.tensor([[[0.0, 1.0, 0.0]] * 3, [[0.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3]], dtype=torch.float64)
    model = dq.ImplicitModel(Elementwise(), dq.SolveConfig(dq.Naive(), dq.Stop(rtol=0.0), sweep=dq.Sliding(2)))
    with torch.no_grad():
        output = model(x, mask=torch.tensor([[True] * 3, [True, False, False]]))
    assert output.value[..., 1].tolist() == [[1, 1.25, 1.3125], [1, 0, 0]]
    assert output.stats.iterations.tolist() == [[2, 4, 2], [2, 0, 0]]
    assert output.stats.updates.tolist() == [[2, 4, 2], [4, 0, 0]]  # work beyond its end is that of its last token
    assert output.stats.evaluations == 4
    assert not output.stats.forced.any()


def test_a_window_that_has_spent_its_budget_moves_at_once():
    """The first token passes at the third evaluation; windows move at every second one, but the budget is three."""
    x = torch.tensor([[[0.5, 1.0, 0.0]] * 3], dtype=torch.float64)
    solve = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=0.2, max_steps=3), sweep=dq.Sliding(2))
    with torch.no_grad():
        assert dq.ImplicitModel(Elementwise(), solve)(x).stats.iterations[0, 0] == 3


@pytest.mark.parametrize(("first", "steps"), [(1000.0, 6), (1.0, 4)])
def test_the_limit_of_divergence_is_that_of_the_largest_scale_so_far(first, steps):
    """The second token grows from a residual of 240 on, twofold; its own limit is 1200, and that of the first 5000."""
    x = torch.tensor([[[0.0, first, 0.0], [2.0, 240 - first / 4, 0.0]]], dtype=torch.float64)
    solve = dq.SolveConfig(dq.Naive(), dq.Stop(divergence=5.0), sweep=dq.Sequential())
    with torch.no_grad():
        output = dq.ImplicitModel(Elementwise(), solve)(x)
    assert output.status.tolist() == [dq.Status.DIVERGED]
    assert output.stats.iterations.tolist() == [[2, steps]]


@pytest.mark.parametrize("sweep", [dq.Chunked(4), dq.Sliding(4)], ids=str)
@pytest.mark.parametrize("keep", [False, True])
def test_rows_that_have_ended_leave_unless_their_cache_is_needed(sweep, keep):
    backbone, rows = affine(), []
    backbone.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    mask = torch.arange(20) < torch.tensor([20, 18, 15, 12, 9, 6, 4, 1])[:, None]
    model = dq.ImplicitModel(backbone, dq.SolveConfig(stop=dq.Stop(rtol=1e-10, max_steps=500)))
    with torch.no_grad():
        assert model(embedded(8, 20), sweep=sweep, mask=mask, return_cache=keep).converged.all()
    assert rows == sorted(rows, reverse=True)
    assert (rows[0], rows[-1]) == ((8, 8) if keep else (8, 1))
