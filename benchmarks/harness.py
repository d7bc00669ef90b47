"""What the benchmarks share: interleaved timing, peak memory, rows with goals, a table and a file of them."""

import argparse
import gc
import json
import operator
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        case: what was run.
        metric: what was measured, with its unit.
        ours: our number; for times the median of the runs.
        peer: what it is compared with.
        theirs: the peer's number.
        ratio: ours / theirs; for times the median of the ratios of neighbouring runs.
        runs: how many pairs of runs were interleaved, ours then theirs; 1 for what does not vary.
        spread: quartiles of the ratios of the pairs, if there are several.
        goal: for example ``"ratio <= 1.03"`` or ``"ours == 20"``; None: the row only informs.
        holds: whether the goal is met.
    """

    case: str
    metric: str
    ours: float
    peer: str
    theirs: float | None
    ratio: float | None
    runs: int
    spread: tuple[float, float] | None
    goal: str | None
    holds: bool | None


class Pairs(NamedTuple):
    """Times in seconds of interleaved runs, and their ratio."""

    ours: float
    theirs: float
    ratio: float
    spread: tuple[float, float]
    runs: int


def interleave(ours: Callable[[], object], theirs: Callable[[], object], runs: int) -> Pairs:
    """Time two functions in turns, so that whatever slows the machine down slows both.

    Args:
        ours: ours.
        theirs: the peer's.
        runs: pairs of runs, at least 2, after one unmeasured pair.
    """
    times = take_turns({"ours": ours, "theirs": theirs}, runs)
    return paired(times["ours"], times["theirs"])


def take_turns(runs: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of several functions, each run once a turn.

    Args:
        runs: the functions by name, in the order of a turn.
        turns: how many, after one that is not measured.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    gc.collect()
    gc.disable()
    try:
        for _ in range(turns):
            for name, run in runs.items():
                times[name].append(_seconds(run))
    finally:
        gc.enable()
    return times


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Pairs:
    """The medians and ratios of times that were measured in turns, at least 2."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Pairs(
        statistics.median(ours), statistics.median(theirs), statistics.median(ratios), (low, high), len(ratios)
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_memory(run: Callable[[], object]) -> int:
    """Bytes that ``run`` holds at its peak above what was held before, from the allocator's events (CPU)."""
    run()
    gc.collect()
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's native code reports every start and stop; nothing else is said meanwhile."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def time_row(
    case: str,
    ours: Callable[[], object],
    peer: str,
    theirs: Callable[[], object],
    *,
    runs: int,
    per: int = 1,
    goal: str | None = None,
) -> Row:
    """A row of times in milliseconds, each divided by ``per`` (the evaluations of a run)."""
    metric = "ms per iteration" if per > 1 else "ms"
    return paired_row(case, metric, interleave(ours, theirs, runs), peer, scale=1e3 / per, goal=goal)


def paired_row(case: str, metric: str, pairs: Pairs, peer: str, *, scale: float = 1e3, goal: str | None = None) -> Row:
    """A row of times that were measured in turns, in seconds times ``scale``: milliseconds, if it is not given."""
    mine, other = (seconds * scale for seconds in (pairs.ours, pairs.theirs))
    holds = judge(goal, mine, pairs.ratio)
    return Row(case, metric, mine, peer, other, pairs.ratio, pairs.runs, pairs.spread, goal, holds)


def memory_row(
    case: str, ours: Callable[[], object], peer: str, theirs: Callable[[], object], *, goal: str | None = None
) -> Row:
    """A row of peak memory in MiB."""
    mine, other = peak_memory(ours) / MEBIBYTE, peak_memory(theirs) / MEBIBYTE
    return value_row(case, "peak MiB", mine, peer, other, goal=goal)


def value_row(case: str, metric: str, ours: float, peer: str, theirs: float | None, *, goal: str | None = None) -> Row:
    """A row of two numbers that do not vary from run to run."""
    ratio = ours / theirs if theirs else None
    return Row(case, metric, ours, peer, theirs, ratio, 1, None, goal, judge(goal, ours, ratio))


def judge(goal: str | None, ours: float, ratio: float | None) -> bool | None:
    """Whether ``"ratio <= 1.03"``, ``"ours <= 1e-11"`` or ``"ours == 20"`` holds; None without a goal.

    Raises:
        ValueError: a goal of another form, or one on the ratio where there is none.
    """
    if goal is None:
        return None
    subject, comparison, limit = goal.split()
    value = {"ours": ours, "ratio": ratio}[subject]
    if value is None:
        raise ValueError(f"goal {goal!r}: there is no ratio, since the peer's number is missing or zero")
    return bool({"<=": operator.le, "==": operator.eq, ">=": operator.ge}[comparison](value, float(limit)))


def machine(threads: int | None = None) -> str:
    """The processor, threads (default: this process's), load and versions that the numbers belong to."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    try:
        torchdeq = f", torchdeq {version('torchdeq')}"
    except PackageNotFoundError:
        torchdeq = ""
    python = platform.python_version()
    cores = f"{os.cpu_count()} cores, {threads or torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    return f"{model}, {cores}, torch {torch.__version__}{torchdeq}, Python {python}"


def command_line(description: str) -> argparse.ArgumentParser:
    """The command line of every benchmark: ``--quick`` and ``--json PATH``."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="fewer runs; a minute or two on two cores")
    parser.add_argument("--json", type=_writable, metavar="PATH", help="where to write the rows")
    return parser


def arguments(description: str) -> argparse.Namespace:
    """The options of a benchmark that has no others; its rows are many runs' work, so bad ones end it at once."""
    return command_line(description).parse_args()


def _writable(path: str) -> Path:
    nearest = next(folder for folder in Path(path).parents or [Path()] if folder.exists())
    if not path or Path(path).is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file that can be written, got {path!r}")
    return Path(path)


def report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the rows as a table, and write them with the machine's description to ``--json``, if given."""
    print(f"\n{machine()}\n")
    table = [("case", "metric", "ours", "peer", "theirs", "ratio", "spread", "goal")]
    table += [_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if options.quick:
        print("\nA --quick run: too few runs to compare; goals are judged in full runs.")
    write(rows, options)


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write the rows so far with the machine's description to ``--json``, if given."""
    if (path := options.json) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        here = machine()
        path.write_text(json.dumps([{**asdict(row), "machine": here} for row in rows], indent=1) + "\n")


def _cells(row: Row) -> tuple[str, ...]:
    theirs = "" if row.theirs is None else f"{row.theirs:.4g}"
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    spread = "" if row.spread is None else f"{row.spread[0]:.3f}..{row.spread[1]:.3f}"
    goal = "" if row.goal is None else f"{row.goal}: {'holds' if row.holds else 'MISSED'}"
    return row.case, row.metric, f"{row.ours:.4g}", row.peer, theirs, ratio, spread, goal
