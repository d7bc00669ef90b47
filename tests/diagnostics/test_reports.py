"""What all reports on a model share: refusals, a model that is left as it was."""

import copy

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, language_model

import deqseq as dq
from deqseq.diagnostics import check_duality, model_spectral_radius

IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(6) < torch.tensor([6, 4, 2])[:, None]

every_diagnostic = pytest.mark.parametrize("diagnose", [check_duality, model_spectral_radius])


@every_diagnostic
def test_explicit_models_are_refused(diagnose):
    with pytest.raises(TypeError, match="model must be an ImplicitModel"):
        diagnose(dq.CausalLM(11, dq.ExplicitModel(contractive_llama(injection=False))), IDS)


@every_diagnostic
def test_the_model_is_left_as_it_was(diagnose):
    lm = language_model(contractive_mamba2(dropout=0.5), gradient=dq.Unrolled()).train()
    lm.model.backbone.layers[0].eval()
    lm(IDS, labels=IDS).loss.backward()
    before = copy.deepcopy([(p, p.grad) for p in lm.parameters()])
    modes = [part.training for part in lm.modules()]
    state = torch.get_rng_state()
    assert str(diagnose(lm, IDS)) == str(diagnose(lm, IDS))  # without dropout
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in lm.modules()] == modes
    for (p, grad), now in zip(before, lm.parameters(), strict=True):
        assert torch.equal(p, now)
        assert torch.equal(grad, now.grad)
    assert torch.is_grad_enabled()
    assert not lm.model.backbone._forward_pre_hooks


@every_diagnostic
def test_inference_mode_makes_no_difference(diagnose):
    lm = language_model(contractive_llama())
    with torch.inference_mode():
        inside = diagnose(lm, IDS.clone(), mask=MASK.clone())
    assert str(inside) == str(diagnose(lm, IDS, mask=MASK))
