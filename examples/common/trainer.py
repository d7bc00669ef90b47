"""What scripts add to transformers' Trainer: progress, whole checkpoints, batches of tokens."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback

from common.run import Progress


class Shown(TrainerCallback):
    """Progress of a training, with a terminal or without."""

    def __init__(self, name: str, steps: int) -> None:
        self.progress = Progress(f"train {name}", steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show the loss."""
        if logs and "loss" in logs:
            self.progress.to(state.global_step, loss=float(logs["loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the bar."""
        self.progress.close()


def train(trainer: Trainer, folder: Path) -> None:
    """Train from the newest whole checkpoint; a finished run is loaded: the Trainer would make one more update."""
    trainer.remove_callback(PrinterCallback)  # Shown prints
    newest, steps = newest_checkpoint(folder), trainer.args.max_steps
    if newest is None or _step(newest) < steps:
        trainer.train(resume_from_checkpoint=newest and str(newest))
        return
    trainer._load_from_checkpoint(str(newest))
    trainer.state.global_step = trainer.state.max_steps = steps
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)  # enters the last phase
    trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)


def newest_checkpoint(folder: Path) -> Path | None:
    """The Trainer's newest whole checkpoint: it writes ``trainer_state.json`` last, which a kill may leave out."""
    for path in sorted((path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit()), key=_step)[::-1]:
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return path
    return None


def _step(path: Path) -> int:
    return int(path.name[11:])


def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch: every token is a label."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}
