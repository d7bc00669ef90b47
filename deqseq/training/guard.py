"""A training run whose loss is not finite stops before the weights are updated."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from deqseq.arguments import NonNegativeInt, checked, shown


class NonFiniteLoss(FloatingPointError):
    """The loss, or another number that the next training step depends on, is NaN or infinite.

    Example:
        >>> issubclass(NonFiniteLoss, ArithmeticError)
        True
    """


@checked
def check_finite(
    value: Any,
    *,
    step: NonNegativeInt,
    phase: str | None = None,
    quantity: str = "loss",
) -> float:
    """Stop a run whose loss is NaN or infinite; a finite value is returned, for the log.

    Call it with the loss before ``backward()``, and with the gradient norm before the optimizer's
    step. On a GPU this waits for the value. With several processes, pass the mean over all of them,
    so that all stop together.

    Args:
        value: one number, as a tensor ``()`` or ``(1,)``.
        step: number of finished optimizer steps.
        phase: the curriculum's phase, for the message.
        quantity: what the value is.

    Raises:
        NonFiniteLoss: says where.
        TypeError: not a number; None, from a model that was not given targets.
        ValueError: a tensor of several numbers.

    Example:
        >>> import torch
        >>> check_finite(torch.tensor(0.5), step=3)
        0.5
        >>> check_finite(float("nan"), step=3, phase="free")
        Traceback (most recent call last):
        deqseq.training.guard.NonFiniteLoss: the loss is nan after step 3 in phase 'free': stopped
        before the weights are updated
    """
    wanted = f"value must be the {quantity}, one number"
    if isinstance(value, Tensor):
        value = value.detach()
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool or value.is_meta:
            raise ValueError(f"{wanted}, got {shown(value)}")
    elif not isinstance(value, Real) or isinstance(value, bool):
        hint = ": a model returns its loss if it is given targets" if value is None else ""
        raise TypeError(f"{wanted}, got {value!r}{hint}")
    number = float(value)
    if not math.isfinite(number):
        where = "" if phase is None else f" in phase {phase!r}"
        raise NonFiniteLoss(
            f"the {quantity} is {number} after step {step}{where}: stopped before the weights are "
            "updated"
        )
    return number
