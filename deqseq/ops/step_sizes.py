"""Step sizes of a selective scan."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

UNLIMITED = (0.0, float("inf"))


class StepSizes(NamedTuple):
    r"""How a scan's step sizes come from what was projected, :math:`\mathrm{clamp}(\mathrm{softplus}(dt + b))`.

    Attributes:
        bias: :math:`b`, ``(heads,)``. Default: zero.
        softplus: whether they pass a softplus.
        limit: lower and upper bound.

    Example:
        >>> import torch
        >>> StepSizes(softplus=False, limit=(0.0, 2.0)).of(torch.tensor([[-1.0, 3.0]]))
        tensor([[0., 2.]])
    """

    bias: Float[Tensor, " heads"] | None = None
    softplus: bool = True
    limit: tuple[float, float] = UNLIMITED

    @property
    def unlimited(self) -> bool:
        """Whether the bounds are no bounds."""
        return tuple(self.limit) == UNLIMITED

    def of(self, dt: Float[Tensor, "*batch heads"]) -> Float[Tensor, "*batch heads"]:
        """The step sizes, in the dtype of ``dt``."""
        dt = dt if self.bias is None else dt + self.bias.to(dt.dtype)
        dt = F.softplus(dt) if self.softplus else dt
        return dt if self.unlimited and self.softplus else dt.clamp(*self.limit)
