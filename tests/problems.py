"""Maps for tests of solvers and of the loop, beside those of ``deqseq.testing.problems``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deqseq.testing.problems import Affine, seeded, symmetric


def expansive(dim: int) -> Affine:
    """Every direction expands by 1.3 to 1.9, half of them with a change of sign: no damping helps."""
    sizes = torch.linspace(1.3, 1.9, dim, dtype=torch.float64)
    signs = torch.where(torch.arange(dim) % 2 == 0, 1.0, -1.0)
    bias = torch.randn(3, dim, generator=seeded(2), dtype=torch.float64)
    return Affine(symmetric(sizes * signs), bias)


def diverging(z: Tensor) -> Tensor:
    """Doubles the distance to its fixed point -1."""
    return 2 * z + 1


@dataclass(frozen=True)
class Staircase:
    """f(z) = min(z + 1, target): from zero a row passes, exactly, at evaluation number target + 1."""

    target: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return torch.minimum(z + 1, self.target)


def staircase(targets: list[int]) -> Staircase:
    """One target per row."""
    return Staircase(torch.tensor(targets, dtype=torch.float64)[:, None])
