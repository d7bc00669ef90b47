"""A backbone of a user's own, trained on short sequences: its solves "converge" and differ, and explain() says so."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import deqseq as dq


@dataclass(frozen=True)
class Last(dq.Cache):
    state: torch.Tensor


class Gated(dq.Backbone[Last]):
    """z_t = u z_t + (1 - u) tanh(h), with a gate u and h linear in x_t, z_t and z_{t-1}: near u = 1 nothing moves."""

    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model
        self.inputs = nn.Linear(d_model, 2 * d_model)
        self.own, self.before = (nn.Linear(d_model, 2 * d_model, bias=False) for _ in range(2))

    def prepare(self, x, cache=None, mask=None):
        return self.inputs(x)

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        first = torch.zeros_like(z[:, :1]) if cache is None else cache.state[:, None]
        states = torch.cat([first, z], dim=1)
        gate, new = (inputs + self.own(z) + self.before(states[:, :-1])).chunk(2, dim=-1)
        return torch.lerp(new.tanh(), z, gate.sigmoid()), states

    def advance(self, cache, aux, tokens, counts=None):
        last = torch.full((len(aux),), tokens, device=aux.device) if counts is None else counts
        return Last(aux[torch.arange(len(aux)), last])


@pytest.mark.usefixtures("unchecked")
def test_sweeps_of_a_gated_backbone_disagree():
    torch.manual_seed(0)
    config = dq.SolveConfig(solver=dq.Naive(), stop=dq.Stop(rtol=1e-2), gradient=dq.Phantom())
    lm = dq.CausalLM(2, dq.ImplicitModel(Gated(16), config))
    optimizer = torch.optim.Adam(lm.parameters(), lr=1e-2)
    for _ in range(100):
        ids = torch.randint(0, 2, (32, 12))
        loss = lm(ids, targets=ids.cumsum(1) % 2).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    output = lm.eval()(torch.randint(0, 2, (4, 64)), stop=dq.Stop(rtol=1e-2, max_steps=1024))
    assert output.converged.all()
    explanation = output.explain()
    assert set(explanation.causes) <= {"loose tolerance", "several fixed points"}
    assert "Simultaneous() and Sliding(window=8) converge to different values" in str(explanation)


class Bistable(dq.Backbone[Last]):
    """f(z)_t = tanh(3 z_t + z_{t-1} - x_t) after z_{-1} = 1: what is found depends on which token moves first."""

    d_model = 1

    def prepare(self, x, cache=None, mask=None):
        return x

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        first = torch.ones_like(z[:, :1]) if cache is None else cache.state[:, None]
        states = torch.cat([first, z], dim=1)
        return torch.tanh(3 * z + states[:, :-1] - inputs), states

    advance = Gated.advance


def test_sweeps_that_find_other_fixed_points():
    x = torch.full((2, 12, 1), -1.5)  # goes to 1 from any start near zero
    x[0, 8:] = 0.5  # goes where its predecessor is at first
    model = dq.ImplicitModel(Bistable(), dq.SolveConfig(solver=dq.Naive())).eval()
    for used, other in ((dq.Simultaneous(), dq.Sliding(8)), (dq.Sequential(), dq.Simultaneous())):
        explanation = model(x, sweep=used).explain()
        assert explanation.causes == ("several fixed points", "converged")
        assert f"At a tolerance of 1e-05, {used} and {other} converge to different values" in str(explanation)
