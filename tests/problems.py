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
    """Every direction expands by 1.3 to 1.9, half of them with a change of sign: no
    damping helps.
    """
    sizes = torch.linspace(1.3, 1.9, dim, dtype=torch.float64)
    signs = torch.where(torch.arange(dim) % 2 == 0, 1.0, -1.0)
    bias = torch.randn(3, dim, generator=seeded(2), dtype=torch.float64)
    return Affine(symmetric(sizes * signs), bias)


def diverging(z: Tensor) -> Tensor:
    """Doubles the distance to its fixed point -1."""
    return 2 * z + 1


@dataclass(frozen=True)
class Staircase:
    """f(z) = min(z + 1, target): from zero a row passes, exactly, at evaluation number
    target + 1.
    """

    target: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return torch.minimum(z + 1, self.target)


def staircase(targets: list[int]) -> Staircase:
    """One target per row."""
    return Staircase(torch.tensor(targets, dtype=torch.float64)[:, None])


@dataclass(frozen=True)
class CausalChain:
    """f(z)_t = x_t + coupling z_{t-1} + own z_t on (batch, length, dim).

    With ``own = 0`` token t is exact once token t - 1 is: one more token per evaluation.
    """

    x: Tensor
    coupling: float = 0.9
    own: float = 0.0

    def __call__(self, z: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], dim=1)
        return self.x + self.coupling * before + self.own * z


@dataclass(frozen=True)
class Tanh:
    """f(z) = tanh(W z + b), a contraction where the norm of W is below one."""

    inner: Affine

    def __call__(self, z: Tensor) -> Tensor:
        return torch.tanh(self.inner(z))

    def fixed_point(self) -> Tensor:
        """Newton's method with the dense Jacobian, in float64."""
        weight, bias = self.inner.weight.double(), self.inner.bias.double()
        double = Tanh(Affine(weight, bias.reshape(len(bias), -1)))
        z = torch.zeros_like(double.inner.bias)
        for _ in range(20):
            fz = double(z)
            jacobian = (1 - fz**2)[:, :, None] * weight
            z = z - torch.linalg.solve(
                torch.eye(len(weight), dtype=torch.float64) - jacobian, z - fz
            )
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
    ceilings: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> RowAffine:
    """One gain per row, offsets between 1 and 2."""
    offset = 1 + torch.rand(len(gains), *event, generator=seeded(3), dtype=torch.float64)
    limits = [math.inf] * len(gains) if ceilings is None else ceilings
    return RowAffine(
        torch.tensor(gains, dtype=dtype), offset.to(dtype), torch.tensor(limits, dtype=dtype)
    )
