"""All sweeps find the same fixed point: states, predictions and caches."""

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, language_model

import deqseq as dq
from deqseq.diagnostics import check_duality

TIGHT = dq.Stop(rtol=1e-10, max_steps=500)
SWEEPS = (dq.Simultaneous(), dq.Chunked(4), dq.Sequential(), dq.Sliding(3), dq.Sliding(50))
IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(6) < torch.tensor([6, 3, 4])[:, None]


@pytest.fixture(params=[contractive_mamba2, contractive_llama], ids=["Mamba2", "Llama"])
def lm(request):
    return language_model(request.param(), stop=TIGHT)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("mask", [None, MASK], ids=["no padding", "padding"])
def test_every_sweep_agrees_with_the_first(lm, mask):
    first, *others = check_duality(lm, IDS, mask=mask, sweeps=SWEEPS).sweeps
    assert first.state_difference == first.cache_difference == 0 and len(others) == 4
    assert max(one.state_difference for one in others) > 0
    for one in others:
        assert one.state_difference <= 1e-7 and one.cache_difference <= 1e-7
        assert one.converged == 1 and one.agreement == 1 and one.updates > 18


def test_the_numbers_against_both_solves(lm):
    """Each number of the second sweep, computed from the outputs themselves."""
    early = dq.Stop(rtol=1e-10, max_steps=3)
    report = check_duality(lm, IDS, sweeps=[dq.Simultaneous(), dq.Chunked(4)], stop=early)
    with torch.no_grad():
        x = lm.eval().embedding(IDS)
        a, b = (
            lm.model(x, sweep=one.sweep, stop=early, return_cache=True) for one in report.sweeps
        )
    ours, norms = report.sweeps[1], torch.maximum(a.value.norm(dim=-1), b.value.norm(dim=-1))
    assert ours.state_difference == pytest.approx(
        ((a.value - b.value).norm(dim=-1) / norms).max().item()
    )
    same = lm.logits(a.value).argmax(dim=-1) == lm.logits(b.value).argmax(dim=-1)
    assert ours.agreement == pytest.approx(same.double().mean().item())
    pairs = zip(a.cache.tensors(), b.cache.tensors(), strict=True)
    caches = [((x - y).norm() / torch.maximum(x.norm(), y.norm())).item() for x, y in pairs]
    assert ours.cache_difference == pytest.approx(max(caches)) and max(caches) > 0
    assert (ours.evaluations, ours.updates) == (b.stats.evaluations, b.stats.updates.sum())
    assert report.worst == max(ours.state_difference, ours.cache_difference)


def test_disagreement_is_reported(lm):
    report = check_duality(lm, IDS, sweeps=SWEEPS[:4], stop=dq.Stop(rtol=1e-10, max_steps=2))
    assert all(one.converged == 0 for one in report.sweeps)
    assert report.worst > 1e-4
    assert [line.split()[0] for line in str(report).splitlines()[1:]] == [
        str(one.sweep) for one in report.sweeps
    ]


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(lm):
    with pytest.raises(ValueError, match=r"len\(sweeps\) must be an integer >= 2"):
        check_duality(lm, IDS, sweeps=SWEEPS[:1])
    with pytest.raises(TypeError, match=r"give sweeps=\(...\)"):
        check_duality(lm, IDS, sweep=dq.Sequential())


def test_what_is_not_a_number_is_not_hidden():
    lm = dq.CausalLM(11, dq.ImplicitModel(contractive_mamba2())).double()
    lm.embedding.weight.data[3] = torch.nan
    report = check_duality(
        lm, torch.tensor([[1, 2], [4, 3]]), sweeps=[dq.Simultaneous(), dq.Chunked(8)]
    )
    assert torch.tensor(report.worst).isnan()


class LooksAhead(dq.Affine):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + 0.01 * z.mean(dim=1, keepdim=True), aux


def test_a_backbone_that_is_not_causal_is_named():
    with pytest.raises(ValueError, match="model is not causal"):
        check_duality(dq.CausalLM(11, dq.ImplicitModel(LooksAhead(4))), IDS)
