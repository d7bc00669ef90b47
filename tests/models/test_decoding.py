"""Decoding in windows: the tokens of decoding one by one, in fewer evaluations."""

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
BACKBONES = {
    "Affine": affine,
    "Mamba2": contractive_mamba2,
    "Llama": contractive_llama,
    "Injected": injected_llama,
    "RecurrentDepth": injected_llama,
}


def language_model(name: str) -> dq.CausalLM:
    model = dq.ImplicitModel(BACKBONES[name](), TIGHT)
    if name == "RecurrentDepth":
        model = recurrent_depth(model, dq.layers.RMSNorm(8))
    torch.manual_seed(3)
    return dq.CausalLM(13, model, embedding_std=1.0).double().eval()


@pytest.fixture(params=BACKBONES, scope="module")
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
        some = lm.generate(PROMPT, max_new_tokens=20, window=window, **WAYS[way])
        assert some.rows() == one.rows()
        assert torch.equal(some.tokens, one.tokens)
        assert some.converged.all()
        assert some.evaluations < one.evaluations
        assert (some.guessed < some.lengths).all()
        assert (some.updates % window == 0).all()
        assert (some.updates <= window * some.evaluations).all()
    assert some.guessed.sum() > 0


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_every_solver_takes_a_window(mamba, solver):
    one, some = (mamba.generate(PROMPT, max_new_tokens=12, window=w, solver=solver) for w in (1, 5))
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
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[2])


def test_no_check_is_later_than_the_budget(mamba):
    stop = dq.Stop(rtol=1e-13, max_steps=6, check_every=4)
    generated = mamba.generate(PROMPT, max_new_tokens=5, window=4, stop=stop)
    assert generated.evaluations == 4 * 4  # a check after 8 would be too late


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


@pytest.mark.parametrize("window", [2, 8])
def test_callbacks_are_told_every_token_once_and_no_guess(mamba, window):
    told = [[] for _ in PROMPT]

    def note(new: dq.NewTokens) -> None:
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
    with INSIDE[context](lm):
        generated = lm.generate(prompt, max_new_tokens=10, window=4, stop=dq.Stop(rtol=2e-2))
    assert generated.converged.all()
    assert generated.guessed.all()
