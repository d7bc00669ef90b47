"""Windows: each row of a batch walks at its own pace, as in a plain loop over that row alone, to
the last bit.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import affine, embedded
from test_solve_properties import PROPERTY

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
    """f(z)_t = rate_t z_t + z_{t-1} / 4 + x_t with rate_t the first number of x_t: the same bits in
    any batch.
    """

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


@dataclass(frozen=True)
class Points(dq.Solver[None]):
    """Half of the way; rows that converge return the point that was tested."""

    returns_point = True

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        return torch.lerp(z, fz, 0.5), None


def one_row(x, block, window, stop, solver):
    """One row by the documented rules: values, statistics of each token, status, and the last
    committed point.
    """
    length, f, every, tiny = len(x), Elementwise(), stop.check_every, torch.finfo(x.dtype).tiny
    z = begun = torch.zeros_like(x)
    value, status, cache, limit = z.clone(), dq.Status.CONVERGED, None, 0.0
    steps, entered, forced = torch.zeros(3, length, dtype=torch.int64)
    residual, forced = torch.full((length,), math.inf).double(), forced.bool()
    bound = torch.full((length,), math.nan).double()
    first = since = count = (
        0  # the first token of the window, the evaluation at which it came there, and evaluations
    )
    while first < length:
        end, count = min(first + block * window, length), count + 1
        here, age = slice(first, end), count - since
        fz = f(z[None, here], f.prepare(x[None, here]), cache)[0][0]
        going = torch.cat([z[:first], solver.step(z[here], fz, None)[0], z[end:]])
        late = age >= stop.max_steps
        due = age % every == 0 or late
        if due or age == 1:
            d, s = (torch.linalg.vector_norm(y, dim=-1) for y in (fz - z[here], fz))
            if stop.norm == "row":  # one number for each token of a block
                d, s = (
                    torch.cat([y.norm().expand(len(y)) for y in x.split(block)]) for x in (d, s)
                )
            if age == 1:
                scale = torch.cat([d, s]).max().clamp_min(1)
                limit = max(limit, -1.0 if scale.isinf() else stop.divergence * scale.item())
            bound[here] = torch.where(bound[here].isnan(), stop.rtol * s, bound[here]).maximum(
                d / 2
            )
        if due:
            passed = [
                bool(one.all())
                for one in (d <= torch.minimum(stop.rtol * s, bound[here])).split(block)
            ]
            leaving = min(block * [*passed, False].index(False), end - first)
            lost = not bool((d <= limit).all())
            spent = late and leaving == 0 and not lost
            whole = first + leaving == end and (age == 1 or end == length)
            if every == 1 and block * window > 1 and count % 2 and not late and not whole:
                leaving = 0  # windows of several tokens move after every second evaluation
            leaving = end - first if lost else min(block, end - first) if spent else leaving
            out = slice(first, first + leaving)
            value[out] = z[out] if solver.returns_point and not spent else fz[:leaving]
            value[out] = value[out] if not lost else (z if z[here].isfinite().all() else begun)[out]
            residual[out] = (d / s.clamp_min(tiny)).nan_to_num(nan=torch.inf)[:leaving]
            steps[out], forced[out] = count - entered[out], spent or lost
            if lost:
                forced[first:] = True
                return value, steps, residual, forced, dq.Status.DIVERGED, None
            if leaving:
                status = max(status, dq.Status.MAX_STEPS_REACHED) if spent else status
                cache, begun = Last(z[None, first + leaving - 1]), going
                entered[end : end + leaving] = since = count
                first += leaving
        z = going
    return value, steps, residual, forced, status, cache.previous[0]


@st.composite
def batches(draw):
    """Rows of unequal length, whose tokens converge at once, slowly, from side to side, or not at
    all.
    """
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    rates = st.sampled_from([0.0, 0.0, 0.3, 0.3, -0.6, 0.9, 1.0, 40.0])
    numbers = st.sampled_from([0.0, 0.5, -1.0, 3.0, 1e3, 1e-3])
    shape = (len(lengths), max(lengths))
    made = [
        draw(st.lists(each, min_size=math.prod(shape), max_size=math.prod(shape)))
        for each in (rates, *[numbers] * 2)
    ]
    x = torch.tensor(made, dtype=torch.float64).reshape(3, *shape).permute(1, 2, 0).contiguous()
    if draw(st.integers(0, 3)) == 0:
        x[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1)), 1] = torch.inf
    return x, torch.arange(shape[1]) < torch.tensor(lengths)[:, None]


STOPS = (
    st.fixed_dictionaries(  # made into a Stop by the test: the checks of types draw random numbers
        {
            "rtol": st.sampled_from([1e-1, 1e-3, 1e-9]),
            "max_steps": st.integers(1, 25),
            "check_every": st.sampled_from([1, 1, 2, 3]),
            "norm": st.sampled_from(["token", "row"]),
            "divergence": st.sampled_from([1.5, 30.0, 1e4]),
        }
    )
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
    model = dq.ImplicitModel(
        Elementwise(), dq.SolveConfig(solver, stop, sweep=Blocks(block, window))
    )
    model.backbone.register_forward_hook(
        lambda _, inputs, __: seen.append(inputs[0].shape[:2].numel())
    )
    with torch.no_grad():
        output = model(x, mask=mask, return_cache=keep)
    stats = output.stats
    assert (stats.evaluations, stats.updates.sum()) == (len(seen), sum(seen))
    for row, real in enumerate(mask):
        value, steps, residual, forced, status, last = one_row(
            x[row, real], block or mask.shape[1], window if block else 1, stop, solver
        )
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
    """With rate 0 and no tolerance token t passes one evaluation after token t - 1; the second row
    has one token.
    """
    x = torch.tensor(
        [[[0.0, 1.0, 0.0]] * 3, [[0.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3]], dtype=torch.float64
    )
    model = dq.ImplicitModel(
        Elementwise(), dq.SolveConfig(dq.Naive(), dq.Stop(rtol=0.0), sweep=dq.Sliding(2))
    )
    with torch.no_grad():
        output = model(x, mask=torch.tensor([[True] * 3, [True, False, False]]))
    assert output.value[..., 1].tolist() == [[1, 1.25, 1.3125], [1, 0, 0]]
    assert output.stats.iterations.tolist() == [[2, 4, 2], [2, 0, 0]]
    assert output.stats.updates.tolist() == [
        [2, 4, 2],
        [4, 0, 0],
    ]  # work beyond its end is that of its last token
    assert output.stats.evaluations == 4
    assert not output.stats.forced.any()


def test_a_window_that_has_spent_its_budget_moves_at_once():
    """The first token passes at the third evaluation; windows move at every second one, but the
    budget is three.
    """
    x = torch.tensor([[[0.5, 1.0, 0.0]] * 3], dtype=torch.float64)
    solve = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=0.2, max_steps=3), sweep=dq.Sliding(2))
    with torch.no_grad():
        assert dq.ImplicitModel(Elementwise(), solve)(x).stats.iterations[0, 0] == 3


@pytest.mark.parametrize(("first", "steps"), [(1000.0, 6), (1.0, 4)])
def test_the_limit_of_divergence_is_that_of_the_largest_scale_so_far(first, steps):
    """The second token grows from a residual of 240 on, twofold; its own limit is 1200, and that of
    the first 5000.
    """
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
