"""All diagnostics at once: what they print, and that the model is left as it was."""

import copy
import subprocess
import sys

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2

import deqseq as dq
from deqseq.diagnostics import check_collapse, model_spectral_radius, report, residual_trace, token_effort

IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(6) < torch.tensor([6, 4, 2])[:, None]


def language_model(backbone, **options):
    torch.manual_seed(1)
    return dq.CausalLM(11, dq.ImplicitModel(backbone, dq.SolveConfig(**options)), embedding_std=1.0).double()


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"])
@pytest.mark.parametrize("mask", [None, MASK.flip(1)], ids=["whole", "padded"])
def test_every_backbone_with_and_without_padding(make, mask):
    lm = language_model(make())
    found = report(lm, IDS, mask=mask)
    assert found.trace.converged.all() and found.spectral.at_fixed_point.all()
    assert 0 < found.spectral.per_row.max() < 1
    assert found.bias.is_exact
    assert found.collapse.verdict in str(found)
    titles = ("Residuals\n-", "Iterations of each", "Spectral radius", "Gradient estimators", "Does it iterate")
    assert all(title in str(found) for title in titles)
    assert "nan" not in str(found) and max(map(len, str(found).splitlines())) <= 88
    panels = ["relative residual", "spectral radius", "row"]
    assert [axis.get_ylabel() for axis in found.plot().axes[:3]] == panels


def test_the_model_is_left_as_it_was():
    lm = language_model(contractive_mamba2(dropout=0.5), gradient=dq.Unrolled()).train()
    lm.model.backbone.layers[0].eval()
    lm(IDS, labels=IDS).loss.backward()
    before = copy.deepcopy([(p, p.grad) for p in lm.parameters()])
    modes = [part.training for part in lm.modules()]
    state = torch.get_rng_state()
    found = report(lm, IDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in lm.modules()] == modes
    for (p, grad), now in zip(before, lm.parameters(), strict=True):
        assert torch.equal(p, now) and (grad is now.grad or torch.equal(grad, now.grad))
    assert torch.is_grad_enabled() and not lm.model.backbone._forward_pre_hooks
    assert [type(one.estimator) for one in found.bias.estimators] == [dq.OneStep, dq.Phantom, dq.Unrolled]


def test_in_inference_mode():
    lm = language_model(contractive_llama())
    with torch.inference_mode():
        inside = report(lm, IDS.clone(), mask=MASK.clone(), targets=IDS.clone())
    outside = report(lm, IDS, mask=MASK, targets=IDS)
    assert inside.bias.estimators == outside.bias.estimators
    assert str(inside) == str(outside)


def test_diverging_and_broken_models_are_reported():
    lm = language_model(affine())
    lm.model.backbone.A.data = 3 * torch.eye(8).double()
    found = report(lm, IDS)
    assert found.collapse.verdict == "unsolved" and not found.spectral.at_fixed_point.any()
    assert torch.allclose(found.spectral.per_row, torch.full((3,), 3.0).double())
    assert "Not exact: 0% of rows converged" in str(found)
    lm.model.backbone.A.data[0, 0] = torch.nan
    assert report(lm, IDS).spectral.per_row.isnan().all()


def test_it_is_the_diagnostics_themselves():
    """Eigenvalues and collapse share a solve; each number is that of the function called alone."""
    lm, solves = language_model(contractive_mamba2()), []
    with lm.model.register_forward_pre_hook(lambda *_: solves.append(None)):
        found = report(lm, IDS, mask=MASK)
    assert len(solves) == 3 + 1 + len(found.bias.estimators) + 2  # the explanation starts elsewhere
    assert found.explanation.causes == ("converged",) * 3
    assert str(found.spectral) == str(model_spectral_radius(lm, IDS, mask=MASK, products=16))
    assert str(found.collapse) == str(check_collapse(lm, IDS, mask=MASK))
    assert str(found.trace) == str(residual_trace(lm, IDS, mask=MASK))


def test_targets_solver_and_sweep_are_handed_on():
    lm = language_model(affine())
    stop, targets = dq.Stop(rtol=1e-6), (IDS + 1) % 11
    found = report(lm, IDS, targets=targets, solver=dq.Anderson(), stop=stop, sweep=dq.Sequential())
    other = report(lm, IDS, stop=stop)
    assert found.trace.rtol == 1e-6 and found.effort.sweep == dq.Sequential()
    assert found.trace.iterations.max() < other.trace.iterations.max()
    assert found.bias.estimators[0].cosine != other.bias.estimators[0].cosine


def test_unsolved_models_are_called_so():
    text = str(report(language_model(affine()), IDS, stop=dq.Stop(rtol=1e-9, max_steps=2)))
    assert "verdict: unsolved" in text
    assert text.count("no\n") >= 6


def test_explicit_models_and_empty_batches_are_refused():
    with pytest.raises(TypeError, match="model must be an ImplicitModel"):
        report(dq.CausalLM(11, dq.ExplicitModel(contractive_llama(injection=False))), IDS)
    with pytest.raises(ValueError, match="ids must be int64"):
        report(language_model(affine()), IDS[:, :0])


def test_a_missing_matplotlib_is_named(monkeypatch):
    found = token_effort(language_model(affine()), IDS)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "deqseq\[examples\]"'):
        found.plot()


def test_the_core_alone_imports_it():
    extras = "('matplotlib', 'torchdeq') if m in sys.modules"
    code = f"import sys, deqseq.diagnostics; print([m for m in {extras}])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
