"""Maps with known fixed points, and a wrapper that records evaluations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


def seeded(seed: int) -> torch.Generator:
    """A new random generator."""
    return torch.Generator().manual_seed(seed)


def zeros(*shape: int) -> Tensor:
    """A start in float64."""
    return torch.zeros(shape, dtype=torch.float64)


def random(*shape: int, seed: int) -> Tensor:
    """Normally distributed numbers in float64."""
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def symmetric(eigenvalues: Tensor) -> Tensor:
    """A symmetric matrix with these eigenvalues, so that its norm is its spectral radius."""
    size = len(eigenvalues)
    basis = torch.linalg.qr(random(size, size, seed=0)).Q
    return basis * eigenvalues.double() @ basis.T


@dataclass(frozen=True)
class Affine:
    """f(z) = W z + b on flattened rows; b has a row per row of the batch, W is shared."""

    weight: Tensor
    bias: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        products = z.reshape(len(z), -1) @ self.weight.T
        return products.reshape(z.shape) + self.bias

    def take_rows(self, rows: Tensor) -> "Affine":
        """The map of some rows; the weight stays whole."""
        return replace(self, bias=self.bias[rows])

    def fixed_point(self) -> Tensor:
        """The closed form, in float64."""
        weight, bias = self.weight.double(), self.bias.double()
        system = torch.eye(len(weight)) - weight
        rows = torch.linalg.solve(system, bias.reshape(len(bias), -1).T).T
        return rows.reshape(bias.shape)


def affine(
    *,
    radius: float = 0.5,
    batch: int = 3,
    event: Sequence[int] = (4,),
    dtype: torch.dtype = torch.float64,
) -> Affine:
    """A map with eigenvalues from -radius to radius: contracts by ``radius`` if that is below 1."""
    eigenvalues = torch.linspace(-radius, radius, math.prod(event), dtype=torch.float64)
    bias = random(batch, *event, seed=1)
    return Affine(symmetric(eigenvalues).to(dtype), bias.to(dtype))


@dataclass(frozen=True)
class RowTanh:
    """f(z) = gain tanh(z) + offset, elementwise: rows are equal bit by bit in any batch."""

    gain: Tensor
    offset: Tensor
    solution: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return self.gain * torch.tanh(z) + self.offset

    def fixed_point(self) -> Tensor:
        """The point for which the offset was computed."""
        return self.solution


def row_tanh(
    gains: Sequence[float], *, event: Sequence[int] = (3,), dtype: torch.dtype = torch.float64
) -> RowTanh:
    """One gain per row, which contracts if it is below 1; fixed points between 1/2 and 1."""
    gain = torch.tensor(gains, dtype=torch.float64).reshape(-1, *(1 for _ in event))
    uniform = torch.rand(len(gains), *event, generator=seeded(5), dtype=torch.float64)
    solution = 0.5 + 0.5 * uniform
    offset = solution - gain * torch.tanh(solution)
    return RowTanh(gain.to(dtype), offset.to(dtype), solution.to(dtype))


def mapped(z: Tensor, problem: Callable[[Tensor], Tensor]) -> Tensor:
    """A problem as ``args`` of a map, so that finished rows of it are removed from the batch."""
    return problem(z)


@dataclass(frozen=True)
class Recorded:
    """A map, with or without ``args``, that keeps copies of the input and value of every call."""

    f: Callable[..., Any]
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, z: Tensor, *args: Any) -> Any:
        point = z.detach().clone()
        result = self.f(z, *args)
        fz = result[0] if isinstance(result, tuple) else result
        self.calls.append((point, fz.detach().clone()))
        return result

    @property
    def evaluations(self) -> int:
        """How many calls there were."""
        return len(self.calls)

    @property
    def rows(self) -> list[int]:
        """The number of rows in each call."""
        return [len(z) for z, _ in self.calls]
