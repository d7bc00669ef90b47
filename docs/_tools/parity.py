"""The implicit model and the training of tutorials/parity.md, for weights.py."""

import torch

import deqseq as dq
from deqseq.tasks import WordProblem, cyclic
from deqseq.training import Curriculum, free, unrolled

plain = dq.SolveConfig(solver=dq.Naive())
curriculum = Curriculum((unrolled(8, until=0.4, base=plain), free(32, rtol=0.03, base=plain)))


def implicit_model(seed: int = 0) -> dq.CausalLM:
    """One Mamba2 block, iterated, under a head of two tokens."""
    torch.manual_seed(seed)
    return dq.EXAMPLES["parity"].build()


def train(lm: dq.CausalLM, curriculum: Curriculum, *, steps: int = 400, seed: int = 0) -> None:
    """Train on sequences of 16 bits."""
    optimizer = torch.optim.AdamW(lm.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    batches = WordProblem(cyclic(2)).batches(32, 16, seed=seed)
    for step, batch in zip(range(steps), batches, strict=False):
        progress = step / steps
        curriculum.at(progress).apply(lm)
        output = lm(batch.inputs, targets=batch.targets)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.25)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 50, 5 * (1 - progress))
        optimizer.step()
