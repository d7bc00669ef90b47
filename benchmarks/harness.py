"""What the benchmarks share: runs in turns, peak memory, rows with goals, the command line."""

import argparse
import gc
import json
import operator
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

# the profiler reports every start on stderr
os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
import torch
from torch.profiler import ProfilerActivity, profile

MEBIBYTE = 2**20
Work = Callable[[], object]


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

    def __str__(self) -> str:
        theirs = "" if self.theirs is None else f"{self.theirs:.4g}"
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        spread = "" if self.spread is None else f"{self.spread[0]:.3f}..{self.spread[1]:.3f}"
        goal = "" if self.goal is None else f"{self.goal}: {'holds' if self.holds else 'MISSED'}"
        case = f"{self.case:60}  {self.metric:20}  {self.ours:<9.4g}"
        return f"{case}  {self.peer:28}  {theirs:9}  {ratio:7}  {spread:14}  {goal}".rstrip()


def value_row(
    case: str,
    metric: str,
    ours: float,
    peer: str = "",
    theirs: float | None = None,
    *,
    goal: str | None = None,
) -> Row:
    """A row of one or two numbers that do not vary from run to run."""
    ratio = ours / theirs if theirs else None
    return Row(case, metric, ours, peer, theirs, ratio, 1, None, goal, judge(goal, ours, ratio))


def paired_row(
    case: str,
    ours: Sequence[float],
    peer: str,
    theirs: Sequence[float],
    *,
    metric: str = "ms",
    scale: float = 1e3,
    goal: str | None = None,
) -> Row:
    """A row of seconds that were measured in turns, times ``scale``."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    ratio, mine = statistics.median(ratios), scale * statistics.median(ours)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else None
    spread = (quartiles[0], quartiles[2]) if quartiles else None
    other, holds = scale * statistics.median(theirs), judge(goal, mine, ratio)
    return Row(case, metric, mine, peer, other, ratio, len(ratios), spread, goal, holds)


def time_row(
    case: str,
    ours: Work,
    peer: str,
    theirs: Work,
    *,
    runs: int,
    per: int = 1,
    goal: str | None = None,
) -> Row:
    """A row of milliseconds, each divided by ``per`` (the evaluations of a run)."""
    times = take_turns({"ours": ours, "theirs": theirs}, runs)
    metric = "ms per iteration" if per > 1 else "ms"
    return paired_row(
        case, times["ours"], peer, times["theirs"], metric=metric, scale=1e3 / per, goal=goal
    )


def memory_row(case: str, ours: Work, peer: str, theirs: Work, *, goal: str | None = None) -> Row:
    """A row of peak memory in MiB."""
    return value_row(case, "peak MiB", peak_memory(ours), peer, peak_memory(theirs), goal=goal)


def judge(goal: str | None, ours: float, ratio: float | None) -> bool | None:
    """Whether a goal such as ``"ratio <= 1.03"`` or ``"ours == 20"`` holds; None without one."""
    if goal is None:
        return None
    subject, comparison, limit = goal.split()
    value = {"ours": ours, "ratio": ratio}[subject]
    assert value is not None, (
        f"goal {goal!r}: there is no ratio, since the peer's number is missing or zero"
    )
    return bool(
        {"<=": operator.le, "==": operator.eq, ">=": operator.ge}[comparison](value, float(limit))
    )


def take_turns(
    works: Mapping[str, Work], turns: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Seconds of several functions, run in turns, so that a slow machine slows all of them.

    Args:
        works: the functions by name, in the order of a turn.
        turns: how many.
        warm_up: whether a turn that is not measured comes first.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values() if warm_up else ():
        work()
    gc.collect()
    gc.disable()
    try:
        for _ in range(turns):
            for name, work in works.items():
                times[name].append(seconds(work))
    finally:
        gc.enable()
    return times


def seconds(work: Work) -> float:
    """How long a function takes, what it started on a GPU included."""
    wait = torch.cuda.synchronize if on_gpu() else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def on_gpu() -> bool:
    """Whether new tensors are on a GPU."""
    return torch.get_default_device().type == "cuda"


def peak_memory(work: Work) -> float:
    """MiB that ``work`` holds at its peak above what was held before."""
    work()
    gc.collect()
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / MEBIBYTE
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = accumulate(
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    )
    return max(held, default=0) / MEBIBYTE


def machine() -> str:
    """The processor, threads, load and versions that the numbers belong to."""
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), model
    )
    model = f"{torch.cuda.get_device_name()}, {model}" if on_gpu() else model
    torchdeq = f", torchdeq {version('torchdeq')}" if find_spec("torchdeq") else ""
    cores = (
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    )
    return (
        f"{model}, {cores}, torch {torch.__version__}{torchdeq}, Python {platform.python_version()}"
    )


def command_line(description: str | None) -> argparse.ArgumentParser:
    """The command line of every benchmark: ``--quick`` and ``--json PATH``."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=description, formatter_class=form, allow_abbrev=False
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes and fewer runs: shows that it works"
    )
    parser.add_argument("--json", type=_writable, metavar="PATH", help="where to write the rows")
    return parser


def _writable(path: str) -> Path:
    nearest = next(folder for folder in Path(path).parents or [Path()] if folder.exists())
    if not path or Path(path).is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a file that can be written, got {path!r}")
    return Path(path)


def benchmark(
    description: str | None, rows: Callable[[bool], Iterable[Row]], *, device: bool = False
) -> Callable[[], None]:
    """The main function of a benchmark; ``rows`` is told whether the run is quick.

    With ``device`` there is an option for it, and new tensors are made there.
    """

    def main() -> None:
        parser = command_line(description)
        parser.set_defaults(device="cpu")
        if device:
            parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cpu")
        options = parser.parse_args()
        torch.set_default_device(options.device)
        report(rows(options.quick), options)

    return main


def report(rows: Iterable[Row], options: argparse.Namespace) -> None:
    """Print rows as they come, and write them to ``--json``, also when interrupted."""
    print(f"{machine()}\n")
    found: list[Row] = []
    try:
        for row in rows:
            found.append(row)
            print(row, flush=True)
    finally:
        if options.json is not None and found:
            here = machine()
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(
                json.dumps([{**asdict(row), "machine": here} for row in found], indent=1) + "\n"
            )
    if options.quick:
        print("\nA --quick run: too few runs to compare; goals are judged in full runs.")
