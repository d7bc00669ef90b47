"""Draft and verify: the tokens of plain decoding, committed row by row, with fewer evaluations one after another."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded

import deqseq as dq
from deqseq.tasks import WordProblem, alternating, generators

pytestmark = pytest.mark.usefixtures("unchecked")  # the docstrings' examples run with the checks of shapes

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-6, max_steps=300))
PROMPT = torch.randint(0, 13, (3, 6), generator=torch.Generator().manual_seed(0))


def recurrent_depth(solve: dq.SolveConfig = TIGHT) -> dq.RecurrentDepth:
    def layers() -> dq.Backbone:
        return contractive_llama(n_layers=1, injection=False)

    core = dq.ImplicitModel(dq.Injected(layers(), dq.AddInjection()), solve)
    return dq.RecurrentDepth(dq.ExplicitModel(layers()), core, dq.ExplicitModel(layers()))


MODELS = {
    "Mamba2": lambda: dq.ImplicitModel(contractive_mamba2(), TIGHT),
    "Llama": lambda: dq.ImplicitModel(contractive_llama(), TIGHT),
    "RecurrentDepth": recurrent_depth,
}


def language_model(model: dq.ImplicitModel | dq.RecurrentDepth) -> dq.CausalLM:
    torch.manual_seed(3)
    return dq.CausalLM(13, model, embedding_std=1.0, tied=False).double().eval()


@pytest.fixture(params=MODELS, scope="module")
def lm(request):
    return language_model(MODELS[request.param]())


@pytest.fixture(scope="module")
def plain(lm):
    generated = lm.generate(PROMPT, max_new_tokens=9)
    assert generated.converged.all()
    assert len(generated.tokens.unique()) > 3
    return generated


def core_of(lm: dq.CausalLM) -> dq.ImplicitModel:
    assert lm.core is not None
    return lm.core


def solves(lm: dq.CausalLM) -> tuple[list[int], list[bool]]:
    """Two lists that fill with the tokens of every evaluation, and with whether each solve verifies a window."""
    evaluated, verifies = [], []
    core_of(lm).backbone.register_forward_hook(lambda module, args, _: evaluated.append(args[0].shape[1]))

    def seen(module, args, options):
        if options.get("cache") is not None:
            verifies.append(options.get("stop") is None)

    core_of(lm).register_forward_pre_hook(seen, with_kwargs=True)
    return evaluated, verifies


@pytest.mark.parametrize("draft", [dq.Draft(1, 1), dq.Draft(4, 3), dq.Draft(20, 2)], ids=str)
def test_the_tokens_are_those_of_plain_decoding(lm, plain, draft):
    drafted = lm.generate(PROMPT, max_new_tokens=9, draft=draft)
    assert torch.equal(drafted.tokens, plain.tokens)
    assert torch.equal(drafted.lengths, plain.lengths)
    assert drafted.converged.all()


@pytest.mark.parametrize("new", [1, 2, 6])
def test_for_any_number_of_tokens_and_a_single_row(lm, plain, new):
    drafted = lm.generate(PROMPT[1:2], max_new_tokens=new, draft=dq.Draft(3, 4))
    assert torch.equal(drafted.tokens, plain.tokens[1:2, :new])


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_unequal_length(lm, side):
    mask = torch.arange(6) < torch.tensor([6, 1, 4])[:, None]
    mask = mask if side == "right" else mask.flip(1)
    one, other = (lm.generate(PROMPT, mask=mask, max_new_tokens=9, draft=draft) for draft in (None, dq.Draft(3, 2)))
    assert torch.equal(one.tokens, other.tokens)


def test_sampled_tokens_too(lm):
    options = {"max_new_tokens": 9, "temperature": 1.0, "top_p": 0.9, "seed": 0}
    one, other = (lm.generate(PROMPT, draft=draft, **options) for draft in (None, dq.Draft(3, 6)))
    assert torch.equal(one.tokens, other.tokens)


def test_rows_that_end_and_what_a_callback_is_told(lm, plain):
    told = {None: [], dq.Draft(3, 12): []}
    options = {"max_new_tokens": 9, "stop_tokens": [int(plain.tokens[1, 2])], "pad_token": 12}
    made = [lm.generate(PROMPT, draft=draft, callback=seen.append, **options) for draft, seen in told.items()]
    assert made[1].rows() == made[0].rows()
    assert torch.equal(made[1].tokens, made[0].tokens)
    assert made[0].lengths.min() < 9
    ended = torch.arange(made[0].tokens.shape[1]) >= made[0].lengths[:, None]
    assert (made[1].iterations[ended] == 0).all()
    assert made[1].converged.all()
    for one, other in zip(*told.values(), strict=True):
        assert one.step == other.step
        assert torch.equal(one.rows, other.rows)
        assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("draft", [None, dq.Draft(3, 2)], ids=str)
def test_evaluations_are_counted(name, draft):
    lm = language_model(MODELS[name]())
    evaluated, verifies = solves(lm)
    generated = lm.generate(PROMPT[:, :1], max_new_tokens=1, draft=draft)
    prompt = len(evaluated)
    assert generated.evaluations == 0
    generated = lm.generate(PROMPT[:, :1], max_new_tokens=9, draft=draft)
    after = evaluated[2 * prompt :]
    assert generated.evaluations == len(after)
    if draft is None:
        assert set(after) == {1}
        assert generated.evaluations == generated.iterations[:, 1:].amax(0).sum()
    else:
        assert sum(verifies) <= 8
        assert after[: 3 * 2] == [1, 1, 2, 2, 3, 3]
        assert after[6] == 4


def test_a_trained_model_takes_fewer_evaluations():
    lm, prompts = (
        dq.load_example("text").double(),
        torch.tensor([list(b"ROMEO:\nBut soft,"), list(b"KING HENRY:\nOnce")]),
    )
    options = {"max_new_tokens": 12, "stop": dq.Stop(rtol=1e-3, max_steps=500)}
    plain, drafted = (lm.generate(prompts, draft=draft, **options) for draft in (None, dq.Draft()))
    assert plain.converged.all()
    assert torch.equal(drafted.tokens, plain.tokens)
    assert drafted.evaluations < 0.9 * plain.evaluations


def test_a_state_tracker_gives_the_same_tokens():
    lm, group = dq.load_example("a5").double(), alternating(5)
    prompt = WordProblem(group, generators(group, 2)).fixed(4, 12, seed=0).inputs[3:]
    options = {"max_new_tokens": 6, "stop": dq.Stop(rtol=1e-3, max_steps=500)}
    plain, drafted = (lm.generate(prompt, draft=draft, **options) for draft in (None, dq.Draft()))
    assert plain.converged.all()
    assert torch.equal(drafted.tokens, plain.tokens)


class Late(dq.Backbone):
    """A map whose first iterations point away from its fixed point: a clock tells when to turn round."""

    d_model = 13

    def prepare(self, x, cache=None, mask=None):
        return x

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        clock = 0.9 * z[..., :1] + 0.1
        value = torch.roll(inputs, 1, dims=-1) * torch.where(clock > 0.95, 1, -1)
        return torch.cat([clock, value[..., 1:]], dim=-1), value

    def advance(self, cache, aux, tokens, counts=None):
        return dq.backbones.affine.AffineCache(aux[:, 0])


def test_drafts_that_are_always_wrong_cost_nothing_but_their_iterations():
    lm = dq.CausalLM(13, dq.ImplicitModel(Late(), dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-6, max_steps=200))))
    torch.nn.init.eye_(lm.embedding.weight)
    _, verifies = solves(lm)
    plain = lm.generate(torch.tensor([[3], [5]]), max_new_tokens=6)
    del verifies[:]
    drafted = lm.generate(torch.tensor([[3], [5]]), max_new_tokens=6, draft=dq.Draft(2, 2))
    assert torch.equal(drafted.tokens, plain.tokens)
    assert len(plain.tokens.unique()) > 3
    assert verifies == [False, False, True] * 3 + [False, True, True]  # a token each; the last have less to draft
    assert drafted.evaluations <= plain.evaluations + 7 * 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"draft": 4}, TypeError, ["draft", "4"]),
        ({"draft": dq.Draft(), "sweep": dq.Lockstep(3)}, ValueError, ["draft", "Lockstep(steps=3)"]),
    ],
    ids=["type", "Lockstep"],
)
def test_what_cannot_be_drafted_is_refused(lm, options, error, words):
    with pytest.raises(error) as caught:
        lm.generate(PROMPT, max_new_tokens=2, **options)
    assert all(word in str(caught.value) for word in words)


def test_an_explicit_model_drafts_nothing():
    lm = dq.CausalLM(13, dq.ExplicitModel(affine()))
    with pytest.raises(TypeError, match=r"explicit model .* no draft"):
        lm.generate(PROMPT, max_new_tokens=2, draft=dq.Draft())


@pytest.mark.parametrize("fields", [{"tokens": 0}, {"iterations": 0}], ids=str)
def test_bad_fields_are_named(fields):
    with pytest.raises((TypeError, ValueError), match=f"Draft.{next(iter(fields))} must be an integer >= 1, got"):
        dq.Draft(**fields)


@pytest.mark.parametrize("name", MODELS)
def test_lockstep_decodes_as_it_solves_a_whole_sequence(name):
    lm = language_model(MODELS[name]())
    generated = lm.generate(PROMPT, max_new_tokens=5, sweep=dq.Lockstep(3))
    whole = torch.cat([PROMPT, generated.tokens], dim=1)
    with torch.no_grad():
        logits = lm(whole[:, :-1], sweep=dq.Lockstep(3)).logits
    assert torch.equal(logits[:, 5:].argmax(-1), generated.tokens)
    assert generated.evaluations == 4 * 3


# what the models offer for it


def explicit() -> dq.ExplicitModel:
    return dq.ExplicitModel(contractive_llama(injection=False))


MAKE = {**MODELS, "Affine": lambda: dq.ImplicitModel(affine(), TIGHT), "Explicit": explicit}


@pytest.mark.parametrize("counts", [[3, 3], [2, 5], [0, 7]], ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_each_row_commits_as_many_tokens_as_it_wants(name, counts):
    """The cache goes on as that of a row alone."""
    model, x = MAKE[name]().double().eval(), embedded(2, 12)
    with torch.no_grad():
        before = model(x[:, :3], return_cache=True).cache
        output = model(x[:, 3:10], cache=before, return_uncommitted=True)
        assert output.cache is None
        after = output.uncommitted.commit(torch.tensor(counts))
        rest = torch.stack([x[row, 3 + count : 5 + count] for row, count in enumerate(counts)])
        value = model(rest, cache=after, return_cache=True)
        for row, count in enumerate(counts):
            alone = model(x[row : row + 1, : 5 + count], return_cache=True)
            assert torch.allclose(value.value[row], alone.value[0, -2:], atol=1e-4)
        if counts[0] == counts[1]:
            alone = model(x[:, : 3 + counts[0]], return_cache=True).cache
            for one, other in zip(after.tensors(), alone.tensors(), strict=True):
                assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MAKE)
def test_counts_are_of_real_tokens(name, side):
    model, x = MAKE[name]().double().eval(), embedded(2, 6)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    with torch.no_grad():
        given = (x, mask) if side == "right" else (x.flip(1), mask.flip(1))
        cache = model(given[0], mask=given[1], return_uncommitted=True).uncommitted.commit(torch.tensor([5, 3]))
        value = model(x[:, :1], cache=cache).value
        for row, count in enumerate([5, 3]):
            prompt = given[0][row, given[1][row]][:count]
            alone = model(torch.cat([prompt, x[row, :1]])[None]).value
            assert torch.allclose(value[row], alone[0, -1:], atol=1e-4)


@pytest.mark.parametrize("sweep", [dq.Sequential(), dq.Sliding(3), dq.Lockstep(3)], ids=str)
def test_only_tokens_solved_together_stay_uncommitted(sweep):
    with pytest.raises(ValueError, match="return_uncommitted=True needs the Simultaneous sweep"):
        dq.ImplicitModel(affine())(embedded(), sweep=sweep, return_uncommitted=True)


@pytest.mark.parametrize(
    "counts", [[0, 0], [1, 8], [-1, 2], [1], [1.0, 2.0], 3, torch.zeros(2, dtype=torch.int64, device="meta")], ids=str
)
@pytest.mark.parametrize("name", ["Affine", "Explicit"])
def test_counts_that_cannot_be_committed_are_refused(name, counts):
    output = MAKE[name]().double()(embedded(2, 7), return_uncommitted=True)
    with pytest.raises((TypeError, ValueError), match="counts must be"):
        output.uncommitted.commit(torch.tensor(counts) if isinstance(counts, list) else counts)


def test_a_cache_is_returned_or_committed_later():
    with pytest.raises(ValueError, match="return_uncommitted=True commits later: leave return_cache out"):
        dq.ImplicitModel(affine())(embedded(), return_uncommitted=True, return_cache=True)


@pytest.mark.parametrize("start", ["zero", "input", dq.RandomStart(0.5, seed=0)], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_start_of_the_first_tokens_alone(start, side):
    """The others begin where the model does."""
    model, x, given = dq.ImplicitModel(affine()), embedded(2, 6), embedded(2, 6).flip(2)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    mask = mask if side == "right" else mask.flip(1)
    own = {"zero": torch.zeros_like(x), "input": x}.get(start)
    if isinstance(start, dq.RandomStart):  # drawn for the real tokens of a row first
        own = start.draw(x)
        own = own if side == "right" else torch.stack([own[0], own[1].roll(2, dims=0)])
    options = {"mask": mask, "stop": dq.Stop.exactly(2)}
    with torch.no_grad():
        whole = model(x, start=torch.cat([given[:, :3], own[:, 3:]], dim=1), **options).value
        model.solve = dq.SolveConfig(start=start)
        assert torch.equal(model(x, start=given[:, :3], **options).value, whole)


@pytest.mark.parametrize("counts", [[3, 2], [3, 3]])
def test_padding_is_not_committed(counts):
    mask = torch.tensor([[True, True, False], [True, True, True]])
    output = dq.ImplicitModel(contractive_llama()).eval()(embedded(2, 3), mask=mask, return_uncommitted=True)
    with pytest.raises(ValueError, match=r"counts must be 0 to \[2, 3\]"):
        output.uncommitted.commit(torch.tensor(counts))
