"""The outer eigenvalues of a matrix that is known by its products alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from deqseq.types import State


class Ritz(NamedTuple):
    """Approximate eigenvalues of each row's matrix.

    Attributes:
        values: ``(batch, steps)``; zeros where fewer steps found them all.
        error: the matrix has an eigenvalue equal to the largest of them after a change of this norm.
    """

    values: Complex[Tensor, "batch steps"]
    error: Float[Tensor, " batch"]


def ritz_values(multiply: Callable[[State], State], start: State, steps: int) -> Ritz:
    r"""Arnoldi's method: eigenvalues of the matrix as it is seen in the space of :math:`v, Av, A^2 v, \ldots`

    Unlike a Rayleigh quotient of the power method it finds complex pairs and several eigenvalues of one size, and it
    is exact once there are as many steps as dimensions.

    Args:
        multiply: the product with each row's matrix, ``(batch, *event) -> (batch, *event)``.
        start: a random vector a row, ``(batch, *event)``.
        steps: products, at least 1; no more than there are dimensions are made.

    Returns:
        Ritz values, on the CPU; not a number for rows whose products are not finite.

    References:
        Saad, Numerical Methods for Large Eigenvalue Problems, SIAM 2011, chapter 6.

    Example:
        >>> turn = torch.tensor([[0.0, -0.5], [0.5, 0.0]], dtype=torch.float64)
        >>> found = ritz_values(lambda v: v @ turn, torch.tensor([[1.0, 0.3]], dtype=torch.float64), 2)
        >>> found.values.abs()
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    batch, size = len(start), start[0].numel()
    steps = min(steps, size)
    wide = torch.promote_types(start.dtype, torch.float32)
    first = start.reshape(batch, size).to(wide)
    basis = first.new_zeros(batch, steps + 1, size)
    basis[:, 0] = first / first.norm(dim=1, keepdim=True)
    hessenberg = first.new_zeros(batch, steps + 1, steps)
    for k in range(steps):
        w = multiply(basis[:, k].to(start.dtype).reshape(start.shape)).reshape(batch, size).to(wide)
        negligible = 10 * torch.finfo(start.dtype).eps * w.norm(dim=1)
        for _ in range(2):  # the second time removes what rounding left
            along = torch.einsum("bkn,bn->bk", basis[:, : k + 1], w)
            w = w - torch.einsum("bkn,bk->bn", basis[:, : k + 1], along)
            hessenberg[:, : k + 1, k] += along
        length = w.norm(dim=1)
        length = torch.where(length <= negligible, 0, length)  # the space is closed: zeros from here on
        hessenberg[:, k + 1, k] = length
        basis[:, k + 1] = w / torch.where(length > 0, length, torch.inf)[:, None]
    return _dense(hessenberg.cpu())


def _dense(hessenberg: Tensor) -> Ritz:
    """Eigenvalues of the small matrices, and how far the largest may be off."""
    finite = hessenberg.isfinite().flatten(1).all(dim=1)
    square = torch.where(finite[:, None, None], hessenberg, 0)
    values, vectors = torch.linalg.eig(square[:, :-1])
    largest = values.abs().argmax(dim=1, keepdim=True)
    last = vectors[:, -1].gather(1, largest)[:, 0].abs()
    error = torch.where(finite, square[:, -1, -1] * last, torch.nan)
    return Ritz(torch.where(finite[:, None], values, torch.nan), error)
