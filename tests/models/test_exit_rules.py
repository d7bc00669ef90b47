"""Exit rules in models: rows that end apart, padding, a coda, decoding, generation, and Lockstep."""

from dataclasses import replace

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2

import deqseq as dq

pytestmark = pytest.mark.usefixtures("unchecked")  # the docstrings' examples run with the checks of shapes

NAIVE = dq.Naive()
SOLVE = dq.SolveConfig(NAIVE, dq.Stop(rtol=1e-9, max_steps=80))
RULES = [dq.LogitKL(1e-3), dq.StableArgmax(3), dq.Margin(0.1)]
IDS = torch.randint(13, (5, 7), generator=torch.Generator().manual_seed(0))
LENGTHS = (7, 4, 5, 7, 2)


def implicit(make) -> dq.ImplicitModel:
    return dq.ImplicitModel(make(), SOLVE)


def recurrent() -> dq.RecurrentDepth:
    injection = dq.ConcatInjection(8)
    torch.nn.init.normal_(injection.weight.data[:, :8], std=0.2)
    first, core, last = (contractive_llama(injection=False, n_layers=1, weight_norm=False) for _ in range(3))
    core = dq.ImplicitModel(dq.Injected(core, injection), SOLVE)
    return dq.RecurrentDepth(dq.ExplicitModel(first), core, dq.ExplicitModel(last), dq.layers.RMSNorm(8))


MODELS = {
    "Mamba2": lambda: implicit(contractive_mamba2),
    "Llama": lambda: implicit(contractive_llama),
    "RecurrentDepth": recurrent,
}


@pytest.fixture(params=MODELS, scope="module")
def lm(request):
    torch.manual_seed(3)
    return dq.CausalLM(13, MODELS[request.param](), embedding_std=1.0, tied=False).double().eval()


@pytest.fixture(params=RULES, ids=lambda rule: type(rule).__name__)
def rule(request):
    return request.param


def lets_go(rule: dq.ExitRule, logits: list[torch.Tensor]) -> torch.Tensor:
    """Which tokens may end, from the logits (length, classes) of every evaluation so far."""
    p = [one.exp() / one.exp().sum(-1, keepdim=True) for one in logits]
    if isinstance(rule, dq.Margin):
        ordered = p[-1].sort(dim=-1).values
        return ordered[:, -1] - ordered[:, -2] >= rule.threshold
    if isinstance(rule, dq.StableArgmax):
        same = [one.argmax(-1) == p[-1].argmax(-1) for one in p[-rule.times :]]
        return torch.stack(same).all(0) & (len(same) == rule.times)
    assert isinstance(rule, dq.LogitKL)
    if len(p) == 1:
        return torch.zeros(len(p[-1]), dtype=torch.bool)
    return (p[-2] * (p[-2] / p[-1]).log()).sum(-1) < rule.threshold


def by_hand(lm, ids, rule, cache=None):
    """A row (1, length) in a plain loop, after the tokens of a cache: logits, iterations, status."""
    x, coda = lm.embed(ids), lambda z: z
    if isinstance(lm.model, dq.RecurrentDepth):
        parts = (None, None, None) if cache is None else (cache.prelude, cache.core, cache.coda)
        x, cache = lm.model.prelude(x, cache=parts[0]).value, parts[1]
        coda = lambda z: lm.model.coda(lm.model.norm(z), cache=parts[2]).value  # noqa: E731
    backbone, z, seen = lm.core.backbone, torch.zeros_like(x), []
    inputs = backbone.prepare(x, cache)
    cache = None if cache is None else cache.reserve(x.shape[1])
    for step in range(1, SOLVE.stop.max_steps + 1):
        fz, _ = backbone(z, inputs, cache)
        seen.append(lm.logits(coda(fz))[0])
        passed = (fz - z).norm(dim=-1)[0] <= SOLVE.stop.rtol * fz.norm(dim=-1)[0]
        if bool((passed | lets_go(rule, seen)).all()):
            return seen[-1], step, dq.Status.CONVERGED if bool(passed.all()) else dq.Status.EXITED
        z = fz
    raise AssertionError("the budget is spent")


