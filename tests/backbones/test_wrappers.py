"""A number of iterations as a backbone: it is the loop written out, and is exported."""

import pytest
import torch
from small_models import Logits, affine, contractive_llama, contractive_mamba2, embedded, llama

import deqseq as dq
from deqseq.testing import BackboneContract


def injected():
    torch.manual_seed(1)
    injection = dq.ConcatInjection(8)
    injection.weight.data.normal_(std=0.5)
    return dq.Injected(llama(injection=False), injection).double()


unchecked = pytest.mark.usefixtures("unchecked")
MAKE = {"llama": llama, "mamba2": contractive_mamba2, "affine": affine, "injected": injected}
every_backbone = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


class TestLoopedLlama(BackboneContract):
    backbone = dq.Looped(contractive_llama(n_layers=1), 2)


@unchecked
class TestLoopedMamba2(BackboneContract):
    backbone = dq.Looped(contractive_mamba2(n_layers=1), 3)


def states_of(backbone, x, steps, start):
    """The loop written out."""
    inputs = backbone.prepare(x)
    states = [start]
    for _ in range(steps):
        states.append(backbone(states[-1], inputs)[0])
    return torch.stack(states[1:])


@every_backbone
@pytest.mark.parametrize("steps", [1, 4])
@torch.no_grad()
def test_it_is_the_loop_written_out(make, steps):
    backbone = make()
    x = embedded()
    random = dq.RandomStart(0.5, seed=3)
    for start, first in (("input", x), ("zero", torch.zeros_like(x)), (random, random.draw(x))):
        value = dq.ExplicitModel(dq.Looped(backbone, steps, start=start))(x).value
        assert torch.equal(value, states_of(backbone, x, steps, first)[-1])
    looped = dq.Looped(backbone, steps)
    z = embedded().flip(2)
    assert torch.equal(looped(z, looped.prepare(x))[0], states_of(backbone, x, steps, z)[-1])
    looped.start = z  # states, which the given one does not replace
    assert torch.equal(looped(x, looped.prepare(x))[0], states_of(backbone, x, steps, z)[-1])


def test_gradients_are_those_of_the_loop_written_out():
    results = []
    for looped in (True, False):
        backbone = injected()
        x = embedded().requires_grad_()
        weights = embedded().flip(1)
        start = dq.RandomStart(0.5, seed=3)
        if looped:
            value = dq.ExplicitModel(dq.Looped(backbone, 3, start))(x).value
        else:
            value = states_of(backbone, x, 3, start.draw(x))[-1]
        (value * weights).sum().backward()
        results.append([value, x.grad, *(p.grad for p in backbone.parameters())])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).abs().max() <= 1e-12


@torch.no_grad()
def test_autocast_keeps_the_dtype_of_the_states():
    backbone = affine().float()
    x = embedded().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert backbone(x, backbone.prepare(x))[0].dtype == torch.bfloat16
        value = dq.ExplicitModel(dq.Looped(backbone, 2))(x).value
    assert value.dtype == torch.float32


@unchecked
@pytest.mark.parametrize("start", ["zero", dq.RandomStart()])
def test_a_loop_that_would_not_see_its_input(start):
    looped = dq.Looped(llama(injection=False), 2, start=start)
    with pytest.raises(ValueError, match=r'Looped\.start.*without an injection.*start="input"'):
        dq.ExplicitModel(looped)(embedded())
    looped.start = embedded()  # states can depend on anything
    assert dq.ExplicitModel(looped)(embedded()).value.shape == (2, 7, 8)


@unchecked
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "start"),
    [(llama, "input"), (contractive_mamba2, dq.RandomStart(0.5)), (injected, "zero")],
)
def test_it_is_exported(make, start):
    looped = dq.ExplicitModel(dq.Looped(make(), 3, start))
    once = dq.ExplicitModel(llama(injection=False, n_layers=1))
    model = dq.RecurrentDepth(once, looped, once) if make is injected else looped
    model = Logits(dq.CausalLM(11, model).double().eval())
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    with torch.no_grad():
        exported = torch.export.export(model, (ids[:1],), strict=False).module()
        for row in ids:
            torch.manual_seed(0)
            expected = model(row[None])
            torch.manual_seed(0)
            assert (exported(row[None]) - expected).abs().max() <= 1e-12


@unchecked
@pytest.mark.filterwarnings("ignore")
def test_a_seed_is_not_exported():
    """The exported generator would go on from one call to the next."""
    model = dq.ExplicitModel(dq.Looped(affine(), 2, start=dq.RandomStart(0.5, seed=1)))
    model = Logits(dq.CausalLM(11, model).double().eval())
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"RandomStart\.seed must be None in torch\.export"),
    ):
        torch.export.export(model, (torch.tensor([[1, 2, 3, 4]]),), strict=False)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("steps", 0, ValueError, "an integer >= 1, got 0"),
        ("steps", 2.5, TypeError, "an integer >= 1, got 2.5"),
        ("start", "x", ValueError, "one of .'zero', 'input'"),
    ],
)
def test_an_attribute_is_checked_when_it_is_set(name, value, error, message):
    looped = dq.Looped(affine(), 2)
    with pytest.raises(error, match=rf"Looped\.{name} must be {message}"):
        setattr(looped, name, value)
    assert (looped.steps, looped.start) == (2, "input")
