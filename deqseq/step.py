"""One evaluation of a map and one step of a solver, and what both must hold."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deqseq.arguments import check_like, versions
from deqseq.rows import check_rows, map_tensors, on_device, per_row, take, tensors_of
from deqseq.solvers.base import Solver
from deqseq.stop import Stop
from deqseq.types import FixedPointMap, Residual, RowIndex, State


@dataclass(frozen=True)
class Progress:
    """What a callback receives at each check of the residual.

    Attributes:
        iteration: evaluations so far.
        max_steps: the budget; in a window it begins again at every move, so that ``iteration`` can
            exceed it.
        active_rows: rows that have not ended.
        residual: the latest residual of each token, ``(batch, tokens)``, on the device of the
            state; ``inf`` where there is none yet. Numbers at padding have no meaning.
    """

    iteration: int
    max_steps: int
    active_rows: int
    residual: Residual


Callback = Callable[[Progress], None]
"""Called with a :class:`Progress` at each check of the residual."""


def check_start(name: str, z0: Tensor) -> None:
    """Refuse a starting point that no solve can begin from; ``name`` is that of the argument."""
    if not isinstance(z0, Tensor) or not z0.is_floating_point() or z0.dtype.itemsize < 2:
        got = z0.dtype if isinstance(z0, Tensor) else type(z0).__name__
        raise TypeError(f"{name} must be a floating-point tensor (batch, *event), got {got}")
    if z0.layout != torch.strided or z0.is_nested:
        got = "nested" if z0.is_nested else z0.layout
        raise TypeError(f"{name} must be a dense tensor (batch, *event), got {got}")
    if z0.ndim == 0 or z0.numel() == 0:
        shape = tuple(z0.shape)
        raise ValueError(f"{name} must have at least one row and one element, got shape {shape}")
    if torch.compiler.is_compiling():
        return
    if z0.is_meta:
        raise ValueError(f"{name} must be on a device that computes, got one on meta")
    # the sum is cheap, and finite in all but odd cases; only then is every element looked at
    if not bool(torch.isfinite(z0.sum())) and not bool(torch.isfinite(z0).all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity")


def check_transforms(stop: Stop) -> None:
    """Refuse torch.func's transforms, forward-mode derivatives, and the tracing of a tolerance."""
    if torch._C._get_tracing_state() is not None and stop.has_tolerance:
        raise TypeError(
            "a fixed point with a tolerance cannot be traced, because torch.jit.trace keeps the "
            "iterations of one input: trace it with stop=Stop.exactly(n), or take torch.export"
        )
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


def has_values(x: Tensor) -> bool:
    """Whether its numbers can be looked at: nothing compiles, traces, maps or fakes it."""
    torch_c: Any = torch._C
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and not x.is_meta
        and not torch.compiler.is_compiling()
        and torch_c._get_tracing_state() is None
        and not torch_c._functorch.get_interpreter_stack()
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast computes on a device now; None where it is switched off."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None


def in_autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast as it was when :func:`autocast_dtype` returned this."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def evaluate(
    f: FixedPointMap, z: State, args: Any = None, *, has_aux: bool = False
) -> tuple[State, Any]:
    """``f(z)``, or ``f(z, args)``, in the dtype of ``z``, and its auxiliary output or None.

    Under autocast a map computes in half precision; its value is brought back to the state's dtype,
    so that the iteration does not lose precision from one step to the next.
    """
    # inference mode counts no changes in place, so the map gets a copy there
    point = z.clone() if z.is_inference() else z
    version = versions(z)
    fz = f(point) if args is None else f(point, args)
    if versions(z) != version:
        raise ValueError(
            "f must not change z in place (z.add_(), relu(z, inplace=True), z[...] = ...): the "
            "residual is measured against z. Write the result to a new tensor, or begin with "
            "z = z.clone()"
        )
    aux = None
    if has_aux:
        if not isinstance(fz, tuple) or len(fz) != 2:
            got = type(fz).__name__
            raise TypeError(f"with has_aux=True, f must return a pair (f(z), aux), got {got}")
        fz, aux = fz
    check_like("f", fz, z, "z")
    return (fz if fz.dtype == z.dtype else fz.to(z.dtype)), aux


def check_independent(
    f: FixedPointMap, z: State, args: Any, fz: State, rows: RowIndex, has_aux: bool
) -> int:
    """Refuse a map of which these ``rows``, evaluated without the others, have other values.

    Returns how often the map was evaluated for that. A map that draws random numbers differs from
    itself, too, and is not refused.
    """
    with torch.no_grad():
        try:
            some, _ = evaluate(f, z[rows], take(args, rows), has_aux=has_aux)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"f(z, args) must take some rows of z and args alone, got {len(rows)} of {len(z)} "
                f"and failed ({error}): what it uses of each row, such as a mask, belongs in args"
            ) from error
        if _alike(some, fz[rows]):
            return 1
        repeated, _ = evaluate(f, z, args, has_aux=has_aux)
        if not _alike(repeated, fz):
            return 2
    raise ValueError(
        "f(z, args) must be the same for a row with and without the others, got other values: its "
        "rows depend on one another (a mean over the batch, BatchNorm in training mode), so no row "
        "can be removed when it has converged. Use args inside of f, as in lambda z: f(z, args): "
        "then all rows are evaluated until the last one has ended"
    )


