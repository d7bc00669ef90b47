"""Solvers, gradients, stopping rules and sweeps become JSON and come back equal; what is misspelt is named."""

import inspect
import json
from dataclasses import dataclass

import pytest
from hf_models import exactly

import deqseq as dq
from deqseq.integrations.huggingface import from_json, to_json
from deqseq.integrations.huggingface.objects import CLASSES

OBJECTS = {
    "solver": [dq.Naive(), dq.Relaxed(0.3), dq.Anderson(5, 0.5, 1e-7), dq.Broyden(3)],
    "gradient": [
        dq.Unrolled(True),
        dq.OneStep(),
        dq.Phantom(2, 0.5, True),
        dq.Implicit(dq.Broyden(4), dq.Stop(rtol=1e-7), True),
    ],
    "stop": [dq.Stop(1e-4, 1e-6, 7, "token", "max_token", 2, 50.0), dq.Stop(divergence=float("inf"))],
    "sweep": [dq.Simultaneous(), dq.Chunked(3), dq.Sliding(5), dq.Sequential()],
}
BASES = {"solver": dq.Solver, "gradient": dq.Gradient, "stop": dq.Stop, "sweep": dq.Sweep}


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in OBJECTS.items() for value in values])
def test_round_trip(kind, value):
    data = json.loads(json.dumps(to_json(value)))
    assert from_json(kind, data, "here") == value
    assert from_json(kind, value, "here") is value


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_of_the_library_is_in_the_table(kind):
    public = [getattr(dq, name) for name in dq.__all__]
    concrete = {
        part
        for part in public
        if inspect.isclass(part) and issubclass(part, BASES[kind]) and not inspect.isabstract(part)
    }
    assert set(CLASSES[kind]) == concrete
    assert {type(value) for value in OBJECTS[kind]} == concrete


def test_every_field_is_written():
    assert to_json(dq.Implicit()) == {
        "name": "Implicit",
        "solver": {"name": "Anderson", "memory": 4, "mixing": 1.0, "ridge": None},
        "stop": {
            "rtol": 1e-5,
            "atol": 0.0,
            "max_steps": 100,
            "per": "sample",
            "norm": "frobenius",
            "check_every": 1,
            "divergence": 1e4,
        },
        "throw": False,
        "report": None,
    }


def test_fields_with_a_default_may_be_missing():
    assert from_json("gradient", {"name": "Phantom", "steps": 2}, "here") == dq.Phantom(2)
    assert from_json("stop", {}, "here") == dq.Stop()
    assert from_json("gradient", {"name": "Implicit", "solver": "Naive"}, "here") == dq.Implicit(dq.Naive())


@pytest.mark.parametrize(
    ("kind", "data", "error", "message"),
    [
        ("sweep", "Slide", ValueError, "here: name 'Slide' is unknown; did you mean 'Sliding'? (known: Simultaneous, "
         "Chunked, Sliding, Sequential)"),
        ("solver", {"name": "Relaxed", "dampng": 1}, ValueError, "here: Relaxed field 'dampng' is unknown; did you "
         "mean 'damping'? (known: damping)"),
        ("gradient", {"name": "Implicit", "stop": {"rtl": 1}}, ValueError, "here: Implicit.stop: Stop field 'rtl' is "
         "unknown; did you mean 'rtol'? (known: rtol, atol, max_steps, per, norm, check_every, divergence)"),
        ("solver", {"name": "Relaxed", "damping": "0.8"}, TypeError, "here: Relaxed.damping must be a number, got "
         "'0.8'"),
        ("solver", {"name": "Relaxed", "damping": True}, TypeError, "here: Relaxed.damping must be a number, got True"),
        ("gradient", {"name": "Unrolled", "checkpoint": 1}, TypeError, "here: Unrolled.checkpoint must be true or "
         "false, got 1"),
        ("stop", {"max_steps": 2.0}, TypeError, "here: Stop.max_steps must be an integer, got 2.0"),
        ("stop", {"divergence": 0.5}, ValueError, "here: Stop.divergence must be > 1, got 0.5"),
        ("stop", {"name": "Halt"}, ValueError, "here: name 'Halt' is unknown (known: Stop)"),
        ("sweep", {"name": "Chunked", "size": 0}, ValueError, "here: Chunked.size must be an integer >= 1, got 0"),
        ("solver", {"damping": 1}, TypeError, "here must be a solver of deqseq or its JSON, {\"name\": \"Naive\", "
         "...}, got {'damping': 1}"),
        ("solver", dq.Sliding(2), TypeError, "here must be a solver of deqseq or its JSON, {\"name\": \"Naive\", "
         "...}, got Sliding(window=2)"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(kind, data, error, message):
    with pytest.raises(error, match=exactly(message)):
        from_json(kind, data, "here")


def test_a_missing_field_without_a_default_is_named():
    with pytest.raises(TypeError, match=r"^here: .*size"):
        from_json("sweep", "Chunked", "here")


def test_what_cannot_be_written_is_named():
    @dataclass(frozen=True)
    class Mine(dq.Sweep):
        def solve(self, f, z0, **options):
            raise NotImplementedError

    known = "Naive, Relaxed, Anderson, Broyden, Unrolled, OneStep, Phantom, Implicit, Stop, Simultaneous, Chunked, "
    remedy = "give your own objects in the model's call"
    message = f"a configuration cannot name Mine (known: {known}Sliding, Sequential): {remedy}"
    with pytest.raises(TypeError, match=exactly(message)):
        to_json(Mine())
    with pytest.raises(TypeError, match=r"^a configuration cannot hold Implicit\.report = <built-in function print>$"):
        to_json(dq.Implicit(report=print))
