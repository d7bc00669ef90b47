"""Phases of a curriculum: which is in force, and what it does to a model."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import deqseq as dq
from deqseq.training import Curriculum, Phase, bounded, free, unrolled

BOUNDED = Phase("bounded", 0.8, dq.SolveConfig(stop=dq.Stop.exactly(4), gradient=dq.Phantom(1)))
FREE = Phase("free", 1.0, dq.SolveConfig(stop=dq.Stop(rtol=0.05, max_steps=24)))
PAPER = Curriculum((bounded(4, 1), free(24, 4)))


@pytest.mark.parametrize(("unit", "scale"), [("fraction", 0.1), ("steps", 1), ("tokens", 1)])
def test_the_phase_in_force(unit, scale):
    phases = unrolled(until=3 * scale), bounded(until=8 * scale), free()
    curriculum = Curriculum(phases, unit)
    names = [curriculum.at(amount * scale).name for amount in (0, 2, 3, 7, 8, 10)]
    assert names == ["unrolled", "unrolled", "bounded", "bounded", "free", "free"]


@pytest.mark.parametrize(
    ("unit", "progress", "wanted"),
    [
        ("fraction", 500, "as a fraction must be a number in"),
        ("fraction", -0.1, "as a fraction must be a number in"),
        ("steps", 0.5, "in steps must be an integer"),
        ("tokens", -1, "in tokens must be an integer"),
    ],
)
def test_bad_progress_is_named(unit, progress, wanted):
    with pytest.raises((TypeError, ValueError), match=rf"progress {wanted} .*got {progress}"):
        Curriculum((free(),), unit).at(progress)


def test_the_last_phase_stays_in_force():
    assert Curriculum((bounded(until=1), free(until=2)), "steps").at(10**9).name == "free"


def test_the_phases_of_the_paper():
    first, second = PAPER.phases
    assert first.until == 0.8
    assert first.solve == dq.SolveConfig(stop=dq.Stop.exactly(4), gradient=dq.Phantom(1, 0.8))
    assert first.eval_solve.stop == dq.Stop(rtol=0.05, max_steps=16)
    assert second.until is None
    stop = dq.Stop(rtol=0.05, max_steps=24)
    assert second.solve == dq.SolveConfig(stop=stop, gradient=dq.Phantom(4, 0.8))
    assert second.eval_solve.stop == replace(stop, max_steps=96)
    assert unrolled(6, until=1).solve.gradient == dq.Unrolled()


def test_a_phase_has_a_name():
    with pytest.raises(ValueError, match=r"Phase.name must not be empty"):
        replace(BOUNDED, name="")


def test_a_phase_replaces_how_a_model_solves():
    solve = dq.SolveConfig(dq.Naive(), sweep=dq.Sliding(4))
    eval_solve = dq.SolveConfig(dq.Broyden())
    model = dq.ImplicitModel(dq.Affine(4), solve, eval_solve)
    FREE.apply(model)
    assert model.solve == FREE.solve
    assert model.eval_solve is None
    free(base=solve, eval_base=eval_solve).apply(model)
    assert model.solve.solver == dq.Naive()
    assert model.solve.sweep == dq.Sliding(4)
    assert model.eval_solve.solver == dq.Broyden()
    assert model.eval_solve.stop.max_steps == 96
    assert free(base=solve).eval_solve.solver == dq.Naive()


def test_a_phase_begins_at_the_input_where_the_model_does():
    at_input = dq.SolveConfig(start="input")
    model = dq.ImplicitModel(dq.Affine(4), at_input)
    with pytest.raises(ValueError, match=r"phase 'free' .* got start='zero'.* base=model.solve"):
        FREE.apply(model)
    with pytest.raises(ValueError, match=r"phase 'free' .* base=model.solve"):
        free(base=at_input, eval_base=dq.SolveConfig()).apply(model)
    assert model.solve == at_input
    free(base=at_input).apply(model)
    assert model.solve.start == model.eval_solve.start == "input"
    model.solve = dq.SolveConfig()
    model.eval_solve = None
    FREE.apply(model)
    assert model.solve.start == "zero"


def test_models_inside_others_and_explicit_ones():
    lm = dq.CausalLM(3, dq.ImplicitModel(dq.Affine(4)))
    FREE.apply(nn.Sequential(lm))
    assert lm.model.solve.stop == FREE.solve.stop
    explicit = dq.CausalLM(3, dq.ExplicitModel(dq.Affine(4)))
    ids = torch.tensor([[1, 2]])
    logits = explicit(ids).logits
    FREE.apply(explicit)
    assert torch.equal(explicit(ids).logits, logits)
    message = r"applies to an ImplicitModel or a module with one .* got Linear without"
    with pytest.raises(TypeError, match=message):
        FREE.apply(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("phases", "unit", "message"),
    [
        ((), "fraction", r"must have ends that rise to 1, the last may be None, got \[\]"),
        ((), "steps", r"must have ends that rise, the last may be None, got \[\]"),
        ((BOUNDED,), "fraction", r"rise to 1.*got \[0.8\]"),
        ((FREE, BOUNDED), "fraction", r"rise to 1.*got \[1.0, 0.8\]"),
        ((free(), replace(BOUNDED, until=1.0)), "fraction", r"got \[None, 1.0\]"),
        ((free(), replace(BOUNDED, until=None)), "steps", r"got \[None, None\]"),
        ((BOUNDED, replace(FREE, until=1.5)), "fraction", r"got \[0.8, 1.5\]"),
        ((BOUNDED, free(until=5)), "steps", r"Phase.until in steps must be an integer .* got 0.8"),
        ((BOUNDED, free(name="bounded")), "fraction", r"names .* got \['bounded', 'bounded'\]"),
    ],
)
def test_bad_curricula_are_named(phases, unit, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Curriculum(phases, unit)


def test_a_phase_keeps_how_its_base_measures():
    base = dq.SolveConfig(stop=dq.Stop(rtol=0.5, norm="row", check_every=2))
    phase = free(8, rtol=0.1, base=base)
    assert phase.solve.stop == dq.Stop(rtol=0.1, max_steps=8, norm="row", check_every=2)
    assert phase.eval_solve.stop == dq.Stop(rtol=0.1, max_steps=32, norm="row", check_every=2)
    exactly = replace(dq.Stop.exactly(4), norm="row")
    for phase in (bounded(4, base=base), unrolled(4, until=None, base=base)):
        assert phase.solve.stop == exactly
        assert phase.eval_solve.stop.norm == "row"
