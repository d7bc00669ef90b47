"""Generation: the argmax of the full forward pass, rows of unequal length, rows that end, draws that reproduce."""

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2

import deqseq as dq
from deqseq.models.generation import Sampler

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=500))


def language_model(make, implicit: bool = True) -> dq.CausalLM:
    backbone = make() if implicit else make(injection=False)
    model = dq.ImplicitModel(backbone, TIGHT) if implicit else dq.ExplicitModel(backbone)
    torch.manual_seed(1)
    lm = dq.CausalLM(13, model, embedding_std=1.0).double()
    return lm.eval()


@pytest.fixture(params=[contractive_mamba2, contractive_llama], ids=["Mamba2", "Llama"])
def make(request):
    return request.param


PROMPT = torch.randint(0, 13, (3, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("implicit", [True, False])
def test_greedy_tokens_are_the_argmax_of_the_full_forward(make, implicit):
    lm = language_model(make, implicit)
    generated = lm.generate(PROMPT, max_new_tokens=8)
    whole = torch.cat([PROMPT, generated.tokens], dim=1)
    with torch.no_grad():
        logits = lm(whole[:, :-1]).logits
    assert torch.equal(logits[:, 5:].argmax(-1), generated.tokens)
    assert len(generated.tokens.unique()) > 1
    assert generated.lengths.tolist() == [8, 8, 8]
    if implicit:
        assert bool(generated.converged.all())
        assert generated.iterations.shape == (3, 8)
        assert generated.iterations.min() >= 2
    else:
        assert generated.iterations is None


SWEEPS = (dq.Simultaneous(), dq.Chunked(2), dq.Sequential(), dq.Sliding(3))


@pytest.mark.parametrize(
    "options",
    [*({"sweep": sweep} for sweep in SWEEPS), {"solve": TIGHT}, {"solve": TIGHT, "sweep": dq.Sequential()}],
    ids=str,
)
def test_the_prompt_is_solved_as_asked(make, options):
    lm, sizes = language_model(make), []
    expected = lm.generate(PROMPT, max_new_tokens=5).tokens
    lm.model.backbone.register_forward_hook(lambda module, inputs, _: sizes.append(inputs[0].shape[1]))
    assert torch.equal(lm.generate(PROMPT, max_new_tokens=5, **options).tokens, expected)
    sweep = options.get("sweep", dq.Simultaneous())
    assert max(sizes) == max(sweep.sizes(6))
    sizes.clear()
    lm.generate(PROMPT.repeat(1, 2), max_new_tokens=1)
    assert max(sizes) == dq.Sliding().window == 8  # where nothing is asked for, prompts slide


def test_solve_replaces_the_configuration_of_every_token(make):
    solve = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=2), sweep=dq.Sequential())
    generated = language_model(make).generate(PROMPT, max_new_tokens=3, solve=solve)
    assert (generated.iterations == 2).all()
    assert not generated.converged.any()
    again = language_model(make).generate(PROMPT, max_new_tokens=3, solve=solve, stop=dq.Stop.exactly(3))
    assert (again.iterations == 3).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implicit", [True, False])
def test_prompts_of_unequal_length(make, side, implicit):
    lm, counts = language_model(make, implicit), [6, 1, 4]
    mask = torch.arange(6) < torch.tensor(counts)[:, None]
    together = lm.generate(
        PROMPT if side == "right" else PROMPT.flip(1),
        mask=mask if side == "right" else mask.flip(1),
        max_new_tokens=6,
    )
    for row, count in enumerate(counts):
        prompt = PROMPT[row : row + 1, :count]
        alone = lm.generate(prompt if side == "right" else prompt.flip(1), max_new_tokens=6)
        assert torch.equal(alone.tokens[0], together.tokens[row])


def test_rows_that_have_ended_are_dropped(make):
    lm, seen = language_model(make), []
    free = lm.generate(PROMPT, max_new_tokens=8)
    stop = free.tokens[1, 2].item()
    rows_computed = []
    hook = lm.model.backbone.register_forward_hook(lambda module, inputs, _: rows_computed.append(len(inputs[0])))
    ended = lm.generate(PROMPT, max_new_tokens=8, stop_tokens=[stop], pad_token=12, callback=seen.append)
    hook.remove()
    for row in range(3):
        tokens = free.tokens[row].tolist()
        expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert ended.rows()[row] == expected
        assert ended.lengths[row] == len(expected)
        assert (ended.tokens[row, len(expected) :] == 12).all()
        assert (ended.iterations[row, len(expected) :] == 0).all()
    assert [event.step for event in seen] == list(range(len(seen)))
    assert len(seen[-1].rows) < 3
    assert rows_computed[-1] < 3
    for event in seen:
        assert torch.equal(ended.tokens[event.rows, event.step], event.tokens)


