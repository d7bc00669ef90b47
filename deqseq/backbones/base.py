"""What a backbone is: the map whose fixed point a model computes, and its input, cache and shapes."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from deqseq.types import RowIndex

Sequence = Float[Tensor, "batch length d_model"]
"""A batch of sequences: embedded tokens, or the state of an iteration."""
RealTokens = Bool[Tensor, "batch length"]
"""Which tokens are real, and which are padding."""


class Cache(ABC):
    """What a backbone remembers of the tokens that are settled: a value, whose content nobody changes in place.

    Example:
        >>> import deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4))
        >>> cache = model(torch.ones(2, 6, 4), return_cache=True).cache
        >>> isinstance(cache, Cache), [tensor.shape for tensor in cache.select(torch.tensor([1])).tensors()]
        (True, [torch.Size([1, 4])])
    """

    @abstractmethod
    def select(self, rows: RowIndex, /) -> "Cache":
        """The named ``rows`` alone, ``(rows,)``, in this order; one may be named more than once (beam search)."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is remembered, for comparing and saving; rows first."""

    def reserve(self, tokens: int, /) -> "Cache":
        """The same cache, prepared to be continued by so many ``tokens``."""
        return self


C = TypeVar("C", bound=Cache)
T = TypeVar("T")


@runtime_checkable
class Trail(Protocol):
    """What one evaluation computed, as far as the cache after any of its tokens depends on it.

    Example:
        >>> import deqseq as dq
        >>> backbone, x = dq.Affine(4), torch.ones(2, 6, 4)
        >>> _, trail = backbone(x, backbone.inject(x), return_trail=True)
        >>> isinstance(trail, Trail), torch.equal(trail.after(3).previous, x[:, 2])
        (True, True)
    """

    def after(self, tokens: int, /) -> Cache:
        """The cache after the first ``tokens`` of the evaluated tokens, without a graph."""
        ...

    def merged(self, rows: RowIndex, other: Any, /) -> "Trail":
        """This trail, the named ``rows``, ``(rows,)``, replaced by ``other``, an evaluation of those rows alone."""
        ...


@dataclass(frozen=True)
class Injection:
    """What stays the same of the tokens during a solve: made once, outside the loop.

    Attributes:
        value: what is added inside the layers, ``(batch, length, width)``; None for an explicit model.
        dropout: dropout masks, one a layer, ``(batch, length, d_model)``; empty outside training.
        real: which tokens are no padding, ``(batch, length)``; padding follows all real tokens of its row. None: all.
        tables: what a backbone knows of the tokens' positions, each ``(batch or 1, length, ...)``.

    Example:
        >>> import torch
        >>> Injection(torch.zeros(4, 6, 3)).select(torch.tensor([1, 2])).tokens(0, 5).value.shape
        torch.Size([2, 5, 3])
    """

    value: Float[Tensor, "batch length width"] | None = None
    dropout: tuple[Float[Tensor, "batch length d_model"], ...] = ()
    real: Bool[Tensor, "batch length"] | None = None
    tables: tuple[Float[Tensor, "rows length *features"], ...] = ()

    def select(self, rows: RowIndex) -> "Injection":
        """The named ``rows`` alone, ``(rows,)``."""
        value, real = (None if part is None else part[rows] for part in (self.value, self.real))
        tables = tuple(table if len(table) == 1 else table[rows] for table in self.tables)
        return Injection(value, tuple(mask[rows] for mask in self.dropout), real, tables)

    def tokens(self, start: int, stop: int) -> "Injection":
        """The tokens from ``start`` up to ``stop`` alone."""
        value, real = (None if part is None else part[:, start:stop] for part in (self.value, self.real))
        dropout, tables = (tuple(part[:, start:stop] for part in parts) for parts in (self.dropout, self.tables))
        return Injection(value, dropout, real, tables)

    def contiguous(self) -> "Injection":
        """The same, in memory of its own: compiled code is made anew for each pattern of strides."""
        value, real = (None if part is None else part.contiguous() for part in (self.value, self.real))
        dropout, tables = (tuple(part.contiguous() for part in parts) for parts in (self.dropout, self.tables))
        return Injection(value, dropout, real, tables)