def _alike(x: State, y: State) -> bool:
    """Whether every row is the same, up to the square root of the precision."""
    precision = torch.finfo(autocast_dtype(x.device) or x.dtype).eps
    difference, size = ((tensor.reshape(len(x), -1)).norm(dim=1) for tensor in (x - y, y))
    return not bool((difference > precision**0.5 * size).any())


def next_point(solver: Solver[Any], z: State, fz: State, memory: Any) -> tuple[State, Any]:
    """One checked step of the solver, in full precision: autocast is for the map only."""
    kind, version = z.device.type, versions(z, fz)
    name = f"{type(solver).__name__}.step"
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        pair = solver.step(z, fz, memory)
        if not isinstance(pair, tuple) or len(pair) != 2:
            got = type(pair).__name__
            raise TypeError(f"{name} must return a pair (next point, state), got {got}")
        check_like(name, pair[0], z, "z")  # inside, because under autocast it permits other dtypes
    if versions(z, fz) != version:
        raise ValueError(
            f"{name} must not change z or fz in place: they are values of the solve. Return a new "
            "tensor"
        )
    return pair


def carried(
    solver: Solver[Any], memory: Any, z: State, origins: Tensor | None, fresh: np.ndarray
) -> Any:
    """The memory of a solver at ``z``, after tokens have moved in their windows; checked.

    ``fresh`` tokens, ``(rows, width)``, begin anew. ``origins`` says on the device where each
    token was and whether it is fresh, ``(rows, width, 2)``, for one transfer; None if all stayed.
    """
    rows, name = np.flatnonzero(fresh.any(axis=1)), type(solver).__name__
    if not len(rows):
        return memory
    if fresh.all() or (len(rows) == len(z) and not solver.per_token):
        return solver.init(z)
    if solver.per_token:
        if origins is None:
            places = np.broadcast_to(np.arange(fresh.shape[1]), fresh.shape)
            origins = on_device(np.stack([places, fresh], axis=2), z.device)
        return _carried_tokens(name, memory, solver.init(z), origins)
    new = solver.restart(memory, z, on_device(rows, z.device))
    if type(new) is not type(memory):
        wanted, got = type(memory).__name__, type(new).__name__
        raise TypeError(f"{name}.restart must return a state like {wanted}, got {got}")
    check_rows(f"what {name}.restart returns", new, len(z))
    return new


def _carried_tokens(name: str, memory: Any, first: Any, origins: Tensor) -> Any:
    """``memory`` moved along; fresh tokens, and numbers of their rows, as they are at ``first``."""
    width = origins.shape[1]
    found, wanted = ([tuple(x.shape) for x in tensors_of(tree)] for tree in (memory, first))
    if found != wanted or any(len(shape) < 2 or shape[1] not in (1, width) for shape in found):
        raise ValueError(
            f"the memory of {name}, whose per_token is True, must be tensors (rows, tokens, ...) "
            f"or (rows, 1, ...), of the shapes that init gives, {wanted}, got {found}"
        )
    places, of_token = origins[..., 0], origins[..., 1].bool()
    of_row = of_token.any(dim=1, keepdim=True)

    def like(x: Tensor, old: Tensor) -> Tensor:
        return x.reshape(*x.shape, *[1] * (old.ndim - 2))

    def along(old: Tensor, start: Tensor) -> Tensor:
        if old.shape[1] == 1:
            return torch.where(like(of_row, old), start, old)
        moved = old.gather(1, like(places, old).expand_as(old))
        return torch.where(like(of_token, old), start, moved)

    return map_tensors(along, memory, first)


def returned_value(
    z: State, fz: State, at_point: np.ndarray, diverged: np.ndarray, start: State
) -> State:
    """What each row returns; rows that ``diverged`` are among those ``at_point``.

    =================================  =========
    not ``at_point``                   ``fz``
    ``at_point``, has not diverged     ``z``
    has diverged, ``z`` is finite      ``z``
    has diverged, ``z`` is not finite  ``start``
    =================================  =========
    """
    if not at_point.any():
        return fz
    point = z
    if diverged.any():
        finite = z.isfinite().reshape(len(z), -1).all(dim=1)
        point = torch.where(per_row(finite, z), z, start)
    return torch.where(per_row(on_device(at_point, z.device), z), point, fz)
