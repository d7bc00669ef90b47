"""Generation: the argmax of the full forward pass, rows of unequal length, rows that end, draws
that reproduce.
"""

import numpy as np
import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, injected_llama, recurrent_depth

import deqseq as dq
from deqseq.models.sampler import Sampler, gumbel

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-9, max_steps=500))
PROMPT = torch.randint(0, 13, (3, 6), generator=torch.Generator().manual_seed(0))
LAYERS = {"Mamba2": contractive_mamba2, "Llama": contractive_llama}
MODELS = {
    **{name: lambda make=make: dq.ImplicitModel(make(), TIGHT) for name, make in LAYERS.items()},
    **{
        f"explicit {name}": lambda make=make: dq.ExplicitModel(make(injection=False))
        for name, make in LAYERS.items()
    },
    "RecurrentDepth": lambda: recurrent_depth(dq.ImplicitModel(injected_llama(), TIGHT)),
    "fixed depth": lambda: recurrent_depth(
        dq.ExplicitModel(dq.Looped(injected_llama(), 3, start="zero"))
    ),
}


def language_model(name: str, **options) -> dq.CausalLM:
    model = MODELS[name]()
    torch.manual_seed(1)
    return dq.CausalLM(13, model, embedding_std=1.0, **options).double().eval()


@pytest.fixture(params=LAYERS, scope="module")
def lm(request):
    return language_model(request.param)


@pytest.fixture(scope="module")
def free(lm):
    """What is generated without stop tokens."""
    return lm.generate(PROMPT, max_new_tokens=8)


@pytest.fixture
def shapes(lm):
    """Rows and tokens of every evaluation."""
    seen = []
    hook = lm.model.backbone.register_forward_hook(
        lambda module, inputs, _: seen.append(tuple(inputs[0].shape[:2]))
    )
    yield seen
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


OPTIONS = [
    {},
    {"solve": TIGHT},
    *({"sweep": sweep} for sweep in (dq.Chunked(2), dq.Sequential(), dq.Sliding(3))),
]


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: str(options.get("sweep", [*options]))
)
def test_the_prompt_is_solved_as_asked(lm, free, shapes, options):
    assert torch.equal(
        lm.generate(PROMPT, max_new_tokens=2, window=1, **options).tokens, free.tokens[:, :2]
    )
    asked = options.get("sweep", dq.Simultaneous())  # as TIGHT says; a window takes all six
    assert max(tokens for _, tokens in shapes) == asked.width(6)


def test_without_a_sweep_prompts_slide(lm, shapes):
    lm.generate(PROMPT.repeat(1, 3), max_new_tokens=1)
    assert max(tokens for _, tokens in shapes) == 16 < 3 * PROMPT.shape[1]


def test_solve_replaces_the_configuration_of_every_token_and_failures_are_reported(lm):
    solve = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=2), sweep=dq.Sequential())
    for window in (1, 4):
        generated = lm.generate(PROMPT, max_new_tokens=3, solve=solve, window=window)
        assert (
            generated.iterations[:, :2] == 2
        ).all()  # of a later token in a window, since its input was known
        assert not generated.converged.any()
        assert generated.evaluations == 2 * 2
    assert (
        lm.generate(PROMPT, max_new_tokens=3, solve=solve, stop=dq.Stop.exactly(3)).iterations == 3
    ).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_unequal_length(name, side):
    lm, counts = language_model(name), [6, 1, 4]
    mask = torch.arange(6) < torch.tensor(counts)[:, None]
    ids, mask = (PROMPT, mask) if side == "right" else (PROMPT.flip(1), mask.flip(1))
    together = lm.generate(ids, mask=mask, max_new_tokens=4)
    for row, real in enumerate(mask):
        alone = lm.generate(ids[row : row + 1, real], max_new_tokens=4)
        assert torch.equal(alone.tokens[0], together.tokens[row])


def test_rows_that_have_ended_are_removed(lm, free, shapes):
    stop = free.tokens[1, 2].item()
    ended = lm.generate(PROMPT, max_new_tokens=8, stop_tokens=[stop], pad_token=12)
    for row in range(3):
        tokens = free.tokens[row].tolist()
        expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert ended.rows()[row] == expected
        assert ended.lengths[row] == len(expected)
        assert (ended.tokens[row, len(expected) :] == 12).all()
        assert (ended.iterations[row, len(expected) :] == 0).all()
        assert ended.converged[row, len(expected) :].all()
    assert shapes[-1][0] < 3


def test_evaluations_after_the_prompt_are_counted(lm, shapes):
    lm.generate(PROMPT, max_new_tokens=1)
    prompt = len(shapes)
    generated = lm.generate(PROMPT, max_new_tokens=8, window=1)
    assert (
        generated.evaluations
        == len(shapes) - 2 * prompt
        == generated.iterations[:, 1:].amax(0).sum()
    )
    assert torch.equal(generated.updates, generated.iterations[:, 1:].sum(1))
    assert not generated.guessed.any()


