"""Maps whose iterations are known in closed form settle, go on moving, drift or forget."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import deqseq as dq
from deqseq.diagnostics import extrapolation

IDS = torch.arange(14).view(2, 7) % 11
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


def language_model(*numbers, iterations=3):
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
    lm = language_model(*numbers)
    report = extrapolation(lm, IDS)
    assert report.verdict == verdict
    assert str(report).endswith(f"verdict: {verdict}")
    assert report.trained == 3
    assert [depth.iterations for depth in report.depths] == COUNTS
    for depth in report.depths:
        n, (a, b, *_) = depth.iterations, numbers
        factor = a**n + b * sum(a**k for k in range(n))  # of the logits of the input
        logits = factor * lm.embed(IDS) @ lm.embedding.weight.mT
        scored = logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
        assert depth.loss == pytest.approx(F.cross_entropy(*scored).item(), rel=1e-9)
        first, second = logits[:, -1].softmax(-1)
        wanted = (first - second).clamp(min=0).sum()
        assert depth.difference == pytest.approx(wanted.item())


def test_the_residual_is_that_of_the_last_iteration():
    lm = language_model(0.5, 1.0)
    for depth in extrapolation(lm, IDS).depths:  # z is (2 - 1 / 2^(n - 1)) times the input
        before, after = (2 - 0.5 ** (depth.iterations - k) for k in (1, 0))
        assert depth.residual == pytest.approx((after - before) / after)


def test_targets_padding_and_a_depth_of_ones_own():
    lm = language_model(0.5, 1.0)
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    report = extrapolation(lm, IDS, targets=IDS, mask=mask, trained=4, solver=dq.Relaxed(0.5))
    assert [depth.iterations for depth in report.depths] == [1, 2, 4, 8, 16, 32]
    how = {"stop": dq.Stop.exactly(32), "solver": dq.Relaxed(0.5)}
    output = lm.eval()(IDS, targets=IDS, mask=mask, **how)
    assert report.depths[-1].loss == pytest.approx(output.loss.item())
    first, second = output.logits[0, 6].softmax(-1), output.logits[1, 4].softmax(-1)
    wanted = (first - second).clamp(min=0).sum()
    assert report.depths[-1].difference == pytest.approx(wanted.item())


def test_a_loss_that_is_nan_is_a_drift():
    lm = language_model(0.5, 1.0)
    report = extrapolation(lm, IDS)
    broken = replace(report.depths[-1], loss=float("nan"))
    assert replace(report, depths=(*report.depths[:-1], broken)).verdict == "drifts"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: extrapolation(lm, IDS[:1]), "ids must have two different rows"),
        (lambda lm: extrapolation(lm, IDS[[0, 0]]), "ids must have two different rows"),
        (lambda lm: extrapolation(lm, IDS, trained=0), "trained must be an integer >= 1, got 0"),
        (lambda lm: extrapolation(lm, IDS, stop=dq.Stop()), "chooses stop itself: leave it out"),
        (lambda lm: extrapolation(lm, IDS + 9), r"ids must lie in 0\.\.10, got 9\.\.19"),
        (
            lambda lm: extrapolation(dq.CausalLM(11, dq.ExplicitModel(dq.Affine(8))), IDS),
            r"model\.model must be an ImplicitModel",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(language_model(0.5, 1.0))
