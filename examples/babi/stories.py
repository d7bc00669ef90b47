"""Stories, and the official files that hold them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deqseq.check import check_integer

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
"""The tasks' numbers, and their names in the official file names."""

END_OF_STORY, UNKNOWN = "<eos>", "<unk>"
_WORD = re.compile(r"[^\s.,;:!?]+|[.,;:!?]")


@dataclass(frozen=True)
class Line:
    """A fact, or a question with its answer.

    Args:
        text: one sentence on one line.
        answer: of a question: one word, or several joined by commas, which count as one word. None: a fact.
        support: numbers of the story's lines that the answer follows from, from 1.
    """

    text: str
    answer: str | None = None
    support: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.text.strip() or re.search(r"[\t\n\r\v\f]", self.text):
            raise ValueError(f"text must be one line of text without tabs, got {self.text!r}")
        if self.answer is not None and not re.fullmatch(r"\S+", self.answer):
            raise ValueError(f"answer must be one word, or words joined by commas without spaces, got {self.answer!r}")
        for word in {END_OF_STORY, UNKNOWN} & set(self.words()):
            raise ValueError(f"text and answer must not contain the vocabulary's own token {word}, got {self.text!r}")

    def words(self) -> tuple[str, ...]:
        """Lower-case words and punctuation marks; a question's answer is the last word."""
        return (*_WORD.findall(self.text.lower()), *([self.answer.lower()] if self.answer else []))


@dataclass(frozen=True)
class Story:
    """The lines of one story of one task."""

    task: int
    lines: tuple[Line, ...]

    def __post_init__(self) -> None:
        check_integer("task", self.task, 1, len(TASK_NAMES))
        if not self.lines:
            raise ValueError("lines must hold at least one line, got none")
        for number, line in enumerate(self.lines, start=1):
            _check_support(line, number)

    @property
    def questions(self) -> tuple[Line, ...]:
        """The lines that are questions."""
        return tuple(line for line in self.lines if line.answer is not None)

    def words(self) -> tuple[str, ...]:
        """The words of all lines."""
        return tuple(word for line in self.lines for word in line.words())


def read_folder(folder: Path, split: str, tasks: Iterable[int] = TASK_NAMES) -> list[Story]:
    """Read tasks from a folder of official files, such as ``tasks_1-20_v1-2/en-10k``.

    A task's file is ``qa<task>_<name>_<split>.txt``, or ``qa<task>_<split>.txt`` as in the folders ``en-valid``.

    Args:
        folder: path of the folder.
        split: "train", "test" or "valid".
        tasks: task numbers. Default: all 20.

    Returns:
        The stories, task by task.

    Raises:
        FileNotFoundError: the folder or a task's file is missing.
        ValueError: a file is malformed (names the line), a task number is unknown, or a task has several files.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must be a folder of bAbI files, got {str(folder)!r}")
    stories: list[Story] = []
    for task in tasks:
        check_integer("task", task, 1, len(TASK_NAMES))
        pattern = re.compile(rf"qa{task}_(?:[^_]+_)?{re.escape(split)}\.txt")
        found = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
        if not found:
            raise FileNotFoundError(f"{folder} has no file qa{task}_{TASK_NAMES[task]}_{split}.txt")
        if len(found) > 1:
            raise ValueError(f"{folder} has several files of task {task}: {', '.join(path.name for path in found)}")
        stories += read_stories(found[0], task)
    return stories


def read_stories(path: Path, task: int) -> list[Story]:
    """Read one official file.

    A line is ``ID text``, or ``ID question<tab>answer<tab>ids of supporting facts``. Ids count from 1; id 1 begins a
    new story. Blank lines are skipped.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8, a line is malformed, there is no story, or the task number is unknown.
    """
    check_integer("task", task, 1, len(TASK_NAMES))
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    stories: list[list[Line]] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                _append(stories, line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not stories:
        raise ValueError(f"{path} contains no story")
    return [Story(task, tuple(story)) for story in stories]


def _append(stories: list[list[Line]], line: str) -> None:
    """Parse a line and append it to the last story, or to a new one if its id is 1."""
    number, _, content = line.strip("\r").partition(" ")
    if not re.fullmatch(r"[0-9]+", number):
        raise ValueError(f"a line must begin with its id and a space, got {line!r}")
    if number == "1":
        stories.append([])
    expected = len(stories[-1]) + 1 if stories else 1
    if int(number) != expected:
        raise ValueError(f"the id must be {expected}, or 1 for a new story, got {number}")
    text, *fields = (field.strip() for field in content.split("\t"))
    if fields and len(fields) != 2:
        raise ValueError(f"a question must be 'question<tab>answer<tab>ids', got {len(fields) + 1} fields")
    answer, support = fields or (None, "")
    if not all(re.fullmatch(r"[0-9]+", fact) for fact in support.split()):
        raise ValueError(f"supporting facts must be ids separated by spaces, got {support!r}")
    parsed = Line(text, answer, tuple(int(fact) for fact in support.split()))
    _check_support(parsed, expected)
    stories[-1].append(parsed)


def _check_support(line: Line, number: int) -> None:
    if not all(1 <= fact < number for fact in line.support):
        raise ValueError(f"support must name lines before line {number}, the question's own, got {line.support}")
