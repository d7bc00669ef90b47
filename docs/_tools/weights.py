"""Makes the models of deqseq.load_example: ``python docs/_tools/weights.py parity|parity-unrolled|text``.

The models of parity are trained as in tutorials/parity.md, the one of text on 34 plays of Shakespeare's. That of A5 is
kept from an earlier recipe of ``examples/state_tracking.py``, which left some rows unsettled at damping 0.8: pages show
what to do about them.
"""

import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

import deqseq as dq
from deqseq.models.examples import EXAMPLES, WEIGHTS
from deqseq.training import Curriculum, bounded, check_finite, free, unrolled

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples")]
LENGTH, BATCH, STEPS = 128, 24, 2400


def text() -> tuple[dq.CausalLM, str]:
    """A language model of bytes: four unrolled iterations, then the fixed point for the last fifth."""
    from common.text import load_corpus

    corpus = load_corpus("shakespeare")
    data = torch.tensor(list("\n".join(corpus.train["text"]).encode("ascii", "ignore")))
    unseen = torch.tensor(list("\n".join(corpus.held_out).encode("ascii", "ignore")))
    torch.manual_seed(0)
    lm, drawn = EXAMPLES["text"].build(), torch.Generator().manual_seed(0)
    damped = dq.SolveConfig(dq.Relaxed(0.8))
    curriculum = Curriculum((bounded(4, 1, until=0.8, base=damped), free(24, 4, rtol=0.03, base=damped)))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in (bar := tqdm(range(STEPS), mininterval=5)):
        progress = step / STEPS
        curriculum.at(progress).apply(lm.train())
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 100, 0.02 + 3 * (1 - progress))
        places = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=drawn) + torch.arange(LENGTH)
        loss = lm(data[places], labels=data[places]).loss
        bar.set_postfix(bits=f"{check_finite(loss, step=step) / math.log(2):.3f}", refresh=False)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
    rows = unseen[: 64 * 256].reshape(64, 256)
    with torch.no_grad():
        output = lm.eval()(rows, labels=rows, solve=EXAMPLES["text"].solve)
    bits, settled = output.loss.item() / math.log(2), output.converged.float().mean().item()
    return lm, f"text, {STEPS} steps, seed 0; held-out plays: {bits:.3f} bits per byte, {settled:.0%} of rows converged"


def parity(phases: tuple[object, ...] | None) -> tuple[dq.CausalLM, str]:
    """The model of the tutorial, with its curriculum or another one."""
    import parity as tutorial

    lm = tutorial.implicit_model(seed=0)
    tutorial.train(lm, tutorial.curriculum if phases is None else Curriculum(phases))
    return lm, "trained as in tutorials/parity.md, 400 steps, seed 0"


if __name__ == "__main__":
    (name,) = sys.argv[1:]
    plain = dq.SolveConfig(solver=dq.Naive())
    made = {
        "parity": lambda: parity(None),
        "parity-unrolled": lambda: parity((unrolled(4, until=None, base=plain),)),
        "text": text,
    }
    lm, how = made[name]()
    weights = {key: tensor.contiguous() for key, tensor in lm.state_dict().items()}
    path = WEIGHTS / f"{name}.safetensors"
    save_file(weights, path, {"made_by": f"docs/_tools/weights.py {name}: {how}"})
    path.chmod(0o644)
    print(how)
