"""SolveConfig: what it refuses, and which of a call, an evaluation and a model decides."""

import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

import deqseq as dq
from deqseq.config import resolve

LOOSE, MIDDLE, TIGHT = (dq.SolveConfig(stop=dq.Stop.exactly(steps)) for steps in (2, 3, 5))


def iterations(model, **call) -> int:
    with torch.no_grad():
        return int(model(torch.ones(1, 2, 4), **call).stats.iterations.max())


def test_it_is_a_value():
    assert dq.SolveConfig() == dq.SolveConfig(
        dq.Adaptive(), dq.Stop(), dq.Phantom(4), dq.Simultaneous(), "zero"
    )
    assert {LOOSE: 1}[pickle.loads(pickle.dumps(LOOSE))] == 1
    with pytest.raises(FrozenInstanceError):
        LOOSE.start = "input"


def test_call_fields_come_before_the_calls_record_before_eval_solve_before_solve():
    model, stop = dq.ImplicitModel(dq.Affine(4), LOOSE, MIDDLE), dq.Stop.exactly(7)
    for training, own in ((True, 2), (False, 3)):
        model.train(training)
        assert iterations(model) == own
        assert iterations(model, solve=TIGHT) == 5
        assert iterations(model, stop=stop) == iterations(model, solve=TIGHT, stop=stop) == 7
    assert (model.solve, model.eval_solve) == (LOOSE, MIDDLE)  # a call changes nothing
    assert iterations(dq.ImplicitModel(dq.Affine(4), LOOSE).eval()) == 2


@pytest.mark.parametrize("field", fields(dq.SolveConfig), ids=lambda field: field.name)
def test_every_field_can_be_replaced_alone(field):
    other = dq.SolveConfig(
        dq.Anderson(), dq.Stop.exactly(4), dq.OneStep(), dq.Sequential(), "input"
    )
    changed = resolve(LOOSE, None, {field.name: getattr(other, field.name)})
    assert changed == replace(LOOSE, **{field.name: getattr(other, field.name)}) != LOOSE
    assert resolve(LOOSE, other, {}) is other