def masks():
    """Right padding, left padding and none."""
    right = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    return {"right": right, "left": right.flip(1), "none": None}


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@torch.no_grad()
def test_rows_end_as_in_a_plain_loop_whatever_the_padding(lm, rule, padding):
    mask, evaluated = masks()[padding], []
    hook = lm.core.backbone.register_forward_hook(lambda _, args, __: evaluated.append(len(args[0])))
    output = lm(IDS, mask=mask, stop=replace(SOLVE.stop, exit=rule), throw=True)
    hook.remove()
    real = torch.ones_like(IDS, dtype=torch.bool) if mask is None else mask
    for row in range(5):
        logits, steps, status = by_hand(lm, IDS[row : row + 1, real[row]], rule)
        assert (int(output.stats.iterations[row]), int(output.status[row])) == (steps, status)
        assert torch.allclose(output.logits[row, real[row]], logits, rtol=0, atol=1e-10)
    assert (output.status == dq.Status.EXITED).any()
    assert evaluated[-1] < 5 or len(output.stats.iterations.unique()) <= 2  # rows that have ended are removed


@torch.no_grad()
def test_decoding_with_caches(lm, rule):
    """Against the cache of a prompt; rows exit at different iterations, and are removed with the coda's cache."""
    stop = replace(SOLVE.stop, exit=rule)
    prompts = masks()["left"][:, 1:]
    before = lm(IDS[:, :6], mask=prompts, return_cache=True).cache
    output = lm(IDS[:, 6:], cache=before, stop=stop, return_cache=True)
    again = lm(IDS[:, 5:6], cache=output.cache, stop=stop)
    for row in range(5):
        own = lm(IDS[row : row + 1, :6][:, prompts[row]], return_cache=True).cache
        logits, steps, status = by_hand(lm, IDS[row : row + 1, 6:], rule, own)
        assert (int(output.stats.iterations[row]), int(output.status[row])) == (steps, status)
        assert torch.allclose(output.logits[row], logits, rtol=0, atol=1e-10)
        own = lm(IDS[row : row + 1, 6:], cache=own, stop=stop, return_cache=True).cache
        logits, steps, status = by_hand(lm, IDS[row : row + 1, 5:6], rule, own)
        assert (int(again.stats.iterations[row]), int(again.status[row])) == (steps, status)
        assert torch.allclose(again.logits[row], logits, rtol=0, atol=1e-10)


@torch.no_grad()
def test_generation_exits_in_prompts_and_new_tokens(lm):
    rule = dq.StableArgmax(3)
    stop = replace(SOLVE.stop, exit=rule)
    generated = lm.generate(IDS, mask=masks()["left"], max_new_tokens=3, stop=stop)
    plain = lm.generate(IDS, mask=masks()["left"], max_new_tokens=3)
    assert generated.evaluations < plain.evaluations
    assert not generated.converged.all()
    for row in range(5):
        ids = IDS[row : row + 1, 7 - LENGTHS[row] :]
        cache = lm(ids, stop=stop, return_cache=True).cache
        token = by_hand(lm, ids, rule)[0][-1].argmax()
        for found in generated.tokens[row]:
            assert found == token
            logits, _, _ = by_hand(lm, token[None, None], rule, cache)
            cache = lm(token[None, None], cache=cache, stop=stop, return_cache=True).cache
            token = logits[-1].argmax()


@pytest.mark.parametrize("sweep", [dq.Sliding(3), dq.Sequential()], ids=str)
def test_generation_takes_a_sweep_that_has_exits(sweep):
    """A model that is evaluated by another sweep generates with exits all the same; chosen in the call, it says no."""
    stop = replace(SOLVE.stop, exit=dq.StableArgmax(3))
    lm = dq.CausalLM(13, implicit(contractive_llama), embedding_std=1.0).double().eval()
    wanted = lm.generate(IDS, max_new_tokens=4, stop=stop)
    lm.model.eval_solve = replace(SOLVE, sweep=sweep)
    found = lm.generate(IDS, max_new_tokens=4, stop=stop)
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.iterations, wanted.iterations)
    with pytest.raises(ValueError, match=r"needs the Simultaneous or the Lockstep sweep"):
        lm.generate(IDS, max_new_tokens=4, stop=stop, sweep=sweep)


@torch.no_grad()
def test_drafts_are_verified_with_the_rule(lm):
    stop = replace(SOLVE.stop, exit=dq.LogitKL(1e-12))
    drafted = lm.generate(IDS, max_new_tokens=6, draft=dq.Draft(3, 2), stop=stop)
    assert torch.equal(drafted.tokens, lm.generate(IDS, max_new_tokens=6, stop=stop).tokens)


