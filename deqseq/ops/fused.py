"""The fused kernels of mamba_ssm and causal_conv1d: the only file that knows them, and it imports
them when they run.

They compute what the references beside them compute. Their Triton part needs no CUDA build: where
the package was installed without one, its files are imported one by one.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from deqseq.ops.reference import UNLIMITED, StepSizes

INSTALL = 'pip install "deqseq[cuda]", or see docs/guides/cuda.md for a way without a CUDA build'
CHUNK = 256  # what the kernels are tuned for
HALF_OR_SINGLE = (torch.float32, torch.float16, torch.bfloat16)


class _Kernels(NamedTuple):
    scan: Callable[..., Any]
    step: Callable[..., Tensor]
    whole: Callable[..., Tensor]
    convolves: bool


def why_not(device: str, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on such tensors; None if they can."""
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "the kernels need CUDA tensors (or TRITON_INTERPRET=1, to check them), "
            f"got one on {device}"
        )
    if dtype not in HALF_OR_SINGLE:
        return f"the kernels compute in float32, float16 or bfloat16, got {dtype}"
    return _why_not_imported()


def why_no_convolution() -> str | None:
    """Why the convolution's kernels cannot run; None if they can."""
    return f"causal_conv1d cannot be imported; {INSTALL}" if _conv_kernels() is None else None


# A compiler would follow Triton's tuning into the kernels. torch.compiler.disable imports the
# compiler at once, which takes longer than all of deqseq; this imports it at the first call.
@_disable_dynamo
def scan(
    x,
    dt,
    A,
    B,
    C,
    D,
    steps: StepSizes,
    before: Tensor | None,
    want_state: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:
    """The scan by ``mamba_chunk_scan_combined``, or by ``selective_state_update`` for one token
    without a graph.
    """
    B, C = B.to(x.dtype), C.to(x.dtype)
    if (
        x.shape[1] == 1
        and before is not None
        and not _needs_graph(x, dt, A, B, C, D, steps.bias, before)
    ):
        return _one_token(x, dt, A, B, C, D, steps, before, want_state)
    with torch.autocast(x.device.type, enabled=False):
        found = _kernels().scan(
            x,
            dt,
            A.float(),
            B,
            C,
            chunk_size or CHUNK,
            D=D,
            dt_bias=steps.bias,
            initial_states=before,
            dt_softplus=steps.softplus,
            dt_limit=steps.limit,
            return_final_states=want_state,
        )
    if not want_state:
        return _once_differentiable(found), None
    y, state = found
    return _once_differentiable(y), _once_differentiable(state)


@_disable_dynamo
def convolved(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None) -> Tensor:
    """``silu(conv(x))`` by causal_conv1d; channels come last, as everywhere here."""
    kernels = _conv_kernels()
    assert kernels is not None  # convolves() has said so
    forward, update = kernels
    weight, bias = weight[:, 0].to(x.dtype), bias.to(x.dtype)
    if x.shape[1] == 1 and state is not None and not _needs_graph(x, weight, bias, state):
        past = state.to(x.dtype, copy=True).mT  # written in place
        return update(x[:, 0], past, weight, bias, "silu")[:, None]
    before = None if state is None else state.to(x.dtype).contiguous().mT
    y = forward(_aligned(x).mT, weight, bias, initial_states=before, activation="silu").mT
    return _once_differentiable(y)


@_disable_dynamo
def convolved_and_scanned(
    projected: Tensor,
    conv,
    A,
    D,
    steps: StepSizes,
    norm,
    headdim: int,
    groups: int,
    chunk_size: int | None,
) -> Tensor:
    """All that Mamba2 does between its two projections, by ``mamba_split_conv1d_scan_combined``."""
    weight, bias = conv
    norm_weight, eps = norm
    with torch.autocast(projected.device.type, enabled=False):
        y = _kernels().whole(
            projected,
            weight[:, 0].to(projected.dtype),
            bias.to(projected.dtype),
            steps.bias,
            A.float(),
            D,
            chunk_size or CHUNK,
            dt_limit=steps.limit,
            rmsnorm_weight=norm_weight,
            rmsnorm_eps=eps,
            headdim=headdim,
            ngroups=groups,
            norm_before_gate=False,
        )
    return _once_differentiable(y)


@_disable_dynamo
def joins_everything(tokens: int, channels: int, width: int) -> bool:
    """Whether :func:`convolved_and_scanned` can run on a convolution of this size; it misreads a
    single token.
    """
    return tokens > 1 and convolves(channels, width) and _kernels().convolves


@_disable_dynamo
def convolves(channels: int, width: int) -> bool:
    """Whether :func:`convolved` can run on a convolution of this size."""
    return _conv_kernels() is not None and channels % 8 == 0 and 2 <= width <= 4


def _one_token(x, dt, A, B, C, D, steps: StepSizes, before: Tensor, want_state: bool):
    """One step of the recurrence; the kernel insists on a bias and skip weights, and knows no
    limits.
    """
    state, width, size = before.clone(), x.shape[3], before.shape[3]
    plain = steps.softplus and steps.limit == UNLIMITED
    dt = dt[:, 0] if plain else steps.of(dt[:, 0].float())
    zeros = torch.zeros_like(A, dtype=torch.float32)
    bias, skip = zeros if steps.bias is None or not plain else steps.bias, zeros if D is None else D
    y = _kernels().step(
        state,
        x[:, 0],
        dt[..., None].expand(-1, -1, width),
        A.float()[:, None, None].expand(-1, width, size),
        B[:, 0],
        C[:, 0],
        skip[:, None].expand(-1, width),
        dt_bias=bias[:, None].expand(-1, width),
        dt_softplus=plain,
    )
    return y[:, None], state if want_state else None


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, *dy):
        if torch.is_grad_enabled():  # only in a second derivative
            raise RuntimeError(
                "mamba_ssm's kernels have no second derivatives: take backend='reference'"
            )
        return dy[0]


