"""What a GPU would suffer from, shown without one: reads of the device in the loop, tensors made
elsewhere, masks.
"""

import sys
from pathlib import Path

import pytest
import torch
from problems import SOLVERS
from small_models import contractive_llama, contractive_mamba2
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import deqseq as dq
from deqseq.layers import attention

BACKBONES = {"Mamba2": contractive_mamba2, "Llama": contractive_llama}


class Watch(TorchFunctionMode):
    """Notes every tensor made without saying on which device, or on one by its name."""

    def __init__(self):
        super().__init__()
        self.homeless = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if function in _device_constructors() and isinstance(kwargs.get("device"), str | None):
            self.homeless.append((name, Path(sys._getframe(1).f_code.co_filename).name))
        return function(*args, **kwargs)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_a_solver_reads_nothing(solver):
    with (
        FakeTensorMode(),
        torch.no_grad(),
    ):  # in which a tensor has no content: reading it is an error
        z = torch.empty(3, 6, 8, device="lazy")  # any that is not the CPU
        state = solver.init(z)
        for _ in range(4):
            z, state = solver.step(z, torch.empty_like(z), state)
            state = solver.restart(state, z, torch.zeros(1, dtype=torch.int64, device="lazy"))


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(
    "sweep", [dq.Simultaneous(), dq.Chunked(3), dq.Sliding(3), dq.Sequential()], ids=str
)
def test_no_tensor_is_made_without_a_device(name, sweep):
    lm = dq.CausalLM(
        11, dq.ImplicitModel(BACKBONES[name](), dq.SolveConfig(stop=dq.Stop(rtol=1e-2)))
    ).double()
    ids = torch.randint(0, 11, (2, 7))
    mask = torch.tensor([[True] * 7, [False] * 3 + [True] * 4])
    with Watch() as watch:
        lm(ids, mask=mask, labels=ids, sweep=sweep).loss.backward()
        lm.generate(ids, mask=mask, max_new_tokens=2, sweep=sweep)
    assert set(watch.homeless) == set()


def test_attention_asks_for_what_flash_kernels_compute(monkeypatch):
    """No mask, causality as a flag, heads that are not repeated; a single token with a past needs
    no flag either.

    Several tokens with a past, as in a sliding window, do need a mask: memory-efficient kernels,
    not flash ones.
    """
    asked, real = [], attention.F.scaled_dot_product_attention

    def noted(q, k, v, **options):
        asked.append(
            (
                q.shape[2],
                k.shape[1],
                options["attn_mask"],
                options["is_causal"],
                options["enable_gqa"],
            )
        )
        return real(q, k, v, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", noted)
    lm = dq.CausalLM(
        11, dq.ImplicitModel(contractive_llama(), dq.SolveConfig(stop=dq.Stop.exactly(1)))
    ).double()
    lm.generate(torch.randint(0, 11, (2, 5)), max_new_tokens=3, sweep=dq.Simultaneous())
    assert set(asked) == {(5, 2, None, True, True), (1, 2, None, False, True)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_llama_runs_on_the_flash_kernel():
    backbone = (
        dq.Llama(dq.LlamaConfig(d_model=256, n_layers=2, n_heads=4, n_kv_heads=2)).cuda().bfloat16()
    )
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with sdpa_kernel(
        SDPBackend.FLASH_ATTENTION
    ):  # an error where the kernel cannot take what it is given
        z, _ = backbone(torch.zeros_like(x), backbone.prepare(x))
        z.sum().backward()
    assert torch.isfinite(x.grad).all()
