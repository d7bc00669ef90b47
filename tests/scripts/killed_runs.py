"""A run of training that is killed again and again and taken up again; every process writes down what it saw.

    python killed_runs.py FOLDER SEED

A parent imports the library once and forks the processes that train. ``FOLDER/whole.txt`` is the uninterrupted run,
``FOLDER/anywhere.txt`` one whose processes are killed after a random time, ``FOLDER/writing.txt`` one whose n-th
process kills itself at the n-th thing it does to the files of checkpoints. ``FOLDER/again.txt`` holds what is left of
a checkpoint of weight 1 when a process that writes the same step with weight 2 is killed at the n-th such thing.
"""

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

import deqseq as dq
from deqseq.tasks import WordProblem, cyclic
from deqseq.training import (
    Curriculum,
    bounded,
    check_finite,
    free,
    load_latest,
    parameter_groups,
    save_checkpoint,
    warmup_constant_decay,
)

STEPS, EVERY = 24, 3
TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def train(folder: Path, report: Path) -> None:
    """The run, from its newest checkpoint to the end."""
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_state": 4, "headdim": 4, "dropout": 0.2}
    lm = dq.CausalLM(2, dq.ImplicitModel(dq.Mamba2(dq.Mamba2Config(**sizes))))
    optimizer = torch.optim.AdamW(parameter_groups(lm), lr=1e-2)
    scheduler = warmup_constant_decay(optimizer, total_steps=STEPS, warmup_steps=4, decay_steps=8)
    curriculum, step = Curriculum((bounded(2, 1, until=STEPS // 2), free(6, 2)), unit="steps"), 0
    torch.manual_seed(os.getpid())  # whatever a process starts with, the checkpoint's state has to replace
    random.seed(os.getpid())
    numpy.random.seed(os.getpid())
    saved = load_latest(folder)
    if saved is None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
    else:
        curriculum.resumed(saved.phase)
        saved.restore(lm, optimizer, scheduler)
        step = saved.step
    write(report, f"from {step}")
    data = WordProblem(cyclic(2)).batches(4, (3, 5), seed=0)
    for _ in range(step if saved is None else saved.position["batches"]):
        next(data)
    while step < STEPS:
        phase = curriculum.at(step)
        phase.apply(lm)
        batch = next(data)
        loss = lm(batch.inputs, targets=batch.targets).loss * (1 + random.random() + numpy.random.rand())
        check_finite(loss, step=step, phase=phase.name, directory=folder)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        write(report, f"loss {step} {phase.name} {loss.item().hex()}")
        if step % EVERY == 0:
            position, phase_now = {"batches": step}, curriculum.record(step)
            save_checkpoint(folder, step, lm, optimizer, scheduler=scheduler, position=position, phase=phase_now)
            write(report, f"saved {step}")
    write(report, "end")


def write(report: Path, line: str) -> None:
    """One line, whole."""
    with report.open("a") as file:
        file.write(line + "\n")


def save_weight(folder: Path, weight: float) -> None:
    """A checkpoint of step 1."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, weight)
    save_checkpoint(folder, 1, model, torch.optim.SGD(model.parameters()), keep=1)


def forked(work: Callable[[], None], folder: Path, report: Path, touches: int | None = None) -> int:
    """A process that does some work; with ``touches`` it kills itself at that one."""
    process = os.fork()
    if process:
        return process
    try:
        if touches is not None:
            kill_at(touches, folder)
        work()
    except BaseException as error:
        write(report, f"failed {type(error).__name__}: {error}")
    finally:
        os._exit(0)


def kill_at(touch: int, folder: Path) -> None:
    """Count what this process does to files in the folder, reading apart, and end it there."""
    left = [touch]

    def hook(event: str, arguments: tuple) -> None:
        if event not in TOUCHES or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def lines(report: Path) -> list[str]:
    """What the run's processes have written."""
    return report.read_text().splitlines() if report.exists() else []


def ended(report: Path) -> bool:
    """Whether the run has come to its end, or has failed."""
    return any(line == "end" or line.startswith("failed") for line in lines(report))


def whole(folder: Path, report: Path) -> float:
    """The uninterrupted run; the seconds that it took."""
    begun = time.monotonic()
    os.waitpid(forked(lambda: train(folder, report), folder, report), 0)
    return time.monotonic() - begun


def anywhere(folder: Path, report: Path, chance: random.Random, seconds: float) -> None:
    """Kill after random times."""
    while not ended(report):
        before = len(lines(report))
        process = forked(lambda: train(folder, report), folder, report)
        while len(lines(report)) == before:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.4) * seconds)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def writing(folder: Path, report: Path) -> None:
    """Kill at the first, second, ... touch."""
    for touches in itertools.count(1):
        os.waitpid(forked(lambda: train(folder, report), folder, report, touches), 0)
        if ended(report):
            return


def again(folder: Path, report: Path) -> None:
    """Kill at the first, second, ... touch of a checkpoint that takes the place of another."""
    status = -1
    for touches in itertools.count(1):
        save_weight(folder, 1.0)
        process = forked(lambda: save_weight(folder, 2.0), folder, report, touches)
        status = os.waitpid(process, 0)[1]
        saved = load_latest(folder)
        write(report, "none" if saved is None else f"{saved.model['weight'].item()}")
        if status == 0:
            return


def main(output: Path, seed: int) -> None:
    """All of them."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # loads what every process would load again
    seconds = whole(output / "whole", output / "whole.txt")
    anywhere(output / "anywhere", output / "anywhere.txt", random.Random(seed), seconds)
    writing(output / "writing", output / "writing.txt")
    again(output / "again", output / "again.txt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
