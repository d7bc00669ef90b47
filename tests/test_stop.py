"""The stopping rule: its numbers, what it refuses, and when it checks."""

import math
from fractions import Fraction

import pytest

from deqseq import Stop


def test_defaults():
    assert Stop() == Stop(
        rtol=1e-3,
        atol=0.0,
        max_steps=64,
        per="row",
        norm="max_token",
        check_every=1,
        divergence=1e4,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rtol", -1e-3),
        ("rtol", math.nan),
        ("atol", math.inf),
        ("max_steps", 0),
        ("check_every", -4),
        ("divergence", 1.0),
        ("divergence", math.nan),
        ("per", "sample"),
        ("norm", "l2"),
    ],
)
def test_refuses_values_out_of_range(name, value):
    stop = Stop()
    vars(stop)[name] = value  # past the type checks of the test run, which would refuse some of them first
    with pytest.raises(ValueError, match=rf"^Stop\.{name} must be .* got "):
        stop.__post_init__()


def test_refuses_a_norm_of_the_row_per_token():
    with pytest.raises(ValueError, match=r'Stop\.per="token".* Stop\.norm must be "max_token"'):
        Stop(per="token", norm="frobenius")


@pytest.mark.parametrize(
    ("check_every", "max_steps", "checks"),
    [(1, 4, [1, 2, 3, 4]), (3, 9, [3, 6, 9]), (4, 10, [4, 8, 10]), (9, 5, [5]), (5, 5, [5])],
)
def test_checks_every_so_many_evaluations_and_at_the_last(check_every, max_steps, checks):
    stop = Stop(check_every=check_every, max_steps=max_steps)
    assert [step for step in range(1, max_steps + 1) if stop.checks(step)] == checks


@pytest.mark.parametrize("steps", [1, 7])
def test_exactly_checks_once_at_the_end(steps):
    stop = Stop.exactly(steps)
    assert (stop.rtol, stop.atol, stop.max_steps) == (0.0, 0.0, steps)
    assert [step for step in range(1, steps + 1) if stop.checks(step)] == [steps]


def test_exactly_refuses_no_steps():
    with pytest.raises(ValueError, match="steps must be"):
        Stop.exactly(0)


@pytest.mark.usefixtures("unchecked")
def test_fractions_are_refused_because_torch_takes_none():
    with pytest.raises(TypeError, match=r"Stop\.rtol must be a number"):
        Stop(rtol=Fraction(1, 1000))
