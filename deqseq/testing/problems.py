"""Maps whose fixed points are known without solving for them, and a wrapper that records their
evaluations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    """A random generator of its own."""
    return torch.Generator().manual_seed(seed)


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with the given eigenvalues, so that its norm is its spectral radius."""
    size = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(size, size, generator=seeded(seed), dtype=torch.float64)).Q
    return basis * eigenvalues.double() @ basis.T


@dataclass(frozen=True)
class Affine:
    """f(z) = W z + b on the flattened event; b has a row for each row of the batch, W belongs to
    all.
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return (z.reshape(len(z), -1) @ self.weight.T).reshape(z.shape) + self.bias

    def take_rows(self, rows: Tensor) -> "Affine":
        """The given ``rows`` alone; the weight belongs to all of them."""
        return replace(self, bias=self.bias[rows])

    def fixed_point(self) -> Tensor:
        """The closed form, in float64."""
        weight, bias = self.weight.double(), self.bias.double()
        system = torch.eye(len(weight), dtype=torch.float64) - weight
        return torch.linalg.solve(system, bias.reshape(len(bias), -1).T).T.reshape(bias.shape)


def affine(
    *,
    radius: float = 0.5,
    batch: int = 3,
    event: Sequence[int] = (4,),
    dtype: torch.dtype = torch.float64,
) -> Affine:
    """Contracts by exactly ``radius`` when that is below one; eigenvalues spread from -radius to
    radius.
    """
    eigenvalues = torch.linspace(-radius, radius, math.prod(event), dtype=torch.float64)
    bias = torch.randn(batch, *event, generator=seeded(1), dtype=torch.float64)
    return Affine(symmetric(eigenvalues).to(dtype), bias.to(dtype))


@dataclass(frozen=True)
class RowTanh:
    """f(z) = gain tanh(z) + offset, each element on its own: a row comes out the same to the last
    bit in any batch.
    """

    gain: Tensor
    offset: Tensor
    known: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return self.gain.reshape(-1, *[1] * (z.ndim - 1)) * torch.tanh(z) + self.offset

    def fixed_point(self) -> Tensor:
        """The one that the offset was chosen for."""
        return self.known


def row_tanh(
    gains: Sequence[float], *, event: Sequence[int] = (3,), dtype: torch.dtype = torch.float64
) -> RowTanh:
    """One gain per row, a contraction where it is below one; fixed points between 1/2 and 1."""
    gain = torch.tensor(gains, dtype=torch.float64)
    known = 0.5 + 0.5 * torch.rand(len(gains), *event, generator=seeded(5), dtype=torch.float64)
    offset = known - gain.reshape(-1, *[1] * len(event)) * torch.tanh(known)
    return RowTanh(gain.to(dtype), offset.to(dtype), known.to(dtype))


def mapped(z: Tensor, problem: Callable[[Tensor], Tensor]) -> Tensor:
    """The map of a problem that is given as ``args``, so that finished rows of it are removed from
    the batch.
    """
    return problem(z)


@dataclass(frozen=True)
class Recorded:
    """A map, with or without ``args``, that keeps copies of what went into every evaluation and of
    what came out.
    """

    f: Callable[..., Any]
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, z: Tensor, *args: Any) -> Any:
        given, result = z.detach().clone(), self.f(z, *args)
        fz = result[0] if isinstance(result, tuple) else result
        self.calls.append((given, fz.detach().clone()))
        return result

    @property
    def evaluations(self) -> int:
        """How many there were."""
        return len(self.calls)

    @property
    def rows(self) -> list[int]:
        """How many rows each evaluation was made for."""
        return [len(z) for z, _ in self.calls]
