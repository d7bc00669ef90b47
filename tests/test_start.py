"""The states that an iteration begins from."""

import pytest
import torch
from small_models import contractive_mamba2, randn

import deqseq as dq
from deqseq.start import initial_state


def test_zeros_take_no_memory_and_the_input_is_not_copied():
    x = randn(2, 3, 4)
    zero = initial_state("zero", x)
    assert torch.equal(zero, torch.zeros_like(x))
    assert zero.untyped_storage().nbytes() == x.element_size()
    assert initial_state("input", x) is x


def test_random_states_are_drawn_anew_or_by_their_seed():
    x = randn(4, 50, 8)
    start = dq.RandomStart(0.5, seed=1)
    drawn = initial_state(start, x)
    assert (drawn.dtype, drawn.shape) == (x.dtype, x.shape)
    assert torch.equal(drawn, start.draw(x))
    assert not torch.equal(drawn, dq.RandomStart(0.5, seed=2).draw(x))
    assert not torch.equal(dq.RandomStart(0.5).draw(x), dq.RandomStart(0.5).draw(x))
    assert drawn.abs().max() <= 1.5
    assert drawn.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    "mask", [None, torch.tensor([[False, False, True, True, True]])], ids=["whole", "padded"]
)
@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(3), dq.Sequential()], ids=str)
def test_a_call_can_begin_at_states_of_its_own(sweep, mask):
    torch.manual_seed(0)
    model = dq.ImplicitModel(contractive_mamba2()).double().eval()
    x, stop = (
        torch.randn(1, 5, model.backbone.d_model, dtype=torch.float64),
        dq.Stop(rtol=1e-9, max_steps=500),
    )
    found = model(x, mask=mask, stop=stop, sweep=sweep)
    again = model(x, mask=mask, stop=stop, sweep=sweep, start=found.value)
    assert again.stats.iterations.max() == 1 < found.stats.iterations.max()
    assert torch.allclose(again.value, found.value, rtol=1e-8)
    with pytest.raises(ValueError, match="start must"):
        model(x, start=found.value[..., :3])
