"""What a backbone is: the map whose fixed point a model computes, and its inputs and cache."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Annotated, Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deqseq.arguments import (
    Instance,
    NonNegativeInt,
    Within,
    check_like,
    check_type,
    checked,
    shown,
)
from deqseq.layers import RMSNorm, apply_weight_norm, dropout_mask
from deqseq.layers.weight_norm import has_weight_norm
from deqseq.rows import take, tensors_of
from deqseq.types import Counts, Mask, RowIndex, Sequence


class Cache:
    """What a backbone keeps of the committed tokens (those whose state is final, and which later
    tokens read): a frozen dataclass of tensors.

    Example:
        >>> import torch, deqseq as dq
        >>> from deqseq import Cache
        >>> cache = dq.ImplicitModel(dq.Affine(4))(torch.ones(2, 6, 4), return_cache=True).cache
        >>> (
        ...     isinstance(cache, Cache),
        ...     [tensor.shape for tensor in dq.take(cache, torch.tensor([1])).tensors()],
        ... )
        (True, [torch.Size([1, 4])])
    """

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the cache, to compare and save; their first dimension is the row."""
        return tensors_of(self)

    @checked
    def reserve(self, tokens: NonNegativeInt, /) -> "Cache":
        """The same cache, prepared for a solve of the next ``tokens``."""
        return self

    def crop(self, tokens: int, /) -> "Cache":
        """The cache without the last ``tokens`` of each row; ValueError if that is impossible."""
        raise ValueError(
            f"a {type(self).__name__} cannot be cropped: the state of a recurrent backbone does "
            "not contain earlier states. Keep the cache of the point to come back to"
        )


