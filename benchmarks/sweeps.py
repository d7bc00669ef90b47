"""What each sweep costs on trained models: accuracy, updates, evaluations and time, at equal per-token tolerance.

The models come with the library (parity, and A5 from two generators), were trained at lengths up to 16, and are solved
at 64, 128 and 512, for a batch of 64 and a single sequence. A token has converged at a relative residual of 1e-2, and
every solver is ``Adaptive()``. All sweeps of a case take turns. The simultaneous sweep at length 512 and batch 64
takes minutes: it is run once, and its accuracy is that of the timed sequences alone; of the others, accuracy is that of
256 sequences (8 where they are solved one by one).
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from harness import Row, arguments, judge, report, value_row
from torch import Tensor

import deqseq as dq
from deqseq.tasks import WordProblem, alternating, cyclic, generators

TASKS = {"parity": WordProblem(cyclic(2)), "A5": WordProblem(alternating(5), generators(alternating(5), 2))}
WINDOWS = (4, 8, 16, 32)
RTOL = 1e-2
SEQUENCES = 256


@dataclass(frozen=True)
class Trained:
    """A model, its task, and how to turn its batches into inputs."""

    name: str
    lm: dq.CausalLM
    task: WordProblem


@dataclass
class Measured:
    """What one sweep did in one case."""

    sweep: dq.Sweep
    seconds: list[float]
    accuracy: float = float("nan")
    updates: float = float("nan")
    evaluations: int = 0
    converged: float = float("nan")


def trained(name: str) -> Trained:
    """A model that comes with the library, and its task."""
    return Trained(name, dq.load_example(name.lower()), TASKS[name])


def stop_for(sweep: dq.Sweep, length: int) -> dq.Stop:
    """The same tolerance for all; the budget is that of the whole sequence, of a chunk, or of a commit."""
    budget = max(64, 8 * length) if isinstance(sweep, dq.Simultaneous) else 64
    return dq.Stop(rtol=RTOL, max_steps=budget)


@torch.no_grad()
def solve(model: Trained, ids: Tensor, sweep: dq.Sweep) -> dq.CausalLMOutput:
    """One solve of a batch."""
    return model.lm(ids, sweep=sweep, stop=stop_for(sweep, ids.shape[1]))


def score(model: Trained, measured: Measured, length: int, batch: int, sequences: int) -> None:
    """Accuracy on the last token and the solve's numbers, over some sequences in batches of the case."""
    data = model.task.fixed(sequences, length, seed=1000 + length)
    right, updates, converged, evaluations = 0.0, 0.0, 0.0, []
    for inputs, targets in zip(data.inputs.split(batch), data.targets.split(batch), strict=True):
        begun = time.perf_counter()
        output = solve(model, inputs, measured.sweep)
        if not measured.seconds:  # the slow case, which was not run before
            measured.seconds.append(time.perf_counter() - begun)
        assert output.stats is not None and output.status is not None
        right += float((output.logits[:, -1].argmax(-1) == targets[:, -1]).sum())
        updates += float(output.stats.updates.sum())
        converged += float(output.converged.sum())
        evaluations.append(output.stats.evaluations)
    measured.accuracy, measured.converged = right / sequences, converged / sequences
    measured.updates, measured.evaluations = updates / (sequences * length), round(statistics.mean(evaluations))


def measure(model: Trained, length: int, batch: int, turns: int, quick: bool) -> list[Measured]:
    """All sweeps of a case in turns."""
    sweeps = [dq.Simultaneous(), dq.Sequential(), dq.Chunked(8), *map(dq.Sliding, WINDOWS)]
    results = [Measured(sweep, []) for sweep in sweeps]
    ids = model.task.fixed(batch, length, seed=1000 + length).inputs
    slow = [isinstance(sweep, dq.Simultaneous) and batch * length > 64 * 128 for sweep in sweeps]
    for _ in range(turns):
        for result, once in zip(results, slow, strict=True):
            if once:
                continue
            begun = time.perf_counter()
            solve(model, ids, result.sweep)
            result.seconds.append(time.perf_counter() - begun)
    for result, once in zip(results, slow, strict=True):
        score(model, result, length, batch, batch if once or quick else SEQUENCES if batch > 1 else 8)
    return results


def rows_of(model: Trained, length: int, batch: int, results: list[Measured]) -> Iterator[Row]:
    """Numbers of each sweep, and the ratios that the goals are about."""
    best = max(result.accuracy for result in results)
    peers = [result for result in results if isinstance(result.sweep, dq.Simultaneous | dq.Sequential)]
    for result in results:
        case = f"{model.name}, length {length}, batch {batch}, {result.sweep}"
        near = f"ours >= {best - 0.005:.4f}" if result.sweep == dq.Sliding() else None
        yield value_row(case, "last-token accuracy", result.accuracy, "best of all", best, goal=near)
        yield value_row(case, "updates per token", result.updates, "", None)
        yield value_row(case, "evaluations", result.evaluations, "", None)
        yield value_row(case, "converged", result.converged, "", None)
        for peer in peers:
            if peer is not result:
                yield ratio_row(case, result, peer, goal_of(result.sweep, peer.sweep, length, batch))


def goal_of(sweep: dq.Sweep, peer: dq.Sweep, length: int, batch: int) -> str | None:
    """The default window's goals, at batch 64."""
    if sweep != dq.Sliding() or batch != 64:
        return None
    if isinstance(peer, dq.Sequential):
        return "ratio <= 0.5"
    return {128: "ratio <= 0.1", 512: "ratio <= 0.025"}.get(length)


def ratio_row(case: str, mine: Measured, peer: Measured, goal: str | None) -> Row:
    """Seconds of one solve beside a peer's."""
    ratios = [a / b for a, b in zip(mine.seconds, peer.seconds, strict=False)]  # of the turns that both were in
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    ours, theirs = statistics.median(mine.seconds), statistics.median(peer.seconds)
    ratio, peer_name, runs = statistics.median(ratios), str(peer.sweep), len(ratios)
    return Row(case, "s", ours, peer_name, theirs, ratio, runs, (low, high), goal, judge(goal, ours, ratio))


def described(model: Trained, length: int, batch: int, result: Measured) -> str:
    """One line, while the rest is still being measured."""
    numbers = (
        f"{statistics.median(result.seconds):8.3f} s  {result.evaluations:5} evaluations  "
        f"{result.updates:7.1f} updates per token"
    )
    quality = f"accuracy {result.accuracy:.3f}  converged {result.converged:.0%}"
    return f"{model.name:6} {length:4} x {batch:2} {result.sweep!s:18} {numbers}  {quality}"


def main() -> None:
    """Measure every case and report."""
    options, rows = arguments(__doc__ or ""), []
    lengths, batches, turns = ((64, 128), (1, 64), 2) if options.quick else ((64, 128, 512), (1, 64), 3)
    for name in TASKS:
        model = trained(name)
        for length in lengths:
            for batch in batches:
                if options.quick and length * batch > 64 * 64:
                    continue
                results = measure(model, length, batch, turns, options.quick)
                rows += rows_of(model, length, batch, results)
                print(*(described(model, length, batch, result) for result in results), sep="\n", flush=True)
    report(rows, options)


if __name__ == "__main__":
    main()
