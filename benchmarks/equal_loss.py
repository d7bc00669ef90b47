"""Training on with either sweep, from the same weights on the same batches: is the loss the same?

A part of ``benchmarks/training_step.py``: the arms are those of ``benchmarks/training_sweeps.py``.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from harness import Row, value_row
from sweeps import stop_for
from training_sweeps import BATCH, LENGTH, Arm, arm, rows

import deqseq as dq

SWEEPS: tuple[dq.Sweep, ...] = (dq.Simultaneous(), dq.Sliding())
SLACK = 0.005  # nats by which a loss may differ and count as equal
WHILE_TRAINING = "nats, mean while training"  # it has no goal: the more steps at zero loss, the smaller a difference


def both_arms() -> list[Arm]:
    """Copies of the trained model, to go on with either sweep."""
    return [arm(dq.Simultaneous(), 4 * LENGTH), arm(dq.Sliding(), 32)]


def equal_loss(name: str, arms: Sequence[Arm], steps: int) -> Iterator[Row]:
    """Train on in turns: time of a step, accuracies, and losses, which held out are to be those of the first arm."""
    first, name = arms[0], f"{name}, {steps} steps more at length {LENGTH}"
    before = held_out(first, SWEEPS[0])
    losses = {WHILE_TRAINING: trained_on(arms, steps)}
    for row in rows(list(arms)):
        yield replace(row, case=f"{name}, {row.case}")
    losses |= {f"nats, held out, {sweep}": [held_out(one, sweep) for one in arms] for sweep in SWEEPS}
    for metric, (theirs, *others) in losses.items():
        yield value_row(f"{name}, {first}", metric, theirs, "before", before)
        for one, ours in zip(arms[1:], others, strict=True):
            goal = None if metric == WHILE_TRAINING else f"ours <= {theirs + SLACK:.5f}"
            yield value_row(f"{name}, {one}", metric, ours, str(first), theirs, goal=goal)


def trained_on(arms: Sequence[Arm], steps: int) -> list[float]:
    """The mean loss of each arm over some steps, which are made in turns on the same batches."""
    batches = arms[0].model.task.batches(BATCH, (LENGTH,), seed=77)
    losses: list[list[float]] = [[] for _ in arms]

    def note(seen: list[float], _module: object, _inputs: object, output: dq.CausalLMOutput) -> None:
        assert output.loss is not None
        seen.append(output.loss.item())

    pairs = zip(arms, losses, strict=True)
    hooks = [one.model.lm.register_forward_hook(partial(note, seen)) for one, seen in pairs]
    for _ in range(steps):
        batch = next(batches)
        for one in arms:
            one.step(batch.inputs, batch.targets)
    for hook in hooks:
        hook.remove()
    return [statistics.mean(seen) for seen in losses]


@torch.no_grad()
def shaken(one: Arm, noise: float = 0.2) -> Arm:
    """The arm, with noise on every weight, in units of the standard deviation of its tensor: there is more to learn."""
    generator = torch.Generator().manual_seed(1)
    for weights in one.model.lm.parameters():
        weights += noise * weights.std(correction=0) * torch.randn(weights.shape, generator=generator)
    return one


@torch.no_grad()
def held_out(one: Arm, sweep: dq.Sweep) -> float:
    """The loss over all positions of 256 sequences."""
    data = one.model.task.fixed(256, LENGTH, seed=5)
    output = one.model.lm.eval()(data.inputs, targets=data.targets, sweep=sweep, stop=stop_for(sweep, LENGTH))
    assert output.loss is not None
    return output.loss.item()
