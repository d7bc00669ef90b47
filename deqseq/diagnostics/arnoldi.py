"""The outer eigenvalues of a matrix that is known by its products alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from deqseq.types import State


class Ritz(NamedTuple):
    """Approximate eigenvalues of each row's matrix.

    Zeros pad rows whose Krylov space closed early; rows with non-finite products are NaN. ``error``: the norm of the
    smallest change of the matrix that makes the largest value exact.
    """

    values: Complex[Tensor, "batch products"]
    error: Float[Tensor, " batch"]


def ritz_values(multiply: Callable[[State], State], start: State, products: int) -> Ritz:
    r"""Arnoldi's method: eigenvalues of each row's matrix as seen in the space of :math:`v, Av, A^2 v, \ldots`.

    Unlike the power method it finds complex pairs and several eigenvalues of one size, and it is exact with as many
    products as dimensions. Saad, Numerical Methods for Large Eigenvalue Problems, SIAM 2011, chapter 6.
    """
    batch, size = len(start), start[0].numel()
    products = min(products, size)
    wide = torch.promote_types(start.dtype, torch.float32)
    first = start.reshape(batch, size).to(wide)
    basis = first.new_zeros(batch, products + 1, size)
    basis[:, 0] = first / first.norm(dim=1, keepdim=True)
    hessenberg = first.new_zeros(batch, products + 1, products)
    for k in range(products):
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
    return _eigenvalues(hessenberg.cpu())


def _eigenvalues(hessenberg: Tensor) -> Ritz:
    """Eigenvalues of the small matrices, and how far the largest may be off."""
    finite = hessenberg.isfinite().flatten(1).all(dim=1)
    square = torch.where(finite[:, None, None], hessenberg, 0)
    values, vectors = torch.linalg.eig(square[:, :-1])
    largest = values.abs().argmax(dim=1, keepdim=True)
    last = vectors[:, -1].gather(1, largest)[:, 0].abs()
    error = torch.where(finite, square[:, -1, -1] * last, torch.nan)
    return Ritz(torch.where(finite[:, None], values, torch.nan), error)
