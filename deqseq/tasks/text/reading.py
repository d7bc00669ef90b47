"""Documents from local files: .txt, .jsonl, .parquet, or a folder of them."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deqseq.tasks.text.encoders import utf8

Record = tuple[str, object]  # a place for error texts ("FILE, line 3"), and what was found there


class LocalDocuments:
    """The documents of a file, or of all files of a folder, read lazily.

    A ``.txt`` file is one document; a ``.jsonl`` file has one a line, a ``.parquet`` file one a row, under ``field``.
    Text is UTF-8 and comes as it stands in the file, line ends included; a byte order mark at its beginning is dropped.
    Empty documents and blank lines are left out. A folder's files are read in the order of their paths, those of
    folders in it too; hidden ones are passed over, and others that cannot be read are named in a warning.

    Args:
        path: a file or a folder.
        field: where the text is, in a ``.jsonl`` line or ``.parquet`` row.

    Raises:
        FileNotFoundError: there is no such path, or no file to read in the folder.
        ValueError: the suffix of a file is unknown; while reading, a file without a document, bytes that are no
            UTF-8, a line that is no JSON object, a missing field, text that is no string. Each names file and place.
        ImportError: while reading, a ``.parquet`` file without pyarrow; names the extra to install.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "b.txt").write_text("To be")
        ...     _ = Path(folder, "a.jsonl").write_text('{"text": "or not"}\\n{"text": "to be"}\\n')
        ...     list(LocalDocuments(folder))
        ['or not', 'to be', 'To be']
    """

    def __init__(self, path: str | Path, *, field: str = "text") -> None:
        self.path, self.field = Path(path), field
        self.files = _files(self.path)
        self._start = self._position = (0, 0)  # file, documents of it that are done

    def __iter__(self) -> Iterator[str]:
        """From the beginning, or once from where :meth:`load_state_dict` says."""
        (first, skip), self._start = self._start, (0, 0)
        self._position = (first, skip)
        return self._read(first, skip)

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator stands: the file and how many of its documents are done; JSON-serialisable."""
        index, done = self._position
        return {"file": self._name(index), "documents": done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from there.

        Args:
            state: of :meth:`state_dict`.

        Raises:
            ValueError: the file is no longer there.
        """
        names = [self._name(index) for index in range(len(self.files))]
        if state["file"] not in names:
            raise ValueError(f"{self.path} no longer has the file {state['file']!r} that the state stands in")
        self._start = self._position = (names.index(state["file"]), int(state["documents"]))

    def _name(self, index: int) -> str:
        file = self.files[index]
        return file.name if file == self.path else file.relative_to(self.path).as_posix()

    def _read(self, first: int, skip: int) -> Iterator[str]:
        for index in range(first, len(self.files)):
            for done, document in enumerate(_documents(self.files[index], self.field), start=1):
                if done > skip:
                    self._position = (index, done)  # before the document is out, so that a state taken then is right
                    yield document
            skip = 0


def _files(path: Path) -> list[Path]:
    if path.is_file():
        _reader(path)
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no file or folder {path}")
    inside = sorted(path.rglob("*"), key=lambda file: file.relative_to(path).parts)
    visible = [f for f in inside if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)]
    known = [file for file in visible if file.suffix.lower() in _READERS]
    if not known:
        raise FileNotFoundError(f"{path} has no {', '.join(_READERS)} file")
    if left_out := [file.relative_to(path).as_posix() for file in visible if file not in set(known)]:
        some = ", ".join(left_out[:5]) + (", ..." if len(left_out) > 5 else "")
        warnings.warn(
            f"{len(left_out)} of the files in {path} are no {', '.join(_READERS)} and are not read: {some}",
            stacklevel=3,
        )
    return known


def _reader(file: Path) -> Callable[[Path, str], Iterator[Record]]:
    if file.suffix.lower() not in _READERS:
        raise ValueError(f"{file} must end in {', '.join(_READERS)}, got {file.suffix or 'no suffix'!r}")
    return _READERS[file.suffix.lower()]


def _documents(file: Path, field: str) -> Iterator[str]:
    empty = True
    for place, record in _reader(file)(file, field):
        if document := text_of(record, field, place):
            empty = False
            yield document
    if empty:
        raise ValueError(f"{file} has no text in it")


def text_of(record: object, field: str, place: str) -> str:
    """The document in a record that was read.

    Args:
        record: what was found.
        field: the name of the text in it.
        place: where it was found, for the error.

    Returns:
        The document, which may be empty.

    Raises:
        ValueError: the record is no object, it has no such field, or there is no text that UTF-8 can write.

    Example:
        >>> text_of({"text": "To be", "author": "W. S."}, "text", "plays.jsonl, line 1")
        'To be'
    """
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be an object with the field {field!r}, got {type(record).__name__}")
    if field not in record:
        raise ValueError(f"{place} has no field {field!r}, only {', '.join(map(repr, record)) or 'none'}")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{place}: {field!r} must be a string, got {type(text).__name__}")
    try:
        utf8(text)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return text


def _decoded(content: bytes, file: Path, line: int, offset: int) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line += content[: error.start].count(b"\n")
        raise ValueError(
            f"{file}, line {line}: byte 0x{content[error.start]:02x} at offset {offset + error.start} of the file is "
            f"no UTF-8 ({error.reason}); convert the file to UTF-8"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def _read_txt(file: Path, field: str) -> Iterator[Record]:
    yield str(file), {field: _decoded(file.read_bytes(), file, 1, 0)}


def _read_jsonl(file: Path, field: str) -> Iterator[Record]:
    offset = 0
    with file.open("rb") as lines:
        for number, content in enumerate(lines, start=1):
            line = _decoded(content, file, number, offset)
            offset += len(content)
            if not line.strip():
                continue
            place = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{place} is no JSON: {error}") from error
            yield place, record


def _read_parquet(file: Path, field: str) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f'{file} needs pyarrow: pip install "deqseq[data]"') from error
    try:
        with parquet.ParquetFile(file) as table:
            if field not in (names := table.schema_arrow.names):
                raise ValueError(f"{file} has no column {field!r}, only {', '.join(map(repr, names)) or 'none'}")
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(field):
                    row += 1
                    yield f"{file}, row {row}", {field: value.as_py()}
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} is no parquet file that can be read: {error}") from error


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
