"""The same backbone without iteration: the baseline."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch

from deqseq.annotations import AtLeast, checked
from deqseq.backbones.base import Backbone, Cache, Inputs
from deqseq.layers import with_weights
from deqseq.models.base import Model, check_input
from deqseq.models.output import Evaluation, ModelOutput
from deqseq.models.padding import Padding
from deqseq.tokens import TokenArgs, commit, token_map
from deqseq.types import Counts, Mask, Sequence


class ExplicitModel(Model):
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

    @checked
    def __init__(self, backbone: Backbone[Any]) -> None:
        super().__init__()
        self.backbone = backbone

    @checked
    def forward(
        self,
        x: Sequence,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
    ) -> ModelOutput:
        """Run the layers once.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            mask: bool, True at real tokens, ``(batch, length)``. Padding may be on either side of a row, and leaves the
                row as it is alone. Default: no padding.
            cache: the ``cache`` of the :class:`ModelOutput` for the tokens before. Default: there are none.
            return_cache: whether to return the cache after these tokens.

        Returns:
            The states; no statistics.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a bad shape.
        """
        check_input(x, self.backbone)
        padding = Padding.of(x, mask)
        tokens = padding.compact(x)
        args = self._args(tokens, cache, padding.mask, return_cache)
        value, aux = token_map(tokens, args)
        counts = None if padding.mask is None else padding.mask.sum(dim=1)
        after = args.advance(aux, len(x), x.shape[1], counts) if return_cache else None
        return ModelOutput(padding.back(value), after)

    @checked
    @torch.no_grad()
    def evaluate(
        self,
        x: Sequence,
        cache: Cache | None = None,
        start: Sequence | None = None,
        iterations: Annotated[int, AtLeast(1)] = 1,
    ) -> Evaluation:
        check_input(x, self.backbone)
        value, aux = token_map(x, self._args(x, cache, None, True))
        return Evaluation(value, value, value, aux)

    @checked
    def commit(self, cache: Cache | None, evaluation: Evaluation, counts: Counts | None = None) -> Cache:
        return commit(self.backbone, cache, evaluation.aux, evaluation.states, counts)

    def _args(self, x: Sequence, cache: Cache | None, mask: Mask | None, need_aux: bool) -> TokenArgs:
        args = TokenArgs.prepared(with_weights(self.backbone), x, cache, mask, need_aux)
        if isinstance(args.inputs, Inputs):
            args = args._replace(inputs=replace(args.inputs, injection=None))
        return args

    @property
    def d_model(self) -> int:
        return self.backbone.d_model

    def compile(self, **options: Any) -> None:
        self.backbone.compile(**options)


def check_nothing_to_solve(options: Mapping[str, Any]) -> None:
    """Refuse options of a solve that are given, with a TypeError."""
    unset: Mapping[str, Any] = {"callback": None, "throw": False, "solve": None}
    if given := [name for name, value in options.items() if name not in unset or value is not unset[name]]:
        raise TypeError(f"an explicit model has nothing to solve: it takes no {', '.join(given)}")
