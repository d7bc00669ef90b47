"""The same backbone without iteration: the baseline."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from deqseq.backbones.base import Backbone, Cache, Inputs, check_sequence
from deqseq.check import check_flag, check_type
from deqseq.layers.sharded import unsharded
from deqseq.layers.weight_norm import cached_weights
from deqseq.models.output import ModelOutput
from deqseq.models.padding import Padding
from deqseq.sweeps.tokens import TokenArgs, Uncommitted, advance, commit, token_map
from deqseq.types import Mask, Sequence


class ExplicitModel(nn.Module):
    r"""One pass of a backbone over the embedded tokens, :math:`z = f_\theta(x)`: an ordinary sequence model.

    Args:
        backbone: the layers, best built without an injection, which is not used here; that of a backbone inside a
            :class:`Looped` is.

    Example:
        >>> import torch, deqseq as dq
        >>> config = dq.Mamba2Config(d_model=16, n_layers=2, d_state=4, headdim=8, injection=False)
        >>> dq.ExplicitModel(dq.Mamba2(config))(torch.zeros(1, 5, 16)).value.shape
        torch.Size([1, 5, 16])
    """

    def __init__(self, backbone: Backbone[Any]) -> None:
        super().__init__()
        check_type("backbone", backbone, Backbone, "dq.Mamba2(dq.Mamba2Config(d_model=64, injection=False))")
        self.backbone = backbone

    def forward(
        self,
        x: Sequence,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
        return_uncommitted: bool = False,
    ) -> ModelOutput:
        """Run the layers once.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            mask: bool, True at real tokens, ``(batch, length)``. Padding may be on either side of a row, and leaves the
                row as it is alone. Default: no padding.
            cache: the ``cache`` of the :class:`ModelOutput` for the tokens before. Default: there are none.
            return_cache: whether to return the cache after these tokens.
            return_uncommitted: whether to return, instead of a cache, what commits any number of these tokens.

        Returns:
            The states; no statistics.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a bad shape.
        """
        check_sequence(x, self.backbone.d_model)
        check_type("cache", cache, (Cache, type(None)))
        check_flag("return_cache", return_cache)
        check_flag("return_uncommitted", return_uncommitted)
        padding = Padding.of(x, mask)
        tokens = padding.compact(x)
        # one pass unshards the layers one by one; only the states for a cache are computed after they have been left
        with unsharded(self.backbone, enabled=return_cache), cached_weights(self.backbone):
            inputs = self.backbone.prepare(tokens, cache, padding.mask)
            if isinstance(inputs, Inputs):
                inputs = replace(inputs, injection=None)
            args = TokenArgs(inputs, cache, padding.mask).with_room(x.shape[1])
            value, aux = token_map(self.backbone, need_aux=return_cache or return_uncommitted)(tokens, args)
            cache = advance(self.backbone, args, aux, x.shape[1]) if return_cache else None
        value = padding.back(value)
        states = value.detach()
        own = Uncommitted(states, partial(commit, self.backbone, args, aux, states))
        return ModelOutput(value, cache, uncommitted=own if return_uncommitted else None)

    @property
    def d_model(self) -> int:
        """Width of the states."""
        return self.backbone.d_model

    def compile(self, **options: Any) -> None:
        """Compile the layers with ``torch.compile``.

        Args:
            **options: those of ``torch.compile``.
        """
        self.backbone.compile(**options)


def check_nothing_to_solve(options: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Refuse options of a solve that were given, and all ``fields`` of a :class:`SolveConfig`, with a TypeError."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given := [*given, *fields]:
        raise TypeError(f"an explicit model has nothing to solve: it takes no {', '.join(given)}")
