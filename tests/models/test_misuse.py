"""What could go wrong silently: shared caches, copies, threads, rows that are not finite, backbones
that break their contract.
"""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small_models import affine, contractive_llama, contractive_mamba2, embedded, language_model
from torch.testing import assert_close

import deqseq as dq
from deqseq.rows import take
from deqseq.tokens import TokenArgs, token_map

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=500))
MAKE = pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama, affine])


@torch.no_grad()
@MAKE
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_compiled_model_has_weights_of_its_own(make, copied):
    model = dq.ImplicitModel(make(), TIGHT).eval()
    plain = dq.ImplicitModel(make(), TIGHT).eval()
    model.compile(backend="eager")
    twin = copied(model)
    for parameter in (*twin.parameters(), *plain.parameters()):
        parameter.mul_(0.7)
    assert torch.equal(twin(embedded()).value, plain(embedded()).value)


def test_generation_leaves_modes_and_random_numbers_alone():
    lm = language_model(contractive_mamba2(dropout=0.5)).train()
    lm.model.backbone.eval()
    before = torch.get_rng_state()
    tokens = lm.generate(torch.tensor([[1, 2]]), max_new_tokens=2).tokens
    assert torch.equal(torch.get_rng_state(), before)
    assert tokens.dtype == torch.int64
    assert lm.training
    assert not lm.model.backbone.training


def test_two_threads_generate_with_one_model():
    """The one that ends first must not put the model back into training mode."""
    lm = language_model(contractive_mamba2(dropout=0.5)).train()
    ids = torch.tensor([[1, 2]])
    inside = threading.Event()
    done = threading.Event()
    modes = []

    def wait(new):
        if new.positions[0] == 0:
            inside.set()
            assert done.wait(60)
        modes.append(lm.model.backbone.training)

    generate = partial(lm.generate, ids, max_new_tokens=3, window=1, callback=wait)
    thread = threading.Thread(target=generate)
    thread.start()
    assert inside.wait(60)
    lm.generate(ids, max_new_tokens=1)
    assert not lm.training
    done.set()
    thread.join()
    assert modes == [False] * 3
    assert all(part.training for part in lm.modules())


def test_a_cache_is_continued_by_several_threads():
    config = dq.LlamaConfig(d_model=32, n_layers=2, n_heads=4, injection=False)
    run = torch.no_grad()(dq.ExplicitModel(dq.Llama(config)).eval())
    x = torch.randn(1, 164, 32)
    cache = run(x[:, :99], return_cache=True).cache
    cache = run(x[:, 99:100], cache=cache, return_cache=True).cache  # with room behind it
    rests = [x[:, 100:132], x[:, 132:]]
    expected = [run(rest, cache=cache).value for rest in rests]

    def work(rest):
        return [run(rest, cache=cache).value for _ in range(40)]

    with ThreadPoolExecutor(2) as pool:
        for values, wanted in zip(pool.map(work, rests), expected, strict=True):
            for value in values:
                assert_close(value, wanted, rtol=0, atol=1e-4)


@MAKE
def test_a_cache_made_in_inference_mode_is_continued_outside(make):
    model = dq.ImplicitModel(make(), TIGHT).eval()
    x = embedded()
    with torch.inference_mode():
        cache = model(x[:, :4], sweep=dq.Sequential(), return_cache=True).cache
        cache = model(x[:, 4:5], cache=cache, return_cache=True).cache
    with torch.no_grad():
        rest = model(x[:, 5:], cache=cache).value
        assert_close(rest, model(x).value[:, 5:], rtol=0, atol=1e-9)


def test_half_precision_keys_do_not_round_the_tokens_after_them():
    config = dq.SolveConfig(stop=dq.Stop(rtol=1e-6, max_steps=200))
    model = dq.ImplicitModel(contractive_llama().float(), config).eval()
    x = embedded().float()
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache = model(x[:, :4], return_cache=True, stop=dq.Stop(rtol=1e-2)).cache
        in_place = model(x[:, 4:], cache=cache)
    with_graph = model(x[:, 4:], cache=cache)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert in_place.converged.all()
    assert torch.equal(in_place.stats.iterations, with_graph.stats.iterations)
    assert_close(in_place.value, with_graph.value, rtol=0, atol=1e-5)


