"""Training on synthetic tasks: batches for the phases of a run, its learning rates and its curve."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

import deqseq as dq
from common import options as opt
from common.loop import Call, Settings
from common.loop import train as run_training
from common.run import Log
from deqseq.tasks import WordBatch
from deqseq.training import Curriculum

log = logging.getLogger("examples")

EVERY = 20  # steps between the logged ones


@dataclass(frozen=True)
class WordOptions:
    """Options of models and training that do not depend on the task."""

    d_model: opt.Size = 64
    """width"""
    d_state: opt.Size = 16
    """mamba2: state size of each channel"""
    headdim: opt.Size = 32
    """mamba2: channels a head"""
    layers: opt.Blocks = 1
    """blocks of the implicit model"""
    batch: opt.Size = 64
    """sequences a training step"""
    steps: opt.Count = 1000
    """training steps of each model"""
    lr: opt.Positive = 1e-3
    """peak learning rate"""
    warmup: opt.Count = 50
    """warm-up steps"""
    clip: opt.Positive = 0.25
    """largest gradient norm"""
    unrolled_steps: opt.Count = 8
    """iterations of the first phase, all differentiated"""
    max_steps: opt.Count = 32
    """iterations of the second phase, at most"""
    rtol: opt.Positive = 0.03
    """relative tolerance of the second phase, the largest over the tokens"""
    eval_rtol: opt.Positive = 1e-2
    """relative tolerance at evaluation"""
    checkpoint_every: opt.Count = 50
    """steps between checkpoints"""
    seed: opt.Natural = 0
    """seed of weights and data"""
    device: opt.Device = "cpu"
    """where to run"""
    fresh: bool = False
    """remove what an earlier run wrote into the output folder"""


class Words:
    """The batches of a run, each for the phase that is then in force.

    Args:
        streams: one of these is drawn from at every step; each yields a batch for every phase, by its name.
        curriculum: the phases, in fractions of the run.
        steps: of the run.
        warmup: steps until the learning rate is at its peak.
        seed: decides which stream is drawn from.
    """

    def __init__(
        self,
        streams: Sequence[Iterator[dict[str, WordBatch]]],
        curriculum: Curriculum,
        *,
        steps: int,
        warmup: int,
        seed: int,
    ) -> None:
        self.streams, self.curriculum = streams, curriculum
        self.steps, self.warmup, self.seed, self.step = steps, warmup, seed, 0

    @property
    def progress(self) -> float:
        """The share of the training that is done."""
        return self.step / self.steps

    @property
    def lr_factor(self) -> float:
        """The next learning rate over its peak: linear warm-up, constant, linear decay over the last fifth."""
        return min(1.0, (self.step + 1) / self.warmup, max(0.05, 5 * (1 - self.progress)))

    def __next__(self) -> WordBatch:
        if self.progress >= 1:
            raise StopIteration
        name = self.curriculum.at(self.progress).name
        return self._draw()[name]

    def state_dict(self) -> dict[str, Any]:
        """How many batches were drawn."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw what was drawn before."""
        while self.step < state["step"]:
            self._draw()

    def _draw(self) -> dict[str, WordBatch]:
        """A batch for each phase, at every step, so that a run that goes on draws what it would have drawn."""
        drawn = next(random.Random(f"data {self.seed} {self.step}").choice(self.streams))
        self.step += 1
        return drawn


def fit(
    accelerator: Accelerator,
    name: str,
    lm: dq.CausalLM,
    words: Words,
    settings: Settings,
    folder: Path,
    *,
    lr: float,
    call: Call,
    accuracy: Callable[[dq.CausalLMOutput, WordBatch], float],
) -> None:
    """Train a model to the end of ``words``, from its newest checkpoint if there is one, and write its curve.

    Args:
        accelerator: of :func:`common.processes.make_accelerator`.
        name: of the model, for the progress.
        lm: implicit or explicit.
        words: the batches.
        settings: of the loop.
        folder: of checkpoints and ``curve.jsonl``.
        lr: peak learning rate.
        call: runs the model on a batch.
        accuracy: of an output, for the curve.
    """
    optimizer = torch.optim.AdamW(lm.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = LambdaLR(optimizer, lambda _: words.lr_factor)
    more: dict[str, float] = {}

    def measured(model: Any, batch: WordBatch, phase: Any, step: int) -> dq.CausalLMOutput:
        output = call(model, batch, phase, step)
        if (step + 1) % EVERY == 0:
            more.update(accuracy=accuracy(output, batch))
            if output.stats is not None:
                more.update(token_updates=output.stats.updates.float().mean().item())
        return output

    curve = Log(folder / "curve.jsonl", name, 1.0, shown=("loss", "accuracy", "iterations"))
    parts = (optimizer, scheduler, words, words.curriculum, settings, folder)
    for update in run_training(accelerator, lm, *parts, call=measured):
        if update.step % EVERY == 0:
            numbers = asdict(update) | more
            curve.add(numbers, done=words.progress)
            log.info("%s step %d: %s", name, update.step, numbers)
    curve.close()


def solve_numbers(output: dq.CausalLMOutput) -> dict[str, Any]:
    """Mean iterations, share of the rows that converged, mean updates of a token, evaluations of the map."""
    if output.stats is None or output.status is None:
        return dict.fromkeys(("self_iterations", "converged", "token_updates", "evaluations"))
    return {
        "self_iterations": output.stats.iterations.float().mean().item(),
        "converged": output.converged.float().mean().item(),
        "token_updates": output.stats.updates.float().mean().item(),
        "evaluations": output.stats.evaluations,
    }
