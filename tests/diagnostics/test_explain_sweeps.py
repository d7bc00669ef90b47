"""Sweeps differ in what they find, or in how soon: explain() says which, and names the remedy."""

import re

import torch

import deqseq as dq


def test_a_slow_map_disagrees_at_a_loose_tolerance():
    backbone = dq.Affine(4)
    with torch.no_grad():
        backbone.A.copy_(0.97 * torch.eye(4))
        backbone.R.copy_(0.02 * torch.eye(4))
    stop = dq.Stop(rtol=1e-2, max_steps=2000)
    output = dq.ImplicitModel(backbone, dq.SolveConfig(dq.Naive(), stop)).eval()(
        torch.randn(2, 12, 4)
    )
    assert output.converged.all()
    explanation = output.explain()
    assert explanation.causes == ("loose tolerance",) * 2
    assert "Simultaneous() and Sliding(window=8) converge to different values" in str(explanation)


class Bistable(dq.Affine):
    """f(z)_t = tanh(3 z_t + z_{t-1} - x_t) after z_{-1} = 1: what is found depends on which token
    moves first.
    """

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        first = torch.ones_like(z[:, :1]) if cache is None else cache.previous[:, None]
        states = torch.cat([first, z], dim=1)
        return torch.tanh(3 * z + states[:, :-1] - inputs.injection), states


def test_sweeps_that_find_other_fixed_points():
    x = torch.full((2, 12, 1), -1.5)  # goes to 1 from any start near zero
    x[0, 8:] = 0.5  # goes where its predecessor is at first
    model = dq.ImplicitModel(Bistable(1), dq.SolveConfig(solver=dq.Naive())).eval()
    model.backbone.U.data.fill_(1)
    for used, other in ((dq.Simultaneous(), dq.Sliding(8)), (dq.Sequential(), dq.Simultaneous())):
        explanation = model(x, sweep=used).explain()
        assert explanation.causes == ("several fixed points", "converged")
        assert f"At a tolerance of 1e-05, {used} and {other} converge to different values" in str(
            explanation
        )


def parity(batch, length):
    bits = torch.randint(2, (batch, length), generator=torch.Generator().manual_seed(0))
    return dq.load_example("parity"), bits


def test_tokens_that_converge_one_after_another_are_not_called_stuck():
    lm, bits = parity(2, 400)
    stop = dq.Stop(rtol=1e-2, max_steps=64)
    explanation = lm(bits, stop=stop).explain()
    assert explanation.causes == ("budget", "budget")
    told = r"From left to right, (\d+) of 400 tokens have converged after 256 iterations"
    (count,) = re.match(told, explanation.findings["budget"]).groups()
    longer = lm(bits, stop=dq.Stop(rtol=1e-2, max_steps=256))
    passed = longer.stats.residual[0] <= 1e-2
    assert int(count) == passed.tolist().index(False) < 400
    assert "sweep=Sliding(window=8) converges" in explanation.remedies["budget"]
    assert lm(bits, stop=stop, sweep=dq.Sliding(8)).converged.all()


def test_the_remedy_holds_for_rows_that_converge_within_the_longer_budget_and_for_the_others():
    """The longer solve ends with the first rows; the iterations that they took would not be enough
    for the others.
    """
    lm, bits = parity(16, 96)
    output = lm(bits, stop=dq.Stop(rtol=0.03, max_steps=32))
    longer = lm(bits, stop=dq.Stop(rtol=0.03, max_steps=128)).converged
    assert longer.any()
    assert not longer.all()
    assert output.explain().remedies["budget"].startswith("sweep=Sliding(window=8) converges")