def test_a_cache_keeps_nothing_but_itself():
    model = dq.ImplicitModel(contractive_mamba2())
    output = model(embedded(length=50), stop=dq.Stop.exactly(1), return_cache=True)
    for tensor in output.cache.tensors():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    output = dq.ImplicitModel(affine())(embedded(), return_cache=True)
    before = output.cache.previous.clone()
    output.value.detach().zero_()
    assert torch.equal(output.cache.previous, before)


def looped(steps=3):
    return dq.Looped(affine(), steps)


def three_parts():
    """Caches like those of three steps."""
    parts = [dq.ExplicitModel(affine()) for _ in range(3)]
    return dq.RecurrentDepth(*parts)


one_head = partial(contractive_llama, n_kv_heads=1)
one_layer = partial(contractive_mamba2, n_layers=1)
wider = partial(contractive_mamba2, d_state=8)


@pytest.mark.usefixtures("unchecked")
def test_a_cache_of_parts_is_none_of_steps():
    x = embedded()
    models = three_parts(), dq.ExplicitModel(looped())
    caches = [model(x, return_cache=True).cache for model in models]
    with pytest.raises(ValueError, match="cache must be of this model, of 3 parts, got one of 3 s"):
        models[0](x, cache=caches[1])
    with pytest.raises(ValueError, match="cache must be of this model, of 3 steps, got one of 3 p"):
        models[1](x, cache=caches[0])
    for model, cache in zip(models, caches, strict=True):
        model(x, cache=dq.take(cache, torch.tensor([1, 0])).reserve(1))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "other", "rows", "error", "message"),
    [
        (contractive_llama, one_head, 2, ValueError, r"\(2, 2, None, 2\).*got.*\(2, 1, "),
        (contractive_llama, contractive_mamba2, 2, TypeError, "LlamaCache .*got Mamba2Cache"),
        (contractive_mamba2, wider, 2, ValueError, r"\(2, 3, 24\).* got .*\(2, 3, 32\)"),
        (contractive_mamba2, one_layer, 2, ValueError, "of this model"),
        (contractive_mamba2, contractive_mamba2, 3, ValueError, r"rows of its input.* got .*\(3, "),
        (affine, contractive_mamba2, 2, TypeError, "AffineCache .*got Mamba2Cache"),
        (affine, affine, 3, ValueError, r"\(2, 8\).* got .*\(3, 8\)"),
        (looped, affine, 2, TypeError, "JointCache or None, got AffineCache"),
        (looped, looped, 1, ValueError, "of this model"),
        (looped, partial(looped, 2), 2, ValueError, "of 3 steps, got one of 2"),
    ],
)
def test_a_cache_of_another_model_or_batch_is_named(make, other, rows, error, message):
    cache = dq.ImplicitModel(other())(embedded(rows), return_cache=True).cache
    with pytest.raises(error, match=f"cache must.*{message}"):
        dq.ImplicitModel(make())(embedded(), cache=cache)


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(2)])
def test_in_eval_mode_gradients_do_not_change_the_value(sweep):
    config = dq.SolveConfig(stop=dq.Stop(rtol=1e-2), sweep=sweep)
    model = dq.ImplicitModel(contractive_mamba2(), config).eval()
    output = model(embedded())
    with torch.no_grad():
        assert torch.equal(output.value, model(embedded()).value)
    output.value.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    # in training the phantom steps count, as in the paper
    assert not torch.equal(model.train()(embedded()).value, output.value)


@pytest.mark.parametrize("start", ["zero", "input"])
def test_rows_that_are_not_finite_diverge_alone_and_are_told(start):
    model = dq.ImplicitModel(contractive_mamba2(), TIGHT).eval()
    x = embedded(3)
    x[1:, 0, 0] = torch.nan
    with pytest.warns(dq.ConvergenceWarning, match=r"2 of 3 rows .*\(0 spent .*, 2 diverged\)"):
        status = model(x, start=start).status
    assert status.tolist() == [dq.Status.CONVERGED, dq.Status.DIVERGED, dq.Status.DIVERGED]


