"""A bAbI story: facts, and questions about the facts before them."""

import re
from dataclasses import dataclass

TASK_NAMES = {
    1: "single-supporting-fact",
    2: "two-supporting-facts",
    3: "three-supporting-facts",
    4: "two-arg-relations",
    5: "three-arg-relations",
    6: "yes-no-questions",
    7: "counting",
    8: "lists-sets",
    9: "simple-negation",
    10: "indefinite-knowledge",
    11: "basic-coreference",
    12: "conjunction",
    13: "compound-coreference",
    14: "time-reasoning",
    15: "basic-deduction",
    16: "basic-induction",
    17: "positional-reasoning",
    18: "size-reasoning",
    19: "path-finding",
    20: "agents-motivations",
}
"""Numbers of the tasks and their names in the official file names."""

END_OF_STORY = "<eos>"
UNKNOWN = "<unk>"
_WORD = re.compile(r"[^\s.,;:!?]+|[.,;:!?]")


@dataclass(frozen=True)
class Fact:
    """A statement.

    Args:
        text: a sentence, without tabs or line breaks.

    Raises:
        ValueError: a text that is empty or no single line.

    Example:
        >>> Fact("Mary moved to the bathroom.").words()
        ('mary', 'moved', 'to', 'the', 'bathroom', '.')
    """

    text: str

    def __post_init__(self) -> None:
        _check_text("Fact.text", self.text)

    def words(self) -> tuple[str, ...]:
        """Lower-case words; punctuation marks are words."""
        return split_words(self.text)


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    Args:
        text: a sentence, without tabs or line breaks.
        answer: one word, or several joined by commas without spaces, which then count as one word.
        support: ids of the facts that the answer follows from; the first line of a story has id 1.

    Raises:
        ValueError: a text that is empty or no single line, or an answer that is empty, holds blanks or is one of the
            vocabulary's two tokens that are no words.

    Example:
        >>> question = Question("How do you go from the hallway to the bedroom?", "s,w", (1, 4))
        >>> question.words()[-3:], question.answer
        (('the', 'bedroom', '?'), 's,w')
    """

    text: str
    answer: str
    support: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_text("Question.text", self.text)
        if not self.answer or re.search(r"\s", self.answer):
            raise ValueError(f"Question.answer must be one word or a comma list without blanks, got {self.answer!r}")
        _check_words("Question.answer", (self.answer.lower(),))

    def words(self) -> tuple[str, ...]:
        """Lower-case words of the question, without its answer; punctuation marks are words."""
        return split_words(self.text)


@dataclass(frozen=True)
class Story:
    """Facts and questions in the order they are told; a line's id is its place, from 1.

    Args:
        task: number of the task, 1 to 20.
        lines: at least one.

    Raises:
        ValueError: another task, no lines, or a support that names no earlier line.

    Example:
        >>> story = Story(1, (Fact("Mary moved to the bathroom."), Question("Where is Mary?", "bathroom", (1,))))
        >>> len(story.questions), story.words()[-4:]
        (1, ('is', 'mary', '?', 'bathroom'))
    """

    task: int
    lines: tuple[Fact | Question, ...]

    def __post_init__(self) -> None:
        if self.task not in TASK_NAMES:
            raise ValueError(f"Story.task must be one of 1 to {len(TASK_NAMES)}, got {self.task}")
        if not self.lines:
            raise ValueError("Story.lines must hold at least one line, got none")
        for number, line in enumerate(self.lines, start=1):
            check_support(line, number)

    @property
    def questions(self) -> tuple[Question, ...]:
        """The questions alone."""
        return tuple(line for line in self.lines if isinstance(line, Question))

    def words(self) -> tuple[str, ...]:
        """All words in order; each question is followed by its answer, one word in lower case."""
        return tuple(word for line in self.lines for word in line_words(line))


def check_support(line: Fact | Question, number: int) -> None:
    """Refuse a question whose supporting facts do not come before it.

    Args:
        line: a line of a story; a fact always passes.
        number: its id.

    Raises:
        ValueError: names the support and the id.
    """
    if isinstance(line, Question) and not all(1 <= fact < number for fact in line.support):
        raise ValueError(f"Question.support must name lines before the question's own, {number}, got {line.support}")


def line_words(line: Fact | Question) -> tuple[str, ...]:
    """The words of a line; those of a question end with its answer.

    Args:
        line: a line of a story.

    Returns:
        Lower-case words.

    Example:
        >>> line_words(Question("Where is Mary?", "bathroom", (1,)))
        ('where', 'is', 'mary', '?', 'bathroom')
    """
    return line.words() + ((line.answer.lower(),) if isinstance(line, Question) else ())


def split_words(text: str) -> tuple[str, ...]:
    """Lower case, cut at blanks, punctuation marks apart.

    Args:
        text: any.

    Returns:
        Its words.

    Example:
        >>> split_words("Following that, she moved.")
        ('following', 'that', ',', 'she', 'moved', '.')
    """
    return tuple(_WORD.findall(text.lower()))


def _check_text(name: str, text: str) -> None:
    if not text.strip() or re.search(r"[\t\n\r\v\f]", text):
        raise ValueError(f"{name} must be one line of text without tabs, got {text!r}")
    _check_words(name, split_words(text))


def _check_words(name: str, words: tuple[str, ...]) -> None:
    for word in (END_OF_STORY, UNKNOWN):
        if word in words:
            raise ValueError(f"{name} must not hold {word}, which is no word of a story, got {' '.join(words)!r}")
