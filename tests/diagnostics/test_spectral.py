"""Eigenvalues against dense linear algebra."""

import cmath

import pytest
import torch
from small_models import Pointwise, affine, contractive_llama, contractive_mamba2, language_model

import deqseq as dq
from deqseq.diagnostics import model_spectral_radius, spectral_radius
from deqseq.testing.problems import seeded, symmetric

ZEROS = torch.zeros(1, 1, dtype=torch.float64)
TIGHT = dq.Stop(rtol=1e-11, max_steps=500)
BACKBONES = pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama, affine])
IDS = torch.randint(0, 11, (2, 5), generator=seeded(0))


def rotation(angle, size):
    angle = torch.tensor(angle, dtype=torch.float64)
    return size * torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)


def test_dense_matrices_of_each_row():
    W = torch.randn(4, 12, 12, generator=seeded(1), dtype=torch.float64)
    z = torch.randn(4, 3, 4, generator=seeded(2), dtype=torch.float64)
    report = spectral_radius(
        lambda z: (W @ z.flatten(1)[..., None]).reshape(z.shape), z, products=50
    )
    exact = torch.linalg.eigvals(W).abs().amax(dim=1)
    assert report.eigenvalues.shape == (4, 12)
    assert torch.allclose(report.radius, exact, rtol=1e-9)
    assert (report.backward_error < 1e-9).all()


@pytest.mark.parametrize("angle", [0.3, 1.5707963, 3.0])
def test_complex_pairs_among_many_smaller_eigenvalues(angle):
    others = torch.linspace(-0.6, 0.6, 58, dtype=torch.float64)
    matrix = torch.block_diag(rotation(angle, 0.9), symmetric(others))
    z = ZEROS.expand(3, 60)
    report = spectral_radius(lambda z: z @ matrix.T, z, products=32)
    damped = abs(0.5 + 0.45 * cmath.exp(1j * angle))
    assert report.radius.tolist() == pytest.approx([0.9] * 3, rel=1e-5)
    assert report.damped(0.5).tolist() == pytest.approx([max(damped, 0.8)] * 3, rel=1e-3)
    assert (report.backward_error < 1e-3).all()


def test_another_default_device_changes_nothing():
    with torch.device("meta"):
        report = spectral_radius(lambda z: z / 2, ZEROS)
    assert report.radius.item() == pytest.approx(0.5)


def test_too_few_products_show_in_the_error():
    matrix = symmetric(torch.linspace(-0.9, 0.9, 200, dtype=torch.float64))
    z = ZEROS.expand(1, 200)
    few, many = (spectral_radius(lambda z: z @ matrix, z, products=n) for n in (3, 200))
    assert few.radius < 0.89
    assert few.backward_error > 0.01
    assert many.backward_error < 1e-9
    assert many.radius.item() == pytest.approx(0.9, rel=1e-10)


@BACKBONES
def test_token_blocks_against_the_dense_jacobian(make):
    lm = language_model(make(), stop=TIGHT)
    backbone = lm.model.backbone
    x = lm.embedding(IDS).detach()
    with torch.no_grad():
        z = lm.model(x).value
    by_cache = model_spectral_radius(lm, IDS)
    for row in range(2):
        inputs = backbone.prepare(x[row : row + 1])
        dense = torch.autograd.functional.jacobian(
            lambda z, inputs=inputs: backbone(z, inputs)[0], z[row : row + 1]
        )
        dense = dense[0, :, :, 0]  # token and channel of the value, then of the state
        blocks = torch.stack([dense[t, :, t] for t in range(5)])
        exact = torch.linalg.eigvals(blocks).abs().amax(dim=1)
        assert torch.allclose(by_cache.radius[row], exact, rtol=1e-6)
        whole = torch.linalg.eigvals(dense.reshape(40, 40)).abs().max().item()
        assert by_cache.per_row[row].item() == pytest.approx(whole, rel=1e-3)


def test_a_backbone_without_a_cache_is_told_what_it_lacks():
    lm = language_model(Pointwise(), stop=TIGHT)
    with pytest.raises(NotImplementedError, match=r"Write advance\(\)"):
        model_spectral_radius(lm, IDS)
    # one token needs no cache
    one = IDS[:, :1]
    inner = lm.model.backbone.inner.weight
    slope = 1 - lm.model(lm.embed(one)).value[:, 0, :, None] ** 2
    exact = torch.linalg.eigvals(slope * inner / 4).abs().amax(dim=1, keepdim=True)
    assert torch.allclose(model_spectral_radius(lm, one).radius, exact, rtol=1e-6)


@BACKBONES
def test_a_model_padded_on_either_side(make):
    lm = language_model(make(), stop=TIGHT)
    alone = model_spectral_radius(lm, IDS[:, :3])
    mask = torch.tensor([[False, False, True, True, True]] * 2)
    left = model_spectral_radius(lm, IDS[:, :3][:, [0, 0, 0, 1, 2]], mask=mask)
    right = model_spectral_radius(lm, IDS[:, :3][:, [0, 1, 2, 0, 0]], mask=mask.flip(1))
    assert left.radius[:, :2].isnan().all()
    assert right.radius[:, 3:].isnan().all()
    assert torch.allclose(left.radius[:, 2:], alone.radius, rtol=1e-7)
    assert torch.allclose(right.radius[:, :3], alone.radius, rtol=1e-7)
    assert torch.allclose(left.per_row, alone.per_row, rtol=1e-7)
    assert "nan" not in str(left)


def test_a_point_that_is_no_fixed_point_is_labelled():
    lm = language_model(contractive_mamba2(), stop=TIGHT)
    solved = model_spectral_radius(lm, IDS)
    early = model_spectral_radius(lm, IDS, stop=dq.Stop.exactly(1))
    for report, label in ((solved, "yes"), (early, "no")):
        assert report.at_fixed_point.tolist() == [label == "yes"] * 2
        assert [line.split()[-1] for line in str(report).splitlines()[1:]] == [label] * 2


def test_rows_that_are_not_finite_leave_others_alone():
    gain = torch.tensor([0.5, torch.nan])[:, None]
    report = spectral_radius(lambda z: gain * z, torch.ones(2, 3))
    assert report.radius[0].item() == pytest.approx(0.5)
    assert report.radius[1].isnan()
    assert not report.at_fixed_point[1]


def test_a_map_that_ignores_its_state():
    weight = torch.ones(4, requires_grad=True)
    for f in (torch.ones_like, lambda z: weight.expand_as(z)):
        assert spectral_radius(f, torch.ones(2, 3, 4)).radius.tolist() == [0, 0]


@pytest.mark.parametrize(
    "cut", [lambda z: z.detach() / 2 + 1, lambda z: torch.ones((), requires_grad=True) * z.detach()]
)
def test_a_map_that_cuts_its_graph_is_refused(cut):
    with pytest.raises(ValueError, match=r"f must keep the graph from z to f\(z\)"):
        spectral_radius(cut, torch.ones(1, 2))


def test_a_constant_map_has_radius_zero():
    report = spectral_radius(torch.ones_like, torch.ones(1, 2))
    assert report.radius.item() == 0
