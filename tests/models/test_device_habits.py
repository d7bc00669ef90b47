"""What a GPU would suffer from, shown without one: reads of the device, tensors made elsewhere,
masks.
"""

import pytest
import torch
from problems import SOLVERS
from small_models import contractive_llama, contractive_mamba2, language_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import deqseq as dq

IDS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))


class Watch(TorchFunctionMode):
    """Calls ``look`` with the function and the keywords of every call of torch."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.look(function, args, kwargs)
        return function(*args, **kwargs)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solver_reads_nothing(solver):
    with FakeTensorMode(), torch.no_grad():  # a fake tensor has no content: reading it is an error
        z = torch.empty(3, 6, 8, device="lazy")  # any device but the CPU
        state = solver.init(z)
        for _ in range(4):
            z, state = solver.step(z, torch.empty_like(z), state)
            state = solver.restart(state, z, torch.zeros(1, dtype=torch.int64, device="lazy"))


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama])
@pytest.mark.parametrize(
    "sweep", [dq.Simultaneous(), dq.Chunked(3), dq.Sliding(3), dq.Sequential()]
)
def test_every_tensor_is_made_on_the_device_of_another(make, sweep):
    def look(function, args, kwargs):
        if function in _device_constructors():
            assert isinstance(kwargs.get("device"), torch.device)

    lm = language_model(make(), stop=dq.Stop(rtol=1e-2))
    mask = torch.tensor([[True] * 7, [False] * 3 + [True] * 4])
    with Watch(look):
        lm(IDS, mask=mask, labels=IDS, sweep=sweep).loss.backward()
        lm.generate(IDS, mask=mask, max_new_tokens=2, sweep=sweep)


def test_attention_asks_for_what_flash_kernels_compute():
    """No mask, causality as a flag, heads that are not repeated. A single token with a past needs
    no flag.

    Several tokens with a past, as in a sliding window, need a mask and a memory-efficient kernel.
    """
    calls = set()

    def look(function, args, kwargs):
        if function is torch.nn.functional.scaled_dot_product_attention:
            q, k, _ = args
            mask, causal, grouped = (kwargs[n] for n in ("attn_mask", "is_causal", "enable_gqa"))
            calls.add((q.shape[2], k.shape[1], mask, causal, grouped))

    lm = language_model(contractive_llama(), stop=dq.Stop.exactly(1))
    with Watch(look):
        lm.generate(IDS, max_new_tokens=3, sweep=dq.Simultaneous())
    assert calls == {(7, 2, None, True, True), (1, 2, None, False, True)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_llama_runs_on_the_flash_kernel():
    config = dq.LlamaConfig(d_model=256, n_layers=2, n_heads=4, n_kv_heads=2)
    backbone = dq.Llama(config).cuda().bfloat16()
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error where the kernel cannot be used
        z, _ = backbone(torch.zeros_like(x), backbone.prepare(x))
        z.sum().backward()
    assert torch.isfinite(x.grad).all()
