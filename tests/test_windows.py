"""Windows: each row of a batch walks at its own pace, as in a plain loop over that row, to the last
bit.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import affine, embedded, randn
from test_solve_properties import PROPERTY, tensor_of

import deqseq as dq
from deqseq.models.generation import InWindow
from deqseq.models.output import Evaluation
from deqseq.step import carried

EPS = torch.finfo(torch.float64).eps


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
        first = torch.zeros_like(z[:, :1]) if cache is None else cache.previous[:, None]
        states = torch.cat([first, z], dim=1)
        return rate * z + states[:, :-1] / 4 + x, states

    def advance(self, cache, aux, tokens, counts=None):
        last = torch.full((len(aux),), tokens) if counts is None else counts
        return Last(aux[torch.arange(len(aux)), last])


@dataclass(frozen=True)
class Points(dq.Solver[None]):
    """Half of the way; a token has to pass twice, and models return the point that was tested."""

    combines = True

    def init(self, z0):
        return None

    def step(self, z, fz, state):
        return torch.lerp(z, fz, 0.5), None


def norms(states, block, norm):
    """A norm per token; with the norm of rows, that of its block."""
    sizes = torch.linalg.vector_norm(states, dim=-1)
    if norm == "row":
        sizes = torch.cat([part.norm().expand(len(part)) for part in sizes.split(block)])
    return sizes


def one_row(x, block, window, stop, solver):
    """One row by the documented rules: values, statistics of each token, status, and the last
    committed point.
    """
    length = len(x)
    f = Elementwise()
    tiny = torch.finfo(x.dtype).tiny
    z = begun = torch.zeros_like(x)
    value = z.clone()
    status = dq.Status.CONVERGED
    cache = None
    limit = 0.0
    steps, entered = torch.zeros(2, length, dtype=torch.int64)
    residual, first_size = torch.full((2, length), math.nan).double()
    point, difference = torch.zeros(2, *x.shape).double()  # of the last measurement
    passed_before = torch.zeros(length, dtype=torch.bool)
    forced = torch.zeros(length, dtype=torch.bool)
    first = moved = count = 0  # the window's first token, its last move, and evaluations
    while first < length:
        end = min(first + block * window, length)
        count = count + 1
        here = slice(first, end)
        size = end - first
        age = count - moved
        fz = f(z[None, here], f.prepare(x[None, here]), cache)[0][0]
        proposal = torch.cat([z[:first], solver.step(z[here], fz, None)[0], z[end:]])
        budget_spent = age >= stop.max_steps
        checked = budget_spent or age % stop.check_every == 0
        if checked or age == 1:
            r = fz - z[here]
            d = norms(r, block, stop.norm)
            s = norms(fz, block, stop.norm)
            way = norms(z[here] - point[here], block, stop.norm)
            change = norms(r - difference[here], block, stop.norm)
            point[here], difference[here] = z[here], r
            fresh = first_size[here].isnan()
            sizes = d.maximum(s).clamp_min(1)
            for size_of_token in sizes[fresh & sizes.isfinite()].tolist():
                limit = max(limit, stop.divergence * size_of_token)
            first_size[here] = torch.where(fresh, d.maximum(s), first_size[here])
            allowed = stop.atol + stop.rtol * s
            near = fresh | (d / allowed * way <= 100 * change) | (d <= 8 * EPS * s)
            passed = (d <= allowed) & near
            if solver.combines:
                passed = passed & (s <= 1e4 * first_size[here])
                twice = passed & (passed_before[here] | fresh)
                passed_before[here] = passed
                passed = twice
        if checked:
            blocks = [tokens.all().item() for tokens in passed.split(block)]
            passing = min(block * [*blocks, False].index(False), size)
            diverged = not ((d <= limit) & (s < math.inf)).all()
            whole = passing == size and (age == 1 or end == length)
            # windows of several tokens move after every second evaluation
            waits = stop.check_every == 1 and block * window > 1 and count % 2 == 1
            leaving = 0 if waits and not budget_spent and not whole else passing
            spent = budget_spent and leaving == 0 and not diverged
            if diverged:
                leaving = size
            elif spent:
                leaving = min(block, size)
            out = slice(first, first + leaving)
            if diverged:
                value[out] = (z if z[here].isfinite().all() else begun)[out]
            elif solver.combines and not spent:
                value[out] = z[out]
            else:
                value[out] = fz[:leaving]
            residual[out] = (d / s.clamp_min(tiny)).nan_to_num(nan=math.inf)[:leaving]
            steps[out] = count - entered[out]
            forced[out] = spent or diverged
            if diverged:
                forced[first:], residual[end:] = True, math.inf
                return value, steps, residual, forced, dq.Status.DIVERGED, None
            if spent:
                status = dq.Status.MAX_STEPS_REACHED
            if leaving:
                first = first + leaving
                moved = count
                begun = proposal
                cache, entered[end : end + leaving] = Last(z[None, first - 1]), count
        z = proposal
    return value, steps, residual, forced, status, cache.previous[0]


@st.composite
def batches(draw):
    """Rows of unequal length, whose tokens converge at once, slowly, from side to side, or not at
    all.
    """
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    batch = len(lengths)
    length = max(lengths)
    rates = st.sampled_from([0.0, 0.0, 0.3, 0.3, -0.6, 0.9, 1.0, 40.0])
    numbers = st.sampled_from([0.0, 0.5, -1.0, 3.0, 1e3, 1e-3])
    parts = draw(tensor_of(rates, batch, length, 1)), draw(tensor_of(numbers, batch, length, 2))
    x = torch.cat(parts, dim=2)
    if draw(st.integers(0, 3)) == 0:
        x[draw(st.integers(0, batch - 1)), draw(st.integers(0, length - 1)), 1] = torch.inf
    return x, torch.arange(length) < torch.tensor(lengths)[:, None]


# made into a Stop by the test: the checks of types draw random numbers
STOPS = st.fixed_dictionaries(
    {
        "rtol": st.sampled_from([1e-1, 1e-3, 1e-9]),
        "atol": st.sampled_from([0.0, 0.0, 0.05]),
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
    (x, mask), stop, work = batch, dq.Stop(**rule), []
    config = dq.SolveConfig(solver, stop, sweep=Blocks(block, window))
    model = dq.ImplicitModel(Elementwise(), config)
    model(torch.zeros(2, 8, 3).double())  # the first call checks the backbone, too
    model.backbone.register_forward_hook(
        lambda _, inputs, __: work.append(inputs[0][..., 0].numel())
    )
    with torch.no_grad():
        output = model(x, mask=mask, return_cache=keep)
    stats = output.stats
    assert (stats.evaluations, stats.updates.sum()) == (len(work), sum(work))
    if block is None:
        block = mask.shape[1]
        window = 1
    for row, real in enumerate(mask):
        value, steps, residual, forced, status, last = one_row(
            x[row, real], block, window, stop, solver
        )
        assert output.status[row] == status
        assert torch.equal(output.value[row, real], value)
        assert torch.equal(stats.iterations[row, real], steps)
        assert torch.equal(stats.forced[row, real], forced)
        assert not stats.iterations[row, ~real].any()
        assert not stats.forced[row, ~real].any()
        # a norm over a row is summed in another order where the row is padded
        torch.testing.assert_close(stats.residual[row, real], residual, rtol=1e-12, atol=0)
        if keep and last is not None:
            assert torch.equal(output.cache.previous[row], last)


def test_statistics_worked_out_by_hand():
    """With rate 0 and no tolerance token t passes one evaluation after token t - 1; the second row
    has one token, where work beyond its end is counted.
    """
    x = torch.zeros(2, 3, 3, dtype=torch.float64)
    x[0, :, 1] = x[1, 0, 1] = 1
    config = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=0.0), sweep=dq.Sliding(2))
    with torch.no_grad():
        output = dq.ImplicitModel(Elementwise(), config)(x, mask=x[..., 1] > 0)
    assert output.value[..., 1].tolist() == [[1, 1.25, 1.3125], [1, 0, 0]]
    assert output.stats.iterations.tolist() == [[2, 4, 2], [2, 0, 0]]
    assert output.stats.updates.tolist() == [[2, 4, 2], [4, 0, 0]]
    assert output.stats.evaluations == 4
    assert not output.stats.forced.any()


@pytest.mark.parametrize(("first", "steps"), [(1000.0, 6), (1.0, 4)])
def test_the_limit_of_divergence_is_that_of_the_largest_scale_so_far(first, steps):
    """The second token grows from a residual of 240 on, twofold; its own limit is 1200, and that of
    the first 5000.
    """
    x = torch.tensor([[[0.0, first, 0.0], [2.0, 240 - first / 4, 0.0]]], dtype=torch.float64)
    config = dq.SolveConfig(dq.Naive(), dq.Stop(divergence=5.0), sweep=dq.Sequential())
    with torch.no_grad():
        output = dq.ImplicitModel(Elementwise(), config)(x)
    assert output.status.tolist() == [dq.Status.DIVERGED]
    assert output.stats.iterations.tolist() == [[2, steps]]


@pytest.mark.parametrize("sweep", [dq.Chunked(4), dq.Sliding(4)], ids=str)
@pytest.mark.parametrize("keep", [False, True])
def test_rows_that_have_ended_leave_unless_their_cache_is_needed(sweep, keep):
    backbone = affine()
    rows = []
    backbone.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    mask = torch.arange(20) < torch.tensor([20, 18, 15, 12, 9, 6, 4, 1])[:, None]
    model = dq.ImplicitModel(backbone, dq.SolveConfig(stop=dq.Stop(rtol=1e-10, max_steps=500)))
    with torch.no_grad():
        assert model(embedded(8, 20), sweep=sweep, mask=mask, return_cache=keep).converged.all()
    assert rows == sorted(rows, reverse=True)
    assert (rows[0], rows[-1]) == (8, 8 if keep else 1)


@pytest.mark.usefixtures("unchecked")
def test_a_token_that_was_not_finite_can_pass_later():
    """In decoding a wrong guess may be NaN; its token begins again, with nothing known of it."""

    class Model:
        value = torch.tensor([[[1.0], [math.nan]]])

        def evaluate(self, x, cache, start, iterations, step):
            point = torch.ones(1, 2, 1)
            return Evaluation(point, self.value, self.value, None)

    model, solver, stop = Model(), dq.Naive(), dq.Stop(rtol=0.1)
    decoder = InWindow(model, solver, stop, "zero", Last(torch.zeros(1, 1)), rows=1, width=2)
    right = np.ones((1, 2), dtype=bool)
    counts = []
    for value in (math.nan, 1.01, 1.01):
        model.value = torch.tensor([[[1.0], [value]]])
        _, report = decoder.evaluate(torch.zeros(1, 2, 1))
        counts.append(decoder.judge(report.numpy(), right).counts.item())
    assert counts == [1, 2, 2]


class Told:
    """A model whose evaluations are told: points and values of tokens of one number."""

    def __init__(self):
        self.starts = []

    def evaluate(self, x, cache, start, iterations, step):
        self.starts.append(start)
        return Evaluation(self.point, self.value, self.value, None)

    def commit(self, cache, evaluation, counts):
        return cache


def decoding(solver, rows=1):
    """A window of two tokens, and what it says when their points and values are told."""
    model, cache = Told(), Last(torch.zeros(rows, 1))
    decoder = InWindow(model, solver, dq.Stop(rtol=0.1), "zero", cache, rows, 2)

    def told(point, value):
        model.point, model.value = (torch.tensor(x)[..., None] for x in (point, value))
        _, report = decoder.evaluate(torch.zeros(rows, 2, 1))
        return decoder.judge(report.numpy(), np.ones((rows, 2), dtype=bool))

    return model, decoder, told


def flags(*rows):
    return np.array(rows, dtype=bool)


@pytest.mark.usefixtures("unchecked")
def test_a_token_that_moves_in_a_decoding_window_is_compared_with_itself():
    """It drifts: from 5 to 20 its residual stays 1. That of the token before it was 0."""
    _, decoder, told = decoding(dq.Naive())
    assert told([[1.0, 5.0]], [[1.0, 6.0]]).counts == [1]
    decoder.move(np.array([1]), flags([False, True]), flags(True))
    assert told([[20.0, 0.0]], [[21.0, 1.0]]).counts == [0]


@pytest.mark.usefixtures("unchecked")
def test_a_token_whose_input_changes_is_measured_and_counted_afresh():
    _, decoder, told = decoding(dq.Naive())
    assert told([[1.0, 5.0]], [[1.5, 6.0]]).counts == [0]
    decoder.move(np.array([0]), flags([False, True]), flags(True))
    verdict = told([[1.5, 20.0]], [[1.5, 21.0]])
    assert verdict.counts == [2]
    assert verdict.iterations.tolist() == [[2, 1]]


@pytest.mark.usefixtures("unchecked")
def test_a_token_that_diverges_in_a_decoding_window_begins_again_at_zero():
    model, decoder, told = decoding(dq.Naive())
    for _ in range(2):
        told([[1.0, 3.0]], [[1.5, math.nan]])
        decoder.move(np.array([0]), flags([False, False]), flags(True))
    assert model.starts[1].flatten().tolist() == [1.5, 0.0]


@dataclass(frozen=True)
class Restarting(dq.Solver[torch.Tensor]):
    """Notes which rows begin anew."""

    rows: list

    def init(self, z0):
        return torch.zeros(len(z0))

    def step(self, z, fz, state):
        return fz, state + 1

    def restart(self, state, z, rows):
        self.rows.extend(rows.tolist())
        return super().restart(state, z, rows)


@pytest.mark.usefixtures("unchecked")
def test_the_rows_that_begin_afresh_are_found_where_others_have_left():
    solver = Restarting([])
    _, decoder, told = decoding(solver, rows=3)
    told([[1.0, 5.0]] * 3, [[1.0, 6.0]] * 3)
    changed = flags([False, True], [False, False], [False, True])
    decoder.move(np.array([1, 0, 0]), changed, flags(False, True, True))
    assert solver.rows == [1]


def test_a_row_between_its_checks_does_not_keep_a_measurement_of_other_rows():
    """The first block of row 0 drifts and swings. From check to check only the drift is seen; from
    an evaluation to the next one the residual swings too, and the secant would meet zero.
    """
    x = torch.zeros(2, 16, 3, dtype=torch.float64)
    x[0, 0, 0] = -1  # swings
    x[0, 1, 0] = 1  # drifts
    stop = dq.Stop(rtol=0.5, max_steps=12, check_every=2, norm="row")
    model = dq.ImplicitModel(Elementwise(), dq.SolveConfig(dq.Naive(), stop, sweep=dq.Chunked(2)))
    with torch.no_grad():
        alone, both = model(x[:1]), model(x)
    assert alone.stats.forced[0, :2].all()
    assert torch.equal(both.stats.forced[:1], alone.stats.forced)
    assert torch.equal(both.stats.iterations[:1], alone.stats.iterations)


def test_a_window_of_decoding_begins_where_the_call_says():
    """The model's own start is another one; no token is solved to the end."""
    tokens = torch.tensor([[1, 2, 3]])
    texts = []
    for own_start in ("zero", "input"):
        torch.manual_seed(0)
        config = dq.SolveConfig(start=own_start, stop=dq.Stop(rtol=1e-9, max_steps=2))
        backbone = dq.Llama(dq.LlamaConfig(16, n_heads=2))
        lm = dq.CausalLM(9, dq.ImplicitModel(backbone, config)).eval().double()
        with pytest.warns(dq.ConvergenceWarning):
            texts.append(lm.generate(tokens, max_new_tokens=12, window=4, start="zero"))
    assert torch.equal(texts[0].tokens, texts[1].tokens)
    assert torch.equal(texts[0].iterations, texts[1].iterations)


