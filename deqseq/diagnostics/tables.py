"""How reports print themselves."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from torch import Tensor

SHOWN = 8
"""How many rows of a batch a report prints."""


def text_table(header: SequenceOf[str], lines: Iterable[SequenceOf[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    columns = list(zip(header, *lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    left, *right = zip(columns, widths, strict=True)
    aligned = [[text.ljust(left[1]) for text in left[0]]]
    aligned += [[text.rjust(width) for text in column] for column, width in right]
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def row_table(columns: Mapping[str, SequenceOf[str]]) -> str:
    """A table of the first rows of a batch, with one text per row in each column."""
    rows = min(map(len, columns.values()))
    lines = zip(map(str, range(min(SHOWN, rows))), *columns.values(), strict=False)
    return text_table(("row", *columns), lines) + remaining(rows)


def remaining(rows: int) -> str:
    """What is printed instead of further rows."""
    return f"\n... and {rows - SHOWN} more rows" if rows > SHOWN else ""


def texts(numbers: Tensor, form: str) -> list[str]:
    """Each number, formatted."""
    return [f"{number:{form}}" for number in numbers.tolist()]


def yes_no(answers: Tensor) -> list[str]:
    """Each answer, in words."""
    return ["yes" if answer else "no" for answer in answers.tolist()]
