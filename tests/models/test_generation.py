"""Generation: the argmax of the full forward pass, rows of unequal length, rows that end, draws
that reproduce, and windows, in which the tokens are those of one by one in fewer evaluations.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from problems import SOLVERS
from small_models import (
    affine,
    contractive_llama,
    contractive_mamba2,
    injected_llama,
    recurrent_depth,
)

import deqseq as dq

PROMPT = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(0))


TIGHT = dq.SolveConfig(dq.Relaxed(0.9), dq.Stop(rtol=1e-6, max_steps=500))
IMPLICIT = {
    "Affine": lambda: dq.ImplicitModel(affine(), TIGHT),
    "Mamba2": lambda: dq.ImplicitModel(contractive_mamba2(), TIGHT),
    "Llama": lambda: dq.ImplicitModel(contractive_llama(), TIGHT),
    "Injected": lambda: dq.ImplicitModel(injected_llama(), TIGHT),
    "RecurrentDepth": lambda: recurrent_depth(
        dq.ImplicitModel(injected_llama(), TIGHT), dq.layers.RMSNorm(8)
    ),
}
MODELS = IMPLICIT | {
    "explicit": lambda: dq.ExplicitModel(contractive_llama(injection=False)),
    "fixed depth": lambda: recurrent_depth(
        dq.ExplicitModel(dq.Looped(injected_llama(), 3, start="zero"))
    ),
}


def language_model(name, **options):
    model = MODELS[name]()
    torch.manual_seed(3)
    return dq.CausalLM(13, model, embedding_std=1.0, **options).double().eval()


@pytest.fixture(params=IMPLICIT, scope="module")
def lm(request):
    return language_model(request.param)


@pytest.fixture(scope="module")
def mamba():
    return language_model("Mamba2")


@pytest.fixture
def shapes(mamba):
    """Rows and tokens of every evaluation."""
    shapes = []
    hook = mamba.model.backbone.register_forward_hook(
        lambda module, inputs, _: shapes.append(inputs[0].shape[:2])
    )
    yield shapes
    hook.remove()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_argmax_of_the_full_forward(name):
    lm = language_model(name, embedding_scale=3.0)
    generated = lm.generate(PROMPT, max_new_tokens=8)
    whole = torch.cat([PROMPT, generated.tokens], dim=1)
    with torch.no_grad():
        logits = lm(whole[:, :-1]).logits
    assert torch.equal(logits[:, 5:].argmax(-1), generated.tokens)
    assert len(generated.tokens.unique()) > 1
    assert generated.lengths.tolist() == [8] * 4
    if lm.core is None:
        assert generated.iterations is generated.converged is None
    else:
        assert generated.converged.all()
        assert generated.iterations.shape == (4, 8)
        assert generated.iterations.min() >= 2


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 16),
        ({"solve": TIGHT}, 16),
        ({"sweep": dq.Simultaneous()}, 18),
        ({"sweep": dq.Chunked(2)}, 2),
        ({"sweep": dq.Sequential()}, 1),
        ({"sweep": dq.Sliding(3)}, 3),
    ],
)
def test_the_prompt_is_solved_as_asked(mamba, shapes, options, width):
    prompt = PROMPT.repeat(1, 3)
    expected = mamba(prompt).logits[:, -1].argmax(-1)
    shapes.clear()
    generated = mamba.generate(prompt, max_new_tokens=1, **options)
    assert torch.equal(generated.tokens[:, 0], expected)
    assert max(tokens for _, tokens in shapes) == width


@pytest.mark.parametrize("window", [1, 4])
def test_a_token_that_spends_its_budget_is_committed_and_flagged(mamba, window):
    stop = dq.Stop(rtol=1e-13, max_steps=6)
    solve = dq.SolveConfig(stop=stop, sweep=dq.Sequential())
    generated = mamba.generate(PROMPT, max_new_tokens=3, solve=solve, window=window)
    assert not generated.converged.any()
    assert generated.evaluations == 2 * 6
    # in a window the input of a later token is known before its last iterations
    assert (generated.iterations[:, :2] == 6).all()
    stop = dq.Stop.exactly(3)
    exactly = mamba.generate(PROMPT, max_new_tokens=3, solve=solve, stop=stop)
    assert (exactly.iterations == 3).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_is_generated_as_the_row_without_padding_alone(name, side):
    lm = language_model(name)
    mask = torch.arange(6) < torch.tensor([6, 1, 4, 6])[:, None]
    if side == "left":
        mask = mask.flip(1)
    together = lm.generate(PROMPT, mask=mask, max_new_tokens=4).tokens
    for row, real in enumerate(mask):
        alone = lm.generate(PROMPT[row, real][None], max_new_tokens=4).tokens
        assert torch.equal(alone[0], together[row])


def test_rows_that_have_ended_are_removed(mamba, shapes):
    rows = mamba.generate(PROMPT, max_new_tokens=8).rows()
    stop = rows[1][2]
    ended = mamba.generate(PROMPT, max_new_tokens=8, stop_tokens=[stop], pad_token=12)
    for row, tokens in enumerate(rows):
        length = [*tokens, stop].index(stop) + 1
        assert ended.rows()[row] == tokens[:length]
        assert ended.lengths[row] == min(length, 8)
        assert (ended.tokens[row, length:] == 12).all()
        assert (ended.iterations[row, length:] == 0).all()
        assert ended.converged[row, length:].all()
    assert shapes[-1][0] < 4
    ended = mamba.generate(PROMPT, max_new_tokens=50, stop_tokens=range(13))
    assert ended.tokens.shape == (4, 1)


def test_evaluations_after_the_prompt_are_counted(mamba, shapes):
    assert mamba.generate(PROMPT, max_new_tokens=1).evaluations == 0
    prompt = len(shapes)
    generated = mamba.generate(PROMPT, max_new_tokens=8, window=1)
    iterations = generated.iterations[:, 1:]
    assert generated.evaluations == len(shapes) - 2 * prompt == iterations.amax(0).sum()
    assert torch.equal(generated.updates, iterations.sum(1))
    assert not generated.guessed.any()


def test_seeds_reproduce_and_the_draws_of_a_row_do_not_depend_on_the_others(mamba):
    def drawn(ids, seed, stop_tokens=()):
        generated = mamba.generate(
            ids, max_new_tokens=6, temperature=1.0, seed=seed, stop_tokens=stop_tokens
        )
        return generated.rows()

    rows = drawn(PROMPT, 3)
    assert drawn(PROMPT, 3) == rows != drawn(PROMPT, 4)
    assert drawn(PROMPT[:2], 3) == rows[:2]
    ended = drawn(PROMPT, 3, stop_tokens=rows[0][1])
    assert len(ended[0]) <= 2
    for tokens, whole in zip(ended, rows, strict=True):
        assert tokens == whole[: len(tokens)]


@torch.no_grad()
def with_logits(*logits, model=dq.ExplicitModel):
    """A language model that predicts the same after every prompt of one token."""
    lm = dq.CausalLM(len(logits), model(dq.Affine(1)), tied=False)
    lm.embedding.weight.fill_(1)
    state = lm.model(torch.ones(1, 1, 1)).value
    lm.head.weight.copy_(torch.tensor(logits)[:, None] / state[0])
    return lm


def drawn(lm, rows, **options):
    prompt = torch.zeros(rows, 1, dtype=torch.int64)
    return lm.generate(prompt, **{"max_new_tokens": 1, "seed": 1} | options).tokens


@pytest.mark.parametrize(
    ("option", "value", "count"),
    [
        ("temperature", 0.5, 5),
        ("temperature", 2.0, 5),
        ("top_k", 2, 2),
        ("top_p", 0.1, 1),
        ("top_p", 0.6, 2),
        ("top_p", 0.79, 3),
        ("top_p", 1.0, 5),
    ],
)
def test_draws_are_those_of_the_softmax_of_the_most_probable_tokens(option, value, count):
    """At temperature 1 the probabilities are .58, .21, .13, .09 and .03 in order."""
    options = {"temperature": 1.0, option: value}
    logits = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.5])
    tokens = drawn(with_logits(*logits), 40_000, **options)
    left_out = logits.argsort(descending=True)[count:]
    logits = (logits / options["temperature"]).index_fill(0, left_out, -torch.inf)
    shares = tokens.flatten().bincount(minlength=5) / 40_000
    assert (shares - logits.softmax(-1)).abs().max() < 0.01  # 4 standard deviations


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(0.0, None), (1e-40, None), (1e-46, None), (1.0, 1e-60)]
)
@pytest.mark.parametrize("logits", [(0.0, 1e30, -1e30), (20.0, 30.0, 10.0)])
def test_small_numbers_take_the_most_probable_token(temperature, top_p, logits):
    tokens = drawn(with_logits(*logits), 9, temperature=temperature, top_p=top_p)
    assert tokens.unique().tolist() == [1]


def test_draws_depend_on_the_seed_the_row_and_the_position():
    lm = with_logits(*[0.0] * 100_000)
    seeds = (3, 4, -(2**63), 2**64 - 1)
    tokens = [drawn(lm, 3, max_new_tokens=3, temperature=1.0, seed=seed) for seed in seeds]
    assert len(torch.stack(tokens).unique()) == 4 * 3 * 3


@pytest.mark.parametrize("model", [dq.ImplicitModel, dq.ExplicitModel])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(model, temperature):
    lm = with_logits(torch.nan, 0.0, model=model)
    with pytest.raises(ValueError, match=r"logits of rows \[0, 1\] are not finite"):
        drawn(lm, 2, temperature=temperature)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_tokens": [13]}, r"stop_tokens must .* 0\.\.12, got 13"),
        ({"top_k": 3}, "top_k and top_p need a temperature above 0"),
    ],
)
def test_options_that_cannot_be_honoured_are_named(mamba, options, message):
    with pytest.raises(ValueError, match=message):
        mamba.generate(PROMPT, max_new_tokens=2, **options)


LEFT = torch.arange(6) >= torch.tensor([0, 5, 2, 0])[:, None]
WAYS = {
    "greedy": {},
    "left": {"mask": LEFT, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 6},
    "right": {"mask": LEFT.flip(1), "temperature": 1.0, "seed": 7},
    "ended": {"stop_tokens": [2, 5, 7], "pad_token": 12, "temperature": 1.0, "seed": 8},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_window_gives_the_same_tokens(lm, way):
    one = lm.generate(PROMPT, max_new_tokens=20, window=1, **WAYS[way])
    assert len(one.tokens.unique()) > 1
    for window in (2, 64):
        some = lm.generate(PROMPT, max_new_tokens=20, window=window, **WAYS[way])
        assert some.rows() == one.rows()
        assert torch.equal(some.tokens, one.tokens)
        assert some.converged.all()
        assert some.evaluations < one.evaluations
        assert (some.guessed < some.lengths).all()
        assert (some.updates % min(window, 19) == 0).all()
        assert (some.updates <= window * some.evaluations).all()
    assert some.guessed.sum() > 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_takes_a_window(mamba, solver):
    one = mamba.generate(PROMPT, max_new_tokens=12, window=1, solver=solver)
    some = mamba.generate(PROMPT, max_new_tokens=12, window=5, solver=solver)
    assert torch.equal(one.tokens, some.tokens)
    assert some.converged.all()


def test_prompts_go_on_from_a_cache(lm):
    whole = lm.generate(PROMPT, max_new_tokens=8).tokens
    cache = lm(PROMPT[:, :4], return_cache=True).cache
    for window in (1, 4):
        rest = lm.generate(PROMPT[:, 4:], cache=cache, max_new_tokens=8, window=window)
        assert torch.equal(rest.tokens, whole)


@pytest.mark.parametrize(("name", "least"), [("Mamba2", 1), ("RecurrentDepth", 2)])
def test_tokens_are_chosen_at_every_check(name, least):
    """The layers around a core run for every choice, so it is made at every second iteration at
    least.
    """
    lm = language_model(name)
    tokens = []
    for every in (1, 2, 3):
        stop = dq.Stop(rtol=1e-6, max_steps=500, check_every=every)
        generated = lm.generate(PROMPT, max_new_tokens=12, window=4, stop=stop)
        assert generated.evaluations % max(every, least) == 0
        tokens.append(generated.tokens)
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


class Alternating(dq.Affine):
    """``f(z) = x - 0.9 z``: the best step ends it at once, plain iteration is slow."""

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        _, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return inputs.injection - 0.9 * z, aux


class Drifting(dq.Affine):
    """``f(z) = z + u (1 + 0.002 tanh(z))``, which has no fixed point."""

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        _, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return z + inputs.injection * (1 + 0.002 * z.tanh()), aux


def test_a_jump_between_two_choices_converges_nowhere():
    """Of points that are combined the first one that is measured would pass at once."""
    stop = dq.Stop(1e-2, check_every=3, max_steps=48)
    core = dq.ImplicitModel(Drifting(8), dq.SolveConfig(dq.Anderson(), stop))
    lm = dq.CausalLM(13, core, embedding_std=1.0).double()
    with pytest.warns(dq.ConvergenceWarning):
        generated = lm.generate(PROMPT, max_new_tokens=9, window=4)
    assert not generated.converged.any()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_solver_makes_the_steps_between_two_choices(every):
    core = dq.ImplicitModel(Alternating(8), dq.SolveConfig(stop=dq.Stop(1e-6, check_every=every)))
    for model in (core, recurrent_depth(core)):
        lm = dq.CausalLM(13, model, embedding_std=1.0).double()
        generated = lm.generate(PROMPT, max_new_tokens=12, window=4)
        assert generated.converged.all()
        assert generated.evaluations < 60


def test_no_check_is_later_than_the_budget(mamba):
    stop = dq.Stop(rtol=1e-13, max_steps=6, check_every=4)
    generated = mamba.generate(PROMPT, max_new_tokens=5, window=4, stop=stop)
    assert generated.evaluations == 4 * 4  # a check after 8 would be too late
    assert generated.updates.tolist() == [4 * 16] * 4


class Fragile(dq.Affine):
    """An affine map that is not finite at tokens with one embedding, and notes that it met one."""

    met = False

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        fz, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        bad = inputs.injection.norm(dim=-1) > 100
        self.met = self.met or bool(bad.any())
        return fz.masked_fill(bad[..., None], torch.nan), aux


@pytest.mark.parametrize(("seed", "only_guessed"), [(8, False), (11, True)])
def test_only_a_committed_token_that_diverges_is_flagged(seed, only_guessed):
    torch.manual_seed(seed)
    backbone = Fragile(8)
    prompt = PROMPT.clamp(max=11)
    lm = dq.CausalLM(13, dq.ImplicitModel(backbone, TIGHT), embedding_std=1.0, tied=False)
    lm.double().eval()
    lm.head.weight.data.normal_()
    lm.embedding.weight.data[12] *= 1e4
    one = lm.generate(prompt, max_new_tokens=16, window=1)
    assert backbone.met != only_guessed
    some = lm.generate(prompt, max_new_tokens=16, window=6)
    assert backbone.met
    assert torch.equal(one.tokens, some.tokens)
    assert torch.equal(one.converged, some.converged)
    assert one.converged.all() == only_guessed


@dataclass(frozen=True)
class Nothing(dq.backbones.Cache):
    """A cache without tensors."""


class Pointwise(dq.Backbone):
    """A map whose tokens do not see one another."""

    d_model = 8

    def prepare(self, x, cache=None, mask=None):
        return x

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        return torch.tanh(z.roll(1, dims=2) / 4 + inputs), z

    def advance(self, cache, aux, tokens, counts=None):
        return Nothing()


@pytest.mark.parametrize("window", [1, 4])
def test_a_cache_need_not_have_tensors(window):
    lm = dq.CausalLM(13, dq.ImplicitModel(Pointwise()), embedding_std=1.0).eval()
    first = lm.generate(PROMPT, max_new_tokens=1).tokens[:, 0]
    assert len(first.unique()) > 1
    made = lm.generate(PROMPT, max_new_tokens=6, window=window, stop_tokens=first[0].item())
    assert (made.lengths[first == first[0]] == 1).all()
    assert (made.lengths[first != first[0]] > 1).all()


@dataclass(frozen=True)
class Breaks(dq.Naive):
    """After the prompt, its next point is not finite in rows whose states are large."""

    prompt_is_solved: list

    def step(self, z, fz, state):
        large = (fz.norm(dim=-1) > 100).any(dim=1) & bool(self.prompt_is_solved)
        return fz.masked_fill(large[:, None, None], torch.nan), state


def test_a_step_that_is_not_finite_ends_its_own_row_alone():
    lm = dq.CausalLM(13, dq.ImplicitModel(dq.Affine(8), TIGHT), embedding_std=1.0, tied=False)
    lm.double().eval()
    lm.head.weight.data.normal_()
    lm.head.weight.data[12] = 0  # no row chooses it
    lm.embedding.weight.data[12] *= 1e4
    prompt = PROMPT.clamp(max=11)
    alone = lm.generate(prompt, max_new_tokens=4, window=4)
    prompt[0, -1] = 12
    told = []
    broken = {"solver": Breaks(told), "callback": told.append}
    made = lm.generate(prompt, max_new_tokens=4, window=4, **broken)
    assert not made.converged[0].all()
    assert made.converged[1:].all()
    assert torch.equal(made.tokens[1:], alone.tokens[1:])


class Late(dq.Affine):
    """An affine map that swings for some evaluations before."""

    swings = 0

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        fz, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        self.swings -= 1
        return fz if self.swings < 0 else 1 - z, aux


def test_tokens_that_failed_are_warned_of_when_later_ones_converged():
    stop = dq.Stop(rtol=1e-6, max_steps=60)
    backbone = Late(8)
    lm = dq.CausalLM(13, dq.ImplicitModel(backbone, dq.SolveConfig(dq.Naive(), stop))).eval()

    def swing(new):
        if not new.positions.any():  # those of the prompt
            backbone.swings = 100

    with pytest.warns(dq.ConvergenceWarning):
        generated = lm.double().generate(PROMPT, max_new_tokens=9, window=3, callback=swing)
    assert generated.converged[:, [0, -1]].all()
    assert not generated.converged[:, 1].any()


@pytest.mark.parametrize("window", [2, 8])
def test_callbacks_are_told_every_token_once_and_no_guess(mamba, window):
    told = [[] for _ in PROMPT]

    def note(new):
        assert len(new.rows)
        for row, position, token in zip(new.rows, new.positions, new.tokens, strict=True):
            assert position == len(told[row])
            told[row].append(token.item())

    options = {"window": window, "stop_tokens": [2], "callback": note}
    assert mamba.generate(PROMPT, max_new_tokens=20, **options).rows() == told


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (dq.ExplicitModel, {}, "an explicit model"),
        (dq.ImplicitModel, {"stop": dq.Stop.exactly(3)}, "without a tolerance"),
        (dq.ImplicitModel, {"start": "input"}, 'start="input"'),
    ],
)
def test_where_a_window_cannot_be_the_default_is_none(model, options, reason):
    lm = dq.CausalLM(13, model(contractive_llama())).double().eval()
    with pytest.raises(ValueError, match=f"window must be 1, got 2: .*{reason}"):
        lm.generate(PROMPT, max_new_tokens=2, window=2, **options)
    default = lm.generate(PROMPT, max_new_tokens=3, **options)
    one = lm.generate(PROMPT, max_new_tokens=3, window=1, **options)
    assert torch.equal(default.tokens, one.tokens)


INSIDE = {
    "autocast": lambda lm: torch.autocast("cpu", torch.bfloat16),
    "inference": lambda lm: torch.inference_mode(),
    "bfloat16": lambda lm: nullcontext(lm.bfloat16()),
}


@pytest.mark.parametrize("context", INSIDE)
def test_a_window_works_inside(context):
    lm = dq.load_example("text")
    prompt = torch.tensor([list(b"ROMEO: "), list(b"KING H:")])
    stop = dq.Stop(rtol=2e-2)
    with INSIDE[context](lm):
        generated = lm.generate(prompt, max_new_tokens=10, window=4, stop=stop)
    assert generated.converged.all()
    assert generated.guessed.all()


def test_a_callback_that_writes_into_its_tensors_changes_nothing(lm):
    def overwrites(new):
        new.tokens.fill_(0)
        new.rows.fill_(0)

    plain = lm.generate(PROMPT, max_new_tokens=5)
    assert plain.tokens.any()
    told = lm.generate(PROMPT, max_new_tokens=5, callback=overwrites)
    assert torch.equal(told.tokens, plain.tokens)


def test_a_window_does_not_reach_beyond_the_last_token(mamba):
    """The first of three tokens is chosen from the prompt, and two are left."""
    wide, narrow = (mamba.generate(PROMPT, max_new_tokens=3, window=n) for n in (512, 2))
    assert torch.equal(wide.tokens, narrow.tokens)
    assert torch.equal(wide.updates, narrow.updates)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_default_dtype_rounds_no_token(dtype):
    """float16 cannot hold odd numbers above 2048, and bfloat16 above 256."""
    model = MODELS["explicit"]()
    torch.manual_seed(3)
    lm = dq.CausalLM(50000, model, embedding_std=1.0).double().eval()
    exact = lm.generate(PROMPT, max_new_tokens=4).tokens
    torch.set_default_dtype(dtype)
    try:
        found = lm.generate(PROMPT, max_new_tokens=4).tokens
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, exact)


def test_a_generation_is_printed_without_its_tensors(mamba):
    generation = mamba.generate(PROMPT, max_new_tokens=5)
    rows = len(PROMPT)
    evaluations = f"{generation.evaluations} evaluations"
    expected = f"{rows} rows, 5 to 5 new tokens, {rows} rows converged, {evaluations}"
    assert repr(generation) == f"Generation({expected})"
    explicit = dq.CausalLM(13, dq.ExplicitModel(dq.Affine(8))).generate(PROMPT, max_new_tokens=2)
    assert repr(explicit) == f"Generation({rows} rows, 2 to 2 new tokens)"
