"""The smallest complete example: an implicit model learns parity, and answers on longer inputs.

The task: bits come in, and at each place the parity of the bits so far is to come out. One Mamba2
block is trained on 16 bits, first through 8 unrolled iterations, then at its fixed point, and
evaluated solved, on up to 128 bits.

    python examples/parity.py
"""

import argparse
from collections.abc import Sequence

import torch

import deqseq as dq
from deqseq.tasks import WordProblem, parse_group
from deqseq.training import Curriculum, check_finite, free, unrolled


def build() -> dq.CausalLM:
    """One Mamba2 block whose fixed point is the answer."""
    torch.manual_seed(0)
    block = dq.Mamba2(dq.Mamba2Config(d_model=32, d_state=16, headdim=32))
    return dq.CausalLM(2, dq.ImplicitModel(block))


def train(lm: dq.CausalLM, task: WordProblem, steps: int) -> None:
    """Train in two phases."""
    undamped = dq.SolveConfig(dq.Naive())
    first, then = unrolled(8, until=0.4, base=undamped), free(32, rtol=0.03, base=undamped)
    curriculum = Curriculum((first, then))
    optimizer = torch.optim.AdamW(lm.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    batches = task.batches(32, 16, seed=0)
    for step in range(steps):
        phase = curriculum.at(step / steps)
        phase.apply(lm.train())
        batch = next(batches)
        output = lm(batch.inputs, targets=batch.targets)
        loss = check_finite(output.loss, step=step, phase=phase.name)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.25)
        decay = max(0.05, 5 * (1 - step / steps))
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 50, decay)
        optimizer.step()
        if (step + 1) % 50 == 0:
            iterations = output.stats.iterations.float().mean()
            print(f"step {step + 1}, {phase.name}: loss {loss:.3f}, {iterations:.0f} iterations")


@torch.no_grad()
def evaluate(lm: dq.CausalLM, task: WordProblem, length: int) -> list[float]:
    """Accuracy on the last token of 256 new sequences, mean iterations, share that converged."""
    batch = task.fixed(256, length, seed=1000 + length)
    output = lm.eval()(batch.inputs, stop=dq.Stop(rtol=0.01, max_steps=max(64, 4 * length)))
    right = output.logits[:, -1].argmax(-1) == batch.targets[:, -1]
    numbers = (right, output.stats.iterations, output.converged)
    return [each.float().mean().item() for each in numbers]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, evaluate, and print a table."""
    parser = argparse.ArgumentParser(description="An implicit model learns the parity of bits.")
    parser.add_argument("--steps", type=int, default=400, help="training steps, 400 by default")
    steps = parser.parse_args(arguments).steps
    if steps < 1:
        parser.error(f"--steps must be 1 or more, got {steps}")
    task, lm = WordProblem(parse_group("Z2")), build()
    train(lm, task, steps)
    print("length  accuracy  iterations  converged")
    for length in (16, 32, 64, 128):
        accuracy, iterations, share = evaluate(lm, task, length)
        print(f"{length:6}  {accuracy:8.3f}  {iterations:10.1f}  {share:9.1%}")


if __name__ == "__main__":
    main()
