"""Mamba2 on the kernels beside Mamba2 on plain PyTorch: layers, solves in every sweep, gradients,
generation.
"""

import os
from pathlib import Path

import pytest
import torch
from processes import output_of

import deqseq as dq
from deqseq.layers import Mamba2Mixer

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:Deterministic mode")]
SIZES = {"d_model": 16, "n_layers": 2, "d_state": 16, "headdim": 16, "chunk_size": 16}
SWEEPS = (dq.Simultaneous(), dq.Sliding(4), dq.Sequential())


def random_ids(length):
    torch.manual_seed(0)
    return torch.randint(0, 11, (2, length))


def twins(**changes):
    """The same language model on both backends; its map contracts."""
    models = {}
    for backend in ("reference", "mamba_ssm"):
        torch.manual_seed(0)
        backbone = dq.Mamba2(dq.Mamba2Config(**(SIZES | changes), backend=backend))
        for block in backbone.layers:
            block.mixer.in_proj.parametrizations.weight.original0.data *= 0.1
        solve = dq.SolveConfig(stop=dq.Stop(rtol=1e-6, max_steps=100), gradient=dq.Phantom(2))
        models[backend] = dq.CausalLM(11, dq.ImplicitModel(backbone, solve), embedding_std=1.0)
    return models


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("d_conv", [4, 5])
def test_mixer_and_its_gradients(groups, d_conv):
    torch.manual_seed(0)
    mixer = Mamba2Mixer(16, d_state=16, headdim=16, n_groups=groups, d_conv=d_conv, chunk_size=16)
    u = torch.randn(2, 19, 16)
    injection = torch.randn(2, 19, mixer.injected_width)
    results = {}
    for backend in ("reference", "mamba_ssm"):
        leaves = [x.clone().requires_grad_() for x in (u, injection)]
        y, _ = mixer(*leaves, backend=backend)
        gradients = torch.autograd.grad(y.square().sum(), [*leaves, *mixer.parameters()])
        results[backend] = y, *gradients
    (y, *ours), (expected, *theirs) = results["mamba_ssm"], results["reference"]
    assert torch.allclose(y, expected, atol=1e-5)
    for gradient, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(gradient, wanted, atol=1e-4 * max(1, wanted.abs().max().item()))


@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_solve_without_a_gradient(sweep):
    ids = random_ids(7)
    with torch.no_grad():
        ours, theirs = (
            twins()[backend](ids, sweep=sweep) for backend in ("mamba_ssm", "reference")
        )
    assert ours.converged.all()
    assert theirs.converged.all()
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)


def test_training_step():
    ids = random_ids(11)
    gradients = {}
    for backend, lm in twins().items():
        lm(ids, labels=ids).loss.backward()
        gradients[backend] = {name: p.grad for name, p in lm.named_parameters()}
    for name, theirs in gradients["reference"].items():
        scale = max(1e-3, theirs.abs().max().item())
        assert (gradients["mamba_ssm"][name] - theirs).abs().max().item() < 1e-3 * scale, name


def test_generation():
    prompt = random_ids(5)
    mask = torch.tensor([[False, False, True, True, True], [True] * 5])
    ours, theirs = (
        twins()[b].generate(prompt, mask=mask, max_new_tokens=3) for b in ("mamba_ssm", "reference")
    )
    assert torch.equal(ours.tokens, theirs.tokens)
    assert ours.converged.all()


def test_compiled_code_calls_the_kernels():
    """In a process of its own: checked functions cannot be compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.importorskip("causal_conv1d", reason="the kernel of a whole mixer needs it")
    script = Path(__file__).with_name("compiled.py")
    assert output_of(script) == "compiled as eager, by the kernels\n"
