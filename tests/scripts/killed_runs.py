"""A run of training that is killed again and again and taken up again; every process writes down what it saw.

    python killed_runs.py FOLDER SEED

A parent imports the library once and forks the processes that train. ``FOLDER/whole.txt`` is the uninterrupted run,
``FOLDER/anywhere.txt`` one whose processes are killed after a random time, ``FOLDER/writing.txt`` one whose n-th
process kills itself at the n-th thing it does to the files of checkpoints.
"""

import importlib
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
from deqseq.training import Curriculum, bounded, free

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS.parent / "examples"), str(TESTS / "examples")]
common_loop, common_processes, small_runs = map(
    importlib.import_module, ("common.loop", "common.processes", "small_runs")
)

STEPS, EVERY = 24, 3
TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def run(folder: Path, report: Path) -> None:
    """The run, from its newest checkpoint to the end."""
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_state": 4, "headdim": 4, "dropout": 0.2}
    lm = dq.CausalLM(2, dq.ImplicitModel(dq.Mamba2(dq.Mamba2Config(**sizes))))
    curriculum = Curriculum((bounded(2, 1, until=STEPS // 2), free(6, 2)), unit="steps")
    begun = any(folder.glob("checkpoint-*")) if folder.exists() else False
    for seed in (random.seed, numpy.random.seed):  # whatever a process starts with, the checkpoint's state replaces it
        seed(os.getpid() if begun else 1)
    write(report, "from")

    def call(model, batch, phase, step) -> dq.CausalLMOutput:
        """The loss depends on the random numbers of torch (dropout), Python and NumPy."""
        output = model(batch.inputs, targets=batch.targets)
        output.loss.mul_(1 + random.random() + numpy.random.rand())
        write(report, f"loss {step + 1} {phase.name} {output.loss.item().hex()}")
        return output

    settings = common_loop.Settings(STEPS, checkpoint_every=EVERY)
    parts = (lm, *small_runs.optimizer_of(lm), small_runs.Words(), curriculum, settings, folder)
    for update in common_loop.train(common_processes.make_accelerator(), *parts, call=call):
        write(report, f"update {update.step}")
    write(report, "end")


def write(report: Path, line: str) -> None:
    """One line, whole."""
    with report.open("a") as file:
        file.write(line + "\n")


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
    os.waitpid(forked(lambda: run(folder, report), folder, report), 0)
    return time.monotonic() - begun


def anywhere(folder: Path, report: Path, chance: random.Random, seconds: float) -> None:
    """Kill after random times, which grow: a process that cannot reach its next checkpoint would be killed for ever."""
    longest = 0.4 * seconds
    while not ended(report):
        before = len(lines(report))
        process = forked(lambda: run(folder, report), folder, report)
        while len(lines(report)) == before:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, longest))
        longest *= 1.05
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def writing(folder: Path, report: Path) -> None:
    """Kill at the first, second, ... touch."""
    for touches in itertools.count(1):
        os.waitpid(forked(lambda: run(folder, report), folder, report, touches), 0)
        if ended(report):
            return


def main(output: Path, seed: int) -> None:
    """All of them."""
    torch.set_num_threads(1)  # a forked process has no threads of its parent
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # loads what every process would load again
    seconds = whole(output / "whole", output / "whole.txt")
    anywhere(output / "anywhere", output / "anywhere.txt", random.Random(seed), seconds)
    writing(output / "writing", output / "writing.txt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
