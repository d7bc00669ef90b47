"""Drawn depth in the training loop of the examples: one draw per update, the same when a run goes on."""

import pytest
from small_runs import losses, made, run

from deqseq.training import Curriculum, PoissonLogNormal, unrolled

RISING = unrolled(PoissonLogNormal(6, rise="1-sqrt"), last=2, until=0.5, name="rising")
DRAWN = Curriculum((RISING, unrolled(PoissonLogNormal(6), last=2, until=None)))


def wanted() -> list[int]:
    return [DRAWN.at(step / 8).solve.stop.max_steps for step in range(8)]


def test_every_update_has_its_draw(tmp_path):
    updates = list(run(tmp_path, curriculum=DRAWN, accumulate=2))
    assert [update.iterations for update in updates] == wanted()
    assert [update.phase for update in updates] == ["rising"] * 4 + ["unrolled"] * 4
    assert len(set(wanted())) > 4


def test_an_interrupted_run_goes_on_to_the_bit(tmp_path):
    whole = losses(run(tmp_path / "whole", made(dropout=0.3), DRAWN))
    losses_of, drawn = {}, {}
    for stop in (3, 5, None):
        for update in run(tmp_path / "parts", made(dropout=0.3), DRAWN):
            losses_of[update.step], drawn[update.step] = update.loss, update.iterations
            if update.step == stop:
                break
    assert list(losses_of.values()) == whole
    assert list(drawn.values()) == wanted()
    finished = made(dropout=0.3)
    assert list(run(tmp_path / "parts", finished, DRAWN)) == []
    assert finished.model.eval_solve == DRAWN.phases[-1].eval_solve


def test_another_distribution_is_refused(tmp_path):
    list(run(tmp_path, curriculum=DRAWN, until=3))
    other = Curriculum((RISING, unrolled(PoissonLogNormal(6, seed=1), last=2, until=None)))
    with pytest.raises(ValueError, match=r"phase 2 depth.seed: 0 -> 1"):
        list(run(tmp_path, curriculum=other))
