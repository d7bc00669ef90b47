"""A device called ``pretend``: it computes on the CPU, and does what CUDA does where they differ.

- It refuses tensors in two places: an operation on its tensors takes none of the CPU but single
  numbers, indices and what is copied, and ``numpy()`` needs ``cpu()`` first.
- It rounds as CUDA does: the norm of ``torch._weight_norm`` is rounded to float32 even in float64,
  and cosines and sines in float32 differ from the CPU's in their last bit.
- It counts how often the host waits for it: :func:`counted_waits`.
- Apple's GPUs have no float64: neither has this device inside of :func:`without_float64`.

So code that would fail, wait or round on a GPU does so on a machine without one.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

import deqseq

PACKAGE = str(Path(deqseq.__file__).parent) + "/"
NAME, aten = "pretend", torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
READS = {
    aten._local_scalar_dense.default,  # item, bool, int, float
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
}
"""Operations whose result, or its shape, depends on numbers that the host has to read."""

_recorders: list[list[str]] = []  # of the blocks of counted_waits that are running
_refused_dtypes: set[torch.dtype] = set()


class Elsewhere(torch.Tensor):
    """A tensor of the device, around one of the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Elsewhere":
        if inner.dtype in _refused_dtypes:
            raise TypeError(f"the pretended device has no {inner.dtype} now: use torch.float32")
        layout = {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "dtype": inner.dtype,
        }
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, device=torch.device(NAME, 0), **layout
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Elsewhere({self.inner})"

    def tolist(self) -> Any:
        record_wait("tolist")
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor of the pretended device to numpy: call cpu() first")


def run(op: Any, args: Any, kwargs: Any) -> Any:
    """One operation: checked, computed on the CPU, and its result moved to where it belongs."""
    if op in PINNING:
        return PINNING[op](*args)
    tensors: list[torch.Tensor] = []

    def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor.inner if isinstance(tensor, Elsewhere) else tensor

    plain_args = mapped(unwrapped, args)
    plain_kwargs = {name: mapped(unwrapped, value) for name, value in kwargs.items()}
    ours = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    if op in INDEXED:
        tensors = [args[0], *args[2:3]]  # indices may be of the CPU
    if ours and op not in COPIES:
        refuse_foreign(op, tensors)
    if ours or op in COPIES:
        record_waits_of(op, args, kwargs)
    pinned = bool(plain_kwargs.pop("pin_memory", False))
    if kwargs.get("device") is not None:
        ours = torch.device(kwargs["device"]).type == NAME
        if ours:
            plain_kwargs["device"] = torch.device("cpu")
    kernel = CUDA_KERNELS.get(op, op) if ours else op
    result = kernel(*plain_args, **plain_kwargs)
    if pinned:
        result.pinned = True
    names, written_names = arguments_of(op)
    given = dict(zip(names, args, strict=False)) | kwargs
    written = [given[name] for name in written_names if name in given]
    if written:  # in place, or into out=
        return written[0] if len(written) == 1 else tuple(written)
    return mapped(Elsewhere, result) if ours else result


