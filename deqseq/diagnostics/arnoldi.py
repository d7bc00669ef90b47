"""The outer eigenvalues of a matrix that is known by its products alone."""

from collections.abc import Callable

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from deqseq.types import State


def ritz_values(
    multiply: Callable[[State], State], start: State, products: int
) -> tuple[Complex[Tensor, "batch products"], Float[Tensor, " batch"]]:
    r"""Arnoldi's method: eigenvalues of each row's matrix as seen in the space of :math:`v, Av, A^2
    v, \ldots`.

    Unlike the power method it finds complex pairs and several eigenvalues of one size, and it is
    exact with as many products as dimensions. Zeros pad rows whose Krylov space closed early; rows
    with non-finite products are NaN.

    Returns:
        The eigenvalues, and the norm of the smallest change of the matrix that makes the largest
        one exact.
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
        length = torch.where(
            length <= negligible, 0, length
        )  # the space is closed: zeros from here on
        hessenberg[:, k + 1, k] = length
        basis[:, k + 1] = w / torch.where(length > 0, length, torch.inf)[:, None]
    small = hessenberg.cpu()
    finite = small.isfinite().flatten(1).all(dim=1)
    small = torch.where(finite[:, None, None], small, 0)
    values, vectors = torch.linalg.eig(small[:, :-1])
    largest = values.abs().argmax(dim=1, keepdim=True)
    error = small[:, -1, -1] * vectors[:, -1].gather(1, largest)[:, 0].abs()
    return torch.where(finite[:, None], values, torch.nan), torch.where(finite, error, torch.nan)