def test_a_row_that_diverges_in_training_is_told_once():
    model = dq.ImplicitModel(contractive_mamba2(), TIGHT).train()
    x = embedded(3)
    x[2, 0, 0] = torch.nan
    with pytest.warns(dq.ConvergenceWarning, match="1 of 3 rows .* 1 diverged") as caught:
        for _ in range(3):
            model(x)
    assert len(caught) == 1


def test_inputs_that_a_sweep_cannot_divide_are_named():
    class Shared(dq.Affine):
        def prepare(self, x, cache=None, mask=None):
            return {"inputs": super().prepare(x), "table": torch.ones(len(x), 2)}

        def forward(self, z, inputs, cache=None, *, need_aux=False):
            return super().forward(z, inputs["inputs"], cache, need_aux=need_aux)

    model = dq.ImplicitModel(Shared(4))
    x = torch.ones(3, 5, 4)
    assert model(x).converged.all()
    for sweep in (dq.Chunked(2), dq.Sliding(2)):
        with pytest.raises(ValueError, match=r"Backbone\.prepare must return tensors .*\(3, 2\)"):
            model(x, sweep=sweep)


def test_a_backbone_without_a_width_or_that_returns_no_pair_is_named():
    backbone = dq.Affine(3)
    backbone.forward = lambda z, *rest, **options: z
    with pytest.raises(TypeError, match=r"Affine.forward must return a pair .*, got Tensor"):
        dq.ImplicitModel(backbone)(torch.ones(2, 4, 3))
    backbone.d_model = None
    with pytest.raises(TypeError, match=r"backbone\.d_model must be an integer >= 1, got None"):
        dq.ImplicitModel(backbone)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (torch.nn.Linear(4, 4), "subclass deqseq.Backbone, or solve it with deqseq.fixed_point"),
        (dq.Mamba2Config(32), r"write Mamba2\(Mamba2Config\(...\)\)"),
        (dq.Llama, r"write Llama\(...\)"),
    ],
)
def test_what_is_no_backbone_is_answered_with_how_to_make_one(given, remedy):
    for kind in (dq.ImplicitModel, dq.ExplicitModel):
        with pytest.raises(TypeError, match=f"backbone must be a Backbone, got .*: {remedy}"):
            kind(given)


def own(change):
    """A block of the user's own, whose value is changed by ``change(value, z, count of calls)``."""

    class Own(dq.Affine):
        calls = 0

        def forward(self, z, inputs, cache=None, *, need_aux=False):
            self.calls += 1
            value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
            return change(value, z, self.calls), aux

    return Own(4)


def before_last(z):
    """The last state where the token before it is, zero elsewhere."""
    return torch.eye(z.shape[1])[-2][:, None] * z[:, -1:]