def mapped(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``function`` of each tensor in what an operation takes or returns.

    torch's own function for nested records is several times slower.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(function, part) for part in value])
    return value


@functools.cache
def arguments_of(op: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of an operation's arguments, and of those that it changes and returns."""
    arguments = op._schema.arguments
    written = [argument.name for argument in arguments if argument.is_write and op._schema.returns]
    return tuple(argument.name for argument in arguments), tuple(written)


def refuse_foreign(op: Any, tensors: list[torch.Tensor]) -> None:
    """An error if tensors of the CPU are more than single numbers."""
    foreign = [one for one in tensors if not isinstance(one, Elsewhere) and one.ndim]
    if foreign:
        shapes = [tuple(one.shape) for one in foreign]
        raise RuntimeError(
            f"{op}: all tensors must be on the same device, got {NAME}, and shapes {shapes} on "
            "the CPU"
        )


def weight_norm(
    direction: torch.Tensor, magnitude: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch's CUDA kernel: the root of the sum of squares is taken in float32."""
    others = [axis for axis in range(direction.ndim) if axis != dim]
    norms = direction.square().sum(others, keepdim=True).float().sqrt().to(direction.dtype)
    return direction * (magnitude / norms), norms


def last_bit_differs(compute: Any) -> Any:
    """A function of angles that is one unit in the last place nearer to zero in float32, but at an
    angle of 0.
    """

    def computed(angle: torch.Tensor) -> torch.Tensor:
        value = compute(angle)
        if angle.dtype != torch.float32:
            return value
        return torch.where(angle == 0, value, value.nextafter(torch.zeros_like(value)))

    return computed


CUDA_KERNELS = {
    aten._weight_norm_interface.default: weight_norm,
    aten.cos.default: last_bit_differs(torch.cos),
    aten.sin.default: last_bit_differs(torch.sin),
}
"""Operations that CUDA rounds in another way than the CPU."""


@contextlib.contextmanager
def counted_waits() -> Iterator[list[str]]:
    """The list of all waits of the host for the device inside the block, each with its place.

    A wait is a copy between the device and the CPU that blocks, or an operation whose result the
    host reads. A copy that does not block is a wait only if it comes from memory that is not
    pinned.
    """
    waits: list[str] = []
    _recorders.append(waits)
    try:
        yield waits
    finally:
        _recorders.remove(waits)


def record_wait(reason: str) -> None:
    """A wait, with the line of the library that causes it."""
    if not _recorders:
        return
    frame = sys._getframe()
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    place = frame.f_code.co_filename.removeprefix(PACKAGE)
    for waits in _recorders:
        waits.append(f"{reason} at {place}:{frame.f_lineno}")


def record_waits_of(op: Any, args: Any, kwargs: Any) -> None:
    """The waits of an operation that is a copy, or that has a tensor of the device."""
    if op in READS:
        record_wait(op._opname)
    elif op in INDEXED:
        for index in args[1]:
            if index is not None:
                record_index(index)
    elif op is aten._to_copy.default:
        target = torch.device(kwargs.get("device") or args[0].device)
        record_copy(args[0], target, kwargs.get("non_blocking", False))
    elif op is aten.copy_.default:
        non_blocking = kwargs.get("non_blocking", args[2:3] == (True,))
        record_copy(args[1], args[0].device, non_blocking)


def record_index(index: torch.Tensor) -> None:
    """Indices of the CPU are copied to the device, and a mask is counted."""
    if not isinstance(index, Elsewhere):
        record_wait("copy of indices to the device")
    elif index.dtype == torch.bool:
        record_wait("nonzero of a mask")


def record_copy(source: torch.Tensor, target: torch.device, non_blocking: bool) -> None:
    """Copies to the device that do not block need pinned memory; those to the CPU get it."""
    if isinstance(source, Elsewhere):
        if target.type != NAME and not non_blocking:
            record_wait("copy to the CPU")
    elif target.type == NAME and not (non_blocking and is_pinned(source)):
        record_wait("copy to the device")


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Whether a tensor of the CPU, or the one that it is a view of, was made in pinned memory."""
    owner = tensor if tensor._base is None else tensor._base
    return getattr(owner, "pinned", False)


def in_pinned_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy that counts as pinned."""
    copy = tensor.clone()
    copy.pinned = True  # pyright: ignore[reportAttributeAccessIssue]
    return copy


PINNING = {aten.is_pinned.default: is_pinned, aten._pin_memory.default: in_pinned_memory}


@contextlib.contextmanager
def without_float64() -> Iterator[None]:
    """Inside the block the device refuses tensors in float64, as Apple's GPUs do."""
    _refused_dtypes.add(torch.float64)
    try:
        yield
    finally:
        _refused_dtypes.clear()


class Device(TorchDispatchMode):
    """While it is entered, tensors can be made on the device."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, kwargs or {})


class Module(_DummyBackendModule):
    """What ``torch.get_device_module`` returns; random numbers are those of the CPU's generator."""

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        # autocast changes nothing: it is switched off for this device below
        return [torch.bfloat16, torch.float16]


def copy_from(source: torch.Tensor, target: Any, non_blocking: bool = False) -> torch.Tensor:
    """How torch itself copies to the device, for instance in ``torch.tensor(..., device=)``."""
    record_copy(source, target.device, non_blocking)
    target.inner.copy_(source.inner if isinstance(source, Elsewhere) else source)
    return target


_setup_privateuseone_for_python_backend(NAME, Module())
# parameters that are moved are new objects
torch.__future__.set_swap_module_params_on_conversion(True)
# registrations last as long as these objects do
ATEN, ANY = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
# torch calls these without the mode, too
for op in (aten.empty.memory_format, aten.empty_strided.default):
    ATEN.impl(op, lambda *args, op=op, **kwargs: run(op, args, kwargs), "PrivateUse1")
ATEN.impl("_copy_from", copy_from, "PrivateUse1")
ANY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
