"""Which tokens are solved together: a block size and a window."""

from dataclasses import dataclass

from deqseq.arguments import PositiveInt, check_integer, checked


class Sweep:
    """Which tokens of a sequence are solved together: two numbers.

    A row iterates a window of ``window`` blocks, each of ``block`` tokens, which begins with its
    first uncommitted block. The tokens of a block end together. When the first blocks of the window
    pass the tolerance, they are committed (fixed, and added to the cache) and the window moves on.
    When ``stop.max_steps`` evaluations have committed nothing, the first block is committed as it
    is. Each row moves and ends independently. If a causal map has one fixed point, all sweeps find
    it, up to the tolerance; they differ in the amount of work and in how much of it is parallel.

    Example:
        A sweep of your own: windows of two blocks of four tokens.

        >>> from dataclasses import dataclass
        >>> from deqseq import Sweep
        >>> import torch, deqseq as dq
        >>> @dataclass(frozen=True)
        ... class Pairs(Sweep):
        ...     block = 4
        ...     window = 2
        >>> model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(stop=dq.Stop(rtol=1e-6)))
        >>> x = torch.ones(2, 9, 4)
        >>> torch.allclose(model(x, sweep=Pairs()).value, model(x).value, atol=1e-4)
        True
    """

    block: int | None = None
    """How many tokens end together. None: the whole row."""
    window: int = 1
    """How many blocks are iterated at once."""

    def width(self, length: int) -> int:
        """How many positions are iterated at once in sequences of ``length`` tokens: whole blocks,
        so that it can exceed ``length``. A ``block`` or ``window`` below 1 is an error.
        """
        if self.block is None:
            return length
        check_integer(f"{type(self).__name__}.block", self.block, 1)
        check_integer(f"{type(self).__name__}.window", self.window, 1)
        return min(self.block * self.window, -(-length // self.block) * self.block)


@dataclass(frozen=True)
class Simultaneous(Sweep):
    """All tokens together: parallel over the sequence, as the paper trains.

    If tokens converge only after those before them, the number of iterations grows with the length.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4))
        >>> model(torch.ones(2, 3, 4), sweep=dq.Simultaneous()).stats.iterations.shape
        torch.Size([2, 3])
    """


@checked
@dataclass(frozen=True)
class Chunked(Sweep):
    """Chunks of a fixed size: each ends before the next one begins.

    Args:
        size: tokens per chunk.

    Raises:
        ValueError: ``size`` is below 1.

    Example:
        >>> import torch, deqseq as dq
        >>> output = dq.ImplicitModel(dq.Affine(4))(torch.ones(2, 6, 4), sweep=dq.Chunked(3))
        >>> output.stats.evaluations, bool(output.converged.all())
        (16, True)
    """

    size: PositiveInt

    @property
    def block(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The size of a chunk."""
        return self.size


@dataclass(frozen=True)
class Sequential(Sweep):
    """Token by token: the model run as a recurrent network.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4))
        >>> model(torch.ones(2, 3, 4), sweep=dq.Sequential()).converged
        tensor([True, True])
    """

    block = 1


@checked
@dataclass(frozen=True)
class Sliding(Sweep):
    """A window over the first tokens that have not converged.

    If tokens converge from left to right, as in a trained model, about one per iteration, it takes
    nearly as few evaluations as :class:`Simultaneous`, and much less work. When its first tokens
    have converged, they are committed, and the window moves on. Tokens that stay in it keep their
    state; new ones begin at the model's ``start``. ``stats.forced`` marks tokens that were
    committed without converging, because the budget was spent.

    Args:
        window: how many tokens are iterated together.

    Raises:
        ValueError: ``window`` is below 1.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(stop=dq.Stop(rtol=1e-6)))
        >>> output = model(torch.ones(2, 30, 4), sweep=dq.Sliding(4))
        >>> output.stats.updates.shape, bool(output.stats.forced.any())
        (torch.Size([2, 30]), False)
    """

    block = 1
    window: PositiveInt = 8
