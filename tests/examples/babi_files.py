"""Official files of bAbI, written from stories."""

from collections.abc import Sequence
from pathlib import Path

from babi import TASK_NAMES, Story


def write_stories(folder: Path, split: str, stories: Sequence[Story]) -> Path:
    """Write the stories of one task as an official file in ``folder``, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"qa{stories[0].task}_{TASK_NAMES[stories[0].task]}_{split}.txt"
    text = ""
    for story in stories:
        for number, line in enumerate(story.lines, start=1):
            answer = "" if line.answer is None else f"\t{line.answer}\t{' '.join(map(str, line.support))}"
            text += f"{number} {line.text}{answer}\n"
    path.write_text(text, encoding="utf-8")
    return path
