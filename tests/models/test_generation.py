"""Generation: the argmax of the full forward pass, prompts of unequal length, rows that end, draws
that reproduce.
"""

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, injected_llama, recurrent_depth

import deqseq as dq

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-9, max_steps=500))
PROMPT = torch.randint(0, 13, (3, 6), generator=torch.Generator().manual_seed(0))
IMPLICIT = {
    "Mamba2": lambda: dq.ImplicitModel(contractive_mamba2(), TIGHT),
    "Llama": lambda: dq.ImplicitModel(contractive_llama(), TIGHT),
}
MODELS = IMPLICIT | {
    "explicit": lambda: dq.ExplicitModel(contractive_llama(injection=False)),
    "RecurrentDepth": lambda: recurrent_depth(dq.ImplicitModel(injected_llama(), TIGHT)),
    "fixed depth": lambda: recurrent_depth(
        dq.ExplicitModel(dq.Looped(injected_llama(), 3, start="zero"))
    ),
}


def language_model(name: str, **options) -> dq.CausalLM:
    model = MODELS[name]()
    torch.manual_seed(1)
    return dq.CausalLM(13, model, embedding_std=1.0, **options).double().eval()


@pytest.fixture(params=IMPLICIT, scope="module")
def lm(request):
    return language_model(request.param)


@pytest.fixture
def shapes(lm):
    """Rows and tokens of every evaluation."""
    shapes = []
    hook = lm.model.backbone.register_forward_hook(
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
    assert generated.lengths.tolist() == [8, 8, 8]
    if lm.core is None:
        assert generated.iterations is generated.converged is None
    else:
        assert generated.converged.all()
        assert generated.iterations.shape == (3, 8)
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
    ids=str,
)
def test_the_prompt_is_solved_as_asked(lm, shapes, options, width):
    prompt = PROMPT.repeat(1, 3)
    expected = lm(prompt).logits[:, -1].argmax(-1)
    shapes.clear()
    generated = lm.generate(prompt, max_new_tokens=1, **options)
    assert torch.equal(generated.tokens[:, 0], expected)
    assert max(tokens for _, tokens in shapes) == width


@pytest.mark.parametrize("window", [1, 4])
def test_a_token_that_spends_its_budget_is_committed_and_flagged(lm, window):
    stop = dq.Stop(rtol=1e-13, max_steps=6)
    solve = dq.SolveConfig(stop=stop, sweep=dq.Sequential())
    generated = lm.generate(PROMPT, max_new_tokens=3, solve=solve, window=window)
    assert not generated.converged.any()
    assert generated.evaluations == 2 * 6
    # in a window the input of a later token is known before its last iterations
    assert (generated.iterations[:, :2] == 6).all()
    exactly = lm.generate(PROMPT, max_new_tokens=3, solve=solve, stop=dq.Stop.exactly(3))
    assert (exactly.iterations == 3).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_is_generated_as_the_row_without_padding_alone(name, side):
    lm = language_model(name)
    mask = torch.arange(6) < torch.tensor([6, 1, 4])[:, None]
    if side == "left":
        mask = mask.flip(1)
    for options in ({}, {"window": 1}):
        together = lm.generate(PROMPT, mask=mask, max_new_tokens=4, **options).tokens
        for row, real in enumerate(mask):
            alone = lm.generate(PROMPT[row, real][None], max_new_tokens=4, **options).tokens
            assert torch.equal(alone[0], together[row])


def test_rows_that_have_ended_are_removed(lm, shapes):
    rows = lm.generate(PROMPT, max_new_tokens=8).rows()
    stop = rows[1][2]
    ended = lm.generate(PROMPT, max_new_tokens=8, stop_tokens=[stop], pad_token=12)
    for row, tokens in enumerate(rows):
        expected = tokens
        if stop in tokens:
            expected = tokens[: tokens.index(stop) + 1]
        length = len(expected)
        assert ended.rows()[row] == expected
        assert ended.lengths[row] == length
        assert (ended.tokens[row, length:] == 12).all()
        assert (ended.iterations[row, length:] == 0).all()
        assert ended.converged[row, length:].all()
    assert shapes[-1][0] < 3
    assert lm.generate(PROMPT, max_new_tokens=50, stop_tokens=range(13)).tokens.shape == (3, 1)


def test_evaluations_after_the_prompt_are_counted(lm, shapes):
    lm.generate(PROMPT, max_new_tokens=1)
    prompt = len(shapes)
    generated = lm.generate(PROMPT, max_new_tokens=8, window=1)
    iterations = generated.iterations[:, 1:]
    assert generated.evaluations == len(shapes) - 2 * prompt == iterations.amax(0).sum()
    assert torch.equal(generated.updates, iterations.sum(1))
    assert not generated.guessed.any()


def test_seeds_reproduce_and_the_draws_of_a_row_do_not_depend_on_the_others(lm):
    def drawn(ids, seed, stop_tokens=()):
        generated = lm.generate(
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
def with_logits(*logits: float, model=dq.ExplicitModel) -> dq.CausalLM:
    """A language model that predicts the same after every prompt of one token."""
    lm = dq.CausalLM(len(logits), model(dq.Affine(1)), tied=False)
    lm.embedding.weight.fill_(1)
    state = lm.model(torch.ones(1, 1, 1)).value
    lm.head.weight.copy_(torch.tensor(logits)[:, None] / state[0])
    return lm


def drawn(lm, rows: int, **options) -> torch.Tensor:
    prompt = torch.zeros(rows, 1, dtype=torch.int64)
    return lm.generate(prompt, **{"max_new_tokens": 1, "seed": 1} | options).tokens


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 5),
        ({"temperature": 0.5}, 5),
        ({"temperature": 2.0}, 5),
        ({"top_k": 2}, 2),
        ({"top_p": 0.1}, 1),
        ({"top_p": 0.6}, 2),
        ({"top_p": 0.79}, 3),
        ({"top_p": 1.0}, 5),
    ],
    ids=str,
)
def test_draws_are_those_of_the_softmax_of_the_most_probable_tokens(options, count):
    """At temperature 1 the probabilities are .58, .21, .13, .09 and .03 in order."""
    options = {"temperature": 1.0} | options
    logits = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.5])
    tokens = drawn(with_logits(*logits), 40_000, **options)
    left_out = logits.argsort(descending=True)[count:]
    logits = (logits / options["temperature"]).index_fill(0, left_out, -torch.inf)
    shares = tokens.flatten().bincount(minlength=5) / 40_000
    assert (shares - logits.softmax(-1)).abs().max() < 0.01  # 4 standard deviations


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1e-40},
        {"temperature": 1e-46},
        {"temperature": 1.0, "top_p": 1e-60},
    ],
    ids=str,
)
def test_small_numbers_take_the_most_probable_token(options):
    assert drawn(with_logits(-1e30, 1e30, 0.0), 9, **options).unique().tolist() == [1]
    assert drawn(with_logits(3.0, 2.0, 1.0), 9, **options).unique().tolist() == [0]


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
def test_options_that_cannot_be_honoured_are_named(lm, options, message):
    with pytest.raises(ValueError, match=message):
        lm.generate(PROMPT, max_new_tokens=2, **options)
