"""How reports print themselves."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

SHOWN = 8
"""How many rows of a batch a table names."""


def text_table(header: SequenceOf[str], rows: Iterable[SequenceOf[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right.

    Args:
        header: a name a column.
        rows: as many texts each.

    Returns:
        Lines of text, without a newline at the end.

    Example:
        >>> print(text_table(["row", "rate"], [["0", "0.5"], ["10", "0.25"]]))
        row  rate
        0     0.5
        10   0.25
    """
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for line in lines:
        first, *others = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        aligned.append([line[0].ljust(len(first)), *others])
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def rest(rows: int) -> str:
    """What a table says of the rows that it does not name."""
    return f"\n... and {rows - SHOWN} more rows" if rows > SHOWN else ""
