"""Weights are computed once per solve, belong to it, carry its gradient, and cannot be
written to.
"""

import copy
from typing import Any

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2
from torch import nn

import deqseq as dq
from deqseq.layers import apply_weight_norm, fold_weight_norm, with_weights
from deqseq.layers.weight_norm import WeightNorm

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MAKE = pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama])


def model(seed=0, **fields):
    torch.manual_seed(seed)
    config = dq.SolveConfig(stop=dq.Stop(rtol=1e-6), **fields)
    return dq.ImplicitModel(contractive_mamba2(), config).double().eval()


def layer() -> Any:
    layer = nn.Linear(3, 2)
    apply_weight_norm(layer)
    return layer


def gradients(one, value):
    names, parameters = zip(*one.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value.sum(), parameters), strict=True))


@pytest.fixture
def computed(monkeypatch):
    """The weights that were computed, in order."""
    seen = []
    compute = WeightNorm.forward
    monkeypatch.setattr(WeightNorm, "forward", lambda self: (seen.append(self), compute(self))[1])
    return seen


def test_it_keeps_initial_weights_and_is_the_formula():
    one = nn.Sequential(nn.Linear(3, 4), dq.layers.CausalConv1d(4, 2))
    x = torch.randn(2, 5, 3)
    before = [part.weight.detach().clone() for part in one]
    expected = one(x)
    apply_weight_norm(one)
    apply_weight_norm(one)  # does nothing
    torch.testing.assert_close(one(x), expected)
    torch.testing.assert_close([part.weight for part in with_weights(one)], before)
    norm: Any = one[0].parametrizations.weight
    norm.original0.data *= 2
    direction = norm.original1 / norm.original1.norm(dim=1, keepdim=True)
    torch.testing.assert_close(one[0](x), x @ (norm.original0 * direction).T + one[0].bias)