def test_a_window_is_not_wider_than_the_tokens_that_are_left():
    lm = dq.load_example("text")
    wide = lm.generate(torch.ones(1, 4).long(), max_new_tokens=3, window=10**6)
    narrow = lm.generate(torch.ones(1, 4).long(), max_new_tokens=3, window=3)
    assert torch.equal(wide.tokens, narrow.tokens)
    assert torch.equal(wide.updates, narrow.updates)


@pytest.mark.usefixtures("unchecked")
def test_a_guess_that_changes_leaves_the_step_of_the_tokens_before_it():
    """With f(z) = -1.2 z the best step, 1 / 2.2, is known after two evaluations."""
    _, decoder, told = decoding(dq.Adaptive())
    for z, changed in ((1.0, False), (-1.2, True)):
        told([[z, z]], [[-1.2 * z, -1.2 * z]])
        decoder.move(np.array([0]), flags([False, changed]), flags(True))
    assert decoder._memory.damping.tolist() == [pytest.approx([1 / 2.2, 1])]


def test_a_memory_per_token_moves_along_and_fresh_tokens_begin_anew():
    """Two rows of three tokens; row 0 has moved by one, in row 1 the second token is fresh."""
    solver, z = dq.Adaptive(), randn(2, 3, 4)
    memory = solver.init(z)
    for seed in range(2):
        z, memory = solver.step(z, randn(2, 3, 4, seed=seed), memory)
    source = torch.tensor([[1, 2, 2], [0, 1, 2]])
    fresh = flags([False, False, True], [False, True, False])
    moved = torch.stack([source, torch.from_numpy(fresh)], dim=2)
    new, first = carried(solver, memory, z, moved, fresh), solver.init(z)
    for moved, old, start in zip(new[:3], memory[:3], first[:3], strict=True):
        assert torch.equal(moved[0], torch.stack([old[0, 1], old[0, 2], start[0, 2]]))
        assert torch.equal(moved[1], torch.stack([old[1, 0], start[1, 1], old[1, 2]]))
    for moved, start in zip(new[3:], first[3:], strict=True):
        assert torch.equal(moved, start)
    nothing = carried(solver, memory, z, None, flags([False] * 3, [False] * 3))
    assert nothing is memory
    same = carried(solver, memory, z, None, fresh)
    assert torch.equal(same.residual[0, :2], memory.residual[0, :2])
    assert torch.equal(same.residual[0, 2], first.residual[0, 2])
    with pytest.raises(ValueError, match=r"memory of Adaptive, whose per_token is True, must be"):
        carried(solver, memory._replace(limit=torch.ones(2)), z, None, fresh)
