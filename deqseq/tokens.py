"""The map of some tokens of a backbone, and how they are committed."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deqseq.arguments import check_like, check_type
from deqseq.backbones.base import Backbone, Cache
from deqseq.rows import check_record, check_rows, map_tensors, tensors_of
from deqseq.solution import Solution, SolveStats, Status
from deqseq.step import autocast_dtype
from deqseq.types import Counts, Mask, Sequence


class TokenArgs(NamedTuple):
    """What the map of some tokens needs besides their state: the second argument of
    :func:`token_map`.

    ``need_aux`` says whether the map returns what commits them, and of a whole sequence whether its
    cache is wanted; ``x`` is what the inputs of a whole sequence were prepared from.
    """

    backbone: Backbone[Any]
    inputs: Any
    cache: Cache | None = None
    mask: Mask | None = None
    need_aux: bool = False
    x: Sequence | None = None

    @classmethod
    def prepared(
        cls,
        backbone: Backbone[Any],
        x: Sequence,
        cache: Cache | None,
        mask: Mask | None,
        need_aux: bool,
    ) -> "TokenArgs":
        """The inputs of all tokens ``x``, ``(batch, length, d_model)``, and room in the cache.

        A backbone that is evaluated more than once comes from :func:`deqseq.layers.with_weights`.
        """
        inputs = backbone.prepare(x, cache, mask)
        check_record(f"what {type(backbone).__name__}.prepare returns", inputs, len(x))
        reserved = None if cache is None else cache.reserve(x.shape[1])
        return cls(backbone, inputs, reserved, mask, need_aux, x)

    def renewed(self) -> "TokenArgs":
        """The same with inputs prepared from these rows only, so that no graph reaches others.

        What has no graph, such as a random mask, stays as it was drawn.
        """
        assert self.x is not None
        new = self.backbone.prepare(self.x, self.cache, self.mask)
        kept = map_tensors(lambda new, old: new if new.requires_grad else old, new, self.inputs)
        return self._replace(inputs=kept)

    def at(
        self, shared: Tensor, separate: Tensor, cache: Cache | None, mask: Mask | None
    ) -> "TokenArgs":
        """The tokens of a window, ``(rows, width)``, which may be committed.

        Args:
            shared: positions, for inputs of one row that all share.
            separate: ``row * length + position``, for inputs of each row.
            cache: of the tokens before the window.
            mask: True at real tokens. Default: all of them are.
        """

        def gathered(x: Tensor) -> Tensor:
            return x[0][shared] if len(x) == 1 else x.flatten(0, 1)[separate]

        inputs = map_tensors(gathered, self.inputs)
        return TokenArgs(self.backbone, inputs, cache, mask, need_aux=True)

    def advance(self, aux: Any, rows: int, tokens: int, counts: Counts | None = None) -> Cache:
        """The cache of these ``rows`` after the first ``tokens``, or ``counts`` of them."""
        with torch.no_grad():
            after = self.backbone.advance(self.cache, aux, tokens, counts)
        name = f"what {type(self.backbone).__name__}.advance returns"
        check_type(name, after, Cache)
        check_rows(name, after, rows, "z")
        return after

    def per_token(self, solution: Solution) -> Solution:
        """A solution with statistics per token, and the cache after these tokens as its ``aux``."""
        stats, shape = solution.stats, solution.value.shape[:2]
        if stats.iterations.ndim == 2:  # a sweep has counted tokens, and its aux is the cache
            return solution

        def expanded(numbers: Tensor) -> Tensor:
            return numbers.reshape(len(numbers), -1).expand(shape)

        iterations = expanded(stats.iterations)
        forced = expanded(solution.status != Status.CONVERGED)
        counts = None
        if self.mask is not None:
            iterations, forced = iterations * self.mask, forced & self.mask
            counts = self.mask.sum(dim=1)
        residual, updates = expanded(stats.residual), expanded(stats.updates)
        stats = SolveStats(iterations, residual, stats.evaluations, updates, forced)
        cache = None
        if self.need_aux:
            cache = self.advance(solution.aux, len(solution.value), solution.value.shape[1], counts)
        return replace(solution, stats=stats, aux=cache)

    def check_sweep(self, length: int) -> None:
        """Refuse inputs that cannot be divided into tokens."""
        for x in tensors_of(self.inputs):
            if x.ndim < 2 or x.shape[1] != length:
                raise ValueError(
                    f"Backbone.prepare must return tensors (batch, {length} tokens, ...), which a "
                    f"sweep can divide, got one of shape {tuple(x.shape)}: expand it, or keep it "
                    "as an attribute of the backbone"
                )


def token_map(z: Sequence, tokens: TokenArgs) -> tuple[Sequence, Any]:
    """One iteration of some tokens, and what commits them; padding is zero in its value."""
    pair = tokens.backbone(z, tokens.inputs, tokens.cache, need_aux=tokens.need_aux)
    name = f"{type(tokens.backbone).__name__}.forward"
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{name} must return a pair (new state, aux), got {type(pair).__name__}")
    check_like(name, pair[0], z, "z")
    if tokens.mask is None:
        return pair
    value, aux = pair
    return value.masked_fill(~tokens.mask[..., None], 0), aux


def own_parts(backbone: Backbone[Any]) -> list[Backbone[Any]]:
    """The backbones inside, or itself, that are the user's and not of this library."""
    parts = (part for part in backbone.modules() if isinstance(part, Backbone))
    return [part for part in parts if not type(part).__module__.startswith("deqseq.")]