def pairs_swapped(z):
    return z[:, [i ^ 1 for i in range(z.shape[1] // 2 * 2)] + [-1] * (z.shape[1] % 2)]


BROKEN = {
    "mixes rows": lambda value, z, _: value + 0.1 * z.mean(dim=0),
    "mixes rows: the value": lambda value, z, _: value + 0.1 * z[:1],
    "mixes rows: the value of a row": lambda value, z, _: value + 0.1 * z.cumsum(0),
    "is not causal": lambda value, z, _: value + 0.1 * z.mean(dim=1, keepdim=True),
    "is not causal: its tokens": lambda value, z, _: value + 0.1 * pairs_swapped(z),
    "is not causal: its": lambda value, z, _: value + 0.1 * z[:, -1:],
    "is not causal: its tokens depend": lambda value, z, _: value + 0.1 * before_last(z),
}


@pytest.mark.parametrize("message", BROKEN)
@pytest.mark.parametrize("length", [2, 5, 8])
def test_a_block_that_breaks_its_promise_is_refused_at_its_first_call(message, length):
    block, ids = own(BROKEN[message]), torch.zeros(3, length).long()
    for model in (dq.ImplicitModel(block), dq.ExplicitModel(block)):
        with pytest.raises(ValueError, match=f"this Own {message}"):
            model(torch.ones(3, length, 4))
        with pytest.raises(ValueError, match=f"this Own {message}"):
            dq.CausalLM(5, model)(ids)
    lm = dq.CausalLM(5, dq.ImplicitModel(dq.Affine(4)))
    assert lm(ids).converged.all()
    lm.model.backbone = own(BROKEN[message])
    with pytest.raises(ValueError, match=f"this Own {message}"):
        lm(ids)


@torch.no_grad()
@pytest.mark.parametrize("make", [dq.ImplicitModel, dq.ExplicitModel])
def test_a_block_is_checked_with_its_first_rows_and_tokens_in_eval_mode(make):
    block = own(lambda value, z, _: torch.dropout(value, 0.5, block.training))
    model, calls = make(block), 0
    if make is dq.ImplicitModel:
        model.solve = dq.SolveConfig(stop=dq.Stop.exactly(1))
    checks = (((1, 1), 1), ((2, 1), 3), ((2, 4), 6), ((2, 4), 0), ((3, 8), 6), ((3, 9), 0))
    for shape, evaluations in checks:
        model.train()(torch.ones(*shape, 4))
        calls += evaluations + 1
        assert block.calls == calls
        assert block.training


def test_what_looks_two_tokens_ahead_is_found_once_there_are_so_many():
    model = dq.ImplicitModel(own(lambda value, z, _: value + 0.1 * F.pad(z, (0, 0, 0, 2))[:, 2:]))
    assert model(torch.ones(1, 2, 4)).converged.all()
    with pytest.raises(ValueError, match="is not causal"):
        model(torch.ones(1, 8, 4))


@torch.no_grad()
def test_what_cannot_be_checked_is_not_refused():
    draws = dq.ExplicitModel(own(lambda value, z, _: value + torch.rand_like(z)))
    counts = dq.ExplicitModel(own(lambda value, z, calls: value + calls))
    x, rows = torch.ones(3, 5, 4), torch.arange(3.0)[:, None, None]
    of_each_row = dq.ExplicitModel(own(lambda value, z, _: value + rows))
    for model in (draws, counts, of_each_row):
        assert model(x).value.shape == x.shape
    plain = dq.ExplicitModel(own(lambda value, z, _: value))
    assert torch.vmap(lambda x: plain(x).value)(x[None]).shape == (1, 3, 5, 4)
    assert plain.to("meta")(x.to("meta")).value.is_meta


def test_a_block_inside_a_wrapper_is_named():
    block = dq.Injected(own(BROKEN["mixes rows"]), dq.AddInjection())
    with pytest.raises(ValueError, match="this Own mixes rows"):
        dq.ImplicitModel(block)(torch.ones(2, 3, 4))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda value, z, _: value.mT, (ValueError, "Own.forward must keep the shape")),
        (lambda value, z, _: value.long(), (TypeError, "Own.forward must keep the dtype")),
        (lambda value, z, _: None, (TypeError, "Own.forward returns must be a Tensor")),
    ],
)
def test_what_a_block_returns_is_named_by_a_language_model_too(change, error):
    with pytest.raises(error[0], match=error[1]):
        dq.CausalLM(5, dq.ImplicitModel(own(change)))(torch.zeros(3, 5).long())


def test_rows_beside_one_that_diverged_keep_the_masks_of_their_solve():
    backbone, x, z = contractive_mamba2(dropout=0.5).train(), embedded(3), embedded(3).flip(0)
    whole = TokenArgs.prepared(backbone, x.requires_grad_(), None, None, False)
    rows = torch.tensor([2, 0])
    some = take(whole, rows).renewed()
    value, _ = token_map(z[rows], some)
    assert_close(value, token_map(z, whole)[0][rows])
    assert not torch.allclose(value, backbone(z[rows], backbone.prepare(x[rows]))[0])
