"""SolveConfig is a value; which of a call, an evaluation and a model decides."""

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

import deqseq as dq

LOOSE, MIDDLE, TIGHT = (dq.SolveConfig(stop=dq.Stop.exactly(steps)) for steps in (2, 3, 5))


def iterations(model, **call):
    with torch.no_grad():
        return int(model(torch.ones(1, 2, 4), **call).stats.iterations.max())


def test_it_is_a_value():
    default = dq.SolveConfig(dq.Adaptive(), dq.Stop(), dq.Phantom(4), dq.Simultaneous(), "zero")
    assert dq.SolveConfig() == default
    assert {LOOSE: 1}[pickle.loads(pickle.dumps(LOOSE))] == 1
    with pytest.raises(FrozenInstanceError):
        LOOSE.start = "input"


def test_call_fields_come_before_the_calls_record_before_eval_solve_before_solve():
    model = dq.ImplicitModel(dq.Affine(4), LOOSE, MIDDLE)
    stop = dq.Stop.exactly(7)
    for training, default in ((True, 2), (False, 3)):
        model.train(training)
        assert iterations(model) == default
        assert iterations(model, solve=TIGHT) == 5
        assert iterations(model, stop=stop) == iterations(model, solve=TIGHT, stop=stop) == 7
    # a call changes nothing
    assert model.solve == LOOSE
    assert model.eval_solve == MIDDLE
    assert iterations(dq.ImplicitModel(dq.Affine(4), LOOSE).eval()) == 2


FIELDS = {
    "solver": dq.Anderson(),
    "stop": dq.Stop.exactly(4),
    "gradient": dq.OneStep(),
    "sweep": dq.Sequential(),
    "start": "input",
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_call_replaces_that_field(field):
    model = dq.ImplicitModel(dq.Affine(4), MIDDLE)
    x = torch.randn(2, 3, 4, requires_grad=True)

    def found(**call):
        value = model(x, **call).value
        return torch.cat([value, *torch.autograd.grad(value.square().sum(), x)])

    changes = {field: FIELDS[field]}
    changed = found(**changes)
    assert torch.equal(changed, found(solve=replace(MIDDLE, **changes)))
    assert not torch.equal(changed, found())
