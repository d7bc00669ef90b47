"""What the scripts that train on text share: their options, and transformers' Trainer."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
import transformers
from accelerate import PartialState
from corpus import check_texts, load_corpus, load_tokenizer, train_tokenizer, training_rows
from datasets import IterableDataset
from run_folder import check_numbers, flag, is_main, naming
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments, default_data_collator

from deqseq.arguments import Choice, suggestion
from deqseq.integrations.huggingface import CurriculumCallback
from deqseq.training import Curriculum, parameter_groups


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of a training run on text; a script adds its own."""

    quick: bool = False  # tiny models on made-up sentences, without a download
    # or babble; a .txt, .jsonl or .parquet file, or a folder of them; hub:NAME[:SUBSET]
    corpus: str = "shakespeare"
    # text to score. Default: three plays, the hub's validation split, or the last 20th
    held_out: str | None = None
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

    # the least of integers, else 1
    LEAST: ClassVar = {"vocab_size": 257, "length": 2, "eval_tokens": 0, "seed": 0}
    INTERVALS: ClassVar = {}  # other numbers: above 0
    FREE: ClassVar = ("quick", "accumulate", "checkpoint_every", "eval_tokens", "device", "output")
    """Options that may change when a run is continued."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if empty := [flag(name) for name, value in vars(self).items() if value == ""]:
            raise ValueError(f"{empty[0]} must not be empty")
        special = ("shakespeare", "babble")
        if (
            not self.corpus.startswith("hub:")
            and self.corpus not in special
            and not Path(self.corpus).exists()
        ):
            wanted = "shakespeare, babble, hub:NAME, or a file or folder"
            raise ValueError(
                f"--corpus must be {wanted}, got {self.corpus!r}{suggestion(self.corpus, special)}"
            )
        if self.held_out is not None and not Path(self.held_out).exists():
            raise ValueError(f"--held-out must be a file or folder, there is no {self.held_out!r}")
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        Choice(devices)("--device", self.device)
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if self.batch % (parts := processes * self.accumulate):
            raise ValueError(
                f"--batch must be a multiple of processes * --accumulate, {parts}, got {self.batch}"
            )
        # one process on several GPUs would be DataParallel
        if self.device == "cuda" and processes == 1 and torch.cuda.device_count() > 1:
            raise ValueError(
                "--device cuda: with several GPUs use torchrun, or set CUDA_VISIBLE_DEVICES=0"
            )
        nearest = next(
            path
            for path in (Path(self.output), *Path(self.output).absolute().parents)
            if path.exists()
        )
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise ValueError(
                f"--output must be a folder that can be written, got {self.output!r}: see {nearest}"
            )


def prepare(
    options: TextOptions, tokenizer: str | None
) -> tuple[PreTrainedTokenizerBase, Any, list[str]]:
    """The tokenizer (None: a BPE of the corpus), the training rows and the held-out documents."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    held_out = f", --held-out {options.held_out}" if options.held_out else ""
    with naming(f"--corpus {options.corpus}{held_out}", SystemExit):
        corpus = load_corpus(options.corpus, options.held_out)
    with naming(f"tokenizer {tokenizer}", SystemExit):
        made = None if tokenizer is None else load_tokenizer(tokenizer)
    with naming(f"--corpus {options.corpus}, --length {options.length}", SystemExit):
        if made is None:
            some = [record["text"] for record in islice(corpus.train, 20_000)]
            made = train_tokenizer(check_texts(some), options.vocab_size)
        rows = training_rows(corpus.train, made, options.length)
        # without end, because the Trainer resumes within one epoch of a stream
        if isinstance(rows, IterableDataset):
            rows = rows.shuffle(options.seed, buffer_size=1000).repeat(None)
    return made, rows, corpus.held_out


class TextTrainer(Trainer):
    """transformers' Trainer with the weight decay of :func:`deqseq.training.parameter_groups`."""

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """A tied weight is stored once, so its other name is not missing."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

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
    **arguments: Any,
) -> Path:
    """Train a model, or go on from its newest checkpoint, or leave a finished one as it is.

    The further ``arguments`` are ``TrainingArguments``. Returns the folder of the saved model.
    """
    folder = Path(options.output) / name
    if (folder / "model").exists():
        say(f"{name}: trained already")
        return folder / "model"
    torch.manual_seed(options.seed)
    model, share = (
        build(),
        options.batch // int(os.environ.get("WORLD_SIZE", 1)) // options.accumulate,
    )
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
    first = 0 if newest is None else int(newest.name.rpartition("-")[2])
    say(f"{name}: training from step {first} to {settings.max_steps}, checkpoints in {folder}/")
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    trainer.save_state()
    trainer.save_model(str(folder / "unfinished"))
    if trainer.is_world_process_zero():
        (folder / "unfinished").replace(folder / "model")
    trainer.accelerator.wait_for_everyone()
    return folder / "model"


def say(text: str) -> None:
    """Print a line in the main process."""
    if is_main():
        print(text, flush=True)


def newest_checkpoint(folder: Path, steps: int) -> Path | None:
    """The Trainer's newest whole checkpoint before the end of a run.

    It writes ``trainer_state.json`` last, which a kill may leave out. Of a checkpoint of the last
    update it would make one update more, so the one before is used.
    """
    numbered = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    found = {int(number): path for number, path in numbered.items() if number.isdigit()}
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
