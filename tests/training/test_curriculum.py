"""Phases of a curriculum: which is in force, what it does to a model, and what a checkpoint says of
it.
"""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import deqseq as dq
from deqseq.training import Curriculum, Phase, bounded, free, unrolled

BOUNDED = Phase("bounded", 0.8, dq.SolveConfig(stop=dq.Stop.exactly(4), gradient=dq.Phantom(1)))
FREE = Phase("free", 1.0, dq.SolveConfig(stop=dq.Stop(rtol=0.05, max_steps=24)))
PAPER = Curriculum((bounded(4, 1), free(24, 4)))


@pytest.mark.parametrize("unit", ["fraction", "steps", "tokens"])
@pytest.mark.parametrize("last", [None, 10])
def test_the_phase_in_force(unit, last):
    scale = 0.1 if unit == "fraction" else 1
    ends = [3 * scale, 8 * scale, last and round(last * scale, 1)]
    curriculum = Curriculum(
        (unrolled(until=ends[0]), bounded(until=ends[1]), free(until=ends[2])), unit
    )
    names = [curriculum.at(amount * scale).name for amount in (0, 2, 3, 7, 8, 9, 10)]
    assert names == ["unrolled"] * 2 + ["bounded"] * 2 + ["free"] * 3
    assert unit == "fraction" or curriculum.at(10**9).name == "free"
    for progress in (500, -0.1) if unit == "fraction" else (0.5, -1):
        wanted = (
            "as a fraction must be a number in"
            if unit == "fraction"
            else f"in {unit} must be an integer"
        )
        with pytest.raises((TypeError, ValueError), match=rf"progress {wanted} .*got {progress}"):
            curriculum.at(progress)


def test_the_phases_of_the_paper():
    first, second = PAPER.phases
    assert (first.until, first.solve.stop, first.solve.gradient) == (
        0.8,
        dq.Stop.exactly(4),
        dq.Phantom(1, 0.8),
    )
    assert first.eval_solve.stop == dq.Stop(rtol=0.05, max_steps=16)
    assert (second.until, second.solve.gradient) == (None, dq.Phantom(4, 0.8))
    assert second.solve.stop == dq.Stop(rtol=0.05, max_steps=24)
    assert second.eval_solve.stop == dq.Stop(rtol=0.05, max_steps=96)
    assert free(32, rtol=0.01).eval_solve.stop == dq.Stop(rtol=0.01, max_steps=128)
    assert unrolled(6, until=1).solve.gradient == dq.Unrolled()
    assert unrolled(6, until=1).solve.stop == dq.Stop.exactly(6)


def test_a_phase_has_a_name():
    with pytest.raises(ValueError, match=r"Phase.name must not be empty"):
        replace(BOUNDED, name="")


def test_a_phase_replaces_how_a_model_solves():
    model = dq.ImplicitModel(
        dq.Affine(4), dq.SolveConfig(dq.Naive()), dq.SolveConfig(dq.Anderson())
    )
    FREE.apply(model)
    assert (model.solve, model.eval_solve) == (FREE.solve, None)
    solves = dq.SolveConfig(dq.Naive(), sweep=dq.Sliding(4)), dq.SolveConfig(dq.Broyden())
    phase = free(base=solves[0], eval_base=solves[1])
    phase.apply(model)
    assert (model.solve.solver, model.solve.sweep, model.eval_solve.solver) == (
        dq.Naive(),
        dq.Sliding(4),
        dq.Broyden(),
    )
    assert (model.eval_solve.stop.max_steps, free(base=solves[0]).eval_solve.solver) == (
        96,
        dq.Naive(),
    )


def test_a_phase_begins_at_the_input_where_the_model_does():
    own = dq.SolveConfig(start="input")
    model = dq.ImplicitModel(dq.Affine(4), own)
    with pytest.raises(ValueError, match=r"phase 'free' .* got start='zero'.* base=model.solve"):
        FREE.apply(model)
    with pytest.raises(ValueError, match=r"phase 'free' .* base=model.solve"):
        free(base=own, eval_base=dq.SolveConfig()).apply(model)
    assert (model.solve, model.eval_solve) == (own, None)
    free(base=own).apply(model)
    assert (model.solve.start, model.eval_solve.start) == ("input", "input")
    model.solve, model.eval_solve = dq.SolveConfig(), None
    FREE.apply(model)
    assert model.solve.start == "zero"


