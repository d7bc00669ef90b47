"""The same backbone without iteration: the baseline."""

from typing import Any

import torch

from deqseq.arguments import PositiveInt, checked
from deqseq.backbones.base import Cache, GivenBackbone, check_narrow
from deqseq.layers import with_weights
from deqseq.models.base import BackboneModel, Uncommitted, check_input, check_loaded
from deqseq.models.output import Evaluation, ModelOutput
from deqseq.models.padding import Padding
from deqseq.start import Start
from deqseq.tokens import TokenArgs, check_commits, token_map
from deqseq.types import Mask, Sequence

UNSET = {"callback": None, "throw": False, "solve": None}
"""Options of a solve that ask for nothing."""


class ExplicitModel(BackboneModel):
    r"""One pass of a backbone over the embedded tokens, :math:`z = f_\theta(x)`: an ordinary
    sequence model.

    Args:
        backbone: the layers. An injection is not used here, except that of a backbone inside a
            :class:`Looped`, so build the backbone without.

    Example:
        >>> import torch, deqseq as dq
        >>> config = dq.Mamba2Config(d_model=16, n_layers=2, d_state=4, headdim=8, injection=False)
        >>> dq.ExplicitModel(dq.Mamba2(config))(torch.zeros(1, 5, 16)).value.shape
        torch.Size([1, 5, 16])
    """

    @checked
    def __init__(self, backbone: GivenBackbone) -> None:
        super().__init__(backbone)
        check_narrow("backbone", backbone)

    @checked
    def forward(
        self,
        x: Sequence,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
        **options: Any,
    ) -> ModelOutput:
        """Run the layers once; the value has no statistics.

        ``x``, ``mask``, ``cache`` and ``return_cache`` are those of :meth:`ImplicitModel.forward`,
        ``(batch, length, d_model)`` and ``(batch, length)``. Its other ``options`` raise an
        error unless they have no effect.

        Raises:
            TypeError: an argument of the wrong type, or an option of a solve.
            ValueError: a bad shape, or offloaded weights.
        """
        for name, value in options.items():
            if name not in UNSET or value is not UNSET[name]:
                raise TypeError(f"an explicit model has nothing to solve: it takes no {name}")
        check_loaded(self.backbone, x)
        check_input(x, self.backbone)
        if return_cache or cache is not None:
            check_commits(self.backbone)
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
        start: Start | Sequence | None = None,
        iterations: PositiveInt = 1,
    ) -> Evaluation:
        check_input(x, self.backbone)
        check_commits(self.backbone)
        value, aux = token_map(x, self._args(x, cache, None, True))
        return Evaluation(value, value, value, Uncommitted(self.backbone, cache, aux))

    def _args(
        self, x: Sequence, cache: Cache | None, mask: Mask | None, need_aux: bool
    ) -> TokenArgs:
        args = TokenArgs.prepared(with_weights(self.backbone), x, cache, mask, need_aux)
        return args._replace(inputs=self.backbone.without_injection(args.inputs))
