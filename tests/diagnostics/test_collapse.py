"""Models that iterate, models that do not, and maps for which all numbers are known."""

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2

import deqseq as dq
from deqseq.diagnostics import check_collapse

IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))
TIGHT = dq.Stop(rtol=1e-10, max_steps=300)


def affine_model(own, before=None, **options):
    """z_t = own z_t + before z_{t-1} + x_t."""
    torch.manual_seed(0)
    backbone = dq.Affine(8)
    backbone.A.data = own * torch.eye(8)
    backbone.R.data = torch.zeros(8, 8) if before is None else before
    return dq.CausalLM(
        11, dq.ImplicitModel(backbone, dq.SolveConfig(stop=TIGHT, **options)), embedding_std=1.0
    ).double()


def test_a_map_that_ignores_its_state_has_collapsed():
    report = check_collapse(affine_model(0.0), IDS)
    assert report.verdict == "collapsed" and report.collapsed.all()
    assert torch.allclose(report.first_iteration, torch.ones(3).double())
    assert report.dependence.max() < 1e-12
    assert report.agreement.tolist() == [1, 1, 1]
    assert str(report).endswith("verdict: collapsed")


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama])
def test_random_backbones_have_not(make):
    torch.manual_seed(1)
    lm = dq.CausalLM(11, dq.ImplicitModel(make(), dq.SolveConfig(stop=TIGHT)), embedding_std=1.0).double()
    report = check_collapse(lm, IDS)
    assert not report.collapsed.any() and report.verdict != "collapsed"
    assert report.dependence.min() > 0.05


def test_tokens_that_depend_on_those_before_iterate():
    mix = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(3))).Q
    report = check_collapse(affine_model(0.0, mix), IDS)
    assert report.verdict == "iterates"
    assert report.first_iteration.max() < 0.6 and report.agreement.min() < 1


def test_the_numbers_of_a_scaled_identity():
    """f(z) = 0.4 z + u: the first step is 0.6 of the way, distances shrink by 0.4, and all predict alike."""
    report = check_collapse(affine_model(0.4), IDS, samples=50)
    assert torch.allclose(report.first_iteration, torch.full((3,), 0.6).double(), atol=1e-8)
    assert torch.allclose(report.dependence, torch.full((3,), 0.4 * 2**0.5).double(), rtol=0.06)
    assert report.agreement.tolist() == [1, 1, 1]
    assert report.verdict == "predictions settle at once"


def test_thresholds_are_arguments():
    lm = affine_model(0.04)
    strict, loose = (check_collapse(lm, IDS, limit=limit) for limit in (0.05, 0.06))
    assert strict.verdict == "predictions settle at once" and loose.verdict == "collapsed"
    assert torch.equal(strict.first_iteration, loose.first_iteration)
    assert check_collapse(lm, IDS, limit=0.01).verdict == "predictions settle at once"


def test_padding_has_no_say():
    lm = affine_model(0.4, 0.3 * torch.eye(8))
    alone = check_collapse(lm, IDS[:, :3], samples=200)
    mask = torch.tensor([[False, False, False, True, True, True]] * 3)
    padded = check_collapse(lm, IDS[:, [5, 4, 3, 0, 1, 2]], mask=mask, samples=200)
    assert torch.allclose(padded.first_iteration, alone.first_iteration, atol=1e-8)
    assert torch.equal(padded.agreement, alone.agreement)
    assert torch.allclose(padded.dependence, alone.dependence, rtol=0.05)


def test_unsolved_rows_have_no_verdict():
    report = check_collapse(affine_model(0.4), IDS, stop=dq.Stop(rtol=1e-12, max_steps=2))
    assert report.verdict == "unsolved" and not report.collapsed.any()
    ignoring = check_collapse(affine_model(0.0), IDS, stop=dq.Stop(max_steps=1))
    assert ignoring.verdict == "unsolved" and not ignoring.collapsed.any()


def test_the_start_at_the_input_is_the_first_iteration():
    zero, embedded = (check_collapse(affine_model(0.4, start=start), IDS) for start in ("zero", "input"))
    assert not torch.allclose(zero.first_iteration, embedded.first_iteration)


def test_draws_are_its_own():
    lm = affine_model(0.4)
    state = torch.get_rng_state()
    first, again, other = (check_collapse(lm, IDS, seed=seed).dependence for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments():
    lm = affine_model(0.4)
    for name, value in (("samples", 0), ("limit", 1.5), ("agreed", -1.0), ("limit", float("nan")), ("seed", 2**64)):
        with pytest.raises(ValueError, match=name):
            check_collapse(lm, IDS, **{name: value})
    for name, value in (("samples", 2.0), ("limit", "0.1"), ("seed", None), ("mask", [[True]]), ("solve", dq.Stop())):
        with pytest.raises(TypeError, match=f"{name} must be"):
            check_collapse(lm, IDS, **{name: value})
    with pytest.raises(TypeError, match="model must be a CausalLM"):
        check_collapse(lm.model, IDS)
    with pytest.raises(TypeError, match="model must be an ImplicitModel"):
        check_collapse(dq.CausalLM(11, dq.ExplicitModel(contractive_llama(injection=False))), IDS)


def test_predictions_of_recurrent_depth_are_those_of_the_coda():
    class Constant(dq.Backbone):
        d_model = 8

        def prepare(self, x, cache=None, mask=None):
            return x

        def forward(self, z, inputs, cache=None, *, need_aux=False):
            return torch.ones_like(z), None

    prelude, core = contractive_llama(injection=False), contractive_llama()
    Constant.d_model = core.d_model
    model = dq.RecurrentDepth(dq.ExplicitModel(prelude), dq.ImplicitModel(core), dq.ExplicitModel(Constant()))
    lm = dq.CausalLM(11, model, embedding_std=1.0).to(next(core.parameters()).dtype)
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[0, 3:] = False
    assert check_collapse(lm, IDS, mask=mask, stop=TIGHT).agreement.tolist() == [1.0] * 3
