"""One evaluation of a fixed-point map, with its contract checked."""

from typing import Any

import torch
from torch import Tensor

from deqseq.arguments import check_like, versions
from deqseq.types import FixedPointMap, State


def check_start(name: str, z0: Tensor) -> None:
    """Refuse a starting point that no solve can begin from; ``name`` is that of the argument."""
    if not isinstance(z0, Tensor) or not z0.is_floating_point() or z0.dtype.itemsize < 2:
        got = z0.dtype if isinstance(z0, Tensor) else type(z0).__name__
        raise TypeError(f"{name} must be a floating-point tensor (batch, *event), got {got}")
    if z0.layout != torch.strided or z0.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor (batch, *event), got "
            f"{'nested' if z0.is_nested else z0.layout}"
        )
    if z0.ndim == 0 or z0.numel() == 0:
        raise ValueError(
            f"{name} must have at least one row and one element, got shape {tuple(z0.shape)}"
        )
    if torch.compiler.is_compiling():
        return
    if z0.is_meta:
        raise ValueError(
            f"{name} must be on a device that computes, got one on meta, which has no values"
        )
    # the sum is cheap and finite in all but odd cases; only then is every element looked at
    if not bool(torch.isfinite(z0.sum())) and not bool(torch.isfinite(z0).all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity")


def check_transforms() -> None:
    """Refuse the transforms of ``torch.func``, and forward-mode differentiation, which a solve
    cannot run under.
    """
    torch_c: Any = torch._C
    running = [
        level.key().name.lower() for level in torch_c._functorch.get_interpreter_stack() or ()
    ]
    if torch.autograd.forward_ad._current_level >= 0:
        running.append("jvp")
    remedy = {
        "vmap": "rows of a batch are solved on their own already: pass them as rows of z0",
        "jvp": "there is no forward-mode derivative: use backward() or torch.autograd.grad",
        "grad": "use backward() or torch.autograd.grad",
    }
    for name, advice in remedy.items():
        if name in running:
            raise TypeError(f"a fixed point cannot be solved inside torch.func's {name}; {advice}")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast computes on a device now; None where it is switched off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def in_autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast as it was when :func:`autocast_dtype` returned this."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def evaluate(
    f: FixedPointMap, z: State, args: Any = None, *, has_aux: bool = False
) -> tuple[State, Any]:
    """``f(z)``, or ``f(z, args)``, in the dtype of ``z``, and its auxiliary output (None without).

    Under autocast a map computes in half precision; its value is brought back to the state's dtype,
    so that the iteration does not lose precision from one step to the next.
    """
    given, before = z.clone() if z.is_inference() else z, versions(z)
    fz = f(given) if args is None else f(given, args)
    if versions(z) != before:
        raise ValueError(
            "f must not change z in place (z.add_(), relu(z, inplace=True), z[...] = ...): the "
            "residual is measured "
            "against z. Write the result to a new tensor, or begin with z = z.clone()"
        )
    aux = None
    if has_aux:
        if not isinstance(fz, tuple) or len(fz) != 2:
            raise TypeError(
                f"with has_aux=True, f must return a pair (f(z), aux), got {type(fz).__name__}"
            )
        fz, aux = fz
    check_like("f", fz, z, "z")
    return (fz if fz.dtype == z.dtype else fz.to(z.dtype)), aux
