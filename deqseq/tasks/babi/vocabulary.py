"""Words as numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deqseq.tasks.babi.story import END_OF_STORY, UNKNOWN, Story


@dataclass(frozen=True)
class Vocabulary:
    """A word-level vocabulary; a word's place is its token id.

    Args:
        words: ``<eos>``, which stands between stories, ``<unk>`` for words it does not know, and the words.
        replace_unknown: whether an unknown word becomes ``<unk>``; otherwise it is an error.

    Raises:
        ValueError: words that do not begin so, or are repeated.

    Example:
        >>> vocabulary = Vocabulary(("<eos>", "<unk>", "is", "mary"))
        >>> vocabulary.encode(["mary", "is"]), vocabulary.decode([3, 2])
        ([3, 2], ['mary', 'is'])
    """

    words: tuple[str, ...]
    replace_unknown: bool = False
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.words[:2] != (END_OF_STORY, UNKNOWN):
            raise ValueError(
                f"Vocabulary.words must begin with {END_OF_STORY} and {UNKNOWN}, got {list(self.words[:2])}"
            )
        ids = {word: token for token, word in enumerate(self.words)}
        if len(ids) < len(self.words):
            repeated = next(word for token, word in enumerate(self.words) if ids[word] != token)
            raise ValueError(f"Vocabulary.words must not repeat a word, got {repeated!r} twice")
        object.__setattr__(self, "_ids", ids)

    @classmethod
    def of(cls, stories: Iterable[Story], *, replace_unknown: bool = False) -> "Vocabulary":
        """The words of some stories and of their answers, in alphabetical order.

        Args:
            stories: best the training data; CatbAbI's own code takes training and test data.
            replace_unknown: whether an unknown word becomes ``<unk>``; otherwise it is an error.

        Returns:
            The vocabulary.

        Raises:
            ValueError: no stories.

        Example:
            >>> from deqseq.tasks.babi import generate_stories
            >>> len(Vocabulary.of(generate_stories(1, 100, seed=0)))
            23
        """
        words = {word for story in stories for word in story.words()}
        if not words:
            raise ValueError("stories must hold at least one, got none")
        return cls((END_OF_STORY, UNKNOWN, *sorted(words)), replace_unknown)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def end_of_story(self) -> int:
        """Token id of ``<eos>``."""
        return 0

    @property
    def unknown(self) -> int:
        """Token id of ``<unk>``."""
        return 1

    def encode(self, words: Iterable[str]) -> list[int]:
        """Token ids of words.

        Args:
            words: in lower case.

        Returns:
            Their ids.

        Raises:
            KeyError: a word that it does not know, unless those are replaced.
        """
        if self.replace_unknown:
            return [self._ids.get(word, self.unknown) for word in words]
        try:
            return [self._ids[word] for word in words]
        except KeyError as error:
            raise KeyError(
                f"{error.args[0]!r} is not in the vocabulary of {len(self)} words: build it from more stories, or with "
                "replace_unknown=True"
            ) from None

    def decode(self, tokens: Sequence[int]) -> list[str]:
        """Words of token ids.

        Args:
            tokens: ids, each below the vocabulary's length.

        Returns:
            Their words.

        Raises:
            IndexError: an id that is none.
        """
        for token in tokens:
            if not 0 <= token < len(self):
                raise IndexError(f"tokens must lie in 0..{len(self) - 1}, got {token}")
        return [self.words[token] for token in tokens]
