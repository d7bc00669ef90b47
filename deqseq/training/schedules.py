"""The paper's learning rate: linear warm-up, constant, 1 - sqrt decay."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class WarmupConstantDecay:
    r"""The learning rate of a step, as a factor of its peak.

    With :math:`w` steps of warm-up, :math:`d` of decay, :math:`T` in all and the floor :math:`c`, step
    :math:`t = 0, 1, \dots` has the smaller of

    .. math:: \frac{t + 1}{w} \quad\text{and}\quad
              c + (1 - c) \left(1 - \sqrt{\tfrac{t - (T - d)}{d}}\right) \text{ from } t = T - d \text{ on.}

    The first step already learns, and from :math:`T` on the rate stays at the floor.

    Args:
        total_steps: optimizer steps of the run, at least 1.
        warmup_steps: steps until the peak, at least 0.
        decay_steps: the last steps, in which it falls, at least 0.
        floor: the final rate over the peak, in [0, 1].

    Raises:
        ValueError: a number out of its range, or warm-up and decay that do not fit into the run.

    References:
        Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, NeurIPS 2024, arXiv
        2405.18392. Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> factor = WarmupConstantDecay(total_steps=10, warmup_steps=2, decay_steps=4, floor=0.1)
        >>> [round(factor(step), 2) for step in range(11)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.55, 0.36, 0.22, 0.1]
    """

    total_steps: int
    warmup_steps: int
    decay_steps: int
    floor: float | int = 0.0

    def __post_init__(self) -> None:
        for name, least in (("total_steps", 1), ("warmup_steps", 0), ("decay_steps", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"WarmupConstantDecay.{name} must be an integer >= {least}, got {value!r}")
        if self.warmup_steps + self.decay_steps > self.total_steps:
            raise ValueError(
                f"WarmupConstantDecay: warmup_steps {self.warmup_steps} and decay_steps {self.decay_steps} must fit "
                f"into total_steps {self.total_steps}"
            )
        if not 0 <= self.floor <= 1:
            raise ValueError(f"WarmupConstantDecay.floor must lie in [0, 1], got {self.floor!r}")

    def __call__(self, step: int) -> float:
        """The factor of step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decayed = step - (self.total_steps - self.decay_steps)
        if self.decay_steps == 0 or decayed <= 0:
            return 1.0
        return self.floor + (1 - self.floor) * (1 - math.sqrt(min(1.0, decayed / self.decay_steps)))


def warmup_constant_decay(
    optimizer: Optimizer,
    *,
    total_steps: int,
    warmup_steps: int,
    decay_steps: int,
    final_lr: float | int = 1e-5,
) -> LambdaLR:
    """The paper's schedule as a scheduler of torch; every group of the optimizer starts from its own ``lr``, the peak.

    Call ``step()`` after each optimizer step, or give it to the Trainer of transformers: ``optimizers=(optimizer,
    scheduler)``. Like any scheduler of torch, ``load_state_dict`` brings back the numbers that it was saved with, so a
    resumed run follows the schedule it began with.

    Args:
        optimizer: whose learning rates are set.
        total_steps: optimizer steps of the run.
        warmup_steps: steps until the peak.
        decay_steps: the last steps, in which the rate falls to ``final_lr``; 0 keeps it constant to the end.
        final_lr: the rate at the end, the same for all groups, at most the smallest peak.

    Returns:
        The scheduler.

    Raises:
        ValueError: a number out of its range, or a final rate above a group's peak.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-3)
        >>> scheduler = warmup_constant_decay(optimizer, total_steps=100, warmup_steps=10, decay_steps=20)
        >>> scheduler.get_last_lr()
        [0.0001]
    """
    factors = []
    for index, group in enumerate(optimizer.param_groups):
        peak = float(group.get("initial_lr", group["lr"]))  # a resumed optimizer's lr is that of its last step
        if not 0 <= final_lr <= peak or peak == 0:
            raise ValueError(
                f"warmup_constant_decay: final_lr must lie between 0 and the peak of every group, got {final_lr!r} for "
                f"the lr {peak!r} of group {index}"
            )
        factors.append(WarmupConstantDecay(total_steps, warmup_steps, decay_steps, final_lr / peak))
    return LambdaLR(optimizer, factors)
