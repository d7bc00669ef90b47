"""One training loop, on accelerate: phases, accumulation, mixed precision, several processes, checkpoints."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import deqseq as dq
from common.checkpoints import newest, prune, resume, save
from common.processes import can_compile, whole
from deqseq.check import check_choice, check_integer, check_number
from deqseq.training import Curriculum, NonFiniteLoss, Phase, check_finite, gather_once

log = logging.getLogger("examples")

Compile = Literal["auto", "always", "never"]
TRIED = 20  # updates, after which "auto" decides
LONG = 3600.0  # seconds: the first, compiling calls are won back after 11 to 16 minutes (benchmarks/compile.py)


class Batches(Protocol):
    """Batches with ``inputs`` and ``targets``, this process's rows ``(batch, length)``, that know where they stand."""

    def __next__(self) -> Any:
        """The next batch; StopIteration ends the run."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as JSON, the same in all processes."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from where ``state`` was taken."""
        ...


Call = Callable[[nn.Module, Any, Phase, int], dq.CausalLMOutput]
"""Runs the model on a batch, in a phase, after so many updates: ``call(model, batch, phase, step)``."""


@dataclass(frozen=True)
class Settings:
    """What decides a run besides its parts.

    Args:
        steps: updates of the weights.
        accumulate: batches whose gradients are averaged for an update.
        clip: largest gradient norm.
        checkpoint_every: updates between checkpoints.
        seed: of the random numbers in training, as for dropout: they depend on seed, update and process alone.
        compile: the blocks. ``"auto"``: after 20 updates, if those that are left would take more than an hour. A
            resumed run stays compiled if it was, unless this is ``"never"``.
    """

    steps: int
    accumulate: int = 1
    clip: float = 1.0
    checkpoint_every: int = 100
    seed: int = 0
    compile: Compile = "never"

    def __post_init__(self) -> None:
        check_choice("Settings.compile", self.compile, get_args(Compile))
        for name in ("steps", "accumulate", "checkpoint_every"):
            check_integer(f"Settings.{name}", getattr(self, name), 1)
        check_number("Settings.clip", self.clip, "(0, inf)")
        check_integer("Settings.seed", self.seed, 0)


@dataclass(frozen=True)
class Update:
    """The numbers of one update, averaged over its batches and over all processes.

    Attributes:
        step: updates that are done, this one included.
        phase: of the curriculum.
        loss: mean over the targets, in nats.
        gradient_norm: before clipping.
        lr: of the first group.
        iterations: mean over tokens; None: an explicit model.
        converged: share of the rows whose solve has converged; None: an explicit model.
        seconds: that it took in this process.
    """

    step: int
    phase: str
    loss: float
    gradient_norm: float
    lr: float
    iterations: float | None
    converged: float | None
    seconds: float


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    batches: Batches,
    curriculum: Curriculum,
    settings: Settings,
    folder: Path,
    *,
    call: Call | None = None,
    progress: Callable[[], float] | None = None,
    origin: Path | None = None,
    until: int | None = None,
) -> Iterator[Update]:
    """Train a model, an update at a time, from the newest checkpoint in ``folder`` if there is one.

    Stop whenever: the same call in another process goes on, with the losses of an uninterrupted run, bitwise on a CPU.
    The run ends after ``settings.steps`` updates, or when ``batches`` end. Afterwards ``model`` itself can be
    evaluated; with several processes by all of them.

    Args:
        accelerator: of :func:`common.processes.make_accelerator`; it may train several models, one after the other.
        model: a :class:`deqseq.CausalLM`, not prepared.
        optimizer: of its parameters, not prepared.
        scheduler: of its learning rate, one step an update.
        batches: this process's rows.
        curriculum: phases of an implicit model; an explicit one is left as it is.
        settings: the numbers.
        folder: of the checkpoints.
        call: how the model is run on a batch. Default: ``model(batch.inputs, targets=batch.targets)``.
        progress: the share of the run that is done, for a curriculum in fractions. Default: its updates over
            ``settings.steps``.
        origin: checkpoints of another run, where this one begins if it has none of its own: weights, optimizer,
            schedule, data and updates go on from there, with this run's curriculum.
        until: stop after so many updates, with a checkpoint, as if interrupted.

    Yields:
        The numbers of each update, before its checkpoint is written: a kill in between repeats the update, and no
        number is lost.

    Raises:
        ValueError: the checkpoints are of a run with another curriculum.
        FileNotFoundError: an origin without a checkpoint.
        SystemExit: ``settings.compile`` is ``"always"``, or the run was compiled before, and nothing compiles here.
        NonFiniteLoss: a loss or gradient that is not finite; the weights and the checkpoints are as they were.
    """
    accelerator.free_memory()
    accelerator.gradient_accumulation_steps = settings.accumulate
    prepared, optimizer = accelerator.prepare(model, optimizer)
    gather_once(prepared)
    run = _Run(accelerator, prepared, optimizer, scheduler, batches, curriculum, settings, call or _call, progress)
    try:
        run.resume(folder, origin)
        curriculum.record(run.progress)  # what a checkpoint cannot hold is an error now, not at the first one
        curriculum.at(run.progress).apply(prepared)  # a finished run is evaluated as it was trained
        last, saved = min(settings.steps, until or settings.steps), run.step
        prepared.train()
        if settings.compile == "always" and not run.compiled:
            run.compile()
        while run.step < last and len(drawn := run.draw()) == settings.accumulate:
            yield run.update(drawn)
            if settings.compile == "auto" and run.step == TRIED:  # before the checkpoint, which says what was decided
                run.compile_if_it_pays()
            if run.step % settings.checkpoint_every == 0 or run.step == last:
                run.save(folder)
                saved = run.step
        if saved < run.step:  # the batches have ended
            run.save(folder)
    except NonFiniteLoss as error:
        error.add_note(f"the last good checkpoint: {newest(folder) or 'none has been written'}")
        raise
    finally:
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)  # evaluation chooses its precision itself


