"""What it saves to find the fixed point with a sliding window while training.

The trained parity model of ``benchmarks/sweeps.py`` goes on training at its fixed point (4 phantom steps over the whole
sequence, damping 0.8) at length 64, solved by one sweep or another: copies of one model, the same batches, steps in
turns. The simultaneous sweep needs a budget that grows with the length; with 32 iterations, enough at length 16,
its fixed points are not reached and training goes wrong, which its accuracy shows.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from harness import Row, arguments, judge, report, value_row
from sweeps import Trained, stop_for, trained

import deqseq as dq

LENGTH, BATCH = 64, 64


@dataclass
class Arm:
    """One way of solving while training."""

    sweep: dq.Sweep
    max_steps: int
    model: Trained
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.sweep}, at most {self.max_steps}"

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One training step."""
        self.model.lm.train()
        begun = time.perf_counter()
        output = self.model.lm(inputs, targets=targets, sweep=self.sweep)
        assert output.loss is not None and output.stats is not None
        self.optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.lm.parameters(), 0.25)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begun)
        self.updates.append(output.stats.updates.float().mean().item())

    @torch.no_grad()
    def accuracy(self, sweep: dq.Sweep) -> float:
        """Last-token accuracy on 256 sequences."""
        data = self.model.task.fixed(256, LENGTH, seed=5)
        output = self.model.lm.eval()(data.inputs, sweep=sweep, stop=stop_for(sweep, LENGTH))
        return (output.logits[:, -1].argmax(-1) == data.targets[:, -1]).float().mean().item()


def arm(sweep: dq.Sweep, max_steps: int) -> Arm:
    """A copy of the trained model, ready for its free phase at the longer length."""
    model = trained("parity")
    assert isinstance(model.lm.model, dq.ImplicitModel)
    model.lm.model.solve = dq.SolveConfig(stop=dq.Stop(rtol=0.03, max_steps=max_steps))
    optimizer = torch.optim.AdamW(model.lm.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    return Arm(sweep, max_steps, model, optimizer)


def rows(arms: list[Arm]) -> Iterator[Row]:
    """Time of a step beside the simultaneous sweep's, work, and accuracy afterwards."""
    peer = arms[0]
    for one in arms:
        ratios = [mine / other for mine, other in zip(one.seconds, peer.seconds, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        goal = "ratio <= 0.5" if one.sweep == dq.Sliding() else None
        ours, theirs = (statistics.median(x.seconds) * 1e3 for x in (one, peer))
        ratio = statistics.median(ratios)
        timed = (len(ratios), (low, high), goal, judge(goal, ours, ratio))
        yield Row(str(one), "ms per training step", ours, str(peer), theirs, ratio, *timed)
        yield value_row(str(one), "updates per token", statistics.mean(one.updates), "", None)
        for sweep in (dq.Simultaneous(), dq.Sequential(), dq.Sliding()):
            kept = "ours >= 0.99" if one.sweep == dq.Sliding() else None
            yield value_row(str(one), f"accuracy, {sweep}", one.accuracy(sweep), "", None, goal=kept)


def main() -> None:
    """Train all arms in turns, and report."""
    options = arguments(__doc__ or "")
    arms = [arm(dq.Simultaneous(), 4 * LENGTH), arm(dq.Simultaneous(), 32)]
    arms += [arm(sweep, 32) for sweep in (dq.Sliding(8), dq.Sliding(4), dq.Sequential())]
    batches = arms[0].model.task.batches(BATCH, (LENGTH,), seed=77)
    for _ in range(5 if options.quick else 20):
        batch = next(batches)
        for one in arms:
            one.step(batch.inputs, batch.targets)
    report(list(rows(arms)), options)


if __name__ == "__main__":
    main()
