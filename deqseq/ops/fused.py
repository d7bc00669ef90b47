"""The fused kernels of mamba_ssm and causal_conv1d, and when they are used.

They compute what the references beside them compute. No other file knows these packages, and they
are imported when a kernel first runs. Their Triton part needs no CUDA build: where the package was
installed without one, its files are imported one by one.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from deqseq.arguments import Choice
from deqseq.ops.reference import UNLIMITED, StepSizes

Backend = Literal["auto", "reference", "mamba_ssm"]
"""``"reference"`` is plain PyTorch, on any device; ``"mamba_ssm"`` the kernels of that package;
``"auto"`` takes the kernels for CUDA tensors in float32, float16 or bfloat16 where they can be
imported, and the reference otherwise; the reason is logged once."""

INSTALL = 'pip install "deqseq[cuda]", or see docs/guides/cuda.md for a way without a CUDA build'
CHUNK = 256  # what the kernels are tuned for

_log = logging.getLogger(__name__)


class BackendError(RuntimeError):
    """A backend was named that cannot run here; the message says what is missing."""


class _Kernels(NamedTuple):
    scan: Callable[..., Any]
    step: Callable[..., Tensor]
    whole: Callable[..., Tensor]
    convolves: bool


def resolved(backend: Backend, x: Tensor) -> Literal["reference", "mamba_ssm"]:
    """What computes an operation whose main input is ``x``."""
    if torch.compiler.is_compiling():
        # Mamba2 decides before, and logs the reason; compilers can fuse the reference
        return "mamba_ssm" if backend == "mamba_ssm" else "reference"
    return _decided(backend, x.device.type, x.dtype)


@cache
def _decided(
    backend: Backend, device: str, dtype: torch.dtype
) -> Literal["reference", "mamba_ssm"]:
    """The decision; made, and its reason logged, once for each kind of tensor."""
    Choice(get_args(Backend))("backend", backend)
    if backend == "reference":
        return "reference"
    reason = _why_not(backend, device, dtype)
    if reason is None:
        if _conv_kernels() is None:
            _log.warning(
                "mamba_ssm's kernels compute the scan, PyTorch the convolution before it: "
                "causal_conv1d cannot be imported; %s",
                INSTALL,
            )
        return "mamba_ssm"
    if backend == "mamba_ssm":
        raise BackendError(f"backend='mamba_ssm' cannot run: {reason}")
    level = logging.WARNING if device == "cuda" else logging.INFO
    _log.log(level, "scans of %s tensors on %s are computed by PyTorch: %s", dtype, device, reason)
    return "reference"


def _why_not(backend: Backend, device: str, dtype: torch.dtype) -> str | None:
    """Why the kernels do not run on such tensors; None if they do."""
    if device != "cuda" and backend == "auto":
        return "only CUDA tensors have kernels"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "the kernels need CUDA tensors (or TRITON_INTERPRET=1, to check them), "
            f"got one on {device}"
        )
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels compute in float32, float16 or bfloat16, got {dtype}"
    try:
        _kernels()
    except ImportError as error:
        return f"mamba_ssm's kernels cannot be imported ({error}); {INSTALL}"
    return None


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
    initial_state: Tensor | None,
    want_state: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:
    """The scan by ``mamba_chunk_scan_combined``; one token without a graph is a single step."""
    B, C = B.to(x.dtype), C.to(x.dtype)
    graph = _needs_graph(x, dt, A, B, C, D, steps.bias, initial_state)
    if x.shape[1] == 1 and initial_state is not None and not graph:
        return _one_token(x, dt, A, B, C, D, steps, initial_state)
    with torch.autocast(x.device.type, enabled=False):
        outputs = _kernels().scan(
            x,
            dt,
            A.float(),
            B,
            C,
            chunk_size or CHUNK,
            D=D,
            dt_bias=steps.bias,
            initial_states=initial_state,
            dt_softplus=steps.softplus,
            dt_limit=steps.limit,
            return_final_states=want_state,
        )
    y, state = outputs if want_state else (outputs, None)
    return _once_differentiable(y), None if state is None else _once_differentiable(state)


def _one_token(x, dt, A, B, C, D, steps: StepSizes, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the recurrence; the kernel needs a bias and skip weights, and has no limits."""
    state, width, size = initial_state.clone(), x.shape[3], initial_state.shape[3]
    zeros = torch.zeros_like(A, dtype=torch.float32)
    plain = steps.softplus and steps.limit == UNLIMITED
    dt = dt[:, 0] if plain else steps.of(dt[:, 0].float())
    bias = steps.bias if plain and steps.bias is not None else zeros
    skip = zeros if D is None else D
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
    return y[:, None], state


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
    past = None if state is None else state.to(x.dtype).contiguous().mT
    strides = (*x.stride()[:2], x.storage_offset())
    if x.stride(2) != 1 or any(stride % 8 for stride in strides):
        # the kernel reads sixteen bytes at a time; contiguous() would not move a single token
        x = x.clone(memory_format=torch.contiguous_format)
    y = forward(x.mT, weight, bias, initial_states=past, activation="silu").mT
    return _once_differentiable(y)


@_disable_dynamo
def convolved_and_scanned(
    projected: Tensor,
    conv: Any,
    A,
    D,
    steps: StepSizes,
    norm,
    headdim: int,
    groups: int,
    chunk_size: int | None,
) -> Tensor:
    """All that Mamba2 does between its two projections, by ``mamba_split_conv1d_scan_combined``."""
    with torch.autocast(projected.device.type, enabled=False):
        y = _kernels().whole(
            projected,
            conv.weight[:, 0].to(projected.dtype),
            conv.bias.to(projected.dtype),
            steps.bias,
            A.float(),
            D,
            chunk_size or CHUNK,
            dt_limit=steps.limit,
            rmsnorm_weight=norm.weight,
            rmsnorm_eps=norm.eps,
            headdim=headdim,
            ngroups=groups,
            norm_before_gate=False,
        )
    return _once_differentiable(y)


@_disable_dynamo
def joins_everything(tokens: int, channels: int, width: int) -> bool:
    """Whether :func:`convolved_and_scanned` can run; it misreads a single token."""
    return tokens > 1 and convolves(channels, width) and _kernels().convolves


@_disable_dynamo
def convolves(channels: int, width: int) -> bool:
    """Whether :func:`convolved` can run on a convolution of this size."""
    return _conv_kernels() is not None and channels % 8 == 0 and 2 <= width <= 4


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
    """``y``; a second derivative is refused, because the kernels would silently leave it out."""
    return _OnceDifferentiable.apply(y) if y.requires_grad else y


def _needs_graph(*tensors: Tensor | None) -> bool:
    required = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return torch.is_grad_enabled() and required


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
    """Let mamba_ssm's files be imported where its ``__init__`` fails for want of a CUDA build."""
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
