"""The numbers of a run as it goes, a line of JSON an update, and for TensorBoard."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Curve:
    """A file of numbers that grows with a run, and fits it again after an interruption.

    Args:
        path: of the file, a line an update; made when something is written.
        tensorboard: folder of an event file with the same numbers; None: there is none.

    Raises:
        ImportError: TensorBoard is wanted and missing; names the extra to install.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     curve = Curve(Path(folder) / "curve.jsonl")
        ...     for step in (1, 2, 3):
        ...         curve.add({"step": step, "loss": 1 / step})
        ...     curve.go_on(2)  # the run was killed, and its checkpoint is that of step 2
        ...     curve.rows()
        [{'step': 1, 'loss': 1.0}, {'step': 2, 'loss': 0.5}]
    """

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self.path = path
        self._board: Any = None
        if tensorboard is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError('curves for TensorBoard need tensorboard: pip install "deqseq[examples]"') from error
            self._board = SummaryWriter(str(tensorboard))

    def rows(self) -> list[dict[str, Any]]:
        """All numbers so far; a line that a crash has cut off is left out."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def go_on(self, step: int) -> None:
        """Drop what came after ``step``: the run is about to repeat it."""
        kept = [row for row in self.rows() if row["step"] <= step]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in kept))
        unfinished.replace(self.path)

    def add(self, numbers: Mapping[str, Any]) -> None:
        """Append the numbers of an update.

        Args:
            numbers: with ``"step"``; what is no number is left out of TensorBoard.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(dict(numbers)) + "\n")
        if self._board is None:
            return
        for name, value in numbers.items():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(name, value, numbers["step"])
