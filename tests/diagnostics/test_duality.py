"""All sweeps find the same fixed point: states, predictions and caches."""

import math

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, language_model

import deqseq as dq
from deqseq.diagnostics import check_duality

TIGHT = dq.Stop(rtol=1e-10, max_steps=500)
SWEEPS = (dq.Simultaneous(), dq.Chunked(4), dq.Sequential(), dq.Sliding(3), dq.Sliding(50))
IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(6) < torch.tensor([6, 3, 4])[:, None]


@pytest.fixture(params=[contractive_mamba2, contractive_llama])
def lm(request):
    return language_model(request.param(), stop=TIGHT)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mask", [None, MASK])
def test_every_sweep_agrees_with_the_first(lm, mask):
    first, *others = check_duality(lm, IDS, mask=mask, sweeps=SWEEPS).sweeps
    assert first.state_difference == first.cache_difference == 0
    assert len(others) == 4
    assert max(sweep.state_difference for sweep in others) > 0
    for sweep in others:
        assert max(sweep.state_difference, sweep.cache_difference) <= 1e-7
        assert sweep.converged == 1
        assert sweep.agreement == 1
        assert sweep.updates > 18


def difference(a, b):
    """The largest distance, relative to the larger norm."""
    norms = torch.maximum(a.norm(dim=-1), b.norm(dim=-1))
    return ((a - b).norm(dim=-1) / norms).max().item()


def test_the_numbers_against_both_solves(lm):
    early = dq.Stop(rtol=1e-10, max_steps=3)
    report = check_duality(lm, IDS, sweeps=SWEEPS[:2], stop=early)
    with torch.no_grad():
        x = lm.eval().embedding(IDS)
        a, b = (lm.model(x, sweep=sweep, stop=early, return_cache=True) for sweep in SWEEPS[:2])
        same = lm.logits(a.value).argmax(dim=-1) == lm.logits(b.value).argmax(dim=-1)
    second = report.sweeps[1]
    pairs = zip(a.cache.tensors(), b.cache.tensors(), strict=True)
    caches = max(difference(x.flatten(), y.flatten()) for x, y in pairs)
    assert second.state_difference == pytest.approx(difference(a.value, b.value))
    assert second.cache_difference == pytest.approx(caches)
    assert caches > 0
    assert second.agreement == pytest.approx(same.double().mean().item())
    assert second.evaluations == b.stats.evaluations
    assert second.updates == b.stats.updates.sum()
    assert report.worst == max(second.state_difference, second.cache_difference)


def test_disagreement_is_reported(lm):
    report = check_duality(lm, IDS, sweeps=SWEEPS[:4], stop=dq.Stop(rtol=1e-10, max_steps=2))
    assert all(sweep.converged == 0 for sweep in report.sweeps)
    assert report.worst > 1e-4
    names = [line.split()[0] for line in str(report).splitlines()]
    assert names == ["sweep", *map(str, SWEEPS[:4])]


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(lm):
    with pytest.raises(ValueError, match=r"len\(sweeps\) must be an integer >= 2"):
        check_duality(lm, IDS, sweeps=SWEEPS[:1])
    with pytest.raises(TypeError, match=r"give sweeps=\(...\)"):
        check_duality(lm, IDS, sweep=dq.Sequential())


def test_what_is_not_a_number_is_not_hidden():
    lm = dq.CausalLM(11, dq.ImplicitModel(contractive_mamba2())).double()
    lm.embedding.weight.data[3] = torch.nan
    report = check_duality(lm, torch.tensor([[1, 2], [4, 3]]), sweeps=SWEEPS[:2])
    assert math.isnan(report.worst)


class LooksAhead(dq.Affine):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + 0.01 * z.mean(dim=1, keepdim=True), aux


def test_a_backbone_that_is_not_causal_is_named():
    with pytest.raises(ValueError, match="model is not causal"):
        check_duality(dq.CausalLM(11, dq.ImplicitModel(LooksAhead(4))), IDS)
