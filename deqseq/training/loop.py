"""One training loop: a curriculum, several batches an update, several processes, checkpoints."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from deqseq.models.implicit import ImplicitModel
from deqseq.solution import Status
from deqseq.sweeps import Simultaneous, Sweep
from deqseq.training.checkpoint import Checkpoint, load_latest, save_checkpoint
from deqseq.training.curriculum import Curriculum
from deqseq.training.guard import check_finite
from deqseq.training.processes import (
    Processes,
    gradients_exchanged,
    restore_whole_state,
    unwrapped,
    whole_state,
)


@runtime_checkable
class Batch(Protocol):
    """What a step is trained on.

    Example:
        >>> from deqseq.tasks import WordProblem, cyclic
        >>> batch = WordProblem(cyclic(2)).fixed(4, 8, seed=0)
        >>> isinstance(batch, Batch)
        True
    """

    @property
    def inputs(self) -> Tensor:
        """Token ids, ``(batch, length)``."""
        ...

    @property
    def targets(self) -> Tensor:
        """The answer at each position, ``(batch, length)``."""
        ...


@runtime_checkable
class Batches(Protocol):
    """This process's part of one batch after the other, which can go on from where it was.

    Example:
        >>> from deqseq.tasks import WordProblem, cyclic
        >>> class Words:
        ...     def __init__(self): self.task, self.done = WordProblem(cyclic(2)), 0
        ...     def __next__(self):
        ...         self.done += 1
        ...         return self.task.fixed(4, 8, seed=self.done)
        ...     def state_dict(self): return {"done": self.done}
        ...     def load_state_dict(self, state): self.done = state["done"]
        >>> isinstance(Words(), Batches)
        True
    """

    def __next__(self) -> Batch:
        """The next one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, the same in all processes."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from where ``state`` was taken."""
        ...


@dataclass(frozen=True)
class Settings:
    """What decides a run, besides its parts.

    Args:
        steps: updates of the weights.
        batches_a_step: batches whose gradients are averaged for an update.
        clip: largest gradient norm.
        bfloat16: whether the model computes under autocast to bfloat16; weights and states stay as they are.
        checkpoint_every: updates between checkpoints.
        keep: checkpoints that stay.
        seed: of the random numbers in training, as for dropout: they depend on seed, update and process alone.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> Settings(steps=1000, clip=0.25).checkpoint_every
        100
    """

    steps: int
    batches_a_step: int = 1
    clip: float = 1.0
    bfloat16: bool = False
    checkpoint_every: int = 100
    keep: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batches_a_step", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"Settings.{name} must be at least 1, got {getattr(self, name)!r}")
        if not self.clip > 0:
            raise ValueError(f"Settings.clip must be above 0, got {self.clip!r}")


@dataclass(frozen=True)
class Update:
    """The numbers of one update, those of its batches averaged over them and over all processes.

    Attributes:
        step: updates that are done, this one included.
        phase: of the curriculum.
        loss: mean over the targets, in nats.
        gradient_norm: before clipping.
        lr: of the first group.
        seconds: that it took in this process.
        self_iterations: mean over rows, or tokens if the stopping rule tells them apart; None: an explicit model.
        converged: share of the rows whose solve has converged, 0 in a bounded phase, which does not ask; None: an
            explicit model.
    """

    step: int
    phase: str
    loss: float
    gradient_norm: float
    lr: float
    seconds: float
    self_iterations: float | None
    converged: float | None


