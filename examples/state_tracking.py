"""State tracking: an implicit model learns a word problem, next to explicit models of the same blocks.

A sequence of group elements comes in, the product of each prefix is to come out (for Z2: the parity of the ones so
far). The implicit model is trained on short sequences, first through a few unrolled self-iterations, then at its
fixed point with phantom gradients, and evaluated on longer ones, solved simultaneously, sequentially and with a sliding
window. Explicit models of 1, 2 and 4 blocks get the same training time. The implicit Mamba2 extrapolates, to 32 times
the trained length; Llamas, implicit or explicit, learn parity at the trained lengths alone. Interrupt it and run it
again: it goes on from its last checkpoint.

    python examples/state_tracking.py                                # parity
    python examples/state_tracking.py --quick                        # the implicit model alone
    python examples/state_tracking.py --group A5 --generators 2      # the smallest group that is not solvable
    python examples/state_tracking.py --group A5                     # all of its 60 elements as inputs
    python examples/state_tracking.py --group A5xM --identity-probability 0.9
    python examples/state_tracking.py --backbone llama               # parity with Transformer blocks
"""

import argparse
import itertools
import json
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import matplotlib
import torch
from torch.nn import functional as F
from tqdm import tqdm

import deqseq as dq
from deqseq.tasks import WordBatch, WordProblem, generators, parse_group
from deqseq.training import Curriculum, check_finite, free, load_latest, save_checkpoint, unrolled
from deqseq.training.run_folder import claim_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

log = logging.getLogger("state_tracking")

HARDER: dict[str, Any] = {"lr": 2e-3, "eval_lengths": (16, 32, 64, 128), "baselines": (4,)}
LARGER: dict[str, Any] = {
    "lr": 3e-3, "d_state": 32, "batch": 256, "steps": 4000, "unrolled_steps": 6, "free_from": 0.75,
    "lengths": (3, 4, 6, 8, 12, 16), "free_lengths": (16, 24, 32), "eval_lengths": (16, 32, 64, 128), "baselines": (),
    "train_sweeps": ("sliding",), "train_solver": "relaxed",
}  # fmt: skip
RECIPES: dict[tuple[str, str, int], dict[str, Any]] = {  # backbone, group, generators; none: 0
    ("mamba2", "Z2", 0): {"steps": 700},
    ("mamba2", "S3", 0): HARDER | {"steps": 1000, "free_from": 0.5},
    ("mamba2", "A5", 2): HARDER | {"steps": 3200, "free_from": 0.65, "lengths": (4, 6, 8, 12, 16)},
    ("mamba2", "A5", 0): LARGER,
    ("mamba2", "A5xM", 0): LARGER | {"train_identity_probability": (0.5,), "free_lengths": (16, 32, 64)},
    ("llama", "Z2", 0): {
        "steps": 1500,
        "lengths": (4, 8, 16),
        "max_steps": 24,
        "train_sweeps": ("simultaneous", "sequential", "sliding"),  # of several fixed points, all are to find the same
        "window": 4,
        "eval_lengths": (8, 16, 24, 32, 64),
    },
}
SWEEPS = {
    "simultaneous": lambda o: dq.Simultaneous(),
    "sequential": lambda o: dq.Sequential(),
    "sliding": lambda o: dq.Sliding(o.window),
}
SOLVERS = {
    "relaxed": lambda o: dq.Relaxed(o.damping),
    "naive": lambda o: dq.Naive(),
    "anderson": lambda o: dq.Anderson(),
    "broyden": lambda o: dq.Broyden(),
}
GRADIENTS = {
    "phantom": lambda o: dq.Phantom(o.phantom_steps, o.damping),
    "one-step": lambda o: dq.OneStep(),
    "implicit": lambda o: dq.Implicit(),
    "unrolled": lambda o: dq.Unrolled(),
}


