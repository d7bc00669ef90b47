"""How often the host waits for the device, during which it cannot launch anything; ``-s`` shows the
numbers.

The tolerance is far above rounding errors, so that every device takes the same iterations.
"""

import os
from collections.abc import Callable

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, embedded, language_model

import deqseq as dq

pytestmark = pytest.mark.cuda
DEVICE = os.environ.get("DEVICE", "cuda")
STOP = dq.Stop(rtol=1e-3, max_steps=500)
IDS = torch.arange(14).view(2, 7) % 11
MASK = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])


def solve(sweep: dq.Sweep) -> Callable[[dq.Backbone], Callable[[], object]]:
    """Two rows of seven tokens, one of them padded."""

    def prepare(backbone):
        model = dq.ImplicitModel(backbone, dq.SolveConfig(stop=STOP, sweep=sweep))
        model, x, mask = model.to(DEVICE).eval(), embedded().to(DEVICE), MASK.to(DEVICE)
        return torch.no_grad()(lambda: model(x, mask=mask))

    return prepare


def generate(window: int) -> Callable[[dq.Backbone], Callable[[], object]]:
    """Four tokens after two prompts of seven."""

    def prepare(backbone):
        lm, ids = language_model(backbone, stop=STOP).to(DEVICE).eval(), IDS.to(DEVICE)
        return lambda: lm.generate(ids, max_new_tokens=4, window=window)

    return prepare


def train_exactly_24_steps(backbone: dq.Backbone) -> Callable[[], object]:
    """Forward and backward pass and an update, with a phantom gradient of four steps."""
    lm = language_model(backbone, stop=dq.Stop.exactly(24), gradient=dq.Phantom(4))
    lm, ids = lm.to(DEVICE).train(), IDS.to(DEVICE)
    optimizer = torch.optim.SGD(lm.parameters(), lr=1e-3)

    def step():
        lm(ids, labels=ids).loss.backward()
        optimizer.step()

    return step


CASES = {
    "all tokens together": solve(dq.Simultaneous()),
    "chunks of 3": solve(dq.Chunked(3)),
    "one token after another": solve(dq.Sequential()),
    "sliding window of 3": solve(dq.Sliding(3)),
    "generation, one token at a time": generate(window=1),
    "generation, window of 4": generate(window=4),
    "training step, Stop.exactly(24)": train_exactly_24_steps,
}
UPPER_BOUNDS = {  # waits; beside them the evaluations
    "all tokens together": {"llama": 7, "mamba2": 6},  # in 6 and 5
    "chunks of 3": {"llama": 20, "mamba2": 18},  # in 16 and 16
    "one token after another": {"llama": 41, "mamba2": 31},  # in 29 and 29
    "sliding window of 3": {"llama": 19, "mamba2": 14},  # in 12 and 12
    "generation, one token at a time": {"llama": 29, "mamba2": 24},  # in 20 and 19
    "generation, window of 4": {"llama": 21, "mamba2": 24},  # in 12 and 13
    "training step, Stop.exactly(24)": {"llama": 4, "mamba2": 4},  # in 28 and 28
}
BACKBONES = {"llama": contractive_llama, "mamba2": contractive_mamba2}


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_at_most_so_often(name, case, counted_waits):
    evaluations, backbone = [], BACKBONES[name]()
    backbone.register_forward_hook(lambda *_: evaluations.append(1))
    work = CASES[case](backbone)
    with counted_waits() as waits:
        work()
    print(f"{case}, {name}: {len(waits)} waits in {len(evaluations)} evaluations")
    assert len(waits) <= UPPER_BOUNDS[case][name], waits


def test_what_is_a_wait(counted_waits):
    there, here = torch.ones(3, device=DEVICE), torch.ones(3)
    pinned = here.pin_memory()
    waiting = (
        lambda: here.to(DEVICE),
        lambda: pinned.to(DEVICE),
        lambda: there.cpu(),
        lambda: there.sum().item(),
        lambda: there.tolist(),
        lambda: bool(there.any()),
    )
    for work in waiting:
        with counted_waits() as waits:
            work()
        assert len(waits) == 1
    with counted_waits() as waits:
        pinned.to(DEVICE, non_blocking=True)
        pinned.copy_(there, non_blocking=True)
        there.add_(1).masked_fill_(there > 3, 0.0)
    assert not waits
