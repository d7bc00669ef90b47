"""Training on synthetic tasks: one recipe for all of them, whose lengths grow as the accuracy does.

An implicit model starts on strings of 2 tokens, through a few unrolled iterations, all differentiated. When nearly all
answers are right, the next length follows; from ``--lengths`` it goes on to ``--free-lengths``, where the fixed point
itself is trained, solved with a sliding window from random states. When the last length is learned, the learning rate
falls to the end. An explicit model sees the same batches at the same steps.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import deqseq as dq
from common import options as opt
from common.checkpoints import FILES
from common.loop import Settings
from common.loop import train as run_training
from common.run import Log, claim_folder
from deqseq.tasks import Task, WordBatch
from deqseq.training import Curriculum, Phase, free, unrolled

log = logging.getLogger("examples")

EVERY = 20  # steps between the logged ones
FALLING = 600  # steps of the falling learning rate, at least
# options of the evaluation alone
TESTS = ("baselines", "eval_lengths", "eval_rtol", "eval_identity_probability", "solver", "strings")
RECENT = 10  # batches whose accuracy decides whether a length is learned


@dataclass(frozen=True)
class WordOptions:
    """Options of models and training that do not depend on the task."""

    d_model: opt.Size = 64
    """width"""
    d_state: opt.Size = 32
    """mamba2: state size of each channel"""
    headdim: opt.Size = 32
    """mamba2: channels a head"""
    layers: opt.Blocks = 1
    """blocks of the implicit model"""
    dropout: Annotated[float, opt.number("[0, 1)")] = 0.2
    """of the blocks, one mask a solve: keeps small errors from adding up over the tokens"""
    batch: opt.Size = 128
    """sequences a training step"""
    lengths: Annotated[tuple[opt.Size, ...], opt.Ascending] = (2, 3, 4, 5, 6, 7, 8)
    """lengths of the first phase, one after the other as they are learned"""
    free_lengths: Annotated[tuple[opt.Size, ...], opt.Ascending] = (8, 10, 12, 14, 16, 20, 24, 28, 32)
    """lengths of the second phase"""
    learned: opt.Probability = 0.95
    """accuracy at which the next length follows"""
    steps: opt.Count = 8000
    """training steps at most"""
    lr: opt.Positive = 3e-3
    """peak learning rate"""
    warmup: opt.Count = 50
    """warm-up steps"""
    clip: opt.Positive = 0.25
    """largest gradient norm"""
    unrolled_steps: opt.Count = 8
    """iterations of the first phase, all differentiated"""
    max_steps: opt.Count = 16
    """iterations of the second phase, at most, before a token leaves the window"""
    rtol: opt.Positive = 0.03
    """relative tolerance of the second phase"""
    start: opt.Positive = 0.5
    """standard deviation of the states that the solves of the second phase begin at"""
    window: opt.Size = 8
    """tokens of the sliding window, in training and evaluation"""
    phantom_steps: opt.Count = 4
    """steps of the second phase's gradient"""
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

    @property
    def longest(self) -> int:
        """The longest trained length."""
        return max(*self.lengths, *self.free_lengths)

    @property
    def curriculum(self) -> Curriculum:
        """Unrolled iterations first, then the fixed point itself; a lesson of each phase is a length."""
        windowed = dq.SolveConfig(dq.Adaptive(), sweep=dq.Sliding(self.window), start=dq.RandomStart(self.start))
        until = len(self.lengths) / (len(self.lengths) + len(self.free_lengths) + 1)
        adaptive = dq.SolveConfig(dq.Adaptive())
        first = unrolled(self.unrolled_steps, until=until, base=dq.SolveConfig(dq.Relaxed(0.8)), eval_base=adaptive)
        then = free(self.max_steps, self.phantom_steps, rtol=self.rtol, base=windowed, eval_base=adaptive)
        return Curriculum((first, then))


def claim(script: str, options: WordOptions, folder: str, *more: str) -> Path:
    """Make or enter the folder of the results; ``more`` are the files that this script alone writes."""
    runs = [f"{run}/{file}" for run in ("implicit", "explicit-*-block*") for file in (*FILES, "curve.jsonl")]
    writes = [*runs, "results.json", "table.md", f"{script}.png", "log.txt", *more]
    free = ("output", "device", "checkpoint_every", "quick", "fresh", *TESTS)  # may change when a run is continued
    return claim_folder(folder, script, asdict(options), fresh=options.fresh, free=free, writes=writes)