def option(default: Any, text: str, choices: Any = None) -> Any:
    """A field that is also a command-line option."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Options:
    """Everything that decides a run."""

    group: str = option("Z2", "a group or product: Z2, S3, A5, Z2xZ3, A5xM")
    generators: int = option(0, "inputs: a generating subset of this size; 0: every element")
    identity_probability: float = option(0.0, "probability that a token's group element is the identity")
    train_identity_probability: tuple[float, ...] = option((), "that of training, one drawn a batch; none: the same")
    lengths: tuple[int, ...] = option((16,), "training lengths, one drawn for each batch")
    free_lengths: tuple[int, ...] = option((), "training lengths of the second phase; none: the same")
    eval_lengths: tuple[int, ...] = option((16, 32, 64, 128, 256, 512), "evaluation lengths")
    backbone: str = option("mamba2", "blocks of all models", ("mamba2", "llama"))
    d_model: int = option(64, "width")
    d_state: int = option(16, "mamba2: state size of each channel")
    headdim: int = option(32, "mamba2: channels a head")
    expand: int = option(2, "mamba2: inner width over d_model")
    heads: int = option(4, "llama: attention heads")
    mlp_width: int = option(128, "llama: hidden width of the feed-forward layer")
    layers: int = option(1, "blocks of the implicit model")
    batch: int = option(64, "sequences a training step")
    steps: int = option(1000, "training steps of the implicit model")
    lr: float = option(1e-3, "peak learning rate")
    warmup: int = option(50, "warm-up steps")
    clip: float = option(0.25, "largest gradient norm")
    unrolled_steps: int = option(8, "self-iterations of the first phase, all differentiated")
    free_from: float = option(0.4, "fraction of the steps after which the fixed point itself is trained")
    max_steps: int = option(32, "self-iterations of the second phase, at most")
    rtol: float = option(0.03, "relative tolerance of the second phase, the largest over the tokens")
    gradient: str = option("phantom", "estimator of the second phase", GRADIENTS)
    phantom_steps: int = option(4, "steps of the phantom gradient")
    damping: float = option(0.8, "damping of the phantom gradient and of the relaxed solver")
    train_solver: str = option("naive", "solver of the second phase", SOLVERS)
    train_sweeps: tuple[str, ...] = option(("simultaneous",), "sweeps of the second phase, one drawn a step", SWEEPS)
    window: int = option(8, "tokens of the sliding sweep's window, in training and evaluation")
    solver: str = option("relaxed", "solver at evaluation", SOLVERS)
    eval_rtol: float = option(1e-2, "relative tolerance at evaluation")
    baselines: tuple[int, ...] = option((1, 2, 4), "blocks of the explicit models")
    baseline_seconds: float = option(0.0, "training time of each explicit model; 0: the implicit model's")
    checkpoint_seconds: float = option(20.0, "time between checkpoints")
    seed: int = option(0, "seed of weights and data")
    device: str = option("cpu", "where to run")
    output: str = option("", "folder of the results; empty: runs/state_tracking_GROUP_SEED[_llama][_quick]")

    @property
    def longest(self) -> int:
        """The longest trained length."""
        return max(*self.lengths, *self.free_lengths, 0)


def parse(arguments: list[str]) -> Options:
    """Read the command line and fill in the group's recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    for item in fields(Options):
        default: Any = item.default
        many = isinstance(default, tuple)
        parser.add_argument(
            f"--{item.name.replace('_', '-')}",
            type=(*get_args(item.type), item.type)[0],
            nargs="*" if many else None,
            choices=item.metadata["choices"],
            default=argparse.SUPPRESS,
            help=f"{item.metadata['help']} (default: {default!r}, or the group's recipe)",
        )
    parser.add_argument("--quick", action="store_true", help="the implicit model alone, up to length 64")
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier run left in the output folder")
    given = vars(parser.parse_args(arguments))
    quick, fresh = given.pop("quick"), given.pop("fresh")
    backbone, group, generating, seed = (
        given.get(name, getattr(Options, name)) for name in ("backbone", "group", "generators", "seed")
    )
    suffix = "_llama" * (backbone == "llama") + "_quick" * quick
    values: dict[str, Any] = {"output": f"runs/state_tracking_{group}_{seed}{suffix}"}
    values |= RECIPES.get((backbone, group, generating), RECIPES.get((backbone, group, 0), {}))
    values |= {"baselines": (), "eval_lengths": (16, 32, 64)} if quick else {}
    values |= {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    options = Options(**values)
    try:
        check(options)
    except (ValueError, RuntimeError, AssertionError) as error:  # torch names a missing device by any of these
        parser.error(str(error))
    try:
        claim_folder(options.output, asdict(options), free=("output", "device", "checkpoint_seconds"), fresh=fresh)
    except (ValueError, FileExistsError) as error:
        raise SystemExit(f"{error} (--output, --fresh)") from error
    return options


def check(options: Options) -> None:
    """Refuse, before anything is written, what would fail after minutes of training or never end.

    Raises:
        ValueError, RuntimeError, AssertionError: names the option, or is the library's own refusal.
    """
    for name in ("steps", "batch", "warmup", "unrolled_steps", "max_steps", "layers", "heads", "mlp_width", "window"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    for name, least in (("lengths", 1), ("free_lengths", 0), ("eval_lengths", 1), ("baselines", 0)):
        values = getattr(options, name)
        if len(values) < least or min(values, default=1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be numbers of at least 1, got {list(values)}")
    if options.backbone == "llama" and options.d_model % (2 * options.heads):
        raise ValueError(f"--heads must divide --d-model {options.d_model} into even widths, got {options.heads}")
    if not options.train_sweeps:
        raise ValueError(f"--train-sweeps must name at least one of {', '.join(SWEEPS)}")
    if options.gradient == "unrolled" and set(options.train_sweeps) != {"simultaneous"}:
        raise ValueError(f"--gradient unrolled needs --train-sweeps simultaneous, got {list(options.train_sweeps)}")
    if not options.output or Path(options.output).is_file():
        raise ValueError(f"--output must be a folder, got {options.output!r}")
    make_curriculum(options)
    make_model(options, make_task(options).vocab_size, None)
    training_tasks(options)


def make_task(options: Options) -> WordProblem:
    """The word problem, over all elements or a generating subset."""
    group = parse_group(options.group)
    inputs = generators(group, options.generators) if options.generators else None
    return WordProblem(group, inputs, identity_probability=options.identity_probability)


def training_tasks(options: Options) -> list[WordProblem]:
    """The same problem with each probability of an easy token that is trained with."""
    task = make_task(options)
    given = options.train_identity_probability or (options.identity_probability,)
    return [replace(task, identity_probability=probability) for probability in given]


def make_curriculum(options: Options) -> Curriculum:
    """Unrolled steps first, then the fixed point itself."""
    first = unrolled(options.unrolled_steps, until=options.free_from or 1.0)
    then = replace(free(options.max_steps, rtol=options.rtol), gradient=GRADIENTS[options.gradient](options))
    if options.free_from in (0, 1):
        return Curriculum((first,) if options.free_from else (then,))
    return Curriculum((first, then))


def make_model(options: Options, vocab_size: int, blocks: int | None) -> dq.CausalLM:
    """The implicit model, or an explicit one of ``blocks`` blocks."""
    torch.manual_seed(options.seed)
    sizes: dict[str, Any] = {"n_layers": blocks or options.layers, "injection": blocks is None}
    if options.backbone == "llama":
        vocab_size += 1  # the start token
        sizes |= {"d_model": options.d_model, "n_heads": options.heads, "mlp_width": options.mlp_width}
        backbone = dq.Llama(dq.LlamaConfig(**sizes))
    else:
        sizes |= {name: getattr(options, name) for name in ("d_model", "d_state", "headdim", "expand")}
        backbone = dq.Mamba2(dq.Mamba2Config(**sizes))
    if blocks is not None:
        return dq.CausalLM(vocab_size, dq.ExplicitModel(backbone)).to(options.device)
    solver, eval_solver = SOLVERS[options.train_solver](options), SOLVERS[options.solver](options)
    model = dq.ImplicitModel(backbone, solver=solver, eval_solver=eval_solver)
    return dq.CausalLM(vocab_size, model).to(options.device)


def with_start(batch: WordBatch, lm: dq.CausalLM) -> WordBatch:
    """The batch; for a Llama behind a start token, not scored: attention over equal tokens alone cannot count them."""
    if not isinstance(lm.model.backbone, dq.Llama):
        return batch
    start = lm.embedding.num_embeddings - 1
    return WordBatch(F.pad(batch.inputs, (1, 0), value=start), F.pad(batch.targets, (1, 0), value=-100))


def solve_options(phase: str, options: Options, step: int) -> dict[str, Any]:
    """The options of a step's solve: in the free phase one of the sweeps is drawn."""
    names = options.train_sweeps if phase == "free" else ("simultaneous",)
    drawn = random.Random(f"{options.seed} {step}").choice(names)  # a resumed run draws the same
    return {"sweep": SWEEPS[drawn](options)}


def learning_rate(options: Options, step: int, progress: float) -> float:
    """Linear warm-up, constant, and linear decay over the last fifth of the run."""
    return options.lr * min(1.0, (step + 1) / options.warmup, max(0.05, 5 * (1 - progress)))


def train(name: str, lm: dq.CausalLM, options: Options, seconds: float | None) -> float:
    """Train for ``options.steps`` steps, or for some seconds; returns the seconds it took in all."""
    folder, step, spent = Path(options.output) / name, 0, 0.0
    optimizer = torch.optim.AdamW(lm.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    curriculum = make_curriculum(options)  # an explicit model has nothing to solve: its phases change nothing
    if (saved := load_latest(folder, options.device)) is not None:
        curriculum.resumed(saved.phase)
        saved.restore(lm, optimizer)
        step, spent = saved.step, saved.meta["seconds"]
        log.info("%s: going on from step %d", name, step)
    data = batches_of(options)
    for _ in range(step):
        next(data)
    progress = step / options.steps if seconds is None else spent / seconds
    shape = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    bar = tqdm(total=100, desc=name, disable=None, bar_format=shape)
    last, saved_at = time.perf_counter(), time.perf_counter()
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step, progress)
        phase = curriculum.at(progress)
        phase.apply(lm)
        how = solve_options(phase.name, options, step) if isinstance(lm.model, dq.ImplicitModel) else {}
        guard = partial(check_finite, step=step, phase=phase.name, directory=folder)
        batch = next(data)[phase.name]
        numbers = train_step(guard, lm, with_start(batch, lm), optimizer, options.clip, how)
        step, spent, last = step + 1, spent + time.perf_counter() - last, time.perf_counter()
        progress = min(1.0, step / options.steps if seconds is None else spent / seconds)
        if step % 20 == 0 or progress == 1:
            bar.update(100 * progress - bar.n)
            shown = {key: f"{float(value):.3g}" for key, value in numbers.items()}
            bar.set_postfix(shown)
            log.info("%s step %d: %s", name, step, shown)
        if progress == 1 or time.perf_counter() - saved_at > options.checkpoint_seconds:
            save_checkpoint(folder, step, lm, optimizer, {"seconds": spent}, phase=curriculum.record(progress))
            saved_at = time.perf_counter()
    bar.close()
    return spent


def batches_of(options: Options) -> Iterator[dict[str, WordBatch]]:
    """A batch for each phase, at every step, so that a run that goes on draws what it would have drawn."""
    ways = [phases_of(task, options) for task in training_tasks(options)]
    for step in itertools.count():
        yield next(random.Random(f"data {options.seed} {step}").choice(ways))


def phases_of(task: WordProblem, options: Options) -> Iterator[dict[str, WordBatch]]:
    """Batches of one problem, without end."""
    draw = partial(task.batches, options.batch, seed=options.seed, device=options.device)
    if not options.free_lengths:
        return ({"unrolled": batch, "free": batch} for batch in draw(options.lengths))
    pairs = zip(draw(options.lengths), draw(options.free_lengths), strict=True)
    return ({"unrolled": first, "free": then} for first, then in pairs)


def train_step(
    guard: Callable[..., float],
    lm: dq.CausalLM,
    batch: WordBatch,
    optimizer: torch.optim.Optimizer,
    clip: float,
    how: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """One optimizer step; returns loss, accuracy on the last token and, if implicit, means over the tokens' solves."""
    output = lm(batch.inputs, targets=batch.targets, **how)
    assert output.loss is not None
    guard(output.loss)
    if output.status is not None and bool((output.status == dq.Status.DIVERGED).all()):
        guard(math.inf, quantity="residual of every row")
    optimizer.zero_grad()
    output.loss.backward()
    guard(torch.nn.utils.clip_grad_norm_(lm.parameters(), clip), quantity="gradient norm")
    optimizer.step()
    numbers = {"loss": output.loss.detach(), "accuracy": last_token_accuracy(output, batch)}
    stats = output.stats
    counts = {} if stats is None else {"self-iterations": stats.steps, "token updates": stats.updates}
    return numbers | {name: count.float().mean() for name, count in counts.items()}


def last_token_accuracy(output: dq.CausalLMOutput, batch: WordBatch) -> torch.Tensor:
    """Share of the sequences whose whole product is right."""
    return (output.logits[:, -1].argmax(-1) == batch.targets[:, -1]).float().mean()


@torch.no_grad()
def evaluate(label: str, lm: dq.CausalLM, task: WordProblem, options: Options) -> list[dict]:
    """Last-token accuracy at each length, with each sweep if the model is implicit, and what the solve took."""
    rows, names = [], SWEEPS if isinstance(lm.model, dq.ImplicitModel) else ("single pass",)
    lm.eval()
    for name, length in tqdm([*itertools.product(names, options.eval_lengths)], desc=f"evaluate {label}", disable=None):
        # self-iterations of all tokens together grow with the length: give the longest fewer sequences
        count = max(16, 8192 // length) if name == "simultaneous" and length > 128 else 256
        batch = with_start(task.fixed(count, length, seed=1000 + length, device=options.device), lm)
        budget = max(64, 4 * length) if name == "simultaneous" else 64
        stop, begun = dq.Stop(rtol=options.eval_rtol, max_steps=budget), time.perf_counter()
        output = lm(batch.inputs, **({"sweep": SWEEPS[name](options), "stop": stop} if name in SWEEPS else {}))
        row = {"model": label, "backbone": options.backbone, "group": options.group, "length": length, "sweep": name}
        row |= {"accuracy": last_token_accuracy(output, batch).item()} | solve_numbers(output)
        row |= {"seed": options.seed, "sequences": count, "seconds": round(time.perf_counter() - begun, 3)}
        rows.append(row)
        log.info("%s", row)
    return rows


def solve_numbers(output: dq.CausalLMOutput) -> dict[str, Any]:
    """Mean self-iterations, share of the rows that converged, mean updates of a token, calls of the map."""
    if output.stats is None or output.status is None:
        return dict.fromkeys(("self_iterations", "converged", "token_updates", "evaluations"))
    return {
        "self_iterations": output.stats.steps.float().mean().item(),
        "converged": (output.status == dq.Status.CONVERGED).float().mean().item(),
        "token_updates": output.stats.updates.float().mean().item(),
        "evaluations": output.stats.evaluations,
    }


@torch.no_grad()
def accuracy_by_budget(lm: dq.CausalLM, task: WordProblem, options: Options) -> list[dict]:
    """Accuracy after a given number of self-iterations, at the longest trained length and at four times that."""
    rows = []
    lm.eval()
    for length in (options.longest, 4 * options.longest):
        batch = with_start(task.fixed(64, length, seed=2000 + length, device=options.device), lm)
        for budget in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            accuracy = last_token_accuracy(lm(batch.inputs, stop=dq.Stop.exactly(budget)), batch).item()
            rows.append({"length": length, "self_iterations": budget, "accuracy": accuracy})
    return rows


def table(rows: list[dict]) -> str:
    """Accuracy and mean self-iterations, models down, lengths across, as Markdown."""
    lengths = sorted({row["length"] for row in rows})
    lines = ["| model | solved | " + " | ".join(map(str, lengths)) + " |", "|---" * (len(lengths) + 2) + "|"]
    for model, sweep in dict.fromkeys((row["model"], row["sweep"]) for row in rows):
        cells = []
        for row in (row for row in rows if (row["model"], row["sweep"]) == (model, sweep)):
            solve = "" if row["self_iterations"] is None else f" ({row['self_iterations']:.0f})"
            doubt = "" if row["converged"] in (None, 1.0) else f", {row['converged']:.1%} converged"
            cells.append(f"{row['accuracy']:.3f}{solve}{doubt}")
        lines.append(f"| {model} | {sweep} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: list[dict], compute: list[dict], trained: int, chance: float, path: Path) -> None:
    """Two panels: accuracy against length, accuracy against self-iterations."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    styles = {
        "simultaneous": {"color": "#0b6e4f", "marker": "o", "linewidth": 2.5},
        "sequential": {"color": "#e4572e", "marker": "o", "linestyle": "--", "markersize": 10, "mfc": "none"},
        "sliding": {"color": "#5b2a86", "marker": "s", "linestyle": ":", "markersize": 14, "mfc": "none"},
    }
    markers = iter("sDv^Px*" * 9)
    for model, sweep in dict.fromkeys((row["model"], row["sweep"]) for row in rows):
        chosen = [row for row in rows if (row["model"], row["sweep"]) == (model, sweep)]
        style = styles.get(sweep) or {"color": "#7a8ca0", "marker": next(markers), "linewidth": 1.2}
        label = f"{model}, {sweep}" if sweep in styles else model
        left.plot([row["length"] for row in chosen], [row["accuracy"] for row in chosen], label=label, **style)
    lengths = sorted({row["length"] for row in rows})
    left.axvspan(lengths[0] / 1.3, trained * 1.15, color="#f2efe6", zorder=0, label="trained lengths")
    for length, colour in zip(dict.fromkeys(row["length"] for row in compute), ("#0b6e4f", "#3a7ca5"), strict=False):
        chosen = [row for row in compute if row["length"] == length]
        x, y = ([row[key] for row in chosen] for key in ("self_iterations", "accuracy"))
        right.plot(x, y, color=colour, marker="o", linewidth=2, label=f"implicit, length {length}")
    budgets = sorted({row["self_iterations"] for row in compute})
    labels = {left: "sequence length (tokens)", right: "self-iterations, all tokens together"}
    for axis, ticks in ((left, lengths), (right, budgets)):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xlabel(labels[axis])
        axis.axhline(chance, color="#999999", linewidth=1, linestyle=":", label="chance")
        axis.set(ylim=(-0.03, 1.05), ylabel="last-token accuracy")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8, labelspacing=0.9)
    left.set_xlim(lengths[0] / 1.3, None)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    """Train, evaluate, and write the table, the figure and the numbers."""
    options = parse(arguments)
    output, task = Path(options.output), make_task(options)
    logging.basicConfig(filename=output / "log.txt", level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    print(f"{options.group}: {len(task.input_ids)} inputs, {task.vocab_size} states; results in {output}/")
    lm = make_model(options, task.vocab_size, None)
    seconds = train("implicit", lm, options, None)
    rows = evaluate("implicit", lm, task, options)
    for blocks in options.baselines:
        label = f"explicit {blocks} block{'s' * (blocks > 1)}"
        baseline = make_model(options, task.vocab_size, blocks)
        train(label.replace(" ", "-"), baseline, options, options.baseline_seconds or seconds)
        rows += evaluate(label, baseline, task, options)
    compute = accuracy_by_budget(lm, task, options)
    (output / "results.json").write_text(json.dumps(rows, indent=1))
    (output / "self_iterations.json").write_text(json.dumps(compute, indent=1))
    (output / "table.md").write_text(table(rows) + "\n")
    draw(rows, compute, options.longest, 1 / task.vocab_size, output / "state_tracking.png")
    print(f"\nlast-token accuracy (mean self-iterations); trained for {seconds:.0f} s at lengths {options.lengths}:\n")
    print(table(rows))
    fewer = {row["length"]: row["sequences"] for row in rows if row["sequences"] < 256}
    print("\n256 sequences of each length" + "".join(f", {n} of length {length}" for length, n in fewer.items()))
    print(f"\nfigure: {output}/state_tracking.png   numbers: {output}/results.json   log: {output}/log.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
