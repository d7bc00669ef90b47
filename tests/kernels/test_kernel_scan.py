"""Each kernel beside its reference: outputs to 1e-5, gradients of every input to 1e-4."""

import pytest
import torch

from deqseq.ops.ssd import ssd

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:Deterministic mode")]


def inputs(batch, length, heads, groups, headdim, d_state, seed=0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "x": randn(batch, length, heads, headdim),
        "dt": randn(batch, length, heads),
        "A": -randn(heads).exp(),
        "B": randn(batch, length, groups, d_state),
        "C": randn(batch, length, groups, d_state),
        "D": randn(heads),
        "dt_bias": randn(heads),
        "initial_state": randn(batch, heads, headdim, d_state),
    }


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    scale = max(1.0, theirs.abs().max().item())
    difference = (ours - theirs).abs().max().item() / scale
    assert ours.dtype == theirs.dtype and difference < tolerance, difference


# batch, length, heads, groups, headdim, d_state; options; inputs that are left out
CASES = {
    "one chunk": ((1, 16, 2, 1, 16, 16), {}, ()),
    "no multiple of the chunk": ((2, 37, 2, 1, 16, 16), {}, ()),
    "groups": ((1, 33, 4, 2, 16, 16), {}, ()),
    "odd sizes": ((1, 21, 3, 3, 12, 20), {}, ()),
    "no state, bias or skip": (
        (1, 20, 2, 1, 16, 16),
        {},
        ("D", "dt_bias", "initial_state"),
    ),
    "limits": ((1, 20, 2, 1, 16, 16), {"dt_limit": (0.3, 1.0)}, ()),
    "no softplus": ((1, 20, 2, 1, 16, 16), {"dt_softplus": False}, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_scan_and_its_gradients(case):
    sizes, options, left_out = CASES[case]
    tensors = {name: t.requires_grad_() for name, t in inputs(*sizes).items() if name not in left_out}
    results = {}
    for backend in ("reference", "mamba_ssm"):
        y, state = ssd(**tensors, **options, return_state=True, chunk_size=16, backend=backend)
        weights = [torch.randn(out.shape, generator=torch.Generator().manual_seed(9)) for out in (y, state)]
        gradients = torch.autograd.grad([y, state], list(tensors.values()), weights)
        results[backend] = (y, state), dict(zip(tensors, gradients, strict=True))
    for ours, theirs in zip(results["mamba_ssm"][0], results["reference"][0], strict=True):
        close(ours, theirs, 1e-5)
    for name, gradient in results["reference"][1].items():
        close(results["mamba_ssm"][1][name], gradient, 1e-4)


def test_the_scan_carries_on_from_a_state():
    whole = inputs(2, 24, 2, 1, 16, 16)
    per_token = ("x", "dt", "B", "C")
    expected = ssd(**whole, return_state=True, backend="reference")
    first = {k: v[:, :9] if k in per_token else v for k, v in whole.items()}
    second = {k: v[:, 9:] if k in per_token else v for k, v in whole.items()}
    y1, state = ssd(**first, return_state=True, chunk_size=16, backend="mamba_ssm")
    y2, state = ssd(**(second | {"initial_state": state}), return_state=True, chunk_size=16, backend="mamba_ssm")
    close(torch.cat([y1, y2], dim=1), expected.y, 1e-5)
    close(state, expected.state, 1e-5)


@pytest.mark.parametrize("left_out", [(), ("D",), ("dt_bias",), ("D", "dt_bias")], ids=str)
@pytest.mark.parametrize("options", [{}, {"dt_limit": (0.3, 1.0)}, {"dt_softplus": False}], ids=str)
def test_one_token(left_out, options):
    tensors = {name: t for name, t in inputs(3, 1, 4, 2, 16, 16).items() if name not in left_out}
    before = tensors["initial_state"].clone()
    ours = ssd(**tensors, **options, return_state=True, backend="mamba_ssm")
    theirs = ssd(**tensors, **options, return_state=True, backend="reference")
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-5)
    assert torch.equal(tensors["initial_state"], before)  # the kernel works in place; nobody else may notice


def test_one_token_with_a_graph():
    tensors = {name: t.requires_grad_() for name, t in inputs(2, 1, 2, 1, 16, 16).items()}
    gradients = {
        backend: torch.autograd.grad(ssd(**tensors, backend=backend).y.square().sum(), list(tensors.values()))
        for backend in ("reference", "mamba_ssm")
    }
    for ours, theirs in zip(gradients["mamba_ssm"], gradients["reference"], strict=True):
        close(ours, theirs, 1e-4)


def test_a_second_derivative_is_refused():
    x = inputs(1, 8, 1, 1, 16, 16)
    x["x"].requires_grad_()
    y = ssd(**x, chunk_size=16, backend="mamba_ssm").y
    with pytest.raises(RuntimeError, match="no second derivatives: take backend='reference'"):
        torch.autograd.grad(y.sum(), x["x"], create_graph=True)


def test_the_package_itself_still_says_what_it_lacks():
    ssd(**inputs(1, 4, 1, 1, 16, 16), chunk_size=16, backend="mamba_ssm")
    with pytest.raises(ImportError, match="selective_scan_cuda"):
        import mamba_ssm  # noqa: F401
