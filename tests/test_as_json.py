"""Solvers, gradients, stopping rules and sweeps become JSON and come back equal; what is misspelt
is named.
"""

import inspect
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

import deqseq as dq
from deqseq.as_json import CLASSES, from_json, to_json
from deqseq.layers import RotaryScaling
from deqseq.models.specification import DecoderLayers
from deqseq.training import Curriculum, Phase, PoissonLogNormal, bounded, free

SOLVER = [dq.Naive(), dq.Relaxed(0.3), dq.Adaptive(), dq.Anderson(5, 0.5, 1e-7), dq.Broyden(3)]
IMPLICIT = dq.Implicit(dq.Broyden(4), dq.Stop(rtol=1e-7), True)
STARTS = ("input", dq.RandomStart(0.5))
OBJECTS = {
    "solver": (dq.Solver, SOLVER),
    "gradient": (
        dq.Gradient,
        [dq.Unrolled(True), dq.OneStep(), dq.Phantom(2, 0.5, True), IMPLICIT],
    ),
    "stop": (dq.Stop, [dq.Stop(1e-4, 1e-6, 7, 2, 50.0, "row"), dq.Stop(divergence=float("inf"))]),
    "sweep": (dq.Sweep, [dq.Simultaneous(), dq.Chunked(3), dq.Sliding(5), dq.Sequential()]),
    "start": (dq.RandomStart, [dq.RandomStart(0.5, 3)]),
    "solve": (
        dq.SolveConfig,
        [dq.SolveConfig(dq.Anderson(), sweep=dq.Sliding(3), start=start) for start in STARTS],
    ),
    "backbone": (
        (dq.LlamaConfig, dq.Mamba2Config, DecoderLayers),
        [
            dq.LlamaConfig(64, rope_scaling=RotaryScaling(4.0)),
            dq.Mamba2Config(64, dt_limit=(0.0, 0.1)),
            DecoderLayers(64, 2, 5, True),
        ],
    ),
    "rope_scaling": (RotaryScaling, [RotaryScaling(2.0, original_length=64)]),
    "depth": (PoissonLogNormal, [PoissonLogNormal(5, 0.2, "1-sqrt", 8, 3)]),
    "phases": (Phase, [replace(free(), depth=PoissonLogNormal(8))]),
    "curriculum": (Curriculum, [Curriculum((bounded(until=20), free()), "steps")]),
}


@pytest.mark.parametrize(
    ("kind", "value"), [(kind, value) for kind, (_, values) in OBJECTS.items() for value in values]
)
def test_round_trip(kind, value):
    data = json.loads(json.dumps(to_json(value)))
    assert from_json(kind, data, "here") == value
    assert from_json(kind, value, "here") is value


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_of_the_library_is_in_the_table(kind):
    base, values = OBJECTS[kind]
    others = (RotaryScaling, DecoderLayers, PoissonLogNormal, Phase, Curriculum)
    public = [
        part
        for part in (*others, *(getattr(dq, name) for name in dq.__all__))
        if inspect.isclass(part)
    ]
    concrete = {
        part for part in public if issubclass(part, base) and not inspect.isabstract(part)
    } - {dq.Sweep}
    assert set(CLASSES[kind]) == concrete == {type(value) for value in values}


BASE = dq.SolveConfig(dq.Relaxed(0.3), dq.Stop(rtol=1e-6), sweep=dq.Sliding(3))
SHORTER = dq.SolveConfig(dq.Relaxed(0.5), dq.Stop(rtol=1e-6, max_steps=7), sweep=dq.Sequential())


@pytest.mark.parametrize(
    ("kind", "data", "base", "wanted"),
    [
        ("gradient", {"name": "Phantom", "steps": 2}, None, dq.Phantom(2)),
        ("stop", {}, None, dq.Stop()),
        ("gradient", {"name": "Implicit", "solver": "Naive"}, None, dq.Implicit(dq.Naive())),
        (
            "solve",
            {"solver": {"damping": 0.5}, "stop": {"max_steps": 7}, "sweep": "Sequential"},
            BASE,
            SHORTER,
        ),
        ("solve", {"stop": dq.Stop()}, BASE, dq.SolveConfig(dq.Relaxed(0.3), sweep=dq.Sliding(3))),
        ("solver", {"name": "Anderson"}, dq.Anderson(5), dq.Anderson()),  # a name begins anew
    ],
)
def test_what_is_left_out_is_that_of_the_base_or_the_default(kind, data, base, wanted):
    assert from_json(kind, data, "here", base) == wanted


@pytest.mark.parametrize(
    ("kind", "data", "error", "message"),
    [
        ("sweep", "Slide", ValueError, "here: name 'Slide' is unknown; did you mean 'Sliding'"),
        ("sweep", "Chunked", TypeError, "^here: .*size"),
        (
            "solver",
            {"name": "Relaxed", "dampng": 1},
            ValueError,
            "Relaxed field 'dampng' .*did you mean 'damping'",
        ),
        (
            "gradient",
            {"name": "Implicit", "stop": {"rtl": 1}},
            ValueError,
            r"Implicit\.stop: .*'rtl' .*'rtol'",
        ),
        (
            "solver",
            {"name": "Relaxed", "damping": "0.8"},
            TypeError,
            r"Relaxed\.damping must be a number",
        ),
        (
            "gradient",
            {"name": "Unrolled", "checkpoint": 1},
            TypeError,
            r"Unrolled\.checkpoint must be True or False",
        ),
        ("stop", {"divergence": 0.5}, ValueError, r"here: Stop\.divergence must be"),
        ("stop", {"name": "Halt"}, ValueError, r"Stop field 'name' is unknown"),
        (
            "solver",
            {"damping": 1},
            TypeError,
            'must be a solver of deqseq or its JSON, {"name": "Naive"',
        ),
        ("solver", dq.Sliding(2), TypeError, "must be a solver of deqseq or its JSON"),
        (
            "solve",
            {"solver": dq.Sliding(2)},
            TypeError,
            r"here: SolveConfig\.solver must be a solver",
        ),
    ],
)
def test_what_cannot_be_read_is_named(kind, data, error, message):
    with pytest.raises(error, match=message):
        from_json(kind, data, "here")


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


def test_numbers_of_numpy_are_plain_ones():
    assert json.dumps(to_json((np.int64(4), np.float32(0.5)))) == "[4, 0.5]"