def _call(model: nn.Module, batch: Any, phase: Phase, step: int) -> dq.CausalLMOutput:
    device = next(model.parameters()).device
    return model(batch.inputs.to(device), targets=batch.targets.to(device))


@dataclass
class _Run:
    accelerator: Accelerator
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    batches: Batches
    curriculum: Curriculum
    settings: Settings
    call: Call
    share: Callable[[], float] | None
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of the last update
    compiled: bool = False

    @property
    def progress(self) -> float | int:
        share = self.step / self.settings.steps if self.share is None else self.share()
        return {"fraction": share, "steps": self.step, "tokens": self.tokens}[self.curriculum.unit]

    def draw(self) -> list[Any]:
        """The batches of an update; fewer at the end."""
        drawn = [next(self.batches, None) for _ in range(self.settings.accumulate)]  # type: ignore[call-overload]
        return [batch for batch in drawn if batch is not None]

    def save(self, folder: Path) -> None:
        weights = nn.utils.get_total_norm([parameter.detach() for parameter in self.model.parameters()])
        check_finite(whole(weights), step=self.step, quantity="norm of the weights")
        extra = {"tokens": self.tokens, "phase": self.curriculum.record(self.progress), "compiled": self.compiled}
        extra |= {"scheduler": self.scheduler.state_dict(), "batches": self.batches.state_dict()}
        save(self.accelerator, folder, self.step, extra)

    def resume(self, folder: Path, origin: Path | None) -> None:
        extra = resume(self.accelerator, folder)
        if extra is not None:
            self.curriculum.resumed(extra["phase"])
            if self.accelerator.is_main_process:  # a kill right after the last save has left one too many
                prune(folder, extra["step"])
        elif origin is None:
            return
        elif (extra := resume(self.accelerator, origin)) is None:
            raise FileNotFoundError(f"origin must hold a checkpoint, there is none in {origin}")
        self.scheduler.load_state_dict(extra["scheduler"])
        self.batches.load_state_dict(extra["batches"])
        self.step, self.tokens = extra["step"], extra["tokens"]
        log.info("%s: going on from step %d", folder.name, self.step)
        if extra["compiled"] and self.settings.compile != "never":
            self.compile()

    def compile_if_it_pays(self) -> None:
        """Compile if the updates that are left take long, as long as the last one did, and a compiler is there."""
        [left] = self.mean(torch.tensor([self.seconds * (self.settings.steps - self.step)]))
        if left > LONG and self.mean(torch.tensor([float(can_compile(self.accelerator.device))])) == [1.0]:
            self.compile()
        log.info("compiled: %s, as %.0f s are left", self.compiled, left)

    def mean(self, numbers: Tensor) -> list[float]:
        """Over all processes."""
        mean: Any = numbers
        if self.accelerator.num_processes > 1:  # else they stay on the CPU: mps has no float64
            mean = self.accelerator.reduce(numbers.to(self.accelerator.device), "mean")
        return mean.tolist()

    def compile(self) -> None:
        if not can_compile(self.accelerator.device):
            raise SystemExit("torch.compile finds no C++ compiler here, or no Triton on a GPU: give --compile never")
        model: Any = self.accelerator.unwrap_model(self.model)
        model.compile()
        self.compiled = True

    def update(self, drawn: list[Any]) -> Update:
        accelerator, world, begun = self.accelerator, self.accelerator.num_processes, time.perf_counter()
        phase = self.curriculum.at(self.progress)
        phase.apply(self.model)
        torch.manual_seed((self.settings.seed * 2**20 + self.step) * world + accelerator.process_index)
        self.optimizer.zero_grad()
        sums = torch.zeros(4, dtype=torch.float64)
        for batch in drawn:
            with accelerator.accumulate(self.model):
                with accelerator.autocast():
                    output = self.call(self.model, batch, phase, self.step)
                accelerator.backward(output.loss)
            sums += _numbers(output)
            self.tokens += batch.inputs.numel() * world
        loss, iterations, converged, diverged = self.mean(sums / len(drawn))
        where: dict[str, Any] = {"step": self.step, "phase": phase.name}
        check_finite(loss, **where)
        check_finite(math.inf if diverged == 1 else 0.0, quantity="residual of every row", **where)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        norm = check_finite(whole(norm), quantity="gradient norm", **where)
        lr = float(self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        solves = (iterations, converged) if iterations else (None, None)
        self.seconds = time.perf_counter() - begun
        return Update(self.step, phase.name, loss, norm, lr, *solves, self.seconds)


def _numbers(output: dq.CausalLMOutput) -> Tensor:
    """Loss, mean iterations, and the shares of the rows that converged and diverged."""
    assert output.loss is not None
    solves = (0.0, 0.0, 0.0)
    if output.stats is not None and output.status is not None:
        ends = (output.status == status for status in (dq.Status.CONVERGED, dq.Status.DIVERGED))
        numbers = (output.stats.iterations, *ends)
        solves = tuple(value.cpu().double().mean().item() for value in numbers)  # mps has no float64
    return torch.tensor((output.loss.item(), *solves), dtype=torch.float64)
