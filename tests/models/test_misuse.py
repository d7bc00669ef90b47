"""What could go wrong without a word: shared caches, copies, nested calls, padding that holds
anything.
"""

import copy
import pickle
import threading
from functools import partial

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded

import deqseq as dq

one_head, wider = partial(contractive_llama, n_kv_heads=1), partial(contractive_mamba2, d_state=8)
looped = lambda steps=3: dq.Looped(affine(), steps)  # noqa: E731
TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=500))
MAKE = pytest.mark.parametrize(
    "make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"]
)


class TestCopies:
    @MAKE
    def test_a_copy_of_a_compiled_model_has_weights_of_its_own(self, make):
        model, plain = (dq.ImplicitModel(make(), TIGHT).eval() for _ in range(2))
        model.compile(backend="eager")
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for one in (twin, plain):
                for p in one.backbone.parameters():
                    p.mul_(0.7)
            assert torch.equal(twin(embedded()).value, plain(embedded()).value)

    def test_a_compiled_model_is_pickled(self):
        model = dq.ImplicitModel(affine())
        with torch.no_grad():
            before = model(embedded()).value
            model.compile(backend="eager")
            assert torch.equal(pickle.loads(pickle.dumps(model))(embedded()).value, before)


def test_generation_leaves_modes_and_random_numbers_alone():
    lm = dq.CausalLM(11, dq.ImplicitModel(contractive_mamba2(dropout=0.5))).double().train()
    lm.model.backbone.eval()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    tokens = lm.generate(torch.tensor([[1, 2]]), max_new_tokens=2).tokens
    assert torch.equal(torch.rand(3), expected)
    assert tokens.dtype == torch.int64
    assert lm.training
    assert not lm.model.backbone.training


class TestCaches:
    def test_one_is_continued_by_several_threads(self):
        model = dq.ExplicitModel(
            dq.Llama(dq.LlamaConfig(d_model=32, n_layers=2, n_heads=4, injection=False))
        ).eval()
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

        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(tokens, expected, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wrong) == 80
        assert not any(wrong)

    @MAKE
    def test_one_made_in_inference_mode_is_continued_outside(self, make):
        model, x = dq.ImplicitModel(make(), TIGHT).eval(), embedded()
        with torch.inference_mode():
            cache = model(x[:, :4], sweep=dq.Sequential(), return_cache=True).cache
            cache = model(x[:, 4:5], cache=cache, return_cache=True).cache
        with torch.no_grad():
            assert torch.allclose(
                model(x[:, 5:], cache=cache).value, model(x).value[:, 5:], atol=1e-9
            )

    def test_half_precision_keys_do_not_round_the_tokens_after_them(self):
        config = dq.SolveConfig(stop=dq.Stop(rtol=1e-6, max_steps=200))
        model, x = dq.ImplicitModel(contractive_llama().float(), config).eval(), embedded().float()
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                cache = model(x[:, :4], return_cache=True, stop=dq.Stop(rtol=1e-2)).cache
            assert cache.layers[0].keys.dtype == torch.bfloat16
            in_place = model(x[:, 4:], cache=cache)
        with_graph = model(x[:, 4:], cache=cache)
        assert in_place.converged.all()
        assert torch.equal(in_place.stats.iterations, with_graph.stats.iterations)
        assert torch.allclose(in_place.value, with_graph.value, atol=1e-5)

    def test_one_keeps_nothing_but_itself(self):
        model = dq.ImplicitModel(
            contractive_mamba2(), dq.SolveConfig(stop=dq.Stop.exactly(1))
        ).eval()
        for tensor in model(embedded(length=50), return_cache=True).cache.tensors():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        output = dq.ImplicitModel(affine()).eval()(embedded(), return_cache=True)
        before = output.cache.previous.clone()
        output.value.detach().zero_()
        assert torch.equal(output.cache.previous, before)

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(
        ("make", "other", "rows", "error", "message"),
        [
            (contractive_llama, one_head, 2, ValueError, r"\(2, 2, None, 2\).*got.*\(2, 1, "),
            (
                contractive_llama,
                contractive_mamba2,
                2,
                TypeError,
                "be a LlamaCache .*got Mamba2Cache",
            ),
            (
                contractive_llama,
                contractive_llama,
                3,
                ValueError,
                r"rows of its input.* got .*\(3, ",
            ),
            (contractive_mamba2, wider, 2, ValueError, r"\(2, 3, 24\).* got .*\(2, 3, 32\)"),
            (
                contractive_mamba2,
                partial(contractive_mamba2, n_layers=1),
                2,
                ValueError,
                "of this model",
            ),
            (
                contractive_mamba2,
                contractive_mamba2,
                3,
                ValueError,
                r"rows of its input.* got .*\(3, ",
            ),
            (affine, contractive_mamba2, 2, TypeError, "be an AffineCache .*got Mamba2Cache"),
            (affine, affine, 3, ValueError, r"\(2, 8\).* got .*\(3, 8\)"),
            (looped, affine, 2, TypeError, "be a JointCache or None, got AffineCache"),
            (looped, looped, 1, ValueError, "be of this model"),
            (looped, partial(looped, 2), 2, ValueError, "of 3 steps, got one of 2"),
        ],
    )
    def test_one_of_another_model_or_batch_is_named(self, make, other, rows, error, message):
        cache = dq.ImplicitModel(other()).eval()(embedded(rows), return_cache=True).cache
        with pytest.raises(error, match=f"cache (must|was).*{message}"):
            dq.ImplicitModel(make())(embedded(), cache=cache)