def test_generation_ends_when_every_row_has(make):
    lm = language_model(make)
    generated = lm.generate(PROMPT, max_new_tokens=50, stop_tokens=range(13))
    assert generated.tokens.shape == (3, 1)
    assert generated.lengths.tolist() == [1, 1, 1]


def test_seeds_reproduce_and_differ(make):
    lm = language_model(make)
    one, again, other = (lm.generate(PROMPT, max_new_tokens=8, temperature=1.0, seed=seed).tokens for seed in (3, 3, 4))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_rows_draws_do_not_depend_on_who_has_ended(make):
    lm = language_model(make)
    free = lm.generate(PROMPT, max_new_tokens=8, temperature=1.0, seed=3)
    stop = free.tokens[0, 1].item()
    ended = lm.generate(PROMPT, max_new_tokens=8, temperature=1.0, seed=3, stop_tokens=[stop])
    for free_row, row in zip(free.rows(), ended.rows(), strict=True):
        assert free_row[: len(row)] == row


class TestSampler:
    def draws(self, logits, **options):
        grid = (torch.arange(10000, dtype=torch.float64) + 0.5) / 10000  # every quantile once
        chosen = Sampler(**options).choose(logits.expand(10000, -1), grid)
        return torch.bincount(chosen, minlength=logits.shape[-1]) / 10000

    logits = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.5], dtype=torch.float64)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_temperature(self, temperature):
        expected = (self.logits / temperature).softmax(-1)
        assert (self.draws(self.logits, temperature=temperature) - expected).abs().max() < 2e-4

    def test_top_k(self):
        expected = self.logits.masked_fill(torch.tensor([1, 0, 1, 0, 1]).bool(), -torch.inf).softmax(-1)
        assert (self.draws(self.logits, temperature=1.0, top_k=2) - expected).abs().max() < 2e-4

    @pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.6, 2), (0.79, 3), (1.0, 5)])
    def test_top_p(self, top_p, kept):
        probability = self.logits.softmax(-1)  # .58, .21, .13, .09, .03 in order
        left_out = probability.argsort(descending=True)[kept:]
        expected = self.logits.index_fill(0, left_out, -torch.inf).softmax(-1)
        assert (self.draws(self.logits, temperature=1.0, top_p=top_p) - expected).abs().max() < 2e-4

    def test_zero_takes_the_best(self):
        assert self.draws(self.logits).tolist() == [0, 1, 0, 0, 0]

    def test_the_largest_number_does_not_reach_what_was_left_out(self):
        almost_one = torch.tensor([1 - 2**-24])
        assert Sampler(temperature=1.0, top_k=2).choose(self.logits[None].float(), almost_one).item() == 3

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": -1.0}, "temperature must be .*>= 0, got -1.0"),
            ({"temperature": float("nan")}, "temperature must be .*>= 0, got nan"),
            ({"temperature": 1.0, "top_k": 0}, "top_k must be .*>= 1, got 0"),
            ({"temperature": 1.0, "top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
            ({"top_k": 3}, "top_k and top_p need a temperature above 0"),
        ],
        ids=str,
    )
    def test_bad_options_are_named(self, options, message):
        with pytest.raises(ValueError, match=message):
            Sampler(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be .*>= 1, got 0"),
        ({"max_new_tokens": 2, "stop_tokens": [13]}, ValueError, r"stop_tokens must lie in 0\.\.12, got \(13,\)"),
        ({"max_new_tokens": 2, "sovler": None}, TypeError, "'sovler'; did you mean 'solver'"),
        ({"max_new_tokens": 2, "temperature": 1.0, "top_p": 2.0}, ValueError, "top_p must lie in"),
    ],
    ids=str,
)
def test_bad_calls_are_named(options, error, message):
    with pytest.raises(error, match=message):
        language_model(contractive_mamba2).generate(PROMPT, **options)


def test_an_explicit_model_takes_no_sweep():
    with pytest.raises(TypeError, match="sweep"):
        language_model(contractive_mamba2, implicit=False).generate(PROMPT, max_new_tokens=2, sweep=dq.Sequential())
