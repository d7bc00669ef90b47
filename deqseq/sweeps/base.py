"""Which tokens are solved together: the plan of a solve over a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from deqseq.check import check_integer


class Sweep(ABC):
    """Which tokens of a sequence are solved together. One of your own is a plan: sizes of chunks, left to right.

    Each chunk is solved to its end against the committed tokens before it. All sweeps of a causal map find the same
    fixed point, as far as the tolerance allows and the map has only one; they differ in how much work it takes and how
    much of it is parallel. A sweep object is its configuration: a frozen dataclass.

    Example:
        A sweep of your own: chunks that double.

        >>> import torch, deqseq as dq
        >>> @dataclass(frozen=True)
        ... class Doubling(Sweep):
        ...     def sizes(self, length):
        ...         size = 1
        ...         while length > 0:
        ...             yield min(size, length)
        ...             length, size = length - size, 2 * size
        >>> model, x = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(stop=dq.Stop(rtol=1e-6))), torch.ones(2, 6, 4)
        >>> torch.allclose(model(x, sweep=Doubling()).value, model(x).value, atol=1e-4)
        True
    """

    @abstractmethod
    def sizes(self, length: int) -> Iterable[int]:
        """Sizes of the chunks, each at least 1, which add up to ``length``."""


@dataclass(frozen=True)
class Simultaneous(Sweep):
    """All tokens together: parallel over the sequence, as the paper trains.

    The number of iterations grows with the length where later tokens wait for earlier ones. Statistics are per row.

    Example:
        >>> import torch, deqseq as dq
        >>> dq.ImplicitModel(dq.Affine(4))(torch.ones(2, 3, 4), sweep=dq.Simultaneous()).stats.iterations.shape
        torch.Size([2])
    """

    def sizes(self, length: int) -> Iterable[int]:
        return (length,)


@dataclass(frozen=True)
class Chunked(Sweep):
    """Chunks of a fixed size. Statistics are per token.

    Args:
        size: tokens per chunk, at least 1.

    Raises:
        ValueError: ``size`` is below 1.

    Example:
        >>> import torch, deqseq as dq
        >>> dq.ImplicitModel(dq.Affine(4))(torch.ones(2, 3, 4), sweep=dq.Chunked(2)).stats.iterations.shape
        torch.Size([2, 3])
    """

    size: int

    def __post_init__(self) -> None:
        check_integer("Chunked.size", self.size, 1)

    def sizes(self, length: int) -> Iterable[int]:
        return [min(self.size, length - start) for start in range(0, length, self.size)]


@dataclass(frozen=True)
class Sequential(Sweep):
    """Token by token: the model run as a recurrent network. Statistics are per token.

    Example:
        >>> import torch, deqseq as dq
        >>> dq.ImplicitModel(dq.Affine(4))(torch.ones(2, 3, 4), sweep=dq.Sequential()).stats.iterations.shape
        torch.Size([2, 3])
    """

    def sizes(self, length: int) -> Iterable[int]:
        return [1] * length


@dataclass(frozen=True)
class Sliding(Sweep):
    """A window over the first tokens that have not converged: the least work where convergence moves left to right.

    In a trained model about one token converges per iteration. Only the window is iterated; when its first tokens have
    converged, they are committed from an evaluation at which they pass, and the window moves on: tokens that stay keep
    their state, new ones start where the model starts.

    Each row has a window of its own, and rows that have ended leave the batch, unless their cache is needed. A window
    of which a part has converged moves after every second evaluation, because a move costs the whole batch about half
    of one. Each token is tested on its own, whatever ``stop.per`` says. After ``stop.max_steps`` iterations without a
    commit the first token of the window is committed as it is; ``stats.forced`` marks those. A solver with a memory
    begins afresh in the rows that move. One of another library cannot: then no window moves until all can.

    Args:
        window: tokens that are iterated together, at least 1.

    Raises:
        ValueError: ``window`` is below 1; at solving, a whole-sequence norm.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(stop=dq.Stop(rtol=1e-6)))
        >>> output = model(torch.ones(2, 30, 4), sweep=dq.Sliding(4))
        >>> output.stats.updates.shape, bool(output.stats.forced.any())
        (torch.Size([2, 30]), False)
    """

    window: int = 8

    def __post_init__(self) -> None:
        check_integer("Sliding.window", self.window, 1)

    def sizes(self, length: int) -> Iterable[int]:
        """The largest commits there can be: whole windows. What is committed is decided while solving."""
        return Chunked(self.window).sizes(length)


@dataclass(frozen=True)
class Lockstep(Sweep):
    """A fixed number of iterations of all tokens together, and a cache for each: iteration 3 sees those of iteration 3.

    So models trained at a fixed depth are decoded as their authors' code does it, Huginn at a given number of steps or
    Ouro. Decoding token by token then equals a forward pass of the whole sequence at any number of iterations, where
    the other sweeps need a fixed point for that; it costs a cache per iteration instead of one. The tolerance and the
    budget of :class:`Stop` are not used, and no row is reported as converged. Statistics are per row.

    With an exit rule, all iterations run all the same, and the value of a token is that of the first iteration at which
    the rule lets it go, or of the last one. Iterations and residuals are then per token.

    Args:
        steps: iterations, at least 1.

    Raises:
        ValueError: ``steps`` is below 1; at solving, an external solver, or a cache of another sweep.

    Example:
        >>> import torch, deqseq as dq
        >>> model, x = dq.ImplicitModel(dq.Affine(4)).eval(), torch.ones(2, 3, 4)
        >>> whole = model(x, sweep=Lockstep(5)).value
        >>> first = model(x[:, :2], sweep=Lockstep(5), return_cache=True)
        >>> last = model(x[:, 2:], sweep=Lockstep(5), cache=first.cache)
        >>> torch.allclose(last.value, whole[:, 2:]), len(first.cache.steps)
        (True, 5)
    """

    steps: int

    def __post_init__(self) -> None:
        check_integer("Lockstep.steps", self.steps, 1)

    def sizes(self, length: int) -> Iterable[int]:
        return (length,)
