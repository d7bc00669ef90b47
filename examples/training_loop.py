"""What the synthetic examples share: checks of options, one training loop, checkpoints."""

import logging
import os
import shutil
import time
import zipfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from run_folder import check_numbers, flag
from safetensors import SafetensorError, safe_open

import deqseq as dq
from deqseq.training import Curriculum, check_finite

MAY_BE_EMPTY = ("baselines", "baseline_lrs", "test_others")
ARCHIVES = ("optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl")
"""Files of a checkpoint beside its weights."""
CLIP = 0.25  # largest gradient norm
SHOWN_EVERY, SAVED_EVERY = 20, 50  # steps


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every synthetic example; a script adds its own."""

    seed: int = 0  # seed of weights and data
    device: str = "cpu"  # cpu, or the accelerator of this machine, such as cuda
    output: str | None = None  # folder of the results; default: a name in runs/
    quick: bool = False  # a small setting, to see that everything runs

    LEAST: ClassVar[dict[str, int]] = {"seed": 0}  # other integers: 1
    INTERVALS: ClassVar[dict[str, str]] = {}  # other numbers: above 0
    FREE: ClassVar[tuple[str, ...]] = ("output", "device", "quick")
    """Options that may change when a run is continued."""


def one_process(script: str) -> None:
    """End a script that several processes were started for."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SystemExit(f"{script} runs in one process: start it with python examples/{script}")


def check_options(options: RunOptions) -> None:
    """Refuse numbers out of range, missing or repeated values, and a device that is not here."""
    check_numbers(options)
    for name, value in vars(options).items():
        if value == () and name not in MAY_BE_EMPTY:
            raise ValueError(f"{flag(name)} must have at least one value, got none")
        if isinstance(value, tuple) and len(set(value)) < len(value):
            raise ValueError(f"{flag(name)} must have every value once, got {value}")
    found = torch.accelerator.current_accelerator(check_available=True)
    if options.device not in (known := ["cpu", *([found.type] if found else [])]):
        raise ValueError(f"--device must be one of {known}, got {options.device!r}")


class TrainingBatches(ABC):
    """The batches of a run, which know where they stand; their state is part of the checkpoints."""

    saved: tuple[str, ...] = ("step", "cpu_seconds", "tokens", "evaluations")

    def __init__(self, steps: int) -> None:
        self.steps, self.step, self.cpu_seconds = steps, 0, 0.0
        self.tokens, self.evaluations = 0, 0  # of all steps: of a row, and of the blocks
        self.solve: dict[str, Any] = {}  # fields of the solve of the last batch, such as its stop

    @property
    def progress(self) -> float:
        """The share of the run that is done."""
        return self.step / self.steps

    @property
    def last(self) -> int:
        """Steps of the whole run, as far as it is known."""
        return self.steps

    @property
    @abstractmethod
    def lr(self) -> float:
        """The next learning rate."""

    @abstractmethod
    def __next__(self) -> Any:
        """The next batch, with ``inputs`` and ``targets``."""

    def loss(self, output: dq.CausalLMOutput, batch: Any) -> torch.Tensor | None:
        """What is minimised; here the model's own loss."""
        return output.loss

    @abstractmethod
    def record(self, output: dq.CausalLMOutput, batch: Any) -> dict[str, Any]:
        """Learn what the model made of the last batch; returns numbers to show."""

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        vars(self).update(state)


def train(
    name: str,
    lm: dq.CausalLM,
    batches: TrainingBatches,
    curriculum: Curriculum,
    folder: Path,
    options: Any,
) -> None:
    """Train to the end of the run, from the newest checkpoint in ``folder/NAME`` if any."""
    # accelerate warns of every checkpoint that it removes
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    folder = folder / name.replace(" ", "-")
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=options.device == "cpu", project_config=config)
    optimizer = torch.optim.AdamW(
        lm.parameters(), lr=batches.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    model, optimizer = accelerator.prepare(lm.train(), optimizer)
    accelerator.register_for_checkpointing(batches)
    resume(name, accelerator, batches, folder)
    curriculum.at(batches.progress).apply(model)  # a finished run is evaluated as it was trained
    while batches.progress < 1:
        begun = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = batches.lr
        phase = curriculum.at(batches.progress)
        phase.apply(model)
        batch = next(batches)
        # dropout depends on seed and step only
        torch.manual_seed(options.seed * 2**20 + batches.step - 1)
        output = model(batch.inputs, targets=batch.targets, **batches.solve)
        loss = batches.loss(output, batch)
        numbers = {"loss": check_finite(loss, step=batches.step, phase=phase.name)}
        numbers |= batches.record(output, batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), CLIP)
        check_finite(norm, step=batches.step, phase=phase.name, quantity="gradient norm")
        optimizer.step()
        batches.tokens += batch.inputs.shape[1]
        batches.evaluations += 1 if output.stats is None else output.stats.evaluations
        batches.cpu_seconds += time.process_time() - begun
        if batches.step % SHOWN_EVERY == 0:
            shown = ", ".join(f"{key} {value:.4g}" for key, value in numbers.items())
            step = f"step {batches.step} of at most {batches.last}"
            print(f"{name}, {step}, {phase.name}: {shown}", flush=True)
        if batches.step % SAVED_EVERY == 0 or batches.progress == 1:
            config.iteration = batches.step  # the number in the checkpoint's name
            try:
                accelerator.save_state()
            except (OSError, RuntimeError, SafetensorError) as error:
                raise SystemExit(
                    f"{name}: the checkpoint of step {batches.step} could not be written to "
                    f"{folder} ({error}); is the disk full? Started again, the run goes on from "
                    "the one before"
                ) from error


def resume(name: str, accelerator: Accelerator, batches: TrainingBatches, folder: Path) -> None:
    """Load the newest checkpoint; what was cut while it was written is removed."""
    found = [*(folder / "checkpoints").glob("checkpoint_[0-9]*")]
    for path in [*found]:
        if not is_whole(path):
            print(f"{name}: {path} was cut while it was written, and is removed")
            shutil.rmtree(path)
            found.remove(path)
    if found:
        accelerator.load_state(str(max(found, key=lambda path: int(path.name.rpartition("_")[2]))))
        print(f"{name}: going on from step {batches.step}")


def is_whole(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint are there to their ends."""
    try:
        with safe_open(checkpoint / "model.safetensors", "torch"):
            return all(zipfile.is_zipfile(checkpoint / name) for name in ARCHIVES)
    except (OSError, SafetensorError):
        return False