class Words:
    """The batches of a run, in lessons: one for each length, which ends when the length is learned.

    Half of the batches have the lesson's length, the others one drawn up to it. When all is learned, or the options'
    ``steps`` are nearly over, the learning rate falls: over 2/5 of the steps done so far, at least 600, at most 2/7 of
    all.

    Args:
        tasks: one of these is drawn from at every step.
        options: lengths, sizes, learning rates.
        plan: the lessons of a run that has ended, ``words.plan``, to be repeated. Default: the accuracy decides.
        device: of the batches.
        prepare: changes a batch.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        options: WordOptions,
        plan: dict[str, Any] | None = None,
        *,
        device: torch.device | str = "cpu",
        prepare: Callable[[WordBatch], WordBatch] = lambda batch: batch,
    ) -> None:
        self.tasks, self.options, self.device, self.prepare = tasks, options, device, prepare
        shortest = max(task.shortest for task in tasks)
        self.lengths = [max(length, shortest) for length in (*options.lengths, *options.free_lengths)]
        self.shortest, self.given, self.step = shortest, plan, 0
        self.ends: list[int] = []  # steps after which a lesson was over
        self.decay: int | None = None  # steps after which the learning rate falls
        self.recent: list[float] = []  # accuracies of this lesson's batches of full length
        self.full = False  # whether the last batch was one
        self.cpu_seconds, self._clock = 0.0, time.process_time()

    @property
    def length(self) -> int:
        """That of the lesson."""
        return self.lengths[min(len(self.ends), len(self.lengths) - 1)]

    @property
    def reached(self) -> int:
        """The longest length of the lessons so far."""
        return max(self.lengths[: len(self.ends) + 1])

    @property
    def last(self) -> int:
        """Steps of the whole run, as far as it is known."""
        return self.options.steps if self.decay is None else self._last(self.decay)

    @property
    def progress(self) -> float:
        """Lessons that are over, a last one for the time in which the learning rate falls."""
        left = len(self.lengths) + 1 - len(self.ends)
        falling = 0.0 if self.decay is None else (self.step - self.decay) / max(1, self.last - self.decay)
        return 1.0 if self.step >= self.last else (len(self.ends) + falling * left) / (len(self.lengths) + 1)

    @property
    def lr_factor(self) -> float:
        """The next learning rate over its peak: linear warm-up, constant, a cosine."""
        rise = min(1.0, (self.step + 1) / self.options.warmup)
        if self.decay is None:
            return rise
        fallen = (self.step - self.decay) / max(1, self.last - self.decay)
        return min(rise, max(0.02, 0.5 + 0.5 * math.cos(math.pi * min(1.0, fallen))))

    @property
    def plan(self) -> dict[str, Any]:
        """When its lessons were over, and the learning rate fell."""
        return {"ends": self.ends, "decay": self.decay}

    @property
    def numbers(self) -> dict[str, Any]:
        """What the training took."""
        return {"steps": self.step, "trained_to": self.reached, "cpu_minutes": round(self.cpu_seconds / 60, 2)}

    def __next__(self) -> WordBatch:
        if self.step >= self.last:
            raise StopIteration
        drawn = random.Random(f"data {self.options.seed} {self.step}")  # a run that goes on draws the same
        length = self.length if drawn.random() < 0.5 else drawn.randint(self.shortest, self.length)
        stream = drawn.choice(self.tasks).batches(
            self.options.batch, length, seed=drawn.getrandbits(61) % 2**31, device=self.device
        )
        self.step, self.full = self.step + 1, length == self.length
        before, self._clock = self._clock, time.process_time()
        self.cpu_seconds += self._clock - before
        return self.prepare(next(stream))

    def observe(self, accuracy: float) -> None:
        """Tell the accuracy of the last batch; it may end the lesson."""
        if self.given is not None:
            self.ends = [end for end in self.given["ends"] if end <= self.step]
            self.decay = self.given["decay"] if (self.given["decay"] or math.inf) <= self.step else None
            return
        if self.full and self.decay is None:
            self.recent = [*self.recent[1 - RECENT :], accuracy]
            if len(self.recent) == RECENT and sum(self.recent) >= self.options.learned * RECENT:
                self.ends.append(self.step)
                self.recent = []
        late = self._last(self.step) == self.options.steps
        if self.decay is None and (late or len(self.ends) == len(self.lengths)):
            self.decay = self.step

    def _last(self, decay: int) -> int:
        """The step at which the run ends if the learning rate falls after ``decay`` of them."""
        return min(self.options.steps, decay + min(max(FALLING, 2 * decay // 5), 2 * self.options.steps // 7))

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, as JSON."""
        names = ("step", "recent", "full", "cpu_seconds")
        return self.plan | {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        for name, value in state.items():
            setattr(self, name, value)


def fit(
    accelerator: Accelerator,
    name: str,
    lm: dq.CausalLM,
    words: Words,
    folder: Path,
    accuracy: Callable[[dq.CausalLMOutput, WordBatch], float],
) -> None:
    """Train a model to the end of ``words``, from its newest checkpoint if there is one, and write its curve.

    Args:
        accelerator: of :func:`common.processes.make_accelerator`.
        name: of the model, for the progress.
        lm: implicit or explicit.
        words: the batches.
        folder: of checkpoints and ``curve.jsonl``.
        accuracy: of an output.
    """
    options, more = words.options, {}
    optimizer = torch.optim.AdamW(lm.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = LambdaLR(optimizer, lambda _: words.lr_factor)
    settings = Settings(options.steps, clip=options.clip, checkpoint_every=options.checkpoint_every, seed=options.seed)

    def call(model: nn.Module, batch: WordBatch, phase: Phase, step: int) -> dq.CausalLMOutput:
        output = model(batch.inputs, targets=batch.targets)
        more.update(length=words.length, accuracy=accuracy(output, batch))
        words.observe(more["accuracy"])
        if output.stats is not None:
            more.update(token_updates=output.stats.updates.float().mean().item())
        return output

    curve = Log(folder / "curve.jsonl", name, 1.0, shown=("loss", "accuracy", "length"))
    parts = (optimizer, scheduler, words, options.curriculum, settings, folder)
    for update in run_training(accelerator, lm, *parts, call=call, progress=lambda: words.progress):
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
