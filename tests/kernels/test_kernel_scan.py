"""Each kernel beside its reference: outputs to 1e-5, gradients of every input to 1e-4."""

from importlib.util import find_spec

import pytest
import torch

from deqseq.ops.ssd import ssd

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:Deterministic mode")]


def inputs(batch, length, heads, groups, headdim, d_state, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())

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


def close(ours, theirs, tolerance):
    scale = max(1.0, theirs.abs().max().item())
    difference = (ours - theirs).abs().max().item() / scale
    assert ours.dtype == theirs.dtype and difference < tolerance, difference


# batch, length, heads, groups, headdim, d_state; options; inputs that are left out
CASES = {
    "one chunk": ((1, 16, 2, 1, 16, 16), {}, ()),
    "no multiple of the chunk": ((2, 37, 2, 1, 16, 16), {}, ()),
    "groups": ((1, 33, 4, 2, 16, 16), {}, ()),
    "odd sizes": ((1, 21, 3, 3, 12, 20), {}, ()),
    "no state, bias or skip": ((1, 20, 2, 1, 16, 16), {}, ("D", "dt_bias", "initial_state")),
    "one token": ((2, 1, 2, 1, 16, 16), {}, ()),
    "limits": ((1, 20, 2, 1, 16, 16), {"dt_limit": (0.3, 1.0)}, ()),
    "no softplus": ((1, 20, 2, 1, 16, 16), {"dt_softplus": False}, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_scan_and_its_gradients(case):
    sizes, options, left_out = CASES[case]
    tensors = {
        name: t.requires_grad_() for name, t in inputs(*sizes).items() if name not in left_out
    }
    results = {}
    for backend in ("reference", "mamba_ssm"):
        y, state = ssd(**tensors, **options, return_state=True, chunk_size=16, backend=backend)
        torch.manual_seed(9)
        weights = [torch.randn(out.shape) for out in (y, state)]
        gradients = torch.autograd.grad([y, state], [*tensors.values()], weights)
        results[backend] = [y, state, *gradients]
    names = ["y", "state", *tensors]
    for name, ours, theirs in zip(names, *reversed(results.values()), strict=True):
        close(ours, theirs, 1e-5 if name in ("y", "state") else 1e-4)


@pytest.mark.parametrize("left_out", [(), ("D",), ("dt_bias",), ("D", "dt_bias")])
@pytest.mark.parametrize("options", [{}, {"dt_limit": (0.3, 1.0)}, {"dt_softplus": False}])
def test_one_token(left_out, options):
    tensors = {name: t for name, t in inputs(3, 1, 4, 2, 16, 16).items() if name not in left_out}
    before = tensors["initial_state"].clone()
    ours = ssd(**tensors, **options, return_state=True, backend="mamba_ssm")
    theirs = ssd(**tensors, **options, return_state=True, backend="reference")
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-5)
    assert torch.equal(
        tensors["initial_state"], before
    )  # the kernel works in place; nobody else may notice


@pytest.mark.skipif(find_spec("selective_scan_cuda") is not None, reason="nothing is missing")
def test_the_package_itself_still_says_what_it_lacks():
    ssd(**inputs(1, 4, 1, 1, 16, 16), chunk_size=16, backend="mamba_ssm")
    with pytest.raises(ImportError, match="selective_scan_cuda"):
        import mamba_ssm  # noqa: F401
