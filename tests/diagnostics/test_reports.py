"""Reports on a model leave it as it was: all sweeps find one fixed point, and maps whose iterations
are known in closed form settle, go on moving, drift or forget.
"""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, language_model
from torch.nn import functional as F

import deqseq as dq
from deqseq.diagnostics import check_duality, extrapolation, model_spectral_radius

IDS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(6) < torch.tensor([6, 3, 4])[:, None]

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


TIGHT = dq.Stop(rtol=1e-10, max_steps=500)
SWEEPS = (dq.Simultaneous(), dq.Chunked(4), dq.Sequential(), dq.Sliding(3), dq.Sliding(50))


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
def test_sweeps_that_cannot_be_compared_are_named(lm):
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
    lm = dq.CausalLM(11, dq.ImplicitModel(LooksAhead(4)))
    with pytest.raises(ValueError, match="this LooksAhead is not causal"):
        check_duality(lm, IDS)
    for call in (lm, partial(lm.generate, max_new_tokens=1)):  # before anything is learned from it
        with pytest.raises(ValueError, match="this LooksAhead is not causal"):
            call(IDS)


ROWS = torch.arange(14).view(2, 7) % 11
COUNTS = [1, 2, 3, 6, 12, 24]


class Scaled(dq.Backbone):
    """``f(z) = a z + b x`` in half of the channels, and a rotation around 1 in the others."""

    def __init__(self, a: float, b: float, angle: float = 0.0) -> None:
        super().__init__()
        self.d_model, self.a, self.b = 8, a, b
        turned = torch.tensor(angle, dtype=torch.float64)
        cosine, sine = turned.cos(), turned.sin()
        self.rotation = torch.stack([cosine, -sine, sine, cosine]).view(2, 2)

    def prepare(self, x, cache=None, mask=None):
        return x

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        moved = self.a * z + self.b * inputs
        if self.a == 1:
            moved = torch.cat([z[..., :6], (z[..., 6:] - 1) @ self.rotation + 1], dim=-1)
        return moved, None


def scaled_model(*numbers, iterations=3):
    torch.manual_seed(0)
    solve = dq.SolveConfig(dq.Naive(), dq.Stop.exactly(iterations), start="input")
    lm = dq.CausalLM(11, dq.ImplicitModel(Scaled(*numbers), solve), embedding_std=1.0).double()
    with torch.no_grad():
        lm.embedding.weight[:, 6:] = 0  # what rotates is not read
    return lm


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ((0.5, 0.5), "settles"),  # at the input, at once
        ((0.3, 1.0), "settles"),  # at 1 / 0.7 times the input
        ((1, 0, 1.0), "marginal"),  # a circle that no logit sees
        ((1.4, 0.1), "drifts"),  # it grows, and is ever surer of what is wrong
        ((0.8, 0.0), "forgets its prompt"),  # it shrinks to zero
    ],
)
def test_verdicts_are_those_of_the_closed_form(numbers, verdict):
    lm = scaled_model(*numbers)
    report = extrapolation(lm, ROWS)
    assert report.verdict == verdict
    assert str(report).endswith(f"verdict: {verdict}")
    assert report.trained == 3
    assert [depth.iterations for depth in report.depths] == COUNTS
    for depth in report.depths:
        n, (a, b, *_) = depth.iterations, numbers
        factor = a**n + b * sum(a**k for k in range(n))  # of the logits of the input
        logits = factor * lm.embed(ROWS) @ lm.embedding.weight.mT
        scored = logits[:, :-1].flatten(0, 1), ROWS[:, 1:].flatten()
        assert depth.loss == pytest.approx(F.cross_entropy(*scored).item(), rel=1e-9)
        first, second = logits[:, -1].softmax(-1)
        wanted = (first - second).clamp(min=0).sum()
        assert depth.difference == pytest.approx(wanted.item())


def test_the_residual_is_that_of_the_last_iteration():
    lm = scaled_model(0.5, 1.0)
    for depth in extrapolation(lm, ROWS).depths:  # z is (2 - 1 / 2^(n - 1)) times the input
        before, after = (2 - 0.5 ** (depth.iterations - k) for k in (1, 0))
        assert depth.residual == pytest.approx((after - before) / after)


def test_targets_padding_and_a_depth_of_ones_own():
    lm = scaled_model(0.5, 1.0)
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    report = extrapolation(lm, ROWS, targets=ROWS, mask=mask, trained=4, solver=dq.Relaxed(0.5))
    assert [depth.iterations for depth in report.depths] == [1, 2, 4, 8, 16, 32]
    how = {"stop": dq.Stop.exactly(32), "solver": dq.Relaxed(0.5)}
    output = lm.eval()(ROWS, targets=ROWS, mask=mask, **how)
    assert report.depths[-1].loss == pytest.approx(output.loss.item())
    first, second = output.logits[0, 6].softmax(-1), output.logits[1, 4].softmax(-1)
    wanted = (first - second).clamp(min=0).sum()
    assert report.depths[-1].difference == pytest.approx(wanted.item())


def test_a_loss_that_is_nan_is_a_drift():
    lm = scaled_model(0.5, 1.0)
    report = extrapolation(lm, ROWS)
    broken = replace(report.depths[-1], loss=float("nan"))
    assert replace(report, depths=(*report.depths[:-1], broken)).verdict == "drifts"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: extrapolation(lm, ROWS[:1]), "ids must have two different rows"),
        (lambda lm: extrapolation(lm, ROWS[[0, 0]]), "ids must have two different rows"),
        (lambda lm: extrapolation(lm, ROWS, trained=0), "trained must be an integer >= 1, got 0"),
        (lambda lm: extrapolation(lm, ROWS, stop=dq.Stop()), "chooses stop itself: leave it out"),
        (lambda lm: extrapolation(lm, ROWS + 9), r"ids must lie in 0\.\.10, got 9\.\.19"),
        (
            lambda lm: extrapolation(dq.CausalLM(11, dq.ExplicitModel(dq.Affine(8))), ROWS),
            r"model\.model must be an ImplicitModel",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(scaled_model(0.5, 1.0))
