"""The stopping rule: its numbers, its refusals and its looks."""

import math

import pytest
from contracts import exactly

from deqseq import Stop


def test_defaults():
    assert Stop() == Stop(
        rtol=1e-3,
        atol=0.0,
        max_steps=64,
        per="sample",
        norm="max_token",
        check_every=1,
        divergence=1e4,
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rtol": -1e-3}, "Stop.rtol must be a finite number >= 0, got -0.001"),
        ({"rtol": math.nan}, "Stop.rtol must be a finite number >= 0, got nan"),
        ({"atol": math.inf}, "Stop.atol must be a finite number >= 0, got inf"),
        ({"max_steps": 0}, "Stop.max_steps must be an integer >= 1, got 0"),
        ({"max_steps": True}, "Stop.max_steps must be an integer >= 1, got True"),
        ({"check_every": -4}, "Stop.check_every must be an integer >= 1, got -4"),
        ({"divergence": 1.0}, "Stop.divergence must be > 1, got 1.0"),
        ({"divergence": math.nan}, "Stop.divergence must be > 1, got nan"),
        (
            {"per": "token", "norm": "frobenius"},
            'Stop.per="token" measures each token: Stop.norm must be "max_token", got "frobenius"',
        ),
    ],
)
def test_refuses_numbers_out_of_range(arguments, text):
    with pytest.raises(ValueError, match=exactly(text)):
        Stop(**arguments)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("max_steps", 2.5, "Stop.max_steps must be an integer >= 1, got 2.5"),
        ("per", "row", "Stop.per must be one of ('batch', 'sample', 'token'), got 'row'"),
        ("norm", "l2", "Stop.norm must be one of ('max_token', 'frobenius'), got 'l2'"),
    ],
)
def test_refuses_what_a_type_checker_would(field, value, text):
    stop = Stop()
    vars(stop)[field] = value  # past the type checks of the test run, which would speak first
    with pytest.raises(ValueError, match=exactly(text)):
        stop.__post_init__()


@pytest.mark.parametrize(
    ("check_every", "max_steps", "looks"),
    [(1, 4, [1, 2, 3, 4]), (3, 9, [3, 6, 9]), (4, 10, [4, 8, 10]), (9, 5, [5]), (5, 5, [5])],
)
def test_looks_at_every_so_many_evaluations_and_at_the_last(check_every, max_steps, looks):
    stop = Stop(check_every=check_every, max_steps=max_steps)
    assert [step for step in range(1, max_steps + 1) if stop.looks_at(step)] == looks


@pytest.mark.parametrize("steps", [1, 7])
def test_exactly_looks_once_at_the_end(steps):
    stop = Stop.exactly(steps)
    assert (stop.rtol, stop.atol, stop.max_steps) == (0.0, 0.0, steps)
    assert [step for step in range(1, steps + 1) if stop.looks_at(step)] == [steps]


def test_exactly_refuses_no_steps():
    with pytest.raises(ValueError, match=exactly("Stop.max_steps must be an integer >= 1, got 0")):
        Stop.exactly(0)
