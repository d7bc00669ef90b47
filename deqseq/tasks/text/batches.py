"""Training batches of a packed text, one after the other."""

from collections.abc import Iterator

from deqseq.tasks.text.packing import PackedText, TextBatch, share_of


class PackedBatches:
    """Batches of a text in memory, without end; the same interface as :class:`~deqseq.tasks.text.PackedStream`.

    Args:
        text: what is trained on.
        batch_size: rows of all processes together.
        seed: of the order of rows.
        rank: of this process.
        world: number of processes; divides the batch size.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> from deqseq.tasks.text import ByteEncoder, PackedText
        >>> text = PackedText.pack(["to be or not to be"], ByteEncoder(), length=4)
        >>> batches = PackedBatches(text, batch_size=2, seed=0)
        >>> next(batches).inputs.shape, batches.state_dict()
        (torch.Size([2, 4]), {'batches': 1})
    """

    def __init__(self, text: PackedText, batch_size: int, seed: int, rank: int = 0, world: int = 1) -> None:
        share_of(batch_size, rank, world)
        self.text, self.batch_size, self.seed = text, batch_size, seed
        self.rank, self.world = rank, world
        self.done = 0

    def __iter__(self) -> Iterator[TextBatch]:
        """Itself."""
        return self

    def __next__(self) -> TextBatch:
        """This process's part of the next batch, ``batch_size / world`` rows."""
        batch = self.text.batch(self.done, batch_size=self.batch_size, seed=self.seed, rank=self.rank, world=self.world)
        self.done += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """How many batches are done."""
        return {"batches": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after as many batches as ``state`` says."""
        self.done = state["batches"]
