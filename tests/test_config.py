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
    assert dq.SolveConfig() == dq.SolveConfig(dq.Adaptive(), dq.Stop(), dq.Phantom(4), dq.Simultaneous(), "zero")
    assert {LOOSE: 1}[pickle.loads(pickle.dumps(LOOSE))] == 1
    with pytest.raises(FrozenInstanceError):
        LOOSE.start = "input"


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("solver", "anderson", r"a Solver, such as dq\.Anderson\(\), got 'anderson': write Anderson"),
        ("solver", dq.Anderson, r"a Solver, .*: write Anderson\(\.\.\.\)"),
        ("stop", 1e-3, r"a Stop, such as dq\.Stop"),
        ("gradient", None, r"a Gradient, such as dq\.Phantom"),
        ("sweep", 8, r"a Sweep, such as dq\.Sliding"),
        ("start", "random", r"one of \('zero', 'input'\) or a RandomStart"),
    ],
)
def test_a_value_of_another_kind_is_named(name, value, remedy):
    with pytest.raises((TypeError, ValueError), match=rf"^SolveConfig\.{name} must be {remedy}"):
        dq.SolveConfig(**{name: value})


@pytest.mark.parametrize(("name", "meant"), [("sweeps", "'sweep'"), ("solvr", "'solver'"), ("gradients", "'gradient'")])
def test_an_unknown_argument_is_named_with_what_was_meant(name, meant):
    model = dq.ImplicitModel(dq.Affine(4))
    with pytest.raises(TypeError, match=rf"unknown argument '{name}'; did you mean {meant}"):
        model(torch.ones(1, 2, 4), **{name: dq.Sequential()})
    with pytest.raises(TypeError, match=r"unknown argument 'qqq' \(known: x, mask, .*, solver, stop"):
        model(torch.ones(1, 2, 4), qqq=1)


@pytest.mark.parametrize("wrong", [dq.Anderson(), {"solver": dq.Anderson()}, "anderson"], ids=repr)
def test_a_model_takes_a_record_and_no_other(wrong):
    for name in ("solve", "eval_solve"):
        with pytest.raises(TypeError, match=rf"^ImplicitModel.{name} must be a SolveConfig"):
            dq.ImplicitModel(dq.Affine(4), **{name: wrong})
    with pytest.raises(TypeError, match=r"^solve must be a SolveConfig"):
        dq.ImplicitModel(dq.Affine(4))(torch.ones(1, 2, 4), solve=wrong)


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
    other = dq.SolveConfig(dq.Anderson(), dq.Stop.exactly(4), dq.OneStep(), dq.Sequential(), "input")
    changed = resolve(LOOSE, None, {field.name: getattr(other, field.name)})
    assert changed == replace(LOOSE, **{field.name: getattr(other, field.name)}) != LOOSE
    assert resolve(LOOSE, other, {}) is other


def test_the_language_model_hands_them_on():
    torch.manual_seed(0)
    model = dq.CausalLM(5, dq.ImplicitModel(dq.Affine(4), LOOSE, MIDDLE)).eval()
    ids = torch.tensor([[1, 2, 3]])
    for call, expected in (({}, 3), ({"solve": TIGHT}, 5), ({"solve": TIGHT, "stop": dq.Stop.exactly(7)}, 7)):
        assert int(model(ids, **call).stats.iterations.max()) == expected
    assert model(ids, sweep=dq.Sequential()).stats.iterations.shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rtol", r": write stop=dq.Stop\(rtol=...\)"),
        ("attention_mask", "; did you mean 'mask'"),
        ("sweeps", "; did you"),
    ],
)
def test_names_from_elsewhere_are_answered_with_ours(name, meant):
    with pytest.raises(TypeError, match=f"unknown argument '{name}'{meant}"):
        dq.ImplicitModel(dq.Affine(4))(torch.ones(1, 2, 4), **{name: 1})
