"""The states that an iteration begins from."""

import pytest
import torch
from small_models import contractive_mamba2, embedded, randn

import deqseq as dq


def first_states(start):
    """The states that the map of a model is first evaluated at."""
    model = dq.ImplicitModel(dq.Affine(8).double())
    seen = []
    model.backbone.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    model(embedded(), start=start, stop=dq.Stop.exactly(1))
    return seen[0]


def test_it_is_zero_or_the_embedded_tokens():
    assert torch.equal(first_states("zero"), torch.zeros(2, 7, 8))
    assert torch.equal(first_states("input"), embedded())


def test_random_states_are_drawn_anew_or_by_their_seed():
    x = randn(4, 50, 8)
    start = dq.RandomStart(0.5, seed=1)
    drawn = start.draw(x)
    assert drawn.dtype == x.dtype
    assert drawn.shape == x.shape
    assert torch.equal(drawn, start.draw(x))
    assert torch.equal(first_states(start), start.draw(embedded()))
    assert not torch.equal(drawn, dq.RandomStart(0.5, seed=2).draw(x))
    assert not torch.equal(dq.RandomStart(0.5).draw(x), dq.RandomStart(0.5).draw(x))
    assert drawn.abs().max() <= 1.5
    assert drawn.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("first", [0, 2], ids=["whole", "padded"])
@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(3), dq.Sequential()])
def test_a_call_can_begin_at_states_of_its_own(sweep, first):
    model = dq.ImplicitModel(contractive_mamba2()).eval()
    x = embedded(1, 5)
    mask = torch.arange(5)[None] >= first
    stop = dq.Stop(rtol=1e-9, max_steps=500)
    call = {"mask": mask, "stop": stop, "sweep": sweep}
    found = model(x, **call)
    same = model(x, start=found.value, **call)
    assert same.stats.iterations.max() == 1 < found.stats.iterations.max()
    torch.testing.assert_close(same.value, found.value, rtol=0, atol=1e-8)
    with pytest.raises(ValueError, match="start must"):
        model(x, start=found.value[..., :3])
