"""Drawn depth: the distribution, that draws repeat, and what a phase makes of one."""

import math
import random
from dataclasses import replace

import pytest
import torch

import deqseq as dq
from deqseq.training import Curriculum, PoissonLogNormal, bounded, free, unrolled

pytestmark = pytest.mark.usefixtures("unchecked")
DRAWS = 10_000
HUGINN = unrolled(PoissonLogNormal(32), last=8, until=None)


@pytest.mark.parametrize(("mean", "sigma"), [(1, 0.5), (32, 0.5), (6.5, 0.2), (4, 0.0)])
def test_mean_variance_and_the_share_of_ones(mean, sigma):
    depth = PoissonLogNormal(mean, sigma)
    draws = torch.tensor([depth.draw(step) for step in range(DRAWS)], dtype=torch.float64)
    variance = mean + mean**2 * math.expm1(sigma**2)
    assert draws.mean().item() == pytest.approx(mean + 1, abs=4 * math.sqrt(variance / DRAWS))
    assert draws.var().item() == pytest.approx(variance, rel=0.1)
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)  # P(n = 1) is the mean of exp(-rate)
    rate = torch.exp(math.log(mean) - sigma**2 / 2 + sigma * x)
    ones = torch.trapezoid(torch.exp(-rate - x**2 / 2), x).item() / math.sqrt(2 * math.pi)
    share = (draws == 1).double().mean().item()
    assert share == pytest.approx(ones, abs=4 * math.sqrt(ones / DRAWS) + 1e-9)


@pytest.mark.parametrize(("rise", "share"), [("linear", 0.5), ("1-sqrt", 1 - math.sqrt(0.5))])
def test_a_rising_mean(rise, share):
    depth = PoissonLogNormal(32, rise=rise)
    for done, mean in ((0.0, 1), (0.5, 1 + 31 * share), (1.0, 32)):
        constant = PoissonLogNormal(mean)
        draws = [depth.draw(step, done) for step in range(99)]
        assert draws == [constant.draw(step) for step in range(99)]


def test_larger_and_smaller_draws_are_replaced():
    draws = [PoissonLogNormal(8).draw(step) for step in range(500)]
    assert max(draws) > 12
    limited = [PoissonLogNormal(8, largest=12).draw(step) for step in range(500)]
    assert limited == [min(12, draw) for draw in draws]
    least = [PoissonLogNormal(8, smallest=5, largest=12).draw(step) for step in range(500)]
    assert least == [max(5, draw) for draw in limited]
    for depth in (PoissonLogNormal(8, largest=1), PoissonLogNormal(1e-300, sigma=0)):
        assert {depth.draw(step) for step in range(9)} == {1}


def test_a_draw_is_the_same_in_every_process_and_order():
    for step, draw in ((2, 41), (1, 21), (0, 25)):  # Python's hashes differ between processes
        torch.manual_seed(step)
        random.seed(step)
        assert PoissonLogNormal(32).draw(step) == draw
    assert PoissonLogNormal(32).draw(1.0) == 21


def test_the_budget_of_each_update():
    rising = unrolled(PoissonLogNormal(32, rise="linear"), last=8, until=0.75, name="rising")
    curriculum = Curriculum((free(24, until=0.25), rising, HUGINN))
    assert curriculum.at(0.2) == curriculum.phases[0]
    cases = (0.25, rising.depth, 0), (0.5, rising.depth, 0.5), (0.75, HUGINN.depth, 1)
    for progress, depth, done in cases:
        phase = curriculum.at(progress)
        assert phase.solve.stop == dq.Stop.exactly(depth.draw(progress, done))
        assert phase.solve.gradient == dq.Unrolled(last=8)
        assert phase.depth is None
        assert phase.eval_solve == HUGINN.eval_solve
    rising = Curriculum((replace(rising, until=10),), "steps")
    assert rising.at(10**6).solve.stop.max_steps == PoissonLogNormal(32).draw(10**6)


def test_only_the_budget_is_drawn():
    stop = dq.Stop(rtol=0.1, max_steps=8, norm="row", check_every=2)
    phase = replace(free(8, rtol=0.1, base=dq.SolveConfig(stop=stop)), depth=PoissonLogNormal(32))
    drawn = phase.drawn(0.3)
    assert drawn.solve.stop == replace(stop, max_steps=phase.depth.draw(0.3))
    assert replace(drawn, solve=phase.solve, depth=phase.depth) == phase
    assert drawn == phase.drawn(0.3, 1.0) == drawn.drawn(0.7)
    phantom = replace(bounded(8, 4), depth=phase.depth).drawn(0.3)
    assert phantom.solve.stop == dq.Stop.exactly(phase.depth.draw(0.3))
    assert phantom.solve.gradient == dq.Phantom(4)


def test_a_phase_that_has_not_been_drawn_is_not_applied():
    message = r"Phase.depth of 'unrolled' must be drawn: .*Curriculum.at"
    with pytest.raises(ValueError, match=message):
        HUGINN.apply(dq.ImplicitModel(dq.Affine(4)))


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"last must be an integer in 1\.\.4, got 9"):
        unrolled(4, until=None, last=9)
    rising = unrolled(PoissonLogNormal(32, rise="linear"), until=None)
    with pytest.raises(ValueError, match=r"largest must be at least smallest, 4, got 3"):
        PoissonLogNormal(8, smallest=4, largest=3)
    with pytest.raises(ValueError, match=r"Phase.until must be given for a depth that rises"):
        Curriculum((rising,), "steps")
    assert Curriculum((rising,)).at(0.0).solve.stop.max_steps >= 1
