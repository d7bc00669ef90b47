"""Which code computes an operation: plain PyTorch, or fused kernels."""

import logging
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from deqseq.arguments import check_choice
from deqseq.ops import fused

Backend = Literal["auto", "reference", "mamba_ssm"]
"""``"reference"`` is plain PyTorch, on any device; ``"mamba_ssm"`` the kernels of that package;
``"auto"`` takes the kernels for CUDA tensors in float32, float16 or bfloat16 where they can be
imported, and the reference otherwise; the reason is logged once."""

_log = logging.getLogger(__name__)


class BackendError(RuntimeError):
    """A backend was named that cannot run here; the message says what is missing."""


def resolved(backend: Backend, x: Tensor) -> Literal["reference", "mamba_ssm"]:
    """What computes an operation whose main input is ``x``."""
    if (
        torch.compiler.is_compiling()
    ):  # Mamba2 decides before, and logs the reason; compilers can fuse the reference
        return "mamba_ssm" if backend == "mamba_ssm" else "reference"
    return _decided(backend, x.device.type, x.dtype)


@cache
def _decided(
    backend: Backend, device: str, dtype: torch.dtype
) -> Literal["reference", "mamba_ssm"]:
    """The decision; made, and its reason logged, once for each kind of tensor."""
    check_choice("backend", backend, get_args(Backend))
    if backend == "reference":
        return "reference"
    elsewhere = backend == "auto" and device != "cuda"
    reason = "only CUDA tensors have kernels" if elsewhere else fused.why_not(device, dtype)
    if reason is None:
        missing = fused.why_no_convolution()
        if missing is not None:
            _log.warning(
                "mamba_ssm's kernels compute the scan, PyTorch the convolution before it: %s",
                missing,
            )
        return "mamba_ssm"
    if backend == "mamba_ssm":
        raise BackendError(f"backend='mamba_ssm' cannot run: {reason}")
    level = logging.WARNING if device == "cuda" else logging.INFO
    _log.log(level, "scans of %s tensors on %s are computed by PyTorch: %s", dtype, device, reason)
    return "reference"
