"""bAbI's official text files, read and written."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from deqseq.tasks.babi.story import TASK_NAMES, Fact, Question, Story, check_support


class BabiFormatError(ValueError):
    """A file that is not of the official format; names the file and the line."""


def read_stories(path: Path, task: int) -> list[Story]:
    r"""Read one file of the official format.

    A line is ``ID text``, or ``ID question<tab>answer<tab>ids of supporting facts`` for a question. Ids count from 1;
    a line with id 1 begins a new story. Blank lines are skipped.

    Args:
        path: the file, in UTF-8.
        task: its task's number, 1 to 20.

    Returns:
        The stories in the file's order.

    Raises:
        OSError: the file cannot be read.
        BabiFormatError: the text is not UTF-8, a line is malformed, or there is no story.
        ValueError: no such task.

    References:
        Weston et al., Towards AI-Complete Question Answering: A Set of Prerequisite Toy Tasks, 2015,
        arXiv 1502.05698.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "qa1_single-supporting-fact_train.txt"
        ...     _ = path.write_text("1 Mary moved to the bathroom.\n2 Where is Mary? \tbathroom\t1\n")
        ...     read_stories(path, 1)[0].questions
        (Question(text='Where is Mary?', answer='bathroom', support=(1,)),)
    """
    _check_task(task)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BabiFormatError(f"{path} is not UTF-8 text: {error}") from error
    stories: list[list[Fact | Question]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            _append(stories, line)
        except ValueError as error:
            raise BabiFormatError(f"{path}, line {number}: {error}") from error
    if not stories:
        raise BabiFormatError(f"{path} holds no story")
    return [Story(task, tuple(lines)) for lines in stories]


def read_folder(folder: Path, split: str, tasks: Iterable[int] = TASK_NAMES) -> list[Story]:
    """Read several tasks from a folder of official files, such as ``tasks_1-20_v1-2/en-10k``.

    A task's file is ``qa<task>_<name>_<split>.txt``, or ``qa<task>_<split>.txt`` as in the folders ``en-valid``.

    Args:
        folder: where the files are.
        split: ``"train"``, ``"test"`` or, in the folders ``en-valid``, ``"valid"``.
        tasks: numbers of the tasks; all 20 by default.

    Returns:
        The stories, task by task.

    Raises:
        FileNotFoundError: the folder, or the file of a task, is missing.
        BabiFormatError: a file is malformed.
        ValueError: no such task, or several files of one task.

    Example:
        >>> import tempfile
        >>> from deqseq.tasks.babi import generate_stories
        >>> stories = generate_stories(15, 3, seed=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_stories(Path(folder), "train", stories)
        ...     path.name, read_folder(Path(folder), "train", [15]) == stories
        ('qa15_basic-deduction_train.txt', True)
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must be a folder of bAbI files, got {str(folder)!r}")
    stories: list[Story] = []
    for task in tasks:
        _check_task(task)
        named = re.compile(rf"qa{task}_(?:[^_]+_)?{re.escape(split)}\.txt")
        found = sorted(path for path in folder.iterdir() if named.fullmatch(path.name))
        if not found:
            raise FileNotFoundError(f"{folder} has no file qa{task}_{TASK_NAMES[task]}_{split}.txt")
        if len(found) > 1:
            raise ValueError(f"{folder} has several files of task {task}: {', '.join(path.name for path in found)}")
        stories += read_stories(found[0], task)
    return stories


def write_stories(folder: Path, split: str, stories: Sequence[Story]) -> Path:
    r"""Write the stories of one task as an official file, which :func:`read_folder` finds.

    Args:
        folder: created if missing.
        split: ``"train"``, ``"test"`` or ``"valid"``.
        stories: at least one, all of one task.

    Returns:
        The file, ``qa<task>_<name>_<split>.txt``.

    Raises:
        ValueError: no stories, or of several tasks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_stories(Path(folder), "test", [Story(1, (Fact("Mary left."),))])
        ...     path.read_text()
        '1 Mary left.\n'
    """
    tasks = sorted({story.task for story in stories})
    if len(tasks) != 1:
        raise ValueError(f"stories must be of one task, got tasks {tasks}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"qa{tasks[0]}_{TASK_NAMES[tasks[0]]}_{split}.txt"
    lines = [f"{number} {_text(line)}\n" for story in stories for number, line in enumerate(story.lines, start=1)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _append(stories: list[list[Fact | Question]], line: str) -> None:
    """Read a line into the story it belongs to; id 1 opens a new one."""
    number, _, content = line.strip("\r").partition(" ")
    if not re.fullmatch(r"[0-9]+", number):
        raise ValueError(f"a line must begin with its id and a blank, got {line!r}")
    if number == "1":
        stories.append([])
    expected = len(stories[-1]) + 1 if stories else 1
    if int(number) != expected:
        raise ValueError(f"the id must be {expected}, or 1 for a new story, got {number}")
    read = _question(content) if "\t" in content else Fact(content.strip())
    check_support(read, expected)
    stories[-1].append(read)


def _question(content: str) -> Question:
    fields = [field.strip() for field in content.split("\t")]
    if len(fields) != 3:
        raise ValueError(f"a question must be 'question<tab>answer<tab>supporting facts', got {len(fields)} fields")
    text, answer, support = fields
    if not all(re.fullmatch(r"[0-9]+", fact) for fact in support.split()):
        raise ValueError(f"supporting facts must be ids with blanks between, got {support!r}")
    return Question(text, answer, tuple(int(fact) for fact in support.split()))


def _text(line: Fact | Question) -> str:
    if isinstance(line, Fact):
        return line.text
    return f"{line.text}\t{line.answer}\t{' '.join(str(fact) for fact in line.support)}"


def _check_task(task: int) -> None:
    if task not in TASK_NAMES:
        raise ValueError(f"task must be one of 1 to {len(TASK_NAMES)}, got {task}")
