"""Make the parity models that come with the library: ``python docs/_tools/parity.py``.

They are trained as on tutorials/parity.md and written to deqseq/models/weights/.
"""

import torch
from safetensors.torch import save_file

import deqseq as dq
from deqseq.models.examples import WEIGHTS
from deqseq.tasks import WordProblem, cyclic
from deqseq.training import Curriculum, free, unrolled

PLAIN = dq.SolveConfig(solver=dq.Naive())
CURRICULA = {
    "parity": Curriculum((unrolled(8, until=0.4, base=PLAIN), free(32, rtol=0.03, base=PLAIN))),
    "parity-unrolled": Curriculum((unrolled(4, until=None, base=PLAIN),)),
}


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


if __name__ == "__main__":
    for name, curriculum in CURRICULA.items():
        torch.manual_seed(0)
        lm = dq.EXAMPLES[name].build()
        train(lm, curriculum)
        made_by = f"docs/_tools/parity.py: {curriculum}, 400 steps, seed 0"
        save_file(lm.state_dict(), WEIGHTS / f"{name}.safetensors", metadata={"made_by": made_by})
