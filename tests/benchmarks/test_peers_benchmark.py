"""The benchmark beside torchdeq and a loop by hand: all three compute the same."""

import sys
from pathlib import Path

import pytest
import torch

import deqseq as dq

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import peers

IDS = torch.tensor([list(b"To be, or not to be"), list(b"that is the questio")])


@pytest.fixture
def lm():
    return dq.load_example("text").double()


def ways(iterations):
    stops = dq.Stop.exactly(iterations), dq.Stop.exactly(iterations - peers.DIFFERENTIATED)
    ours = peers.DeqSeq(*stops, dq.Relaxed(peers.DAMPING), dq.Simultaneous())
    return ours, peers.torchdeq(0.0, iterations), peers.by_hand(iterations)


@pytest.mark.parametrize("training", [True, False])
def test_losses_and_gradients_are_equal(lm, training):
    found: list[list[torch.Tensor]] = []
    for way in ways(200):  # at the fixed point; before it, ours alone does not damp the last evaluation of a solve
        with torch.set_grad_enabled(training):
            loss = way.loss(lm.train(training), IDS)
        if training:
            lm.zero_grad()
            loss.backward()
        found.append([loss.detach()] + ([p.grad.clone() for p in lm.parameters()] if training else []))
    for theirs in found[1:]:
        for mine, other in zip(found[0], theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def test_characters_are_equal(lm):
    ours, *others = (way.decode(lm.eval(), IDS, 12) for way in ways(10))
    assert ours.shape == (2, 12)
    for theirs in others:
        assert torch.equal(ours, theirs)


def test_a_tolerance_ends_the_iterations_of_torchdeq(lm):
    loose, tight = (peers.torchdeq(rtol, 256).loss(lm.eval(), IDS).item() for rtol in (0.5, 1e-8))
    assert tight == pytest.approx(peers.by_hand(256).loss(lm, IDS).item(), abs=1e-6)
    assert abs(loose - tight) > 1e-4


def test_the_cheapest_setting_is_the_first_that_has_the_loss_of_the_solved_model():
    text = peers.Text(IDS.flatten(), IDS, IDS)
    assert peers.cheapest({count: peers.by_hand(count) for count in (1, 64, 128)}, text) == 64
    with pytest.raises(RuntimeError, match=r"none of \[1, 2\] gives the loss of the solved model"):
        peers.cheapest({count: peers.by_hand(count) for count in (1, 2)}, text)
