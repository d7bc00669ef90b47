"""The plugin's loop over requests, beside ``deqseq.solve`` of each request by itself."""

import numpy as np
import pytest
import torch
from deqseq_vllm.iterate import iterate

import deqseq as dq

WIDTH = 6
LENGTHS = np.array([3, 1, 5, 2])


def causal_map(rates, x):
    """Of tokens of some requests: ``tanh`` of a rotation, plus what the token before has."""
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)))[0]

    def of_one(rate, z, x):
        before = torch.cat([torch.zeros(1, WIDTH, dtype=z.dtype), z[:-1]])
        return rate * (z @ turn.to(z)) + 0.3 * before.tanh() + x

    def f(z, rates, x, lengths):
        parts = zip(rates, z.split(lengths), x.split(lengths), strict=True)
        return torch.cat([of_one(*part) for part in parts])

    return f


class Batch:
    """The requests that are still iterated, and how many tokens each evaluation had."""

    def __init__(self, rates, dtype=torch.float64):
        self.rates, self.lengths = list(rates), LENGTHS.tolist()
        draws = torch.Generator().manual_seed(0)
        self.x = torch.randn(int(LENGTHS.sum()), WIDTH, generator=draws, dtype=dtype)
        self.whole = self.x
        self.map, self.tokens = causal_map(rates, self.x), []

    def __call__(self, z):
        self.tokens.append(len(z))
        return self.map(z, self.rates, self.x, self.lengths)

    def keep(self, requests, tokens):
        self.rates = [self.rates[i] for i in requests]
        self.lengths = [self.lengths[i] for i in requests]
        self.x = self.x[tokens]


def solved_alone(batch, rates, config):
    """Each request as a row of its own, solved as a model solves it."""
    rows = zip(rates, batch.whole.split(LENGTHS.tolist()), strict=True)
    for rate, x in rows:

        def f(z, rate=rate, x=x):
            return batch.map(z[0], [rate], x, [len(x)])[None]

        start = torch.zeros_like(x)[None]
        parts = {"solver": config.solver, "stop": config.stop, "returns_tested": False}
        yield dq.Problem(f=f, z0=start, **parts).solve()


RATES = {
    "converging": (0.3, 0.9, 0.5, 0.1),
    "one diverges": (0.3, 2.2, 0.5, 0.9),
    "one never ends": (0.3, 0.999, 0.5, 0.1),
    "one is NaN": (0.3, float("nan"), 0.5, 0.1),
    "all diverge": (3.0, 2.2, 5.0, 2.5),
}


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize(
    ("solver", "stop"),
    [
        (dq.Naive(), dq.Stop(rtol=1e-6, max_steps=200)),
        (dq.Relaxed(0.7), dq.Stop(rtol=1e-5, max_steps=60, check_every=4)),
        (dq.Naive(), dq.Stop(rtol=0, atol=1e-4, max_steps=50, divergence=20.0)),
        (dq.Naive(), dq.Stop.exactly(7)),
        (dq.Naive(), dq.Stop(rtol=0, max_steps=9)),
    ],
    ids=["naive", "relaxed", "divergence", "exactly", "fixed"],
)
def test_each_request_ends_as_it_does_alone(rates, solver, stop):
    batch, config = Batch(rates), dq.SolveConfig(solver, stop)
    found = iterate(batch, torch.zeros_like(batch.x), LENGTHS, config, batch.keep)
    alone = list(solved_alone(batch, rates, config))
    assert found.status.tolist() == [int(one.status) for one in alone]
    assert found.iterations.tolist() == [int(one.stats.iterations) for one in alone]
    torch.testing.assert_close(found.value, torch.cat([one.value[0] for one in alone]))
    assert found.value.isfinite().all()


def test_a_state_that_drifts_does_not_converge():
    # the state grows by a constant, so its change passes a relative test once it is large
    config = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-2, max_steps=300))
    found = iterate(lambda z: z + 1, torch.zeros(2, 1), np.array([1, 1]), config, lambda *_: None)
    assert found.status.tolist() == [int(dq.Status.MAX_STEPS_REACHED)] * 2


def test_requests_that_have_ended_are_not_evaluated():
    rates = RATES["one never ends"]
    batch, config = Batch(rates), dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-4, max_steps=100))
    found = iterate(batch, torch.zeros_like(batch.x), LENGTHS, config, batch.keep)
    work = sum(LENGTHS * found.iterations)
    assert sum(batch.tokens) == work
    assert batch.tokens[-1] == LENGTHS[1]
    assert found.iterations.max() == 100


def test_a_request_that_is_not_finite_returns_its_start():
    batch, config = Batch(RATES["one is NaN"]), dq.SolveConfig(dq.Naive())
    start = torch.full_like(batch.x, 0.5)
    found = iterate(batch, start, LENGTHS, config, batch.keep)
    assert found.status[1] == dq.Status.DIVERGED
    assert found.iterations[1] == 1
    assert found.value[3].tolist() == [0.5] * WIDTH
