"""What scripts add to transformers' Trainer: progress, whole checkpoints, batches of tokens."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from common.run import Progress

__all__ = ["PrinterCallback", "Shown", "collated", "newest_checkpoint"]


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


def newest_checkpoint(folder: Path) -> str | None:
    """The Trainer's newest whole checkpoint: it writes ``trainer_state.json`` last, which a kill may leave out."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch: every token is a label."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}
