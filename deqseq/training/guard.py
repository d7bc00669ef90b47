"""A run that has gone wrong stops where it did, with its last good checkpoint as it was."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from deqseq.training.checkpoint_folders import check_whole, finished


class NonFiniteLoss(FloatingPointError):
    """The loss, or what the next update depends on, is NaN or infinite.

    Attributes:
        quantity: what it was, ``"loss"`` unless said otherwise.
        value: NaN or an infinity.
        step: optimizer steps that were done.
        phase: the curriculum's phase, if one was named.
        checkpoint: the newest whole checkpoint, if there is one.
    """

    def __init__(self, quantity: str, value: float, step: int, phase: str | None, checkpoint: Path | None) -> None:
        self.quantity, self.value, self.step, self.phase, self.checkpoint = quantity, value, step, phase, checkpoint
        where = f"after step {step}" + (f" in phase {phase!r}" if phase is not None else "")
        last = "no checkpoint has been written" if checkpoint is None else f"the last good checkpoint is {checkpoint}"
        super().__init__(f"the {quantity} is {value} {where}: stopped before the weights are updated; {last}")

    def __reduce__(self) -> tuple[type["NonFiniteLoss"], tuple[str, float, int, str | None, Path | None]]:
        return type(self), (self.quantity, self.value, self.step, self.phase, self.checkpoint)


def check_finite(
    value: Tensor | float | int,
    *,
    step: int,
    phase: str | None = None,
    directory: str | os.PathLike[str] | None = None,
    quantity: str = "loss",
) -> float:
    """Stop a run whose loss is NaN or infinite.

    Call it with the loss before ``backward()``, and with the gradient's norm before the optimizer's step: a finite loss
    can have a gradient that is not. On a GPU this waits for the value. With several processes, give it the mean
    over all of them, so that all stop together.

    Args:
        value: one number, as a tensor ``()`` or ``(1,)``.
        step: optimizer steps that are done.
        phase: the curriculum's phase, for the message.
        directory: where :func:`save_checkpoint` writes, for the message.
        quantity: what the value is.

    Returns:
        The value, for the log.

    Raises:
        NonFiniteLoss: says where, and names the last good checkpoint.
        ValueError: a tensor of several numbers.

    Example:
        >>> check_finite(torch.tensor(0.5), step=3)
        0.5
        >>> check_finite(float("nan"), step=3, phase="free")
        Traceback (most recent call last):
        deqseq.training.guard.NonFiniteLoss: the loss is nan after step 3 in phase 'free': stopped before the weights
        are updated; no checkpoint has been written
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"the {quantity} must be one number, got a tensor of shape {tuple(value.shape)}")
    number = float(value.detach() if isinstance(value, Tensor) else value)
    if not math.isfinite(number):
        last = None if directory is None else newest_whole(Path(directory))
        raise NonFiniteLoss(quantity, number, step, phase, last)
    return number


def check_weights(weights: Mapping[str, Tensor], step: int, directory: Path) -> None:
    """Refuse to save what no run can go on from.

    Args:
        weights: a model's state dict.
        step: optimizer steps that are done.
        directory: where the checkpoints are.

    Raises:
        FloatingPointError: names the tensors that hold NaN or infinities, and the last good checkpoint.
    """
    named = [(name, tensor) for name, tensor in weights.items() if tensor.is_floating_point() and tensor.numel()]
    wide = [tensor if tensor.itemsize > 1 else tensor.float() for _, tensor in named]  # float8 knows no isfinite
    finite = [torch.isfinite(tensor).all() for tensor in wide]
    bad = [name for (name, _), good in zip(named, finite, strict=True) if not good]
    if bad:
        last = newest_whole(directory)
        kept = "no checkpoint has been written" if last is None else f"the last good one is {last}"
        raise FloatingPointError(
            f"the weights after step {step} are not finite ({', '.join(bad[:5])}{', ...' * (len(bad) > 5)}): no "
            f"checkpoint is written; {kept}"
        )


def newest_whole(directory: Path) -> Path | None:
    """The newest checkpoint that holds what was written; reads all of it.

    Args:
        directory: where :func:`save_checkpoint` writes.

    Returns:
        Its folder, or None.
    """
    for path in finished(directory):
        try:
            check_whole(path)
        except (OSError, ValueError):
            continue
        return path
    return None