@torch.no_grad()
def test_lockstep_takes_each_token_from_its_first_exit(lm, rule):
    """The core's states; a coda then sees those of all tokens at their own exits."""
    mask, steps, stop = masks()["left"], 9, dq.Stop(exit=rule)
    call = {"mask": mask, "solver": NAIVE}
    output = lm(IDS, stop=stop, sweep=dq.Lockstep(steps), **call)
    x, depth = lm.embed(IDS), isinstance(lm.model, dq.RecurrentDepth)
    x = lm.model.prelude(x, mask=mask).value if depth else x
    sweeps = [dq.Lockstep(step + 1) for step in range(steps)]
    states = torch.stack([lm.core(x, sweep=sweep, **call).value for sweep in sweeps])
    logits = torch.stack([lm(IDS, sweep=sweep, **call).logits for sweep in sweeps])
    wanted = torch.zeros_like(x)
    for row in range(5):
        places = mask[row].nonzero()[:, 0]
        done = torch.stack([lets_go(rule, list(logits[: step + 1, row, places])) for step in range(steps)])
        first = torch.where(done.any(dim=0), done.long().argmax(dim=0), steps - 1)
        assert torch.equal(output.stats.iterations[row, places], first + 1)
        assert (int(output.status[row]) == dq.Status.EXITED) == bool(done.any(dim=0).all())
        wanted[row, places] = states[first, row, places]
    wanted = lm.model.coda(lm.model.norm(wanted), mask=mask).value if depth else wanted
    assert torch.allclose(output.logits[mask], lm.logits(wanted)[mask], rtol=0, atol=1e-10)
    assert output.stats.evaluations == steps
    assert (output.status == dq.Status.EXITED).any()


@torch.no_grad()
def test_lockstep_decodes_with_exits_as_it_runs_the_whole_sequence(rule):
    lm = dq.CausalLM(13, implicit(contractive_llama), embedding_std=1.0).double().eval()
    call = {"stop": dq.Stop(exit=rule), "sweep": dq.Lockstep(9), "solver": NAIVE}
    first = lm(IDS[:, :4], return_cache=True, **call)
    parts = first.logits, lm(IDS[:, 4:], cache=first.cache, **call).logits
    assert torch.allclose(torch.cat(parts, dim=1), lm(IDS, **call).logits, rtol=0, atol=1e-10)


def test_it_trains(lm):
    stop = replace(SOLVE.stop, exit=dq.LogitKL(1e-3))
    for gradient in (dq.Phantom(2), dq.Implicit(), dq.Unrolled()):
        lm.zero_grad()
        lm(IDS, labels=IDS, stop=stop, gradient=gradient).loss.backward()
        gradients = [p.grad for p in lm.core.parameters()]
        assert all(bool(g.isfinite().all()) and bool(g.any()) for g in gradients)


@torch.no_grad()
def test_exits_neither_warn_nor_fail(lm, recwarn):
    output = lm(IDS, stop=replace(SOLVE.stop, exit=dq.StableArgmax(2)), throw=True)
    assert not output.converged.any()
    assert not output.failed.any()
    assert not recwarn.list
    assert set(output.explain().causes) == {"exit rule"}


@pytest.mark.parametrize("sweep", [dq.Sliding(3), dq.Chunked(3), dq.Sequential()], ids=str)
def test_sweeps_that_have_no_exits_say_so(lm, sweep):
    with pytest.raises(
        ValueError, match=r"Stop\.exit=Margin\(threshold=0\.9\) needs .*Lockstep sweep, got " + str(sweep)[:5]
    ):
        lm(IDS, sweep=sweep, stop=dq.Stop(exit=dq.Margin()))


def test_a_model_without_a_head_takes_one_for_a_call(lm):
    x, stop = lm.embed(IDS), replace(SOLVE.stop, exit=dq.StableArgmax(2))
    with pytest.raises(ValueError, match=r"judges logits, and there is no head here.*CausalLM"):
        lm.model(x, stop=stop)
    with pytest.raises(TypeError, match="head must be a function, got 3"):
        lm.model(x, stop=stop, head=3)
    with torch.no_grad():
        output = lm.model(x, stop=stop, head=lm.logits)
        assert torch.equal(output.stats.iterations, lm(IDS, stop=stop).stats.iterations)
