"""The smallest complete example, to copy: an implicit model learns the parity of bits, and answers on longer inputs.

The task: bits come in, and at each place the parity of the bits so far is to come out. One Mamba2 block is trained on
16 bits, first through 8 unrolled iterations, then at its fixed point, and evaluated solved, on up to 128 bits.

    python examples/parity.py
"""

import json
import os
from pathlib import Path

import torch
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import deqseq as dq
from deqseq.tasks import WordProblem, cyclic
from deqseq.training import Curriculum, check_finite, free, unrolled


def build(seed: int) -> dq.CausalLM:
    """One Mamba2 block whose fixed point is the answer."""
    torch.manual_seed(seed)
    return dq.CausalLM(2, dq.ImplicitModel(dq.Mamba2(dq.Mamba2Config(d_model=32, d_state=16, headdim=32))))


def train(lm: dq.CausalLM, task: WordProblem, steps: int, seed: int) -> list[tuple[float, float]]:
    """Train in two phases; the loss and the mean iterations of each step."""
    undamped = dq.SolveConfig(dq.Naive())
    curriculum = Curriculum((unrolled(8, until=0.4, base=undamped), free(32, rtol=0.03, base=undamped)))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50, max(0.05, 5 * (1 - step / steps)))
    )
    batches = task.batches(32, (16,), seed=seed)
    history = []
    for step in (bar := tqdm(range(steps), desc="train", mininterval=1)):
        phase = curriculum.at(step / steps)
        phase.apply(lm.train())
        batch = next(batches)
        output = lm(batch.inputs, targets=batch.targets)
        loss = check_finite(output.loss, step=step, phase=phase.name)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.25)
        optimizer.step()
        scheduler.step()
        history.append((loss, output.stats.iterations.float().mean().item()))
        bar.set_postfix(phase=phase.name, loss=f"{loss:.3f}", refresh=False)
    return history


@torch.no_grad()
def evaluate(lm: dq.CausalLM, task: WordProblem, length: int) -> dict:
    """Accuracy on the last token of 256 new sequences, solved to a relative tolerance of 0.01."""
    batch = task.fixed(256, length, seed=1000 + length)
    stop = dq.Stop(rtol=0.01, max_steps=max(64, 4 * length))
    output = lm.eval()(batch.inputs, stop=stop)
    right = output.logits[:, -1].argmax(-1) == batch.targets[:, -1]
    converged = output.converged
    numbers = {"accuracy": right, "iterations": output.stats.iterations, "converged": converged}
    return {"length": length} | {name: value.float().mean().item() for name, value in numbers.items()}


def main(steps: int = 400, lengths: tuple[int, ...] = (16, 32, 64, 128), seed: int = 0, output: str = "runs/parity"):
    """Train, evaluate, print a table, and write results.json and parity.png."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise SystemExit("parity.py runs in one process: start it with python examples/parity.py, without torchrun")
    given = (("steps", (steps,), 1, 10**6), ("seed", (seed,), 0, 10**9), ("lengths", lengths or (0,), 1, 10**5))
    for name, values, least, most in given:
        if not least <= min(values) <= max(values) <= most:
            raise SystemExit(f"--{name} must be in {least}..{most}, got {', '.join(map(str, values))}")
    folder = Path(output)
    if not output or any(path.is_file() for path in (folder, *folder.parents, folder / "results.json")):
        raise SystemExit(f"--output {output!r} is no folder, or holds another run's results.json: name a new one")
    folder.mkdir(parents=True, exist_ok=True)
    task, lm = WordProblem(cyclic(2)), build(seed)
    history = train(lm, task, steps, seed)
    rows = [evaluate(lm, task, length) for length in lengths]
    print("length  accuracy  iterations  converged")
    for row in rows:
        print(f"{row['length']:6}  {row['accuracy']:8.3f}  {row['iterations']:10.1f}  {row['converged']:9.1%}")
    (folder / "results.json").write_text(json.dumps(rows, indent=1))
    left, right = (figure := Figure(figsize=(9, 3.5), layout="constrained")).subplots(1, 2)
    left.plot(history, label=["loss", "iterations"])
    left.set(xlabel="training step", yscale="log")
    left.legend()
    right.plot([row["length"] for row in rows], [row["accuracy"] for row in rows], marker="o")
    right.set(xlabel="length (trained: 16)", ylabel="last-token accuracy, solved", ylim=(0, 1.05))
    figure.savefig(folder / "parity.png", dpi=150)
    share = min(row["converged"] for row in rows)
    print("every row converged" if share == 1 else f"not every row converged: {share:.1%} at the worst length")


if __name__ == "__main__":
    tyro.cli(main)
