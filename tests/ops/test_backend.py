"""Who computes what, and what is said when it cannot run. The kernels themselves: tests/kernels."""

import logging
import sys

import pytest
import torch

import deqseq as dq
from deqseq.ops import BackendError, fused, reference
from deqseq.ops.reference import StepSizes
from deqseq.ops.ssd import ssd


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """Each test decides anew, on a machine without the kernels unless it says otherwise."""
    caches = (fused._decided, fused._kernels, fused._conv_kernels)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


def tensors(dtype=torch.float32, length=5):
    torch.manual_seed(0)
    x = torch.randn(2, length, 2, 4, dtype=dtype)
    dt = torch.randn(2, length, 2, dtype=dtype)
    B, C = torch.randn(2, 2, length, 1, 3, dtype=dtype)
    return x, dt, -torch.rand(2, dtype=dtype), B, C


def kernels_in_torch(monkeypatch):
    """Stand-ins with the kernels' signatures; what was called is noted."""
    calls = []

    def scan(x, dt, A, B, C, chunk, D, dt_bias, initial_states, return_final_states, **steps):
        calls.append(f"scan in {x.dtype}, chunks of {chunk}")
        steps = StepSizes(dt_bias, steps["dt_softplus"], steps["dt_limit"])
        rest = (D, steps, initial_states, return_final_states, chunk)
        y, state = reference.scan(x, dt, A, B, C, *rest)
        return (y, state) if return_final_states else y

    def step(state, x, dt, A, B, C, D, dt_bias, dt_softplus):
        calls.append("step")
        steps = StepSizes(dt_bias[:, 0], dt_softplus)
        many = (t[:, None] for t in (x, dt[..., 0]))
        y, after = reference.scan(
            *many, A[:, 0, 0], B[:, None], C[:, None], D[:, 0], steps, state, True, None
        )
        state.copy_(after)
        return y[:, 0]

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fused, "_kernels", lambda: fused._Kernels(scan, step, None, False))
    return calls


def test_on_a_cpu_the_reference_is_taken_and_the_reason_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="deqseq"):
        outputs = [ssd(*tensors(), backend=name)[0] for name in ("auto", "auto", "reference")]
    assert torch.equal(outputs[0], outputs[2])
    assert caplog.messages == [
        "scans of torch.float32 tensors on cpu are computed by PyTorch: only CUDA tensors have "
        "kernels"
    ]


def test_a_named_backend_that_cannot_run_is_an_error(monkeypatch):
    with pytest.raises(
        BackendError,
        match=r"backend='mamba_ssm' cannot run: the kernels need CUDA tensors .* on cpu",
    ):
        ssd(*tensors(), backend="mamba_ssm")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BackendError, match=r"float32, float16 or bfloat16, got torch.float64"):
        ssd(*tensors(torch.float64), backend="mamba_ssm")
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    wanted = (
        r"kernels cannot be imported \(.*mamba_ssm.*\); pip install "
        r'"deqseq\[cuda\]", or see docs/guides/cuda.md'
    )
    with pytest.raises(BackendError, match=wanted):
        ssd(*tensors(), backend="mamba_ssm")


def test_auto_on_a_gpu_takes_the_kernels_or_says_once_what_is_missing(caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_why_not", lambda *kind: "no kernels")
        for _ in range(2):
            assert fused._decided("auto", "cuda", torch.bfloat16) == "reference"
    said = "scans of torch.bfloat16 tensors on cuda are computed by PyTorch: no kernels"
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", said)]
    kernels_in_torch(monkeypatch)
    assert fused._decided("auto", "cuda", torch.float16) == "mamba_ssm"
    assert fused._decided("auto", "cuda", torch.float64) == "reference"


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_backend_is_named():
    wanted = r"backend must be one of .*'mamba_ssm'.*, got 'triton'"
    with pytest.raises(ValueError, match=wanted):
        fused.resolved("triton", torch.ones(1))
    with pytest.raises(ValueError, match=wanted):
        dq.Mamba2Config(d_model=8, backend="triton")


def test_the_scan_goes_to_the_kernels_with_all_it_needs(monkeypatch):
    calls = kernels_in_torch(monkeypatch)
    state = torch.randn(2, 2, 4, 3)
    options = {
        "D": torch.randn(2),
        "dt_bias": torch.randn(2),
        "initial_state": state,
        "return_state": True,
    }
    ours, theirs = (ssd(*tensors(), **options, backend=name) for name in ("mamba_ssm", "reference"))
    assert all(map(torch.equal, ours, theirs))
    assert ssd(*tensors(), backend="mamba_ssm")[1] is None
    assert calls == ["scan in torch.float32, chunks of 256"] * 2


def test_one_token_is_a_step_unless_a_graph_is_built(monkeypatch):
    calls = kernels_in_torch(monkeypatch)
    state = torch.randn(2, 2, 4, 3)
    kept = state.clone()
    for options in ({}, {"dt_limit": (0.1, 0.5)}, {"dt_softplus": False}, {"D": torch.ones(2)}):
        ours, theirs = (
            ssd(*tensors(length=1), **options, initial_state=state, return_state=True, backend=name)
            for name in ("mamba_ssm", "reference")
        )
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(ours, theirs, strict=True))
    assert calls == ["step"] * 4
    assert torch.equal(state, kept)
    ssd(*tensors(length=1), initial_state=state.requires_grad_(), backend="mamba_ssm")
    assert calls[4:] == ["scan in torch.float32, chunks of 256"]


def test_half_precision_inputs_stay_half_and_the_state_is_single(monkeypatch):
    calls = kernels_in_torch(monkeypatch)
    x, dt, A, B, C = tensors()
    many = (x.bfloat16(), dt.bfloat16(), A, B.bfloat16(), C)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = ssd(
            *many, initial_state=torch.randn(2, 2, 4, 3), return_state=True, backend="mamba_ssm"
        )
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert calls == ["scan in torch.bfloat16, chunks of 256"]


def test_a_second_derivative_of_the_kernels_is_refused(monkeypatch):
    kernels_in_torch(monkeypatch)
    x, *others = tensors()
    y, _ = ssd(x.requires_grad_(), *others, backend="mamba_ssm")
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives: take backend='reference'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_filter_that_the_kernels_cannot_take_is_convolved_by_the_reference(monkeypatch):
    kernels_in_torch(monkeypatch)
    monkeypatch.setattr(fused, "_conv_kernels", lambda: (None, None))
    conv = dq.layers.CausalConv1d(8, 5)
    x = torch.randn(1, 6, 8)
    ours, theirs = (conv(x, backend=name) for name in ("mamba_ssm", "reference"))
    assert torch.equal(ours, theirs)


def test_a_model_asks_for_the_backend_of_its_configuration(monkeypatch):
    calls = kernels_in_torch(monkeypatch)
    monkeypatch.setattr(fused, "_conv_kernels", lambda: None)
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_state": 4, "headdim": 4, "chunk_size": 3}
    models = [
        dq.ImplicitModel(dq.Mamba2(dq.Mamba2Config(**sizes, backend=b)))
        for b in ("reference", "mamba_ssm")
    ]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(2, 7, 8)
    with torch.no_grad():
        theirs, ours = (
            model(x, sweep=dq.Sequential(), stop=dq.Stop.exactly(2)).value for model in models
        )
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert calls == ["scan in torch.float32, chunks of 3"] * 2 + ["step"] * 12