def test_generation_ends_when_every_row_has(lm):
    generated = lm.generate(PROMPT, max_new_tokens=50, stop_tokens=range(13))
    assert generated.tokens.shape == (3, 1)
    assert generated.lengths.tolist() == [1, 1, 1]


def test_seeds_reproduce_and_a_rows_draws_do_not_depend_on_who_has_ended(lm):
    options = {"max_new_tokens": 6, "temperature": 1.0, "stop": dq.Stop(rtol=1e-4, max_steps=500)}
    one, again, other = (lm.generate(PROMPT, seed=seed, **options) for seed in (3, 3, 4))
    assert torch.equal(one.tokens, again.tokens)
    assert not torch.equal(one.tokens, other.tokens)
    stop = one.tokens[0, 1].item()
    ended = lm.generate(PROMPT, seed=3, stop_tokens=[stop], **options)
    for tokens, row in zip(one.rows(), ended.rows(), strict=True):
        assert tokens[: len(row)] == row
    assert ended.lengths[0] <= 2


class TestSampler:
    def draws(self, logits, count=40000, **options):
        rows, positions = np.arange(4), np.tile(np.arange(count // 4), (4, 1))
        chosen = Sampler(seed=1, **options).choose(
            logits.expand(4, count // 4, -1), rows, positions
        )
        return torch.bincount(chosen.flatten(), minlength=logits.shape[-1]) / count

    logits = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.5], dtype=torch.float64)

    @pytest.mark.parametrize(
        ("options", "kept"),
        [({}, 5), ({"temperature": 0.5}, 5), ({"temperature": 2.0}, 5), ({"top_k": 2}, 2)]
        + [({"top_p": top_p}, kept) for top_p, kept in ((0.1, 1), (0.6, 2), (0.79, 3), (1.0, 5))],
        ids=str,
    )
    def test_draws_are_those_of_the_softmax_of_what_is_kept(self, options, kept):
        """The probabilities at temperature 1 are .58, .21, .13, .09, .03 in order."""
        options = {"temperature": 1.0} | options
        left_out = self.logits.argsort(descending=True)[kept:]
        expected = (
            (self.logits / options["temperature"]).index_fill(0, left_out, -torch.inf).softmax(-1)
        )
        assert (
            self.draws(self.logits, **options) - expected
        ).abs().max() < 0.01  # 4 standard deviations

    def test_zero_takes_the_best(self):
        assert self.draws(self.logits).tolist() == [0, 1, 0, 0, 0]

    def test_noise_depends_on_seed_row_position_and_token(self):
        like, rows, positions = (
            torch.zeros(2, 3, 50),
            np.arange(2),
            np.array([[0, 1, 2], [7, 8, 9]]),
        )
        noise = gumbel(3, rows, positions, like)
        assert len(noise.unique()) == noise.numel()
        assert torch.equal(
            noise[1:, 1:, :20], gumbel(3, rows[1:], positions[1:, 1:], like[1:, 1:, :20])
        )
        seeds = [gumbel(seed, rows, positions, like) for seed in (3, 4, -(2**63), 2**64 - 1)]
        assert len(torch.stack(seeds).unique()) == 4 * noise.numel()

    def test_a_choice_among_tokens_needs_a_temperature(self):
        with pytest.raises(ValueError, match="top_k and top_p need a temperature above 0"):
            Sampler(top_k=3)


def test_stop_tokens_are_in_the_vocabulary():
    with pytest.raises(ValueError, match=r"stop_tokens must .* 0\.\.12, got 13"):
        language_model("Mamba2").generate(PROMPT, max_new_tokens=2, stop_tokens=[13])


@pytest.mark.parametrize("make", [dq.ImplicitModel, dq.ExplicitModel])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(make, temperature):
    lm = dq.CausalLM(5, make(dq.Affine(4)), tied=False)
    torch.nn.init.constant_(lm.head.weight, torch.nan)
    with pytest.raises(ValueError, match=r"logits of rows \[0, 1\] are not finite"):
        lm.generate(torch.tensor([[1], [2]]), max_new_tokens=2, temperature=temperature)


@pytest.mark.parametrize(
    "options", [*({"temperature": t} for t in (1e-40, 1e-46)), {"temperature": 1.0, "top_p": 1e-60}]
)
def test_small_numbers_take_the_best(options):
    logits = torch.tensor([[[-1e30, 1e30, 0.0], [3.0, 2.0, 1.0]]])
    assert Sampler(seed=0, **options).choose(logits, np.arange(1), np.arange(2)[None]).tolist() == [
        [1, 0]
    ]
