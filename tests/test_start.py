"""The states that an iteration begins from."""

import pytest
import torch

import deqseq as dq
from deqseq.start import initial_state


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


@pytest.mark.usefixtures("unchecked")
def test_given_states_must_be_like_the_tokens():
    x = randn(2, 3, 4)
    assert initial_state(y := randn(2, 3, 4, seed=1), x) is y
    for states in (x[:1], x.float()):
        with pytest.raises(
            ValueError, match=r"start must be like the embedded tokens, torch\.float64 \(2, 3, 4\) on cpu"
        ):
            initial_state(states, x)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.0,), "std"),
        ((-1.0,), "std"),
        (("a",), "std"),
        ((1.0, -1), "seed"),
        ((1.0, 0.5), "seed"),
    ],
)
def test_bad_random_starts(arguments, words):
    with pytest.raises((TypeError, ValueError), match=f"RandomStart.{words}"):
        dq.RandomStart(*arguments)
