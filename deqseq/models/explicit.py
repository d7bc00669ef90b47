"""The same backbone without iteration: the baseline."""

from typing import Any

from torch import nn

from deqseq.backbones.base import Backbone, Cache, RealTokens, Sequence, check_sequence
from deqseq.layers.sharded import gathered
from deqseq.layers.weight_norm import weights_computed_once
from deqseq.models.output import ModelOutput
from deqseq.models.padding import Padding


class ExplicitModel(nn.Module):
    r"""One pass of a backbone over the embedded tokens, :math:`z = f_\theta(x)`: an ordinary sequence model.

    Args:
        backbone: best built without an injection, whose parameters would serve nothing here.

    Example:
        >>> import torch, deqseq as dq
        >>> config = dq.Mamba2Config(d_model=16, n_layers=2, d_state=4, headdim=8, injection=False)
        >>> dq.ExplicitModel(dq.Mamba2(config))(torch.zeros(1, 5, 16)).value.shape
        torch.Size([1, 5, 16])
    """

    def __init__(self, backbone: Backbone[Any]) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(
        self,
        x: Sequence,
        *,
        mask: RealTokens | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
    ) -> ModelOutput:
        """Run the layers once.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            mask: which tokens are real, ``(batch, length)``; padding on either side of a row leaves the row as it is
                alone. None: all.
            cache: what came before; None: nothing.
            return_cache: whether the cache after these tokens is wanted.

        Returns:
            The states; no statistics.

        Raises:
            ValueError: a bad shape.
        """
        check_sequence(x, self.backbone.d_model)
        padding = Padding.of(x, mask)
        tokens = padding.compact(x)
        # one pass takes the layers one by one; only the states for a cache are computed after they have been left
        with gathered(self.backbone, enabled=return_cache), weights_computed_once(self.backbone):
            place = self.backbone.place(tokens, cache, padding.real)
            value, trail = self.backbone(tokens, place, cache, return_trail=return_cache)
            if padding.real is not None:
                value = value.masked_fill(~padding.real[..., None], 0)
            return ModelOutput(padding.back(value), None if trail is None else trail.after(x.shape[1]))

    def compile(self, **options: Any) -> None:
        """Compile the layers, block by block, with ``torch.compile``.

        Args:
            **options: of ``torch.compile``.
        """
        self.backbone.compile(**options)
