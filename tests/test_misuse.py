"""What could go wrong without a word: shared caches, copies, nested calls, padding that holds anything."""

import copy
import math
import pickle
import threading

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded

import deqseq as dq
from deqseq.diagnostics import check_duality

TIGHT = dq.Stop(rtol=1e-11, max_steps=500)
MAKE = pytest.mark.parametrize(
    "make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"]
)


@MAKE
def test_a_copy_of_a_compiled_model_has_weights_of_its_own(make):
    model = dq.ImplicitModel(make(), stop=TIGHT).eval()
    model.compile(backend="eager")
    twin = copy.deepcopy(model)
    plain = dq.ImplicitModel(make(), stop=TIGHT).eval()
    with torch.no_grad():
        for one in (twin, plain):
            for p in one.backbone.parameters():
                p.mul_(0.7)
        assert torch.equal(twin(embedded()).value, plain(embedded()).value)


def test_a_compiled_model_is_pickled():
    model = dq.ImplicitModel(affine())
    with torch.no_grad():
        before = model(embedded()).value
        model.compile(backend="eager")
        assert torch.equal(pickle.loads(pickle.dumps(model))(embedded()).value, before)


def test_gradients_wanted_inside_a_call_without_any_are_an_error():
    lm = dq.CausalLM(11, dq.ImplicitModel(contractive_mamba2())).double()
    ids = torch.tensor([[1, 2]])

    def train(_):
        with torch.enable_grad():
            lm(ids, labels=ids)

    with pytest.raises(RuntimeError, match=r"would silently lose them here; wrap it in torch.no_grad\(\)"):
        lm.generate(ids, max_new_tokens=1, callback=train)
    lm(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in lm.parameters())


def test_a_cache_is_continued_by_several_threads():
    model = dq.ExplicitModel(dq.Llama(dq.LlamaConfig(d_model=32, n_layers=2, n_heads=4, injection=False))).eval()
    torch.manual_seed(0)
    x, tokens = torch.randn(1, 100, 32), [torch.randn(1, 32, 32) for _ in range(2)]
    wrong = []
    with torch.no_grad():
        cache = model(x[:, :99], return_cache=True).cache
        cache = model(x[:, 99:], cache=cache, return_cache=True).cache  # with room behind it
        expected = [model(y, cache=cache).value for y in tokens]

    def work(y, answer):
        with torch.no_grad():
            for _ in range(40):
                wrong.append(not torch.allclose(model(y, cache=cache).value, answer, atol=1e-4))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(tokens, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 80
    assert not any(wrong)


@MAKE
def test_a_cache_made_in_inference_mode_is_continued_outside(make):
    model, x = dq.ImplicitModel(make(), stop=TIGHT).eval(), embedded()
    with torch.inference_mode():
        cache = model(x[:, :4], sweep=dq.Sequential(), return_cache=True).cache
        cache = model(x[:, 4:5], cache=cache, return_cache=True).cache
    with torch.no_grad():
        assert torch.allclose(model(x[:, 5:], cache=cache).value, model(x).value[:, 5:], atol=1e-9)


def test_a_half_precision_cache_does_not_round_the_tokens_after_it():
    model, x = dq.ImplicitModel(contractive_llama().float(), stop=dq.Stop(rtol=1e-6, max_steps=200)).eval(), embedded()
    x = x.float()
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache = model(x[:, :4], return_cache=True, stop=dq.Stop(rtol=1e-2)).cache
        assert cache.layers[0].keys.dtype == torch.bfloat16
        in_place = model(x[:, 4:], cache=cache)
    with_graph = model(x[:, 4:], cache=cache)
    assert (in_place.status == dq.Status.CONVERGED).all()
    assert torch.equal(in_place.stats.steps, with_graph.stats.steps)
    assert torch.allclose(in_place.value, with_graph.value, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "cache", "error", "message"),
    [
        (
            contractive_llama,
            lambda: contractive_llama(n_kv_heads=1).init_cache(2),
            ValueError,
            r"\(2, 2\), got \(1, 2\)",
        ),
        (
            contractive_llama,
            lambda: contractive_mamba2().init_cache(2),
            TypeError,
            "must be a LlamaCache, got Mamba2Cache",
        ),
        (
            contractive_llama,
            lambda: contractive_llama().init_cache(3),
            ValueError,
            "2 rows, .* got 2 layers and 3 rows",
        ),
        (
            contractive_mamba2,
            lambda: contractive_mamba2(d_state=8).init_cache(2),
            ValueError,
            "must have conv states of",
        ),
        (affine, lambda: contractive_mamba2().init_cache(2), TypeError, "must be an AffineCache, got Mamba2Cache"),
    ],
)
def test_a_cache_of_another_model_is_named(model, cache, error, message):
    backbone = model()
    check = type(backbone)._check_cache  # itself: the tests' own check of types would be first
    with pytest.raises(error, match=message):
        getattr(check, "__wrapped__", check)(backbone, cache(), embedded())


