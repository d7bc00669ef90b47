"""Documents of a data set on the Hugging Face hub, streamed."""

from collections.abc import Iterator
from typing import Any

from deqseq.tasks.text.reading import text_of


class HubDocuments:
    """The documents of a data set, by its name on the hub or the path of its folder, streamed: nothing is stored.

    Args:
        name: of the data set, such as ``"roneneldan/TinyStories"``.
        subset: which of its configurations; None takes the only one.
        split: which part of it.
        field: the column that has the text; empty documents are left out.
        revision: commit or tag, so that it stays the same; None takes the newest.

    Raises:
        ImportError: datasets is missing; names the extra to install.
        OSError: there is no such data set, or the hub cannot be reached.
        ValueError: there is no such subset or split; while reading, a missing field or text that is no string.

    Example:
        >>> documents = HubDocuments("roneneldan/TinyStories", split="validation")  # doctest: +SKIP
        >>> len(next(iter(documents))) > 0  # doctest: +SKIP
        True
    """

    def __init__(
        self,
        name: str,
        *,
        subset: str | None = None,
        split: str = "train",
        field: str = "text",
        revision: str | None = None,
    ) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ImportError('data sets of the hub need datasets: pip install "deqseq[data]"') from error
        self.name, self.split, self.field = name, split, field
        self._data = datasets.load_dataset(name, subset, split=split, revision=revision, streaming=True)
        self._beginning = self._start = self._origin = self._data.state_dict()
        self._begun = False

    def __iter__(self) -> Iterator[str]:
        """From the beginning, or once from where :meth:`load_state_dict` says."""
        # a state stays loaded in a streamed data set: every iterator would begin there
        self._data.load_state_dict(self._start)
        self._origin, self._begun, self._start = self._start, False, self._beginning
        return self._read()

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator stands, as datasets counts it; JSON-serialisable."""
        # before its first record a data set still tells where the iterator before has stood
        return self._data.state_dict() if self._begun else self._origin

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from there.

        Args:
            state: of :meth:`state_dict`, taken with the same data set.
        """
        self._start = self._origin = state
        self._begun = False

    def _read(self) -> Iterator[str]:
        place = f"{self.name}, split {self.split}"
        for record in self._data:
            self._begun = True
            if document := text_of(record, self.field, place):
                yield document
