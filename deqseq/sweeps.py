"""Which tokens are solved together: the dial from simultaneous to sequential."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


class Sweep(ABC):
    """A way to cut a sequence into chunks, each solved against the settled chunks before it.

    All sweeps of a causal backbone find the same fixed point, as far as the tolerance allows; they differ in how
    much work it takes and in how much of it is parallel.
    """

    @abstractmethod
    def chunks(self, length: int) -> list[int]:
        """Sizes of the chunks of a sequence of ``length`` tokens, left to right.

        Args:
            length: tokens, at least 1.

        Returns:
            Positive sizes that add up to ``length``.
        """


@dataclass(frozen=True)
class Simultaneous(Sweep):
    """All tokens together: parallel over the sequence, as training needs it.

    The number of self-iterations grows with the length where later tokens wait for earlier ones.

    Example:
        >>> Simultaneous().chunks(5)
        [5]
    """

    def chunks(self, length: int) -> list[int]:
        """One chunk."""
        return [length]


@dataclass(frozen=True)
class Chunked(Sweep):
    """Chunks of a fixed size, left to right.

    Args:
        size: tokens a chunk, at least 1.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> Chunked(2).chunks(5)
        [2, 2, 1]
    """

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"Chunked.size must be an integer >= 1, got {self.size!r}")

    def chunks(self, length: int) -> list[int]:
        """Full chunks, and what is left."""
        whole, rest = divmod(length, self.size)
        return [self.size] * whole + [rest] * bool(rest)


@dataclass(frozen=True)
class Sequential(Sweep):
    """Token by token: the model run as the recurrent network it is.

    Example:
        >>> Sequential().chunks(3)
        [1, 1, 1]
    """

    def chunks(self, length: int) -> list[int]:
        """One chunk a token."""
        return [1] * length
