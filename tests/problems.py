"""Maps for tests of solvers and of the loop, beside those of ``deqseq.testing.problems``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deqseq.as_json import CLASSES
from deqseq.testing.problems import Affine, affine, seeded, symmetric

SOLVERS = tuple(kind() for kind in CLASSES["solver"])
"""Every solver of the library."""


def expansive(dim: int) -> Affine:
    """Expands by 1.3 to 1.9 in every direction, half with a change of sign: no damping helps."""
    sizes = torch.linspace(1.3, 1.9, dim, dtype=torch.float64)
    signs = torch.where(torch.arange(dim) % 2 == 0, 1.0, -1.0)
    bias = torch.randn(3, dim, generator=seeded(2), dtype=torch.float64)
    return Affine(symmetric(sizes * signs), bias)


@dataclass(frozen=True)
class Tanh:
    """f(z) = tanh(W z + b), a contraction where the norm of W is below one."""

    inner: Affine

    def __call__(self, z: Tensor) -> Tensor:
        return torch.tanh(self.inner(z))

    def fixed_point(self) -> Tensor:
        """Newton's method with the dense Jacobian, in float64."""
        weight = self.inner.weight.double()
        bias = self.inner.bias.double()
        flat = Tanh(Affine(weight, bias.flatten(1)))
        z = torch.zeros_like(flat.inner.bias)
        for _ in range(20):
            fz = flat(z)
            jacobian = (1 - fz**2)[:, :, None] * weight
            system = torch.eye(len(weight), dtype=torch.float64) - jacobian
            z = z - torch.linalg.solve(system, z - fz)
        return z.reshape(bias.shape)


def tanh_contraction(*, batch: int = 3, event: Sequence[int] = (4,)) -> Tanh:
    """Contracts by at most 0.9."""
    return Tanh(affine(radius=0.9, batch=batch, event=event))


@dataclass(frozen=True)
class RowAffine:
    """f(z) = gain z + offset with a gain per row; elements beyond a row's ceiling become NaN."""

    gain: Tensor
    offset: Tensor
    ceiling: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        shape = (-1, *[1] * (z.ndim - 1))
        fz = self.gain.reshape(shape) * z + self.offset
        return torch.where(z.abs() > self.ceiling.reshape(shape), torch.nan, fz)


def row_affine(
    gains: Sequence[float],
    *,
    event: Sequence[int] = (3,),
    dtype: torch.dtype = torch.float64,
) -> RowAffine:
    """One gain per row, offsets between 1 and 2."""
    offset = 1 + torch.rand(len(gains), *event, generator=seeded(3), dtype=torch.float64)
    ceiling = torch.full((len(gains),), math.inf, dtype=dtype)
    return RowAffine(torch.tensor(gains, dtype=dtype), offset.to(dtype), ceiling)
