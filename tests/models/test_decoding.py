"""Decoding in windows: the tokens of decoding one by one, in fewer evaluations one
after another.
"""

from contextlib import nullcontext

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

TIGHT = dq.SolveConfig(dq.Relaxed(0.9), stop=dq.Stop(rtol=1e-6, max_steps=500))
PROMPT = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(0))


MODELS = {
    "Affine": lambda: dq.ImplicitModel(affine(), TIGHT),
    "Mamba2": lambda: dq.ImplicitModel(contractive_mamba2(), TIGHT),
    "Llama": lambda: dq.ImplicitModel(contractive_llama(), TIGHT),
    "Injected": lambda: dq.ImplicitModel(injected_llama(), TIGHT),
    "RecurrentDepth": lambda: recurrent_depth(
        dq.ImplicitModel(injected_llama(), TIGHT), dq.layers.RMSNorm(8)
    ),
}


def language_model(name: str) -> dq.CausalLM:
    model = MODELS[name]()
    torch.manual_seed(3)
    return dq.CausalLM(13, model, embedding_std=1.0).double().eval()


@pytest.fixture(params=MODELS, scope="module")
def lm(request):
    return language_model(request.param)


@pytest.fixture(scope="module")
def mamba():
    return language_model("Mamba2")


LEFT = torch.arange(6) >= torch.tensor([0, 5, 2, 0])[:, None]
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "top": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 6},
    "left": {"mask": LEFT},
    "right": {"mask": LEFT.flip(1), "temperature": 1.0, "seed": 7},
    "ended": {"stop_tokens": [2, 5, 7], "pad_token": 12, "temperature": 1.0, "seed": 8},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_window_gives_the_same_tokens(lm, way):
    one = lm.generate(PROMPT, max_new_tokens=20, window=1, **WAYS[way])
    assert len(one.tokens.unique()) > 1
    for window in (2, 8, 64):
        found = lm.generate(PROMPT, max_new_tokens=20, window=window, **WAYS[way])
        assert found.rows() == one.rows()
        assert torch.equal(found.tokens, one.tokens)
        assert found.converged.all()
        assert found.evaluations < one.evaluations
        assert (found.guessed < found.lengths).all()
        assert (found.updates % window == 0).all()
        assert (found.updates <= window * found.evaluations).all()
    assert found.guessed.sum() > 0


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_a_row_alone_equals_the_row_in_its_batch(lm, window, way):
    """Where rows are drawn, the first ones: their numbers depend on their place."""
    options = {"max_new_tokens": 12, "window": window, "stop_tokens": [4], **WAYS[way]}
    together = lm.generate(PROMPT, **options).rows()
    assert lm.generate(PROMPT[:2], **options).rows() == together[:2]
    if way == "greedy":
        assert [
            lm.generate(PROMPT[row : row + 1], **options).rows()[0] for row in range(4)
        ] == together


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_every_solver_takes_a_window(mamba, solver):
    one, some = (mamba.generate(PROMPT, max_new_tokens=12, window=w, solver=solver) for w in (1, 5))
    assert torch.equal(one.tokens, some.tokens)
    assert some.converged.all()


def test_prompts_go_on_from_a_cache(lm):
    whole = lm.generate(PROMPT, max_new_tokens=8)
    cache = lm(PROMPT[:, :4], return_cache=True).cache
    for window in (1, 4):
        assert torch.equal(
            lm.generate(PROMPT[:, 4:], cache=cache, max_new_tokens=8, window=window).tokens,
            whole.tokens,
        )


def test_a_row_that_spends_its_budget_commits_a_token_and_is_flagged(mamba):
    stop = dq.Stop(rtol=1e-13, max_steps=6)
    found = mamba.generate(PROMPT, max_new_tokens=5, window=4, stop=stop)
    assert not found.converged.any()
    assert found.evaluations == 4 * 6
    checked = mamba.generate(
        PROMPT, max_new_tokens=5, window=4, stop=dq.Stop(rtol=1e-13, max_steps=6, check_every=4)
    )
    assert checked.evaluations == 4 * 4  # a check after 8 would be too late


@pytest.mark.parametrize(("name", "least"), [("Mamba2", 1), ("RecurrentDepth", 2)])
def test_a_choice_is_made_every_so_many_iterations(name, least):
    """With layers around the core, which run for every choice, every second one at least."""
    lm, tokens = language_model(name), []
    for every in (1, 2, 3):
        stop = dq.Stop(rtol=1e-6, max_steps=500, check_every=every)
        found = lm.generate(PROMPT, max_new_tokens=12, window=4, stop=stop)
        assert found.evaluations % max(every, least) == 0
        tokens.append(found.tokens)
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])


class Fragile(dq.Affine):
    """An affine map that is not finite at tokens with one embedding; says whether it met one."""

    met = False

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        fz, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        bad = inputs.injection.norm(dim=-1) > 100
        self.met = self.met or bool(bad.any())
        return fz.masked_fill(bad[..., None], torch.nan), aux


@pytest.mark.parametrize(("seed", "only_guessed"), [(8, False), (11, True)])
def test_a_wrong_guess_that_diverges_does_no_harm_and_a_token_that_diverges_is_flagged(
    seed, only_guessed
):
    torch.manual_seed(seed)
    lm = (
        dq.CausalLM(13, dq.ImplicitModel(Fragile(8), TIGHT), embedding_std=1.0, tied=False)
        .double()
        .eval()
    )
    lm.head.weight.data.normal_()
    lm.embedding.weight.data[12] *= 1e4
    one = lm.generate(PROMPT.clamp(max=11), max_new_tokens=16, window=1)
    assert lm.model.backbone.met != only_guessed
    some = lm.generate(PROMPT.clamp(max=11), max_new_tokens=16, window=6)
    assert lm.model.backbone.met
    assert torch.equal(one.tokens, some.tokens)
    assert torch.equal(one.converged, some.converged)
    assert one.converged.all() == only_guessed


@pytest.mark.parametrize("window", [2, 8])
def test_callbacks_are_told_every_token_once_and_no_guess(mamba, window):
    told = [[] for _ in PROMPT]

    def note(new: dq.NewTokens) -> None:
        assert len(new.rows)
        for row, position, token in zip(
            *(x.tolist() for x in (new.rows, new.positions, new.tokens)), strict=True
        ):
            assert position == len(told[row])
            told[row].append(token)

    found = mamba.generate(PROMPT, max_new_tokens=20, window=window, stop_tokens=[2], callback=note)
    assert told == found.rows()


REFUSED = {
    "explicit": (lambda: dq.ExplicitModel(contractive_llama()), {}, "an explicit model"),
    "exactly": (MODELS["Llama"], {"stop": dq.Stop.exactly(3)}, "without a tolerance"),
    "input": (MODELS["Llama"], {"start": "input"}, 'start="input"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_a_window_cannot_be_the_default_is_none(case):
    make, options, reason = REFUSED[case]
    lm = dq.CausalLM(13, make()).double().eval()
    with pytest.raises(ValueError, match=f"window must be 1, got 2: .*{reason}"):
        lm.generate(PROMPT, max_new_tokens=2, window=2, **options)
    default, one = (
        lm.generate(PROMPT, max_new_tokens=3, **options, **more) for more in ({}, {"window": 1})
    )
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
    with INSIDE[context](lm):
        found = lm.generate(prompt, max_new_tokens=10, window=4, stop=dq.Stop(rtol=2e-2))
    assert found.converged.all()
    assert found.guessed.all()
