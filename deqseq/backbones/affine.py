"""A linear backbone whose fixed point is known in closed form."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from deqseq.arguments import PositiveInt, Within, checked
from deqseq.backbones.base import Backbone, Cache, Inputs, check_cache
from deqseq.types import Counts, Mask, Sequence


@dataclass(frozen=True)
class AffineCache(Cache):
    """The state of the last committed token.

    Attributes:
        previous: ``(batch, d_model)``.
    """

    previous: Float[Tensor, "batch d_model"]


class Affine(Backbone[AffineCache]):
    r"""The smallest implicit sequence model: affine in its state, recurrent at its fixed point.

    .. math:: f(z)_t = A z_t + R z_{t-1} + U x_t, \qquad z^*_t = (I - A)^{-1} (R z^*_{t-1} + U x_t)

    It is for tests and tutorials: :meth:`solution` gives the exact result for every solver, sweep
    and gradient.

    Args:
        d_model: width.
        contraction: spectral norm of A and of R, float between 0 and 1.

    Example:
        >>> import torch
        >>> from deqseq import Affine
        >>> backbone = Affine(4, contraction=0.4)
        >>> x = torch.ones(1, 3, 4)
        >>> z = backbone.solution(x)
        >>> torch.allclose(backbone(z, backbone.prepare(x))[0], z, atol=1e-6)
        True
    """

    @checked
    def __init__(
        self,
        d_model: PositiveInt,
        contraction: Annotated[float, Within("(0, 1)")] = 0.4,
    ) -> None:
        super().__init__()
        self.d_model = d_model
        self.A = nn.Parameter(_of_norm(d_model, contraction))
        self.R = nn.Parameter(_of_norm(d_model, contraction))
        self.U = nn.Parameter(_of_norm(d_model, 1.0))

    def prepare(
        self, x: Sequence, cache: AffineCache | None = None, mask: Mask | None = None
    ) -> Inputs:
        check_cache(cache, AffineCache, x, [(self.d_model,)])
        return Inputs(x @ self.U.T)

    def forward(
        self,
        z: Sequence,
        inputs: Inputs,
        cache: AffineCache | None = None,
        *,
        need_aux: bool = False,
    ) -> tuple[Sequence, Float[Tensor, "batch known d_model"] | None]:
        previous = z.new_zeros(z.shape[0], self.d_model) if cache is None else cache.previous
        states = torch.cat([previous[:, None], z], dim=1)
        fz = z @ self.A.T + states[:, :-1] @ self.R.T
        if inputs.injection is not None:
            fz = fz + inputs.injection
        return fz, states if need_aux else None

    def advance(
        self, cache: AffineCache | None, aux: Any, tokens: int, counts: Counts | None = None
    ) -> AffineCache:
        # one more state than there are tokens: the first is that before them
        last = torch.full((len(aux),), tokens, device=aux.device) if counts is None else counts
        return AffineCache(aux.detach()[torch.arange(len(aux), device=aux.device), last])

    def solution(self, x: Sequence) -> Sequence:
        """The exact fixed point for embedded tokens ``x``, ``(batch, length, d_model)``."""
        inverse = torch.linalg.inv(torch.eye(self.d_model, dtype=x.dtype, device=x.device) - self.A)
        previous, tokens = x.new_zeros(x.shape[0], self.d_model), []
        for u in (x @ self.U.T).unbind(dim=1):
            previous = (previous @ self.R.T + u) @ inverse.T
            tokens.append(previous)
        return torch.stack(tokens, dim=1)


def _of_norm(dim: int, norm: float) -> Tensor:
    matrix = torch.randn(dim, dim)
    return matrix * (norm / torch.linalg.matrix_norm(matrix, 2))