@torch.no_grad()
def check_backbone(backbone: Backbone[Any], x: Sequence) -> None:
    """Refuse a backbone whose rows mix, or that says it is causal and is not.

    Some tokens are replaced, and the others must keep their values. ``x`` gives the inputs' shape,
    dtype and device. A backbone that draws random numbers differs from itself; it is not refused.
    """
    generator, (rows, length) = torch.Generator("cpu").manual_seed(0), x.shape[:2]

    def noise() -> list[Tensor]:
        shapes = ((rows, length, width) for width in (backbone.d_model, backbone.state_width))
        return [torch.randn(*shape, generator=generator, device="cpu").to(x) for shape in shapes]

    def value(x: Tensor, z: Tensor) -> Tensor:
        return token_map(z, TokenArgs.prepared(backbone, x, None, None, False))[0]

    def differ(values: Tensor, others: Tensor, where: Tensor) -> bool:
        share = torch.finfo(autocast_dtype(x.device) or x.dtype).eps ** 0.5
        far = (values - others).norm(dim=-1) > share * values.norm(dim=-1)
        return bool((far & where).any())

    row, token = torch.arange(rows, device=x.device)[:, None], torch.arange(length, device=x.device)
    cuts = {1, length // 2, length - 1} - {0, length} if backbone.causal else ()
    kept = [(token < cut, LOOKS_AHEAD) for cut in cuts]
    if rows > 1:
        kept += [(half, MIXES_ROWS) for half in (row < rows // 2, row >= rows // 2)]
    first, second = noise(), noise()
    values = value(*first)
    for where, fault in kept:
        pairs = zip(first, second, strict=True)
        others = value(*(torch.where(where[..., None], a, b) for a, b in pairs))
        everywhere = torch.ones_like(where)
        if differ(values, others, where) and not differ(values, value(*first), everywhere):
            named = type((own_parts(backbone) or [backbone])[0]).__name__
            raise ValueError(f"this {named} {fault}")


LOOKS_AHEAD = (
    "is not causal: its tokens depend on later ones, which a language model has to predict. Mend "
    "it, or set causal = False and take a TokenClassifier"
)
MIXES_ROWS = (
    "mixes rows: the value of a row depends on the others, so no row can be solved on its own. "
    "Mend it"
)


def keeps_cache(backbone: Backbone[Any]) -> bool:
    """Whether the backbone can be swept, cached and decoded."""
    return backbone.causal and type(backbone).advance is not Backbone.advance


def check_commits(backbone: Backbone[Any]) -> None:
    """Refuse a backbone that is not causal or has no ``advance``, before anything is solved."""
    if not backbone.causal:
        raise NotImplementedError(
            f"this {type(backbone).__name__} is not causal: all of its tokens are solved together, "
            "by the Simultaneous sweep, without cache, return_cache and evaluate()"
        )
    if not keeps_cache(backbone):
        backbone.advance(None, None, 1)