@MAKE
@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(3), dq.Sequential()], ids=str)
def test_padding_may_hold_anything(make, sweep):
    model, x = dq.ImplicitModel(make(), stop=TIGHT).eval(), embedded()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    spoiled = x.clone()
    spoiled[0, 4:] = torch.nan
    with torch.no_grad():
        clean, other = (model(y, mask=mask, sweep=sweep, return_cache=True) for y in (x, spoiled))
        assert torch.equal(clean.value, other.value)
        later = [model(x, cache=output.cache).value for output in (clean, other)]
    assert torch.equal(*later)


def test_a_trace_of_tokens_is_put_back_in_its_places():
    model = dq.ImplicitModel(affine(), stop=dq.Stop(rtol=1e-6, per="token")).eval()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = False
    with torch.no_grad():
        stats = model(embedded(), mask=mask, trace=True).stats
    assert (stats.trace[:, 0, :3] == 0).all()
    assert (stats.trace[0, 0, 3:] > 0).all()
    assert torch.equal(stats.trace[-1] == 0, stats.residual == 0)


def test_generation_leaves_modes_and_random_numbers_alone():
    lm = dq.CausalLM(11, dq.ImplicitModel(contractive_mamba2(dropout=0.5))).double().train()
    lm.model.backbone.eval()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    lm.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    assert torch.equal(torch.rand(3), expected)
    assert lm.training
    assert not lm.model.backbone.training


def test_duality_does_not_hide_what_is_not_a_number():
    lm = dq.CausalLM(11, dq.ImplicitModel(contractive_mamba2())).double().eval()
    lm.embedding.weight.data[3] = torch.nan
    report = check_duality(lm, torch.tensor([[1, 2], [4, 3]]), sweeps=[dq.Simultaneous(), dq.Chunked(8)])
    assert math.isnan(report.worst)


class Alternating(dq.Affine):
    """An affine map that leaves its fixed point again at every second call: the best value is not the last."""

    calls = 0

    def forward(self, z, injection, cache=None, *, return_trail=False):
        self.calls += 1
        value, trail = super().forward(z, injection, cache, return_trail=return_trail)
        return value + (0.0 if self.calls % 2 else 0.1), trail


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Chunked(3)], ids=str)
def test_rows_evaluated_once_more_are_counted(sweep):
    torch.manual_seed(0)
    backbone, seen = Alternating(8).double(), []
    backbone.register_forward_hook(lambda module, inputs, _: seen.append(inputs[0].shape[0] * inputs[0].shape[1]))
    with torch.no_grad():
        output = dq.ImplicitModel(backbone, stop=dq.Stop(rtol=1e-9, max_steps=8))(
            embedded(), sweep=sweep, return_cache=True
        )
    assert (output.status == dq.Status.BUDGET_SPENT).all()
    assert output.stats.evaluations == len(seen) > 8
    assert output.stats.updates.sum() == sum(seen)
