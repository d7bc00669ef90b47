"""What a backbone is: the map whose fixed point a model computes, and its input, cache and shapes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from deqseq.types import RowIndex

Sequence = Float[Tensor, "batch length d_model"]


@runtime_checkable
class Cache(Protocol):
    """What a backbone remembers of the tokens that are settled; a value that nobody changes in place."""

    def select(self, rows: RowIndex, /) -> "Cache":
        """The named rows alone."""
        ...


C = TypeVar("C", bound=Cache)


@dataclass(frozen=True)
class Injection:
    """How the input enters every self-iteration: made once a solve, outside the loop.

    Attributes:
        value: what is added inside the layers, ``(batch, length, width)``; None for an explicit model.
        masks: dropout masks, one a layer, ``(batch, length, d_model)``; empty outside training.

    Example:
        >>> import torch
        >>> Injection(torch.zeros(4, 6, 3)).select(torch.tensor([1, 2])).tokens(0, 5).value.shape
        torch.Size([2, 5, 3])
    """

    value: Float[Tensor, "batch length width"] | None = None
    masks: tuple[Float[Tensor, "batch length d_model"], ...] = ()

    def select(self, rows: RowIndex) -> "Injection":
        """The named rows alone."""
        value = None if self.value is None else self.value[rows]
        return Injection(value, tuple(mask[rows] for mask in self.masks))

    def tokens(self, start: int, stop: int) -> "Injection":
        """The tokens from ``start`` up to ``stop`` alone."""
        value = None if self.value is None else self.value[:, start:stop]
        return Injection(value, tuple(mask[:, start:stop] for mask in self.masks))


class Backbone(nn.Module, ABC, Generic[C]):
    r"""A stack of sequence layers seen as a map on sequences, :math:`z \mapsto f_\theta(z, x)`.

    It must be causal: what it does at a token depends on tokens up to it. It is pure: neither the cache that it is
    given nor any state of its own changes.
    """

    d_model: int
    """Width of the state."""

    @abstractmethod
    def inject(self, x: Sequence) -> Injection:
        """Prepare the input of a solve.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.

        Returns:
            What :meth:`forward` needs of them, dropout masks included.

        Raises:
            ValueError: the backbone was built without an injection.
        """

    def masks(self, x: Sequence) -> tuple[Sequence, ...]:
        """Dropout masks for one solve (or one explicit pass), one a layer; none unless a backbone drops out."""
        return ()

    @abstractmethod
    def init_cache(self, batch: int) -> C:
        """The cache before the first token."""

    @abstractmethod
    def forward(
        self, z: Sequence, injection: Injection, cache: C | None = None, *, return_cache: bool = False
    ) -> tuple[Sequence, C | None]:
        """One self-iteration.

        Args:
            z: the state, ``(batch, length, d_model)``.
            injection: what :meth:`inject` made of the same tokens.
            cache: what came before them; None: nothing.
            return_cache: whether the cache that follows is wanted.

        Returns:
            The new state, and the cache after these tokens (None if it was not asked for).
        """


def check_sequence(x: Tensor, d_model: int) -> None:
    """Refuse what is not a batch of embedded sequences.

    Raises:
        ValueError: names the shape or dtype that was given and the one that is wanted.
    """
    if not x.is_floating_point():
        raise ValueError(f"x must be embedded tokens, of a floating-point dtype, got {x.dtype}")
    if x.ndim != 3 or x.shape[2] != d_model or 0 in x.shape:
        raise ValueError(f"x must have shape (batch, length, {d_model}), none of them 0, got {tuple(x.shape)}")
