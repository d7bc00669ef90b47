"""Gradient bias against gradients in closed form, and costs that are known."""

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, language_model
from torch.nn import functional as F

import deqseq as dq
from deqseq.diagnostics import gradient_bias
from deqseq.diagnostics.gradient_bias import part_of

IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(6) < torch.tensor([6, 4, 2])[:, None]
TIGHT = dq.Stop(rtol=1e-12, max_steps=500)


def affine_model(**options):
    torch.manual_seed(0)
    return language_model(dq.Affine(8), **options)


def by_hand(lm, value_of, targets):
    """The gradient of the loss with the fixed point replaced by ``value_of(x)``."""
    logits = lm.logits(value_of(lm.embedding(IDS)))
    answers = IDS[:, 1:] if targets is None else targets
    logits = logits[:, :-1] if targets is None else logits
    loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
    found = torch.autograd.grad(loss, list(lm.parameters()))
    return {part_of(name): g.flatten() for (name, _), g in zip(lm.named_parameters(), found, strict=True)}


@pytest.mark.parametrize("targets", [None, TARGETS], ids=["next token", "targets"])
def test_against_the_closed_form(targets):
    """Affine's fixed point is known as a function of its weights, so its gradient needs no solver and no adjoint."""
    lm = affine_model()
    backbone = lm.model.backbone

    def one_step(x):
        return backbone(backbone.solution(x).detach(), backbone.prepare(x))[0]

    def phantom(x):
        z = backbone.solution(x).detach()
        for _ in range(3):
            z = 0.3 * z + 0.7 * backbone(z, backbone.prepare(x))[0]
        return z

    exact = by_hand(lm, backbone.solution, targets)
    report = gradient_bias(lm, IDS, targets=targets, estimators=[dq.OneStep(), dq.Phantom(3, 0.7)])
    assert report.is_exact
    for one, value_of in zip(report.estimators, (one_step, phantom), strict=True):
        ours = by_hand(lm, value_of, targets)
        assert one.cosine.keys() - {"all"} == exact.keys() == {"embedding", "A", "R", "U"}
        pairs = {part: (ours[part], exact[part]) for part in exact}
        pairs["all"] = tuple(torch.cat(every) for every in zip(*pairs.values(), strict=True))
        for part, (a, b) in pairs.items():
            assert one.cosine[part] == pytest.approx(F.cosine_similarity(a, b, dim=0).item(), rel=1e-7)
            assert one.norm_ratio[part] == pytest.approx((a.norm() / b.norm()).item(), rel=1e-7)
        assert one.cosine["all"] < 0.999


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama])
@pytest.mark.parametrize("mask", [None, MASK, MASK.flip(1)], ids=["whole", "right", "left"])
def test_more_steps_come_closer_and_all_of_them_arrive(make, mask):
    lm = language_model(make())
    estimators = [dq.OneStep(), dq.Phantom(2, 1.0), dq.Phantom(30, 1.0), dq.Unrolled()]
    report = gradient_bias(lm, IDS, mask=mask, estimators=estimators, stop=TIGHT)
    assert report.is_exact
    errors = [1 - one.cosine["all"] for one in report.estimators]
    assert errors[0] > errors[1] > errors[2]
    assert abs(errors[3]) < 1e-9 and abs(report.estimators[3].norm_ratio["all"] - 1) < 1e-6
    assert set(report.exact.cosine) >= {"embedding", "layers.0", "layers.1"}
    assert report.exact.cosine["all"] == pytest.approx(1, rel=1e-12)


def test_what_they_cost():
    lm = affine_model(solver=dq.Naive())
    estimators = [dq.Phantom(2), dq.Phantom(4), dq.Phantom(8), dq.Unrolled(), dq.Unrolled(checkpoint=True)]
    report = gradient_bias(lm, IDS, estimators=estimators, stop=dq.Stop(rtol=1e-9, max_steps=300))
    with torch.no_grad():
        solve = lm(IDS, stop=dq.Stop(rtol=1e-9, max_steps=300)).stats.evaluations
    assert [one.evaluations for one in report.estimators] == [solve + 2, solve + 4, solve + 8, solve, 2 * solve]
    assert report.exact.evaluations == solve + 1 and report.adjoint.stats.evaluations > 5


def test_printed_with_numbers_for_the_estimators():
    lines = str(gradient_bias(affine_model(), IDS, estimators=[dq.OneStep(), dq.Phantom(4)])).splitlines()
    assert lines[1].startswith("1  OneStep(") and lines[2].startswith("2  Phantom(steps=4, damping=0.8")
    assert lines[3].split()[:2] == ["exact", "1.0000"] and lines[5].split() == ["cosine", "of", "1", "2"]
    assert [line.split()[0] for line in lines[6:]] == ["embedding", "A", "R", "U"]


def test_nothing_is_left_behind_by_an_estimator_that_fails():
    class Broken(dq.AttachedGradient):
        def attach(self, f, z_star):
            raise ArithmeticError("broken")

    lm = affine_model(gradient=dq.OneStep()).train()
    with pytest.raises(ArithmeticError):
        gradient_bias(lm, IDS, estimators=[Broken()])
    assert lm.model.solve.gradient == dq.OneStep() and lm.training and not lm.model.backbone._forward_pre_hooks


def test_it_works_under_no_grad_and_with_frozen_parameters():
    lm = affine_model()
    lm.model.backbone.U.requires_grad_(False)
    with torch.no_grad():
        report = gradient_bias(lm, IDS, estimators=[dq.Unrolled()])
    assert set(report.exact.cosine) == {"all", "embedding", "A", "R"}
    assert report.estimators[0].cosine["all"] == pytest.approx(1, abs=1e-9)


def test_without_parameters_below_the_head_there_is_no_adjoint_solve():
    lm = dq.CausalLM(11, dq.ImplicitModel(dq.Affine(8)), tied=False).double().requires_grad_(False)
    lm.head.requires_grad_(True)
    report = gradient_bias(lm, IDS, estimators=[dq.OneStep()])
    assert report.adjoint is None and report.is_exact and "Not exact" not in str(report)
    assert report.estimators[0].cosine == {"all": pytest.approx(1), "head": pytest.approx(1)}


def test_where_nothing_converges_the_report_says_so():
    lm = affine_model()
    report = gradient_bias(lm, IDS, estimators=[dq.OneStep()], stop=dq.Stop(rtol=1e-12, max_steps=2))
    assert not report.converged.any() and not report.adjoint.converged.any() and not report.is_exact
    assert "Not exact: 0% of rows converged" in str(report)
    assert "Not exact" not in str(gradient_bias(lm, IDS, estimators=[dq.OneStep()]))


@pytest.mark.usefixtures("unchecked")
def test_bad_arguments():
    lm = affine_model()
    with pytest.raises(ValueError, match=r"len\(estimators\) must be an integer >= 1"):
        gradient_bias(lm, IDS, estimators=[])
    with pytest.raises(TypeError, match=r"give estimators=\[...\]"):
        gradient_bias(lm, IDS, gradient=dq.Phantom())
    with pytest.raises(ValueError, match="nothing to score"):
        gradient_bias(lm, IDS[:, :1])
    with pytest.raises(ValueError, match="at least one parameter that requires a gradient"):
        gradient_bias(lm.requires_grad_(False), IDS)
