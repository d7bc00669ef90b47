"""What a training loop calls: which parameters are decayed, the size of a Jacobian, a bad loss."""

import re
from dataclasses import replace

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded, randn
from torch import nn

import deqseq as dq
from deqseq.testing.problems import seeded
from deqseq.training import NonFiniteLoss, check_finite, jacobian_regularisation, parameter_groups

SIZES = {
    "mamba2": dq.Mamba2Config(8, 2, d_state=4, headdim=4),
    "llama": dq.LlamaConfig(8, 2, n_heads=2, mlp_width=12),
}
MAPS = r"(in_proj|out_proj|conv1d|[qkvo]_proj|(gate|up|down)_proj|injection|head|lm_head)"
DECAYED = re.compile(rf"(^|.*\.){MAPS}\.(weight|parametrizations\.weight\.original1)")


def names(model, weight_decay=0.1):
    """Names of the decayed parameters and of the others; of tied ones the first name."""
    names_of = {parameter: name for name, parameter in model.named_parameters()}
    first, second = parameter_groups(model, weight_decay)
    assert first["weight_decay"] == weight_decay
    assert second["weight_decay"] == 0.0
    return tuple([names_of[one] for one in group["params"]] for group in (first, second))


def check(model, tied):
    decayed, others = names(model)
    everything = [name for name, _ in model.named_parameters()]
    assert sorted(decayed + others) == sorted(everything)  # each once
    assert decayed == [name for name in everything if DECAYED.fullmatch(name)]
    assert len(decayed) > 4
    assert any("head" in name for name in decayed) != tied
    assert sum("embed" in name for name in others) == 1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("kind", [dq.ImplicitModel, dq.ExplicitModel])
@pytest.mark.parametrize("backbone", SIZES)
def test_language_models(backbone, kind, weight_norm, tied):
    sizes = replace(SIZES[backbone], weight_norm=weight_norm)
    spec = dq.LanguageModelSpec(5, sizes, tied=tied)
    lm = (spec if kind is dq.ImplicitModel else spec.explicit()).build()
    check(lm, tied)
    decayed, others = names(lm)
    assert any("original1" in name for name in decayed) == weight_norm
    assert any("original0" in name for name in others) == weight_norm


@pytest.mark.parametrize(("kind", "tied"), [("mamba2", True), ("llama", False)])
def test_models_of_transformers(kind, tied):
    ours = pytest.importorskip("deqseq.integrations.huggingface")
    config = ours.DeqseqConfig(vocab_size=5, backbone=SIZES[kind], tie_word_embeddings=tied)
    check(ours.DeqseqForCausalLM(config), tied)


def test_frozen_and_shared_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm((2, 3)))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert names(model) == (["0.weight"], ["1.bias", "2.weight", "2.bias"])


def test_a_map_that_is_tied_to_an_embedding_is_not_decayed():
    model = nn.Sequential(nn.Linear(2, 5, bias=False), nn.Embedding(5, 2))
    model[1].weight = model[0].weight
    assert names(model) == ([], ["0.weight"])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_magnitude_of_torchs_older_weight_norm_is_not_decayed():
    model = torch.nn.utils.weight_norm(nn.Linear(2, 3, bias=False))
    assert names(model) == (["weight_v"], ["weight_g"])


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match=r"Linear has no parameter that wants a gradient"):
        parameter_groups(nn.Linear(1, 1).requires_grad_(False))


def test_the_size_of_a_jacobian_is_the_dense_formula_for_the_same_draws():
    W = randn(6, 6, seed=1)
    z = randn(3, 6, seed=2)
    draws = seeded(3)
    ours = jacobian_regularisation(lambda z: torch.tanh(z @ W.T), z, samples=5, generator=seeded(3))
    jacobians = (1 - torch.tanh(z @ W.T) ** 2)[:, :, None] * W
    v = torch.stack([torch.randn(3, 6, generator=draws) for _ in range(5)]).double()
    products = torch.einsum("bij,sbi->sbj", jacobians, v)
    assert ours.item() == pytest.approx(products.square().mean().item(), rel=1e-12)


@pytest.mark.parametrize("weight", [None, torch.ones(3, requires_grad=True)])
def test_a_map_that_ignores_its_state(weight):
    f = torch.ones_like if weight is None else lambda z: weight.expand_as(z)
    assert jacobian_regularisation(f, torch.ones(2, 3)).item() == 0


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama, affine])
def test_the_size_of_a_jacobian_reaches_the_parameters_of_a_backbone(make):
    """By finite differences; several chunks of a scan included."""
    backbone = make()
    x = embedded()
    z = randn(2, 7, 8, seed=5)

    def penalty(*_):
        inputs = backbone.prepare(x)
        return jacobian_regularisation(lambda z: backbone(z, inputs)[0], z, generator=seeded(0))

    parameters = [p for name, p in backbone.named_parameters() if "injection" not in name]
    assert torch.autograd.gradcheck(penalty, parameters, fast_mode=True, rtol=1e-4)
    assert penalty().item() > 1e-6
    with torch.no_grad():
        assert not penalty().requires_grad


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_that_says_where(value):
    for loss in (torch.tensor(value, requires_grad=True), value):
        with pytest.raises(NonFiniteLoss, match=r"the loss is .* after step 3 in phase 'free'"):
            check_finite(loss, step=3, phase="free")
    with pytest.raises(FloatingPointError, match=r"the gradient norm is .* after step 0: stopped"):
        check_finite(value, step=0, quantity="gradient norm")


def test_a_finite_number_is_returned():
    assert check_finite(torch.tensor([2.5], requires_grad=True), step=0) == 2.5
