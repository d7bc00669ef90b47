"""Everything that a configuration names becomes JSON and comes back equal; errors name the typo."""

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
    "stop": (
        dq.Stop,
        [
            dq.Stop(1e-4, atol=1e-6, max_steps=7, check_every=2, divergence=50.0, norm="row"),
            dq.Stop(divergence=float("inf")),
        ],
    ),
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
    public = [*others, *(getattr(dq, name) for name in dq.__all__)]
    classes = {one for one in public if inspect.isclass(one) and issubclass(one, base)}
    concrete = {one for one in classes - {dq.Sweep} if not inspect.isabstract(one)}
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
        ("solver", {"name": "Anderson"}, dq.Anderson(3), dq.Anderson()),  # a name: the defaults
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


@dataclass(frozen=True)
class MySweep(dq.Sweep):
    block = 2


class MyRule(dq.Rule):
    def residual(self, z, fz):
        return (fz - z).abs().amax(dim=-1)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (MySweep(), "MySweep"),
        (dq.SolveConfig(sweep=MySweep()), "MySweep"),
        (dq.Stop(norm=MyRule()), ".*MyRule"),
        (dq.Implicit(report=print), "<built-in function print>"),
    ],
)
def test_the_users_own_objects_are_only_for_calls(value, shown):
    with pytest.raises(TypeError, match=rf"cannot name {shown}.* in the call"):
        to_json(value)


def test_the_users_own_objects_are_read():
    assert from_json("solve", {"sweep": MySweep()}, "here").sweep == MySweep()


def test_numbers_of_numpy_are_plain_ones():
    assert json.dumps(to_json((np.int64(4), np.float32(0.5)))) == "[4, 0.5]"