def test_models_inside_others_and_explicit_ones():
    lm = dq.CausalLM(3, dq.ImplicitModel(dq.Affine(4)))
    FREE.apply(nn.Sequential(lm))
    assert lm.model.solve.stop == FREE.solve.stop
    explicit = dq.CausalLM(3, dq.ExplicitModel(dq.Affine(4)))
    before = explicit(torch.ones(1, 2, dtype=torch.int64)).logits
    FREE.apply(explicit)
    assert torch.equal(explicit(torch.ones(1, 2, dtype=torch.int64)).logits, before)
    with pytest.raises(
        TypeError, match=r"applies to an ImplicitModel or a module with one .* got Linear without"
    ):
        FREE.apply(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("phases", "unit", "message"),
    [
        ((), "fraction", r"must have ends that rise to 1, the last may be None, got \[\]"),
        ((), "steps", r"must have ends that rise, the last may be None, got \[\]"),
        ((BOUNDED,), "fraction", r"rise to 1.*got \[0.8\]"),
        ((FREE, BOUNDED), "fraction", r"rise to 1.*got \[1.0, 0.8\]"),
        (
            (FREE, replace(FREE, name="more", until=None)),
            "fraction",
            r"rise to 1.*got \[1.0, None\]",
        ),
        (
            (replace(FREE, until=None), replace(BOUNDED, until=1.0)),
            "fraction",
            r"got \[None, 1.0\]",
        ),
        ((replace(FREE, until=None), replace(BOUNDED, until=None)), "steps", r"got \[None, None\]"),
        ((BOUNDED, replace(FREE, until=1.5)), "fraction", r"got \[0.8, 1.5\]"),
        (
            (BOUNDED, replace(FREE, until=5)),
            "steps",
            r"Phase.until in steps must be an integer .* got 0.8",
        ),
        (
            (BOUNDED, replace(FREE, name="bounded")),
            "fraction",
            r"names of their own, got \['bounded', 'bounded'\]",
        ),
    ],
    ids=str,
)
def test_bad_curricula_are_named(phases, unit, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Curriculum(phases, unit)


def test_the_record_is_json_and_is_accepted_again():
    curriculum = Curriculum(
        (
            unrolled(until=5),
            Phase("free", None, dq.SolveConfig(gradient=dq.Implicit(report=print))),
        ),
        "steps",
    )
    record = json.loads(json.dumps(curriculum.record(5)))
    assert (record["phase"], record["progress"], record["curriculum"]["unit"]) == (
        "free",
        5,
        "steps",
    )
    assert record["curriculum"]["phase 1 solve.gradient.class"] == "Unrolled"
    assert record["curriculum"]["phase 2 solve.gradient.solver.class"] == "Anderson"
    assert curriculum.resumed(record) == curriculum.phases[1]


ONE_STEP = replace(free(), solve=replace(free().solve, gradient=dq.OneStep()))


@pytest.mark.parametrize(
    ("phases", "unit", "changes"),
    [
        (
            (bounded(), free(32)),
            "fraction",
            ["solve.stop.max_steps: 24 -> 32", "phase 2 eval_solve.stop.max_steps"],
        ),
        ((bounded(until=0.7), free()), "fraction", ["phase 1 until: 0.8 -> 0.7"]),
        (
            (free(),),
            "fraction",
            ["phase 1 name: 'bounded' -> 'free'", "phase 2 name: 'free' -> nothing"],
        ),
        ((bounded(until=3), free()), "steps", ["unit: 'fraction' -> 'steps'"]),
        (
            (bounded(), ONE_STEP),
            "fraction",
            ["class: 'Phantom' -> 'OneStep'", "solve.gradient.steps: 4 -> nothing"],
        ),
    ],
    ids=["budget", "end", "phases", "unit", "gradient"],
)
def test_another_curriculum_is_refused_and_the_difference_named(phases, unit, changes):
    other = Curriculum(phases, unit)
    with pytest.raises(
        ValueError, match=r"^the curriculum is not the one that the checkpoint was trained with"
    ) as got:
        other.resumed(PAPER.record(0.5))
    assert all(change in str(got.value) for change in changes)
    for record in (None, {}, {"phases": []}):
        with pytest.raises(ValueError, match=r"saved without phase=curriculum.record\(progress\)"):
            other.resumed(record)


def test_a_phase_keeps_how_its_base_measures():
    base = dq.SolveConfig(stop=dq.Stop(rtol=0.5, norm="row", check_every=2))
    phase = free(8, rtol=0.1, base=base)
    assert phase.solve.stop == dq.Stop(rtol=0.1, max_steps=8, norm="row", check_every=2)
    assert phase.eval_solve.stop == dq.Stop(rtol=0.1, max_steps=32, norm="row", check_every=2)
    for phase in (bounded(4, base=base), unrolled(4, until=None, base=base)):
        assert phase.solve.stop == replace(
            base.stop, rtol=0.0, atol=0.0, max_steps=4, check_every=4
        )
    assert bounded(4).solve.stop == unrolled(4, until=None).solve.stop == dq.Stop.exactly(4)
    assert bounded(4, base=base).eval_solve.stop.norm == "row"
