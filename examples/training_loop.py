"""What the synthetic examples share: command lines, the folder of a run, one training loop, checkpoints."""

import json
import logging
import os
import shutil
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import deqseq as dq
from deqseq.training import Curriculum, check_finite

T = TypeVar("T")
CLIP = 0.25  # largest gradient norm
SHOWN_EVERY, SAVED_EVERY = 20, 50  # steps
FREE = ("output", "device", "quick", "baselines", "eval_lengths", "eval_identity_probability")
"""Options that may change when a run is continued."""


def flag(name: str) -> str:
    """An option as the command line has it."""
    return f"--{name.replace('_', '-')}"


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Name the option whose value something refuses."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {error}") from error


def check_options(options: Any, may_be_zero: Collection[str] = (), shares: Collection[str] = ()) -> None:
    """Refuse numbers out of range, no values where one is needed, values given twice, a device that is not here."""
    for name, value in vars(options).items():
        values = value if isinstance(value, tuple) else (value,)
        if not values and name != "baselines":
            raise ValueError(f"{flag(name)} must have at least one value, got none")
        if len(set(values)) < len(values):
            raise ValueError(f"{flag(name)} must have every value once, got {value}")
        for number in values:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            most = 1 if name in shares else 10**9
            if not (0 < number <= most or (number == 0 and name in may_be_zero)):  # NaN is neither
                interval = f"{'[' if name in may_be_zero else '('}0, {most}]"
                raise ValueError(f"{flag(name)} must be a number in {interval}, got {number}")
    found = torch.accelerator.current_accelerator(check_available=True)
    if options.device not in (known := ["cpu", *([found.type] if found else [])]):
        raise ValueError(f"--device must be one of {known}, got {options.device!r}")


def parse(kind: type[T], arguments: Sequence[str], quick: dict[str, Any]) -> T:
    """Read a command line into a dataclass of options; ``--quick`` changes the defaults."""
    default = kind(**quick) if "--quick" in arguments else None
    options: Any = tyro.cli(kind, args=arguments, default=default, config=(tyro.conf.FlagCreatePairsOff,))
    return options


def claim(script: str, options: Any, default: str) -> Path:
    """Make the folder of a run, or enter it again with the same options; refuse one that holds anything else."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SystemExit(f"{script}.py runs in one process: start it with python examples/{script}.py")
    folder = Path(default if options.output is None else options.output)
    mine, record = json.loads(json.dumps({"script": script} | asdict(options))), folder / "options.json"
    try:
        if folder.exists() and any(folder.iterdir()):
            theirs = json.loads(record.read_text()) if record.is_file() else {}
            if theirs.get("script") != script:
                raise SystemExit(f"--output {folder} holds files but no run of {script}.py: give another folder")
            if changed := [name for name in mine if name not in FREE and theirs.get(name) != mine[name]]:
                changes = ", ".join(f"{name}: {theirs.get(name)} -> {mine[name]}" for name in changed)
                raise SystemExit(f"--output {folder} holds a run with other options ({changes}): give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(mine, indent=1))
    except (OSError, ValueError, AttributeError) as error:  # of the system; of options.json
        raise SystemExit(f"--output {folder} cannot be used ({error}): give another folder") from error
    return folder


class Course(ABC):
    """The batches of a run, which know where they stand; their state is part of the checkpoints."""

    saved: tuple[str, ...] = ("step", "cpu_seconds")

    def __init__(self) -> None:
        self.step, self.cpu_seconds = 0, 0.0

    @property
    @abstractmethod
    def progress(self) -> float:
        """The share of the run that is done."""

    @property
    @abstractmethod
    def lr(self) -> float:
        """The next learning rate."""

    @abstractmethod
    def __next__(self) -> Any:
        """The next batch, with ``inputs`` and ``targets``."""

    @abstractmethod
    def observe(self, output: dq.CausalLMOutput, batch: Any) -> dict[str, Any]:
        """Learn what the model made of the last batch; returns numbers to show."""

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        vars(self).update(state)


def train(name: str, lm: dq.CausalLM, course: Course, curriculum: Curriculum, folder: Path, options: Any) -> None:
    """Train to the end of a course, from the newest checkpoint in ``folder/NAME`` if there is one."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of every checkpoint that it removes
    folder = folder / name.replace(" ", "-")
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=options.device == "cpu", project_config=config)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=course.lr, betas=(0.9, 0.95), weight_decay=0.0)
    model, optimizer = accelerator.prepare(lm.train(), optimizer)
    accelerator.register_for_checkpointing(course)
    resume(name, accelerator, course, folder)
    curriculum.at(course.progress).apply(model)  # a finished run is evaluated as it was trained
    while course.progress < 1:
        begun = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = course.lr
        phase = curriculum.at(course.progress)
        phase.apply(model)
        batch = next(course)
        torch.manual_seed(options.seed * 2**20 + course.step - 1)  # dropout depends on seed and step only
        output = model(batch.inputs, targets=batch.targets)
        numbers = {"step": course.step, "loss": check_finite(output.loss, step=course.step, phase=phase.name)}
        numbers |= course.observe(output, batch)
        optimizer.zero_grad()
        accelerator.backward(output.loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        check_finite(norm, step=course.step, phase=phase.name, quantity="gradient norm")
        optimizer.step()
        course.cpu_seconds += time.process_time() - begun
        if course.step % SHOWN_EVERY == 0:
            shown = ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())
            print(f"{name}, {course.progress:.0%}, {phase.name}: {shown}", flush=True)
        if course.step % SAVED_EVERY == 0 or course.progress == 1:
            config.iteration = course.step  # the number in the checkpoint's name
            accelerator.save_state()


def resume(name: str, accelerator: Accelerator, course: Course, folder: Path) -> None:
    """Load the newest checkpoint. One that a kill has cut off is removed: it lacks the end of what is written last."""
    found = [*(folder / "checkpoints").glob("checkpoint_[0-9]*")]
    for path in [*found]:
        if not zipfile.is_zipfile(path / "custom_checkpoint_0.pkl"):
            shutil.rmtree(path)
            found.remove(path)
    if found:
        accelerator.load_state(str(max(found, key=lambda path: int(path.name.rpartition("_")[2]))))
        print(f"{name}: going on from step {course.step}")