def _once_differentiable(y: Tensor) -> Tensor:
    """``y``; a second derivative is refused: the kernels would leave it out and say nothing."""
    return _OnceDifferentiable.apply(y) if y.requires_grad else y


def _needs_graph(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def _aligned(x: Tensor) -> Tensor:
    """``x`` as causal_conv1d reads it: sixteen bytes at a time."""
    strides = (*x.stride()[:2], x.storage_offset())
    if x.stride(2) == 1 and not any(stride % 8 for stride in strides):
        return x
    return x.clone(
        memory_format=torch.contiguous_format
    )  # contiguous() would leave a single token as it is


@cache
def _why_not_imported() -> str | None:
    try:
        _kernels()
    except ImportError as error:
        return f"mamba_ssm's kernels cannot be imported ({error}); {INSTALL}"
    return None


@cache
def _kernels() -> _Kernels:
    with _importable():
        combined = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
        update = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    return _Kernels(
        combined.mamba_chunk_scan_combined,
        update.selective_state_update,
        combined.mamba_split_conv1d_scan_combined,
        combined.causal_conv1d_fwd_function is not None,
    )


@cache
def _conv_kernels() -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
    try:
        module = importlib.import_module("causal_conv1d")
    except ImportError:
        return None
    return module.causal_conv1d_fn, module.causal_conv1d_update


@contextmanager
def _importable() -> Iterator[None]:
    """Let mamba_ssm's files be imported though its own ``__init__`` fails, as it does without its
    CUDA extension.
    """
    try:
        importlib.import_module("mamba_ssm")
    except ImportError:
        spec = find_spec("mamba_ssm")
        if spec is None or spec.submodule_search_locations is None:
            raise
        bare = ModuleType("mamba_ssm")
        bare.__path__ = list(spec.submodule_search_locations)
        sys.modules["mamba_ssm"] = bare
        try:
            yield
        finally:
            del sys.modules["mamba_ssm"]  # a later import of the package says why it fails
    else:
        yield