class Backbone(nn.Module, ABC, Generic[C]):
    r"""A stack of sequence layers seen as a map on sequences, :math:`z \mapsto f_\theta(z, x)`.

    It must be causal: what it does at a token depends on tokens up to it. It is pure: neither the content of the
    cache that it is given nor any state of its own changes.

    One of your own gives ``d_model``, :meth:`inject`, :meth:`init_cache` and :meth:`forward`, a :class:`Cache` and a
    :class:`Trail`; :class:`deqseq.Affine` is the smallest that has everything.

    Example:
        >>> class NoMemory(Backbone[Any]):     # each token on its own: no cache, no trail
        ...     def __init__(self, d_model):
        ...         super().__init__()
        ...         self.d_model, self.inner = d_model, nn.Linear(d_model, d_model)
        ...     def inject(self, x, cache=None, real=None): return Injection(x, real=real)
        ...     def init_cache(self, batch): raise NotImplementedError
        ...     def forward(self, z, injection, cache=None, *, return_trail=False):
        ...         return torch.tanh(self.inner(z) / 4 + injection.value), None
        >>> import deqseq as dq
        >>> dq.ImplicitModel(NoMemory(4))(torch.ones(2, 6, 4)).value.shape
        torch.Size([2, 6, 4])
    """

    d_model: int
    """Width of the state."""
    _compiled: Callable[..., Any] | None = None

    @abstractmethod
    def inject(self, x: Sequence, cache: C | None = None, real: RealTokens | None = None) -> Injection:
        """Prepare the input of a solve.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            cache: what came before them; None: nothing.
            real: which of them are no padding, ``(batch, length)``, real ones first in each row; None: all.

        Returns:
            What :meth:`forward` needs of them, that of :meth:`place` included.

        Raises:
            ValueError: the backbone was built without an injection.
        """

    def place(self, x: Sequence, cache: C | None = None, real: RealTokens | None = None) -> Injection:
        """All that :meth:`forward` needs of the tokens but their content: dropout masks, positions, padding.

        An explicit model's pass needs no more.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            cache: what came before them; None: nothing.
            real: which of them are no padding, ``(batch, length)``, real ones first in each row; None: all.

        Returns:
            An injection without a value.
        """
        return Injection(real=real)

    @abstractmethod
    def init_cache(self, batch: int) -> C:
        """The cache of ``batch`` rows before their first token."""

    @abstractmethod
    def forward(
        self, z: Sequence, injection: Injection, cache: C | None = None, *, return_trail: bool = False
    ) -> tuple[Sequence, Trail | None]:
        """One self-iteration.

        Args:
            z: the state, ``(batch, length, d_model)``; what it gives at padding does not matter.
            injection: what :meth:`inject` made of the same tokens.
            cache: what came before them; None: nothing.
            return_trail: whether the cache that follows will be asked for.

        Returns:
            The new state, and what the cache after these tokens depends on (None if it was not asked for).
        """

    def compile(self, **options: Any) -> None:
        """Compile one self-iteration with ``torch.compile``.

        Args:
            **options: of ``torch.compile``.
        """
        super().compile(**options)

    def compile_stack(self, stack: Callable[..., Any], options: dict[str, Any]) -> None:
        """Let :meth:`run` call a compiled ``stack``: the part of :meth:`forward` that goes from tensors to tensors.

        Sizes are dynamic from the start, so that another length, batch or window does not compile again. What compiles
        on its own is a kind of call: one row or several, one token or several, with a past or without, with a graph
        or without, to be committed or not. Those are more than the eight that torch allows by default.

        Args:
            stack: the function.
            options: of ``torch.compile``; they come before the defaults named here.
        """
        known = inspect.signature(torch.compile).parameters
        defaults: dict[str, Any] = {"dynamic": True} | ({"recompile_limit": 64} if "recompile_limit" in known else {})
        self._compiled = torch.compile(stack, **(defaults | options))

    def run(self, stack: Callable[..., T], *arguments: Any) -> T:
        """What ``stack`` gives for ``arguments``, compiled if it was asked for."""
        return (self._compiled or stack)(*arguments)

    def __getstate__(self) -> dict[str, Any]:
        # compiled code is no part of a copy or a pickle: it would go on with the weights of the original
        return {**self.__dict__, "_compiled": None, "_compiled_call_impl": None}


def real_tokens(real: RealTokens | None, tokens: int) -> Int64[Tensor, " batch"] | None:
    """How many of the first ``tokens`` are real in each row; None: all of them in all rows."""
    return None if real is None else real[:, :tokens].sum(dim=1)


def check_sequence(x: Tensor, d_model: int) -> None:
    """Refuse what is not a batch of embedded sequences.

    Raises:
        ValueError: names the shape or dtype that was given and the one that is wanted.
    """
    if not x.is_floating_point():
        raise ValueError(f"x must be embedded tokens, of a floating-point dtype, got {x.dtype}")
    if x.ndim != 3 or x.shape[2] != d_model or 0 in x.shape:
        raise ValueError(f"x must have shape (batch, length, {d_model}), none of them 0, got {tuple(x.shape)}")
