"""Solvers, gradients, stopping rules and sweeps become JSON and come back equal; what is misspelt is named."""

import inspect
import json
from dataclasses import dataclass

import pytest

import deqseq as dq
from deqseq.integrations.huggingface import from_json, to_json
from deqseq.integrations.huggingface.objects import CLASSES
from deqseq.layers import RotaryScaling

OBJECTS = {
    "solver": [dq.Naive(), dq.Relaxed(0.3), dq.Adaptive(), dq.Anderson(5, 0.5, 1e-7), dq.Broyden(3)],
    "gradient": [
        dq.Unrolled(True),
        dq.OneStep(),
        dq.Phantom(2, 0.5, True),
        dq.Implicit(dq.Broyden(4), dq.Stop(rtol=1e-7), True),
    ],
    "stop": [dq.Stop(1e-4, 1e-6, 7, 2, 50.0, "row"), dq.Stop(divergence=float("inf"))],
    "sweep": [dq.Simultaneous(), dq.Chunked(3), dq.Sliding(5), dq.Sequential()],
    "start": [dq.RandomStart(0.5, 3)],
    "solve": [
        dq.SolveConfig(dq.Anderson(), dq.Stop(1e-4), dq.OneStep(), dq.Sliding(3), start)
        for start in ("input", dq.RandomStart(0.5))
    ],
    "backbone": [dq.LlamaConfig(64, rope_scaling=RotaryScaling(4.0)), dq.Mamba2Config(64, dt_limit=(0.0, 0.1))],
    "rope_scaling": [RotaryScaling(2.0, original_length=64)],
}
BASES = {
    "solver": dq.Solver,
    "gradient": dq.Gradient,
    "stop": dq.Stop,
    "sweep": dq.Sweep,
    "start": dq.RandomStart,
    "solve": dq.SolveConfig,
    "backbone": (dq.LlamaConfig, dq.Mamba2Config),
    "rope_scaling": RotaryScaling,
}


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in OBJECTS.items() for value in values])
def test_round_trip(kind, value):
    data = json.loads(json.dumps(to_json(value)))
    assert from_json(kind, data, "here") == value
    assert from_json(kind, value, "here") is value


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_of_the_library_is_in_the_table(kind):
    public = [RotaryScaling, *(getattr(dq, name) for name in dq.__all__)]
    concrete = {
        part
        for part in public
        if inspect.isclass(part) and issubclass(part, BASES[kind]) and not inspect.isabstract(part)
    } - {dq.Sweep}
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
            "check_every": 1,
            "divergence": 1e4,
            "norm": "row",
        },
        "throw": False,
        "report": None,
    }


def test_fields_with_a_default_may_be_missing():
    assert from_json("gradient", {"name": "Phantom", "steps": 2}, "here") == dq.Phantom(2)
    assert from_json("stop", {}, "here") == dq.Stop()
    assert from_json("gradient", {"name": "Implicit", "solver": "Naive"}, "here") == dq.Implicit(dq.Naive())


def test_a_base_keeps_what_is_left_out():
    base = dq.SolveConfig(dq.Relaxed(0.3), dq.Stop(rtol=1e-6), sweep=dq.Sliding(3))
    changes = {"solver": {"damping": 0.5}, "stop": {"max_steps": 7}, "sweep": "Sequential"}
    wanted = dq.SolveConfig(dq.Relaxed(0.5), dq.Stop(rtol=1e-6, max_steps=7), sweep=dq.Sequential())
    assert from_json("solve", changes, "here", base) == wanted
    assert from_json("solve", {"stop": dq.Stop()}, "here", base).stop == dq.Stop()
    named = from_json("solve", {"solver": {"name": "Anderson"}}, "here", base)
    assert named.solver == dq.Anderson()


@pytest.mark.parametrize(
    ("kind", "data", "error", "message"),
    [
        ("sweep", "Slide", ValueError, "here: name 'Slide' is unknown; did you mean 'Sliding'"),
        ("solver", {"name": "Relaxed", "dampng": 1}, ValueError, "Relaxed field 'dampng' .*did you mean 'damping'"),
        ("gradient", {"name": "Implicit", "stop": {"rtl": 1}}, ValueError, r"Implicit\.stop: .*'rtl' .*'rtol'"),
        ("solver", {"name": "Relaxed", "damping": "0.8"}, TypeError, r"Relaxed\.damping must be a number"),
        ("solver", {"name": "Relaxed", "damping": True}, TypeError, r"Relaxed\.damping must be a number"),
        ("gradient", {"name": "Unrolled", "checkpoint": 1}, TypeError, r"Unrolled\.checkpoint must be True or False"),
        ("stop", {"max_steps": 2.0}, TypeError, r"Stop\.max_steps must be an integer"),
        ("stop", {"divergence": 0.5}, ValueError, r"here: Stop\.divergence must be"),
        ("stop", {"norm": "max"}, ValueError, r"here: Stop\.norm must be"),
        ("stop", {"name": "Halt"}, ValueError, r"name 'Halt' is unknown \(known: Stop\)"),
        ("sweep", {"name": "Chunked", "size": 0}, ValueError, r"Chunked\.size must be an integer >= 1"),
        ("solver", {"damping": 1}, TypeError, 'must be a solver of deqseq or its JSON, {"name": "Naive"'),
        ("solver", dq.Sliding(2), TypeError, "must be a solver of deqseq or its JSON"),
        ("solve", {"solver": dq.Sliding(2)}, TypeError, r"here: SolveConfig\.solver must be a solver"),
    ],
)
def test_what_cannot_be_read_is_named(kind, data, error, message):
    with pytest.raises(error, match=message):
        from_json(kind, data, "here")


def test_a_missing_field_without_a_default_is_named():
    with pytest.raises(TypeError, match=r"^here: .*size"):
        from_json("sweep", "Chunked", "here")


def test_objects_of_ones_own_are_for_calls_alone():
    @dataclass(frozen=True)
    class Mine(dq.Sweep):
        block = 2

    class MyRule(dq.Rule):
        def residual(self, z, fz):
            return (fz - z).abs().amax(dim=-1)

    assert from_json("solve", {"sweep": Mine()}, "here").sweep == Mine()
    for value in (Mine(), dq.SolveConfig(sweep=Mine()), dq.Stop(norm=MyRule())):
        with pytest.raises(TypeError, match=r"cannot name .*M.* in the call"):
            to_json(value)
    with pytest.raises(TypeError, match=r"cannot name <built-in function print>"):
        to_json(dq.Implicit(report=print))