@dataclass
class Run:
    """A run of training, which goes on from its newest checkpoint.

    Iterate over it: an update each time, as numbers. Interrupt it whenever; another ``Run`` of the same parts goes on,
    and gives the losses of an uninterrupted one, on a CPU to the bit.

    Args:
        model: a :class:`deqseq.CausalLM`, or what :meth:`Processes.spread` has made of it.
        batches: of each process's own rows; rows without any target are not for training.
        optimizer: of the model's parameters.
        scheduler: of its learning rate, an update at a time.
        curriculum: phases of an implicit model; its unit is what ``progress`` counts.
        settings: the numbers.
        directory: of the checkpoints.
        processes: of the run.
        sweep: which tokens are solved together in training.
        origin: checkpoints of another run, where this one begins if it has none of its own: weights, optimizer, data
            and updates go on from there, under this run's curriculum and schedule.

    Raises:
        ValueError: checkpoints of a run with another curriculum.
        FileNotFoundError: an origin without a checkpoint.
        NonFiniteLoss: a loss or gradient that is not finite, before the weights have changed.

    Example:
        >>> import tempfile, deqseq as dq
        >>> from deqseq.tasks.text import ByteEncoder, PackedBatches, PackedText
        >>> from deqseq.training import bounded, warmup_constant_decay
        >>> lm = dq.CausalLM(257, dq.ImplicitModel(dq.Affine(8)))
        >>> text = PackedText.pack(["to be or not to be"], ByteEncoder(), length=4)
        >>> optimizer = torch.optim.AdamW(lm.parameters())
        >>> scheduler = warmup_constant_decay(optimizer, total_steps=3, warmup_steps=1, decay_steps=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     parts = PackedBatches(text, 2, seed=0), optimizer, scheduler, Curriculum((bounded(until=None),))
        ...     [update.step for update in Run(lm, *parts, Settings(steps=3), Path(folder))]
        [1, 2, 3]
    """

    model: nn.Module
    batches: Batches
    optimizer: Optimizer
    scheduler: LRScheduler
    curriculum: Curriculum
    settings: Settings
    directory: Path
    processes: Processes = Processes()
    sweep: Sweep = Simultaneous()
    origin: Path | None = None

    def __post_init__(self) -> None:
        self.step = 0
        self.tokens = 0
        saved = load_latest(self.directory, self.processes.device)
        if saved is not None:
            self.curriculum.resumed(saved.phase)
        elif self.origin is not None:
            saved = load_latest(self.origin, self.processes.device)
            if saved is None:
                raise FileNotFoundError(f"origin must have a checkpoint, there is none in {self.origin}")
        if saved is not None:
            self._go_on(saved)
        self.curriculum.at(self.progress).apply(self.model)  # a finished run is evaluated as it was trained

    @property
    def progress(self) -> float | int:
        """How much is done, in the curriculum's unit."""
        amounts = {"fraction": self.step / self.settings.steps, "steps": self.step, "tokens": self.tokens}
        return amounts[self.curriculum.unit]

    def __iter__(self) -> Iterator[Update]:
        """One update after the other, to the end; checkpoints are written on the way and at the end."""
        self.model.train()
        while self.step < self.settings.steps:
            begun = time.perf_counter()
            update = self._update(begun)
            if self.step % self.settings.checkpoint_every == 0 or self.step == self.settings.steps:
                self.save()
            yield update

    def save(self) -> None:
        """Write a checkpoint; all processes must call this."""
        weights, state = whole_state(self.model, self.optimizer)
        if self.processes.first:
            save_checkpoint(
                self.directory,
                self.step,
                weights,
                state,
                {"tokens": self.tokens},
                scheduler=self.scheduler,
                position=self.batches.state_dict(),
                phase=self.curriculum.record(self.progress),
                keep=self.settings.keep,
            )
        self.processes.wait()

    def _go_on(self, saved: Checkpoint) -> None:
        restore_whole_state(self.model, self.optimizer, saved.model, saved.optimizer)
        self.scheduler.load_state_dict(saved.scheduler or {})
        self.batches.load_state_dict(saved.position)
        self.step, self.tokens = saved.step, saved.meta["tokens"]

    def _update(self, begun: float) -> Update:
        phase = self.curriculum.at(self.progress)
        phase.apply(self.model)
        torch.manual_seed((self.settings.seed * 2**20 + self.step) * self.processes.world + self.processes.rank)
        self.optimizer.zero_grad()
        sums = torch.zeros(3, dtype=torch.float64)
        for index in range(self.settings.batches_a_step):
            sums += self._backward(last=index == self.settings.batches_a_step - 1)
        each = self.settings.batches_a_step * self.processes.world
        loss, steps, converged = (value / each for value in self.processes.sum(*sums.tolist()))
        where = {"step": self.step, "phase": phase.name, "directory": self.directory}
        check_finite(loss, **where)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        check_finite(norm, quantity="gradient norm", **where)
        lr = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        seconds = time.perf_counter() - begun
        counts = (steps, converged) if steps else (None, None)
        return Update(self.step, phase.name, loss, float(norm), lr, seconds, *counts)

    def _backward(self, *, last: bool) -> Tensor:
        """Add one batch's gradients; its loss, self-iterations and share of converged rows."""
        batch, device = next(self.batches), self.processes.device
        inputs, targets = batch.inputs.to(device), batch.targets.to(device)
        how = {"sweep": self.sweep} if isinstance(unwrapped(self.model).model, ImplicitModel) else {}
        with gradients_exchanged(self.model, last):
            with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.bfloat16):
                output = self.model(inputs, targets=targets, **how)
            (output.loss / self.settings.batches_a_step).backward()
        self.tokens += inputs.numel() * self.processes.world
        solved = (0.0, 0.0)
        if output.stats is not None:
            passed = output.status == Status.CONVERGED
            solved = (output.stats.steps.double().mean().item(), passed.double().mean().item())
        return torch.tensor((output.loss.item(), *solved), dtype=torch.float64)