@MAKE
@pytest.mark.parametrize(
    "gradient",
    [dq.Phantom(2, checkpoint=True), dq.OneStep(), dq.Implicit(), dq.Unrolled(checkpoint=True)],
)
def test_a_solve_computes_every_weight_once_and_its_gradient_is_that_of_plain_weights(
    make, gradient, computed
):
    stop = dq.Stop(rtol=1e-9, max_steps=100)
    one = dq.ImplicitModel(make(), dq.SolveConfig(stop=stop, gradient=gradient))
    plain = copy.deepcopy(one)
    computed.clear()
    value = one(X).value
    norms = [part for part in one.modules() if isinstance(part, WeightNorm)]
    assert len(computed) == len(norms)
    assert set(computed) == set(norms)
    found = gradients(one, value)
    fold_weight_norm(plain)
    expected = gradients(plain, plain(X).value)
    for name, part in one.named_modules():
        if isinstance(part, WeightNorm):
            weight = expected.pop(name.replace("parametrizations.", ""))
            pulled = torch.autograd.grad(part(), part.parameters(), weight)
            expected |= dict(zip((f"{name}.original0", f"{name}.original1"), pulled, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


def test_a_generation_computes_every_weight_once_and_a_callback_can_train(computed):
    lm = dq.CausalLM(9, model()).double()
    ids = torch.tensor([[1, 2]])
    counts = []

    def train(_):
        counts.append(len(computed))
        with torch.enable_grad():
            lm(ids, labels=ids).loss.backward()

    lm.generate(ids, max_new_tokens=1, callback=train)
    assert all(p.grad is not None for p in lm.parameters())
    lm.generate(ids, max_new_tokens=4)
    assert len(computed) == 3 * counts[0] > 0


@torch.no_grad()
@pytest.mark.parametrize("itself", [True, False])
def test_weights_loaded_during_a_solve_are_used_by_the_next_call(itself):
    ours = model(0)
    other = model(1)
    one = ours if itself else other
    seen = []
    state = {name: 0.9 * value for name, value in one.state_dict().items()}

    def reload(_):
        if not seen:
            seen.append(one(X).value)
            one.load_state_dict(state)
            seen.append(one(X).value)

    ours(X, callback=reload)
    expected = model(2)
    expected.load_state_dict(state)
    assert torch.equal(seen[1], expected(X).value)
    assert not torch.equal(*seen)


@pytest.mark.parametrize(
    "use",
    [
        lambda one: one.weight,
        lambda one: one.weight.data.copy_(torch.zeros(2, 3)),
        lambda one: setattr(one, "weight", nn.Parameter(torch.ones(2, 3))),
    ],
)
def test_a_write_that_would_be_lost_is_an_error(use):
    with pytest.raises(AttributeError, match="fold_weight_norm"):
        use(layer())
    assert not hasattr(layer(), "weight")


def test_folding_changes_no_bit_and_leaves_copies_alone():
    ours = model()
    other = copy.deepcopy(ours)
    before = ours(X).value.detach()
    ours.backbone.injection.requires_grad_(False)
    fold_weight_norm(ours)
    assert not any("parametrizations" in name for name in ours.state_dict())
    assert torch.equal(ours(X).value, before)
    assert torch.equal(other(X).value, before)
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {"backbone.injection.weight", "backbone.injection.bias"}
    part: Any = ours.backbone.layers[0]
    part.mixer.in_proj.weight.data += 1  # a parameter again
    assert not torch.equal(ours(X).value, before)


def test_a_row_of_zeros_stays_zero_and_can_grow():
    part = nn.Linear(4, 3)
    part.weight.data[1] = 0
    before = part.weight.clone()
    apply_weight_norm(part)
    torch.testing.assert_close(with_weights(part).weight, before)
    (2 - part(torch.ones(2, 4))).square().sum().backward()
    magnitude: Any = part.parametrizations.weight.original0
    assert magnitude.grad[1] != 0


def test_what_cannot_be_normalised_is_named():
    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    second.weight = first.weight
    with pytest.raises(ValueError, match=r"tied weights, got 0\.weight and 1\.weight"):
        apply_weight_norm(nn.Sequential(first, second))
    assert [name for name, _ in first.named_parameters()] == ["weight", "bias"]
    other = nn.Linear(3, 2)
    parametrise = nn.utils.parametrize.register_parametrization
    parametrise(other, "bias", nn.Identity())
    with pytest.raises(ValueError, match="no parametrised tensor but weights, got 'bias'"):
        apply_weight_norm(other)
    normalised = layer()
    with pytest.raises(
        AttributeError, match="fold_weight_norm"
    ):  # torch would change the class of all such layers
        parametrise(normalised, "bias", nn.Identity())
    for one in (other, normalised, layer()):
        assert one.bias.shape == (2,)
        assert one(torch.ones(1, 3)).shape == (1, 2)


def test_what_torch_parametrises_is_computed_once_too():
    """Spectral norm takes a step of its power iteration at each use in training: recomputed, the
    map would change.
    """
    one: Any = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    once = with_weights(one)
    assert once.weight is once.weight
    assert one.weight is not one.weight
    assert with_weights(once) is once
    fold_weight_norm(one)
    assert "weight" in one.parametrizations, "only weight normalisation is folded"


def test_hooks_meet_the_layer_itself_until_they_are_removed():
    one = model()
    block: Any = one.backbone.layers[0]
    layers = (one.backbone, block, block.mixer.in_proj)
    met = []

    def meet(layer, *_):
        met.append(layer)

    handles = [part.register_forward_pre_hook(meet) for part in layers]
    handles += [part.register_forward_hook(meet) for part in layers]
    handles += [layers[-1].register_full_backward_hook(meet)]
    one(X, gradient=dq.OneStep()).value.sum().backward()
    assert met[-1] is layers[-1]
    assert {id(layer) for layer in met} == {id(layer) for layer in layers}
    for handle in handles:
        handle.remove()

    def remove(*_):
        called.append(handle.remove())

    called = []
    handle = layers[-1].register_forward_hook(remove)
    assert one(X).stats.iterations.min() > 1
    assert len(called) == 1


def test_a_wrapped_forward_is_called():
    """As accelerate wraps it: as an attribute of the layer."""
    part = layer()
    x = torch.ones(1, 3)
    expected = part(x)
    inner = part.forward
    part.forward = lambda x: 2 * inner(x)
    torch.testing.assert_close(part(x), 2 * expected)


def test_layers_that_read_the_weights_of_others_are_solved():
    class Encoder(dq.Affine):
        causal = False

        def __init__(self):
            super().__init__(8)
            self.mix = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)

        def forward(self, z, inputs, cache=None, *, need_aux=False):
            value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
            return value + 0.01 * self.mix(z), aux

    one = dq.ImplicitModel(Encoder()).double().eval()
    with torch.no_grad():
        before = one(X).value
        apply_weight_norm(one)
        torch.testing.assert_close(one(X).value, before)


def test_on_meta():
    with torch.device("meta"):
        assert layer()(torch.ones(4, 3)).shape == (4, 2)
