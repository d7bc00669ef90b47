"""All sweeps find the same fixed point: states, predictions and caches."""

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2

import deqseq as dq
from deqseq.diagnostics import check_duality

TIGHT = dq.Stop(rtol=1e-10, max_steps=500)
SWEEPS = (
    dq.Simultaneous(),
    dq.Chunked(4),
    dq.Chunked(50),
    dq.Sequential(),
    dq.Sliding(1),
    dq.Sliding(3),
    dq.Sliding(8),
    dq.Sliding(50),
)
IDS = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(12) < torch.tensor([12, 5, 8])[:, None]


@pytest.fixture(params=[contractive_mamba2, contractive_llama], ids=["Mamba2", "Llama"])
def lm(request):
    torch.manual_seed(1)
    return dq.CausalLM(11, dq.ImplicitModel(request.param(), dq.SolveConfig(stop=TIGHT)), embedding_std=1.0).double()


@pytest.mark.parametrize("mask", [None, MASK, MASK.flip(1)], ids=["no padding", "right padding", "left padding"])
def test_every_pair_of_sweeps_agrees(lm, mask):
    report = check_duality(lm, IDS, mask=mask, sweeps=SWEEPS)
    assert len(report.pairs) == 28
    assert all(one.converged == 1 for one in report.sweeps)
    assert 0 < report.worst <= 1e-7
    assert all(pair.agreement == 1 for pair in report.pairs)
    for one in report.sweeps:
        assert one.token_updates > 36


def test_disagreement_is_reported(lm):
    report = check_duality(lm, IDS, sweeps=SWEEPS[:4], stop=dq.Stop(rtol=1e-10, max_steps=2))
    assert all(one.converged == 0 for one in report.sweeps)
    assert report.worst > 1e-4
    assert "Simultaneous() and Sequential()" in str(report)
    assert str(report).count("\n") == 12


def test_explicit_models_and_single_sweeps_are_refused(lm):
    with pytest.raises(TypeError, match="model must be a CausalLM around an ImplicitModel"):
        check_duality(dq.CausalLM(11, dq.ExplicitModel(contractive_llama(injection=False))), IDS)
    with pytest.raises(ValueError, match="sweeps must be at least two"):
        check_duality(lm, IDS, sweeps=SWEEPS[:1])
    with pytest.raises(TypeError, match=r"give sweeps=\(...\)"):
        check_duality(lm, IDS, sweep=dq.Sequential())


def test_dropout_of_a_model_in_training_makes_no_difference():
    lm = dq.CausalLM(11, dq.ImplicitModel(contractive_llama(dropout=0.5), dq.SolveConfig(stop=TIGHT))).double().train()
    lm.model.backbone.layers[0].eval()
    modes = [part.training for part in lm.modules()]
    assert check_duality(lm, IDS, sweeps=SWEEPS[:4]).worst < 1e-7
    assert [part.training for part in lm.modules()] == modes


def test_what_is_not_a_number_is_not_hidden():
    lm = dq.CausalLM(11, dq.ImplicitModel(contractive_mamba2())).double()
    lm.embedding.weight.data[3] = torch.nan
    report = check_duality(lm, torch.tensor([[1, 2], [4, 3]]), sweeps=[dq.Simultaneous(), dq.Chunked(8)])
    assert torch.tensor(report.worst).isnan()