def test_two_threads_generate_with_one_model():
    """The one that ends first must not put the model back into training mode while the other goes
    on.
    """
    lm = dq.CausalLM(11, dq.ImplicitModel(contractive_mamba2(dropout=0.5))).double().train()
    ids, inside, done, modes = torch.tensor([[1, 2]]), threading.Event(), threading.Event(), []

    def wait(new):
        if new.positions[0] == 0:
            inside.set()
            assert done.wait(60)
        modes.append(lm.model.backbone.training)

    thread = threading.Thread(
        target=lambda: lm.generate(ids, max_new_tokens=3, window=1, callback=wait)
    )
    thread.start()
    assert inside.wait(60)
    lm.generate(ids, max_new_tokens=1)
    assert not lm.training
    done.set()
    thread.join()
    assert modes == [False] * 3
    assert all(part.training for part in lm.modules())


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(2)])
def test_in_eval_mode_gradients_do_not_change_the_value(sweep):
    model = dq.ImplicitModel(
        contractive_mamba2(), dq.SolveConfig(stop=dq.Stop(rtol=1e-2), sweep=sweep)
    ).eval()
    output = model(embedded())
    with torch.no_grad():
        assert torch.equal(output.value, model(embedded()).value)
    output.value.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    trained = model.train()(embedded())
    assert not torch.equal(trained.value, output.value)  # the phantom steps count, as in the paper


def test_a_row_that_is_not_finite_diverges_alone():
    x = embedded()
    x[0, 0, 0] = torch.nan
    for start in ("zero", "input"):
        status = dq.ImplicitModel(contractive_mamba2(), TIGHT)(x, start=start).status.tolist()
        assert status[0] == dq.Status.DIVERGED and set(status[1:]) == {dq.Status.CONVERGED}


def test_rows_that_diverge_in_eval_mode_are_told():
    model = dq.ImplicitModel(contractive_mamba2()).eval()
    told = pytest.warns(
        dq.ConvergenceWarning, match=r"2 of 2 rows did not converge \(0 spent .*, 2 diverged\)"
    )
    with torch.no_grad(), told:
        output = model(embedded() * torch.nan)
    assert output.status.tolist() == [dq.Status.DIVERGED] * 2


def test_inputs_that_a_sweep_cannot_divide_are_named():
    class Shared(dq.Affine):
        def prepare(self, x, cache=None, mask=None):
            return {"inputs": super().prepare(x), "table": torch.ones(3, 2)}

        def forward(self, z, inputs, cache=None, *, need_aux=False):
            return super().forward(z, inputs["inputs"], cache, need_aux=need_aux)

    model = dq.ImplicitModel(Shared(4))
    assert bool(model(torch.ones(3, 5, 4)).converged.all())
    for sweep in (dq.Chunked(2), dq.Sliding(2)):
        with pytest.raises(ValueError, match=r"Backbone\.prepare must return tensors .*\(3, 2\)"):
            model(torch.ones(3, 5, 4), sweep=sweep)


def test_a_backbone_without_a_width_or_that_returns_no_pair_is_named():
    backbone = dq.Affine(3)
    backbone.forward = lambda z, *rest, **options: z
    with pytest.raises(
        TypeError, match=r"Affine.forward must return a pair \(new state, aux\), got Tensor"
    ):
        dq.ImplicitModel(backbone)(torch.ones(2, 4, 3))
    backbone.d_model = None
    with pytest.raises(TypeError, match=r"backbone\.d_model must be an integer >= 1, got None"):
        dq.ImplicitModel(backbone)
