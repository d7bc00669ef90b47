"""What a sliding window saves while training, and whether the loss stays the same.

The trained parity model goes on training at its fixed point (4 phantom steps over the whole
sequence) at length 64, solved by one sweep or another: copies of one model, the same batches, steps
in turns. The simultaneous sweep needs a budget that grows with the length; with 32 iterations,
enough at length 16, its fixed points are not reached, which the held-out loss shows.
"""

import statistics
from collections.abc import Iterator
from functools import partial

import torch
from harness import Row, benchmark, paired_row, take_turns, value_row
from models import stop_for, trained

import deqseq as dq

SLACK = 0.005  # nats by which a loss may differ and count as equal


class Arm:
    """One way of solving while training."""

    def __init__(self, sweep: dq.Sweep, max_steps: int) -> None:
        self.name, self.sweep, self.updates = f"{sweep}, at most {max_steps}", sweep, []
        _, self.lm, self.task = trained("parity")
        assert isinstance(self.lm.model, dq.ImplicitModel)
        self.lm.model.solve = dq.SolveConfig(stop=dq.Stop(rtol=0.03, max_steps=max_steps))
        self.optimizer = torch.optim.AdamW(
            self.lm.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One training step."""
        output = self.lm.train()(inputs, targets=targets, sweep=self.sweep)
        assert output.loss is not None and output.stats is not None
        self.optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.lm.parameters(), 0.25)
        self.optimizer.step()
        self.updates.append(output.stats.updates.float().mean().item())

    @torch.no_grad()
    def held_out(self, sweep: dq.Sweep, sequences: int, length: int) -> tuple[float, float]:
        """Last-token accuracy, and the loss over all positions."""
        data = self.task.fixed(sequences, length, seed=5)
        output = self.lm.eval()(
            data.inputs, targets=data.targets, sweep=sweep, stop=stop_for(sweep, length)
        )
        assert output.loss is not None
        return (
            output.logits[:, -1].argmax(-1) == data.targets[:, -1]
        ).float().mean().item(), output.loss.item()


def rows(quick: bool) -> Iterator[Row]:
    """Train all arms in turns: time of a step beside the first arm's, work, and what came of it."""
    length, size, sequences, steps = (16, 4, 8, 2) if quick else (64, 64, 256, 100)
    arms = [Arm(dq.Simultaneous(), 4 * length), Arm(dq.Simultaneous(), 32)]
    arms += [Arm(sweep, 32) for sweep in (dq.Sliding(8), dq.Sliding(4), dq.Sequential())]
    batches, times = arms[0].task.batches(size, (length,), seed=77), {arm.name: [] for arm in arms}
    for _ in range(steps):
        batch = next(batches)
        works = {arm.name: partial(arm.step, batch.inputs, batch.targets) for arm in arms}
        for name, seconds in take_turns(works, 1, warm_up=False).items():
            times[name] += seconds
    peer, losses = arms[0].name, {}
    for arm in arms:
        judged = arm.sweep == dq.Sliding()
        goal, kept = ("ratio <= 0.5", "ours >= 0.99") if judged else (None, None)
        yield paired_row(
            arm.name, times[arm.name], peer, times[peer], metric="ms per training step", goal=goal
        )
        yield value_row(arm.name, "updates per token", statistics.mean(arm.updates))
        for sweep in (dq.Simultaneous(), dq.Sequential(), dq.Sliding()):
            accuracy, loss = arm.held_out(sweep, sequences, length)
            first = losses.setdefault(sweep, loss)
            yield value_row(arm.name, f"accuracy, {sweep}", accuracy, goal=kept)
            equal = f"ours <= {first + SLACK:.5f}" if judged else None
            yield value_row(arm.name, f"nats, held out, {sweep}", loss, peer, first, goal=equal)


main = benchmark(__doc__, rows)

if __name__ == "__main__":
    main()
