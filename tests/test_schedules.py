"""The learning rate against its closed form, and as a scheduler of torch."""

import json
import math
import pickle
import re

import pytest
import torch

from deqseq.training import WarmupConstantDecay, warmup_constant_decay

RUN = {"total_steps": 40, "warmup_steps": 5, "decay_steps": 10}


def optimizer(*peaks: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": peak} for peak in peaks])


def rates(schedule, steps: int) -> list[list[float]]:
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return seen


def expected(peak: float, step: int, final: float = 1e-5) -> float:
    """Warm-up to step 5, constant to step 30, then the root from the peak to the floor at step 40."""
    if step < 5:
        return peak * (step + 1) / 5
    part = min(max(step - 30, 0), 10) / 10
    return peak - (peak - final) * math.sqrt(part)


def test_the_closed_form_for_groups_of_their_own_peaks():
    seen = rates(warmup_constant_decay(optimizer(1e-2, 3e-4), **RUN), 45)
    for step, pair in enumerate(seen):
        for peak, rate in zip((1e-2, 3e-4), pair, strict=True):
            assert rate == pytest.approx(expected(peak, step), rel=1e-12), step
    assert seen[40:] == [[pytest.approx(1e-5), pytest.approx(1e-5)]] * 5


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ((4, 0, 0), [1, 1, 1, 1, 1]),
        ((4, 4, 0), [0.25, 0.5, 0.75, 1, 1]),
        ((4, 0, 4), [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0]),
        ((1, 1, 0), [1, 1]),
        ((1, 0, 1), [1, 0]),
    ],
    ids=str,
)
def test_runs_at_the_edge(numbers, wanted):
    schedule = WarmupConstantDecay(*numbers)
    assert [schedule(step) for step in range(len(wanted))] == pytest.approx(wanted, abs=1e-15)
    assert schedule(10**9) == wanted[-1]


@pytest.mark.parametrize("stopped", [2, 20, 34])
def test_a_resumed_schedule_goes_on(stopped):
    whole = rates(warmup_constant_decay(optimizer(1e-2), **RUN), 40)
    first = warmup_constant_decay(optimizer(1e-2), **RUN)
    rates(first, stopped)
    states = json.loads(json.dumps(first.state_dict())), first.optimizer.state_dict()
    after = optimizer(1e-2)
    schedule = warmup_constant_decay(after, **RUN)
    after.load_state_dict(states[1])
    schedule.load_state_dict(states[0])
    assert rates(schedule, 40 - stopped) == whole[stopped:]
    late = optimizer(1e-2)
    late.load_state_dict(states[1])  # before the schedule is made: the peak is the first lr, not the last
    schedule = warmup_constant_decay(late, **RUN)
    schedule.load_state_dict(states[0])
    assert rates(schedule, 40 - stopped)[1:] == whole[stopped + 1 :]
    again = pickle.loads(pickle.dumps(first))
    assert rates(again, 40 - stopped) == whole[stopped:]


def test_a_saved_schedule_is_the_one_that_goes_on():
    first, other = (warmup_constant_decay(optimizer(1.0), **(RUN | change)) for change in ({}, {"decay_steps": 20}))
    other.load_state_dict(first.state_dict())
    assert rates(other, 40) == rates(first, 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total_steps": 0}, "WarmupConstantDecay.total_steps must be an integer >= 1, got 0"),
        ({"warmup_steps": -1}, "WarmupConstantDecay.warmup_steps must be an integer >= 0, got -1"),
        ({"decay_steps": True}, "WarmupConstantDecay.decay_steps must be an integer >= 0, got True"),
        ({"warmup_steps": 31}, "warmup_steps 31 and decay_steps 10 must fit into total_steps 40"),
        (
            {"final_lr": 0.5},
            "final_lr must lie between 0 and the peak of every group, got 0.5 for the lr 0.01 of group 0",
        ),
        ({"final_lr": -1e-5}, "final_lr must lie between 0 and the peak of every group, got -1e-05"),
        ({"final_lr": math.nan}, "final_lr must lie between 0 and the peak of every group, got nan"),
    ],
    ids=str,
)
def test_bad_numbers_are_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        warmup_constant_decay(optimizer(1e-2), **(RUN | change))


def test_a_floor_lies_below_every_peak():
    with pytest.raises(ValueError, match=r"WarmupConstantDecay.floor must lie in \[0, 1\], got 2"):
        WarmupConstantDecay(4, 1, 1, floor=2)
    with pytest.raises(ValueError, match=r"got 1e-05 for the lr 0.0 of group 1"):
        warmup_constant_decay(optimizer(1e-2, 0.0), **RUN)
