"""A small run of the training loop that the examples share."""

from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState
from common.loop import Settings, Update, train
from common.processes import make_accelerator
from torch.optim.lr_scheduler import LambdaLR

import deqseq as dq
from deqseq.tasks import WordBatch, WordProblem, cyclic
from deqseq.training import Curriculum, bounded, free, parameter_groups

TWO = Curriculum((bounded(2, 1, until=0.5), free(8, 2)))


class Words:
    """Batches of parity problems, each process's own rows of them."""

    def __init__(self, batch: int = 4, rank: int = 0, world: int = 1) -> None:
        self.batch, self.rank, self.world, self.done = batch, rank, world, 0

    def __next__(self) -> WordBatch:
        self.done += 1
        whole, mine = WordProblem(cyclic(2)).fixed(self.batch, 6, seed=self.done), slice(self.rank, None, self.world)
        return WordBatch(whole.inputs[mine], whole.targets[mine])

    def state_dict(self) -> dict:
        return {"done": self.done}

    def load_state_dict(self, state: dict) -> None:
        self.done = state["done"]


def made(implicit: bool = True, dropout: float = 0.0) -> dq.CausalLM:
    torch.manual_seed(0)
    config = dq.Mamba2Config(d_model=16, d_state=4, headdim=8, dropout=dropout, injection=implicit)
    inner = dq.ImplicitModel(dq.Mamba2(config)) if implicit else dq.ExplicitModel(dq.Mamba2(config))
    return dq.CausalLM(2, inner, embedding_dropout=dropout)


def optimizer_of(lm: dq.CausalLM) -> tuple[torch.optim.Optimizer, LambdaLR]:
    optimizer = torch.optim.AdamW(parameter_groups(lm), lr=3e-3)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))


def run(
    folder: Path, lm=None, curriculum=TWO, *, bfloat16=False, words=None, call=None, origin=None, until=None, **more
):
    """The updates of a run of eight steps."""
    AcceleratorState._reset_state(reset_partial_state=True)  # each run has an accelerator of its own
    GradientState._reset_state()
    lm = made() if lm is None else lm
    settings = Settings(**{"steps": 8, "checkpoint_every": 3, **more})
    parts = (lm, *optimizer_of(lm), words or Words(), curriculum, settings, folder)
    return train(make_accelerator(bfloat16=bfloat16), *parts, call=call, origin=origin, until=until)


def losses(updates) -> list[float]:
    return [update.loss for update in updates]


__all__ = ["TWO", "Update", "Words", "losses", "made", "optimizer_of", "run"]
