"""Maps whose fixed points are known without solving for them, and a wrapper that records their evaluations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
    """f(z) = W z + b on the flattened event; b has a row for each row of the batch, W belongs to all."""

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
    *, radius: float = 0.5, batch: int = 3, event: Sequence[int] = (4,), dtype: torch.dtype = torch.float64
) -> Affine:
    """Contracts by exactly ``radius`` when that is below one; eigenvalues spread from -radius to radius."""
    eigenvalues = torch.linspace(-radius, radius, math.prod(event), dtype=torch.float64)
    bias = torch.randn(batch, *event, generator=seeded(1), dtype=torch.float64)
    return Affine(symmetric(eigenvalues).to(dtype), bias.to(dtype))


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
            z = z - torch.linalg.solve(torch.eye(len(weight), dtype=torch.float64) - jacobian, z - fz)
        return z.reshape(bias.shape)


def tanh_contraction(*, batch: int = 3, event: Sequence[int] = (4,)) -> Tanh:
    """Contracts by at most 0.9."""
    return Tanh(affine(radius=0.9, batch=batch, event=event))


def expansive_tanh() -> Tanh:
    """Its Jacobian at the fixed point has a smallest eigenvalue of about -3."""
    bias = 0.3 * torch.randn(3, 4, generator=seeded(1), dtype=torch.float64)
    return Tanh(Affine(symmetric(torch.linspace(-3.2, 0.6, 4)), bias))


def limit_cycle(z: Tensor) -> Tensor:
    """Plain iteration alternates for ever; the fixed point is 1/2."""
    return 1 - z


def logistic(z: Tensor) -> Tensor:
    """Chaotic: the residual goes up and down without a pattern."""
    return 3.9 * z * (1 - z)


# The maps below use elementwise operations alone: a row comes out the same to the last bit in any batch.


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

    def fixed_point(self) -> Tensor:
        """The closed form, in float64."""
        return self.offset / (1 - self.gain).reshape(-1, *[1] * (self.offset.ndim - 1))


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
    return RowAffine(torch.tensor(gains, dtype=dtype), offset.to(dtype), torch.tensor(limits, dtype=dtype))


@dataclass(frozen=True)
class RowTanh:
    """f(z) = gain tanh(z) + offset, each element on its own; a contraction where the gain is below one."""

    gain: Tensor
    offset: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return self.gain.reshape(-1, *[1] * (z.ndim - 1)) * torch.tanh(z) + self.offset


def row_tanh(gains: Sequence[float], *, event: Sequence[int] = (3,)) -> RowTanh:
    """One gain per row, random offsets."""
    offset = torch.randn(len(gains), *event, generator=seeded(5), dtype=torch.float64)
    return RowTanh(torch.tensor(gains, dtype=torch.float64), offset)


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

    def fixed_point(self) -> Tensor:
        """The closed form, in float64."""
        tokens = [self.x[:, 0] / (1 - self.own)]
        for token in self.x.unbind(dim=1)[1:]:
            tokens.append((token + self.coupling * tokens[-1]) / (1 - self.own))
        return torch.stack(tokens, dim=1)


def causal_chain(*, batch: int = 2, length: int = 5, dim: int = 3, own: float = 0.0) -> CausalChain:
    """Random inputs between 1 and 2."""
    x = 1 + torch.rand(batch, length, dim, generator=seeded(4), dtype=torch.float64)
    return CausalChain(x, own=own)


def mapped(z: Tensor, problem: Callable[[Tensor], Tensor]) -> Tensor:
    """The map of a problem that is given as ``args``, so that finished rows of it are removed from the batch."""
    return problem(z)


class Call(NamedTuple):
    """One evaluation: the very tensors that went in and came out, and copies made at once."""

    z: Tensor
    fz: Tensor
    z_copy: Tensor
    fz_copy: Tensor


@dataclass(frozen=True)
class Recorded:
    """A map, with or without ``args``, that keeps every evaluation."""

    f: Callable[..., Any]
    calls: list[Call] = field(default_factory=list)

    def __call__(self, z: Tensor, *args: Any) -> Any:
        z_copy = z.detach().clone()
        result = self.f(z, *args)
        fz = result[0] if isinstance(result, tuple) else result
        self.calls.append(Call(z, fz, z_copy, fz.detach().clone()))
        return result

    @property
    def evaluations(self) -> int:
        """How many there were."""
        return len(self.calls)

    @property
    def rows(self) -> list[int]:
        """How many rows each evaluation was made for."""
        return [len(call.z) for call in self.calls]
