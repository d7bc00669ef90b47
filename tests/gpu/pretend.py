"""A device called ``pretend``: it computes on the CPU, and refuses what CUDA refuses of tensors in
two places.

An operation on its tensors takes none of the CPU but single numbers, indices and what is copied,
and ``numpy()`` needs ``cpu()`` first. So code that leaves a tensor behind fails on a machine
without a GPU, too.
"""

import contextlib
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME, aten = "pretend", torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class Elsewhere(torch.Tensor):
    """A tensor of the device, around one of the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Elsewhere":
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
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor of the pretended device to numpy: call cpu() first")


def run(op: Any, args: Any, kwargs: Any) -> Any:
    """One operation: checked, computed on the CPU, and its result moved to where it belongs."""
    tensors = [
        leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    ours = any(isinstance(one, Elsewhere) for one in tensors)
    if op in INDEXED:
        tensors = [args[0], *args[2:3]]  # indices may be of the CPU
    foreign = [one for one in tensors if not isinstance(one, Elsewhere) and one.ndim]
    if ours and foreign and op not in COPIES:
        shapes = [tuple(one.shape) for one in foreign]
        raise RuntimeError(
            f"{op}: all tensors must be on the same device, got {NAME}, and shapes {shapes} on "
            "the CPU"
        )
    target = kwargs.get("device")
    if target is not None:
        ours = torch.device(target).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu")} if ours else kwargs
    plain = pytree.tree_map(lambda x: x.inner if isinstance(x, Elsewhere) else x, (args, kwargs))
    found = op(*plain[0], **plain[1])
    arguments, returns = op._schema.arguments, op._schema.returns
    given = {one.name: value for one, value in zip(arguments, args, strict=False)} | kwargs
    written = [given[one.name] for one in arguments if one.is_write and one.name in given]
    if written and returns:  # in place, or into out=
        return written[0] if len(returns) == 1 else tuple(written)
    return (
        pytree.tree_map(lambda x: Elsewhere(x) if isinstance(x, torch.Tensor) else x, found)
        if ours
        else found
    )


class Device(TorchDispatchMode):
    """While it is entered, tensors can be made on the device."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, args, kwargs or {})


class Module(_DummyBackendModule):
    """What ``torch.get_device_module`` returns: there is one generator of random numbers, that of
    the CPU.
    """

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [
            torch.bfloat16,
            torch.float16,
        ]  # there is no autocast on the device: nothing changes under it


def copy_from(source: torch.Tensor, target: Any, non_blocking: bool = False) -> torch.Tensor:
    target.inner.copy_(source.inner if isinstance(source, Elsewhere) else source)
    return target


_setup_privateuseone_for_python_backend(NAME, Module())
torch.__future__.set_swap_module_params_on_conversion(
    True
)  # parameters that are moved are new objects
LIBRARIES = [
    torch.library.Library("aten", "IMPL"),
    torch.library.Library("_", "IMPL"),
]  # they last as long as these do
for op in (
    aten.empty.memory_format,
    aten.empty_strided.default,
):  # torch calls them without the mode, too
    LIBRARIES[0].impl(op, lambda *args, op=op, **kwargs: run(op, args, kwargs), "PrivateUse1")
LIBRARIES[0].impl("_copy_from", copy_from, "PrivateUse1")
LIBRARIES[1].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