@dataclass(frozen=True)
class JointCache(Cache):
    """The caches of the steps of a :class:`deqseq.Looped`, or of prelude, core and coda of a
    :class:`deqseq.RecurrentDepth`.

    Attributes:
        parts: one cache per part, in the order in which the parts run.
        kind: ``"steps"`` of a loop, or ``"parts"`` of a model.
    """

    parts: tuple[Cache, ...]
    kind: str

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is kept, part by part; rows first."""
        return tuple(tensor for part in self.parts for tensor in part.tensors())

    def reserve(self, tokens: int, /) -> "JointCache":
        """The same cache, prepared for the next ``tokens``."""
        return JointCache(tuple(part.reserve(tokens) for part in self.parts), self.kind)

    def crop(self, tokens: int, /) -> "JointCache":
        """The same cache without the last ``tokens`` of each row."""
        return JointCache(tuple(part.crop(tokens) for part in self.parts), self.kind)


def parts_of(cache: Any, number: int, kind: str) -> tuple[Cache | None, ...]:
    """The caches of so many parts of a kind; TypeError or ValueError for one of another model."""
    check_type("cache", cache, (JointCache, type(None)))
    if cache is None:
        return tuple(repeat(None, number))
    if len(cache.parts) != number or cache.kind != kind:
        raise ValueError(
            f"cache must be of this model, of {number} {kind}, got one of {len(cache.parts)} "
            f"{cache.kind}"
        )
    return cache.parts


C = TypeVar("C", bound=Cache)


@dataclass(frozen=True)
class Inputs:
    """What stays the same during a solve: prepared once, outside the loop.

    Attributes:
        injection: what is added inside the layers, ``(batch, length, width)``; None if the backbone
            has no injection, and in an :class:`deqseq.ExplicitModel`.
        dropout: dropout masks, one per layer, ``(batch, length, d_model)``; empty outside training.
        rotary: cosines and sines of the positions, as the blocks use them, each ``(batch or 1,
            length, headdim)`` or ``(batch or 1, length, 1, headdim)``; empty if there are none.
        real: which tokens the others attend to, ``(batch, 1, 1, length)``, in a backbone that is
            not causal. Default: all.
    """

    injection: Float[Tensor, "batch length width"] | None = None
    dropout: tuple[Float[Tensor, "batch length d_model"], ...] = ()
    rotary: tuple[Float[Tensor, "rows length *heads headdim"], ...] = ()
    real: Bool[Tensor, "batch 1 1 length"] | None = None

    def take_rows(self, rows: RowIndex) -> "Inputs":
        """Only the given ``rows``, ``(rows,)``; tables that all rows share stay as they are."""
        shared = all(len(table) == 1 for table in self.rotary)
        rotary = self.rotary if shared else take(self.rotary, rows)
        parts = take((self.injection, self.dropout), rows)
        return Inputs(*parts, rotary, take(self.real, rows))


class Backbone(nn.Module, ABC, Generic[C]):
    r"""A stack of sequence layers seen as a map on sequences, :math:`z \mapsto f_\theta(z, x)`.

    It must be causal (a token depends only on tokens up to it), or set ``causal = False``. It must
    be pure (it changes neither its cache nor its own state). Your own backbone needs ``d_model``,
    :meth:`prepare` and :meth:`forward`. For caches, decoding, and every sweep but
    :class:`Simultaneous` it must be causal and have :meth:`advance`. :class:`deqseq.Affine` is the
    smallest complete example.

    Example:
        >>> import torch, deqseq as dq
        >>> from deqseq import Backbone
        >>> from torch import nn
        >>> from typing import Any
        >>> class Pointwise(Backbone[Any]):  # each token on its own
        ...     def __init__(self, d_model):
        ...         super().__init__()
        ...         self.d_model, self.inner = d_model, nn.Linear(d_model, d_model)
        ...
        ...     def prepare(self, x, cache=None, mask=None):
        ...         return x
        ...
        ...     def forward(self, z, inputs, cache=None, *, need_aux=False):
        ...         return torch.tanh(self.inner(z) / 4 + inputs), None
        >>> dq.ImplicitModel(Pointwise(4))(torch.ones(2, 6, 4)).value.shape
        torch.Size([2, 6, 4])
    """

    d_model: int
    """Width of the input, and of the state unless :attr:`state_width` says otherwise."""
    causal: bool = True
    """Whether a token depends only on tokens up to it; if not, all are solved together."""
    gradient_checkpointing: bool = False
    """Whether the backward pass computes each block again instead of keeping its activations."""
    _stack: Any = None
    """The method that :meth:`run` calls: the part of :meth:`forward` from tensors to tensors."""
    _compiled: Callable[..., Any] | None = None

    @property
    def state_width(self) -> int:
        """Width of the state, at least ``d_model``; a head reads its first ``d_model`` channels."""
        return self.d_model

    @abstractmethod
    def prepare(self, x: Sequence, cache: C | None = None, mask: Mask | None = None) -> Any:
        """Prepare the inputs of a solve.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``; zero at padding.
            cache: what :meth:`advance` returned for the tokens before. Default: there are none.
            mask: True at real tokens, which come first in each row, ``(batch, length)``. Default:
                no padding.

        Returns:
            Inputs of :meth:`forward`: :class:`Inputs`, or any tensor, tuple, list, dict or
            dataclass of tensors ``(batch, length, ...)``.
        """

    @abstractmethod
    def forward(
        self, z: Sequence, inputs: Any, cache: C | None = None, *, need_aux: bool = False
    ) -> tuple[Sequence, Any]:
        """One iteration.

        Args:
            z: the state, ``(batch, length, state_width)``.
            inputs: what :meth:`prepare` returned for these tokens.
            cache: what :meth:`advance` returned for the tokens before. Default: there are none.
            need_aux: whether :meth:`advance` will be called.

        Returns:
            The new state, of the shape of ``z`` (its values at padding are ignored), and what
            :meth:`advance` needs of this evaluation: a record of tensors with a row dimension, or
            None if it is not needed.
        """

    def advance(self, cache: C | None, aux: Any, tokens: int, counts: Counts | None = None) -> C:
        """Commit the first tokens of an evaluation, without a graph or another evaluation.

        Args:
            cache: the cache of that evaluation. None: there were no tokens before.
            aux: what :meth:`forward` returned.
            tokens: how many tokens to commit, at least 1.
            counts: how many of them each row commits, ``(batch,)``. A padded row commits fewer; a
                row with a count of 0 keeps its cache. Default: all.

        Returns:
            The cache after these tokens, without a graph.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no advance(cache, aux, tokens, counts), so it keeps no "
            "cache: only the Simultaneous sweep without return_cache works. Write advance() to "
            "sweep, cache or generate with it"
        )

    def sees_input(self, inputs: Any) -> bool:
        """Whether :meth:`forward` depends on the tokens that ``inputs`` were prepared from."""
        return not isinstance(inputs, Inputs) or inputs.injection is not None

    def without_injection(self, inputs: Any) -> Any:
        """The ``inputs`` for an :class:`deqseq.ExplicitModel`, whose state already is the input."""
        return replace(inputs, injection=None) if isinstance(inputs, Inputs) else inputs

    def sizes(self) -> Any:
        """The configuration of this backbone, for :class:`deqseq.LanguageModelSpec`.

        Raises:
            TypeError: a specification cannot name this backbone.
        """
        raise TypeError(
            f"a specification cannot name a {type(self).__name__} (known: Mamba2, Llama, and "
            "DecoderBackbone, the layers of a transformers decoder): save its state_dict()"
        )

    def run_block(self, block: nn.Module, *arguments: Any) -> Any:
        """Call ``block`` with ``arguments``, in training with ``gradient_checkpointing`` if set."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)

    def compile(self, **options: Any) -> None:
        """Compile one iteration with ``torch.compile`` and its ``options``.

        The library's own backbones are compiled with dynamic shapes, so a new length or batch size
        does not recompile. One row, one token, a cache, gradients and ``need_aux`` each cost one
        more compilation; ``recompile_limit`` is 64 by default.
        """
        if self._stack is None:
            super().compile(**options)
            return
        options.setdefault("dynamic", True)
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            options.setdefault("recompile_limit", 64)
        self._compiled = torch.compile(type(self)._stack, **options)

    def run(self, *arguments: Any) -> Any:
        """Call ``_stack`` with ``arguments``, compiled if :meth:`compile` was called."""
        return (self._compiled or type(self)._stack)(self, *arguments)

    def __getstate__(self) -> dict[str, Any]:
        # compiled code is not copied or pickled: it would use the weights of the original
        return {**self.__dict__, "_compiled": None, "_compiled_call_impl": None}


class Given(Instance):
    """A backbone; the error says how to make one."""

    def remedy(self, value: object) -> str:
        name = type(value).__name__
        if type(value).__module__.startswith("deqseq.backbones") and name.endswith("Config"):
            return f": write {name.removesuffix('Config')}({name}(...))"
        if isinstance(value, type) and issubclass(value, Backbone):
            return f": write {value.__name__}(...)"
        advice = super().remedy(value)
        if isinstance(value, nn.Module) and not advice.startswith(":"):
            return ": subclass deqseq.Backbone, or solve it with deqseq.fixed_point"
        return advice


GivenBackbone = Annotated[Backbone[Any], Given(Backbone)]
"""A backbone as an argument."""
SkipScale = Annotated[float, Within("(0, 1]")]


class BlockStack(Backbone[C]):
    """Equal blocks and one projection of the input, which enters all of them."""

    config: Any
    layers: Any

    def add_injection(self, width: int) -> None:
        """The projection of the input, and weight normalisation of all layers, as configured."""
        config = self.config
        norm = RMSNorm(config.d_model, config.norm_eps) if config.injection else None
        self.injection_norm: Any = norm
        self.injection = nn.Linear(config.d_model, width) if config.injection else None
        if config.weight_norm:
            apply_weight_norm(self)

    def entering(self, z: Sequence) -> Sequence:
        """The state as it enters the first block."""
        scale = self.config.skip_scale
        return z if scale == 1 else z * scale

    def prepared(self, x: Sequence) -> Inputs:
        """The injection and the dropout masks of a solve."""
        injection = None if self.injection is None else self.injection(self.injection_norm(x))
        dropout = self.config.dropout if self.training else 0.0
        return Inputs(injection, tuple(dropout_mask(x, dropout) for _ in self.layers if dropout))

    def sizes(self) -> Any:
        return replace(self.config, weight_norm=has_weight_norm(self))


def check_cache(
    cache: Cache | None, kind: type[Cache], x: Sequence, shapes: Iterable[tuple[int | None, ...]]
) -> None:
    """Refuse a cache of another model, or of other rows or devices than ``x``.

    ``shapes`` are those of one row, None for any size.
    """
    check_type("cache", cache, (kind, type(None)))
    if cache is None:
        return
    wanted, tensors = [(len(x), *shape) for shape in shapes], cache.tensors()

    def fits(tensor: Tensor, shape: tuple[int | None, ...]) -> bool:
        pairs = zip(tensor.shape, shape, strict=False)
        same = all(expected in (None, size) for size, expected in pairs)
        return same and tensor.ndim == len(shape) and tensor.device == x.device

    if len(tensors) != len(wanted) or not all(map(fits, tensors, wanted)):
        got = [tuple(tensor.shape) for tensor in tensors]
        devices = {tensor.device for tensor in tensors}
        raise ValueError(
            f"cache must be of this model and of the rows of its input: tensors {wanted} on "
            f"{x.device}, got {got} on {devices}"
        )


def returned_by(
    name: str, call: Callable[..., Any], *inputs: Tensor, like: Tensor, what: str
) -> Tensor:
    """What a user's object returns, a tensor as ``like`` is; an error of torch names the object."""
    try:
        value = call(*inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        tensors = " and ".join(map(shown, inputs))
        raise ValueError(f"{name} cannot take {tensors}: {error}") from error
    check_like(name, value, like, what)
    return value


def check_narrow(name: str, backbone: Backbone[Any]) -> None:
    """Refuse a backbone whose state is wider than its input, where it becomes the input."""
    if backbone.state_width != backbone.d_model:
        raise ValueError(
            f"{name} must have states as wide as its input, {backbone.d_model}, got a "
            f"{type(backbone).__name__} with states of {backbone.state_width}"
        )


def check_sequence(x: Tensor, d_model: int) -> None:
    """Raise an error if ``x`` is not a batch of embedded sequences."""
    check_type("x", x, Tensor)
    if not x.is_floating_point():
        raise TypeError(f"x must be embedded tokens, of a floating-point dtype, got {x.dtype}")
    if x.ndim != 3 or x.shape[2] != d_model or 0 in x.shape:
        raise ValueError(
            f"x must have shape (batch, length, {d_model}), none of them 0, got {tuple(x.shape)}"
        )
