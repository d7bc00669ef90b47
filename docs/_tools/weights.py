"""Makes the models of deqseq.load_example: ``python docs/_tools/weights.py
parity|parity-unrolled|text|sudoku|balls|swaps``.

The models of parity are trained as in tutorials/parity.md, the one of text as in
benchmarks/skip_scale.py, those of Sudoku, balls and swaps by examples/puzzles.py, reasoning.py
and retrofit.py. A5 is kept from an earlier recipe: some of its rows do not settle at damping 0.8,
which pages use.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm import trange

import deqseq as dq
from deqseq.models.presets import EXAMPLES, WEIGHTS, sudoku
from deqseq.tasks import WordProblem, parse_group
from deqseq.training import Curriculum, check_finite, free, unrolled

SEEDS = {"swaps": 4}  # the first of three that nothing was tuned on; others: 0
PLAIN = dq.SolveConfig(dq.Naive())
PHASES = {
    "parity": (unrolled(8, until=0.4, base=PLAIN), free(32, rtol=0.03, base=PLAIN)),
    "parity-unrolled": (unrolled(4, until=None, base=PLAIN),),
}


def parity(name: str) -> dq.CausalLM:
    """Train on sequences of 16 bits."""
    torch.manual_seed(0)
    lm, curriculum, steps = EXAMPLES[name].build(), Curriculum(PHASES[name]), 400
    batches = WordProblem(parse_group("Z2")).batches(32, 16, seed=0)
    optimizer = torch.optim.AdamW(lm.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in trange(steps, mininterval=5):
        progress = step / steps
        curriculum.at(progress).apply(lm.train())
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 50, 5 * (1 - progress))
        batch = next(batches)
        loss = lm(batch.inputs, targets=batch.targets).loss
        check_finite(loss, step=step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.25)
        optimizer.step()
    return lm


def text() -> dq.CausalLM:
    """Train on Shakespeare's plays."""
    from skip_scale import STEPS, plays, trained

    return trained(EXAMPLES["text"], plays(quick=False)[0], 0, STEPS)


def balls() -> dq.CausalLM:
    """Train on balls in cups, 14 CPU minutes; a run in ``runs/`` goes on, or is used."""
    import reasoning

    reasoning.main(["--baselines"])
    return newest("balls", "runs/reasoning_balls_0/implicit")


def swaps() -> dq.CausalLM:
    """Pretrain a Llama and loop it, 25 CPU minutes; a run in ``runs/`` goes on, or is used."""
    import retrofit

    seed = SEEDS["swaps"]
    retrofit.main(["--seed", str(seed)])
    return newest("swaps", f"runs/retrofit_{seed}/looped").half()  # half the size, the same answers


def newest(name: str, folder: str) -> dq.CausalLM:
    """The model of a run's last checkpoint."""
    found = Path(folder, "checkpoints").glob("*/model.safetensors")
    lm = EXAMPLES[name].build()
    lm.load_state_dict(load_file(max(found, key=lambda path: path.stat().st_mtime)))
    return lm


def puzzle() -> dq.TokenClassifier:
    """Train on Sudokus, six CPU minutes; a run in ``runs/`` goes on, or is used."""
    import puzzles

    puzzles.main([])
    run = torch.load("runs/puzzles_sudoku6_deq_0/checkpoint.pt", weights_only=True)
    lm, prefix = sudoku(), "module."
    mean = {key.removeprefix(prefix): run["mean"][key] for key in run["mean"] if prefix in key}
    lm.load_state_dict(mean)
    return lm


def main(name: str) -> None:
    """Train one model and write its weights."""
    folders = Path(__file__).parents[2]
    sys.path += [str(folders / "benchmarks"), str(folders / "examples")]
    makers: dict[str, Any] = {"text": text, "sudoku": puzzle, "balls": balls, "swaps": swaps}
    lm = makers[name]() if name in makers else parity(name)
    weights = {key: tensor.contiguous() for key, tensor in lm.state_dict().items()}
    path = WEIGHTS / f"{name}.safetensors"
    save_file(
        weights, path, {"made_by": f"docs/_tools/weights.py {name}: seed {SEEDS.get(name, 0)}"}
    )
    path.chmod(0o644)


if __name__ == "__main__":
    main(*sys.argv[1:])
