"""A compiled Mamba2 on the kernels computes what an eager one does, and calls them. Run by
test_kernel_models.py.
"""

import os

import pytest
import torch
from stand_ins import install

import deqseq as dq
from deqseq.ops import fused


def main():
    if os.environ.get("TRITON_INTERPRET") == "1":
        install(pytest.MonkeyPatch())
    else:
        torch.set_default_device("cuda")
    torch.manual_seed(0)
    config = dq.Mamba2Config(
        d_model=16, n_layers=2, d_state=16, headdim=16, chunk_size=16, backend="mamba_ssm"
    )
    model = dq.ImplicitModel(dq.Mamba2(config), dq.SolveConfig(stop=dq.Stop.exactly(3))).eval()
    kernel = fused.convolved_and_scanned
    calls = []

    @torch.compiler.disable
    def counted(*arguments):
        calls.append(arguments)
        return kernel(*arguments)

    fused.convolved_and_scanned = counted
    x = torch.randn(1, 9, 16)
    with torch.no_grad():
        eager = model(x).value
        assert len(calls) == 6
        model.compile(backend="aot_eager")
        assert torch.allclose(model(x).value, eager, atol=1e-5)
    assert len(calls) == 12, len(calls)
    print("compiled as eager, by the kernels")


if __name__ == "__main__":
    main()
