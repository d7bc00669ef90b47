"""State tracking: the options, the recipe of each group, and what they make: task, curriculum, models."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from common import options as opt
from common.checkpoints import FILES
from common.run import claim_folder
from common.words import WordOptions

import deqseq as dq
from deqseq.tasks import WordProblem, generators, parse_group
from deqseq.training import Curriculum, free, unrolled

SweepName = Literal["simultaneous", "sequential", "sliding"]
SolverName = Literal["relaxed", "naive", "adaptive", "anderson", "broyden"]
GradientName = Literal["phantom", "one-step", "implicit", "unrolled"]

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
        "train_sweeps": ("simultaneous", "sequential", "sliding"),  # of several fixed points, all must find the same
        "window": 4,
        "eval_lengths": (8, 16, 24, 32, 64),
    },
}

MOVABLE = ("output", "device", "checkpoint_every", "quick", "fresh")  # may change when a run is continued
WRITES = (
    *(f"{run}/{files}" for run in ("implicit", "explicit-*-block*") for files in (*FILES, "curve.jsonl")),
    *("results.json", "self_iterations.json", "table.md", "state_tracking.png", "log.txt"),
)


def check_group(name: str, value: str) -> None:
    """Refuse what is no group's name."""
    try:
        parse_group(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True)
class Options(WordOptions):
    """An implicit model learns a word problem, next to explicit models of the same blocks.

    Defaults are those of parity with Mamba2 blocks where the group has no recipe of its own.
    """

    group: Annotated[str, opt.Rule(check_group)] = "Z2"
    """a group or product: Z2, S3, A5, D5, Q8, Z2xZ3, A5xM"""
    generators: Annotated[int, opt.integer(0, 1024)] = 0
    """inputs: a generating subset of this size; 0: every element"""
    identity_probability: opt.Probability = 0.0
    """probability that a token's group element is the identity"""
    train_identity_probability: tuple[opt.Probability, ...] = ()
    """that of training, one drawn a batch; none: the same"""
    lengths: tuple[opt.Size, ...] = (16,)
    """training lengths, one drawn for each batch"""
    free_lengths: tuple[opt.Size, ...] = ()
    """training lengths of the second phase; none: the same"""
    eval_lengths: Annotated[tuple[opt.Size, ...], opt.Some] = (16, 32, 64, 128, 256, 512)
    """evaluation lengths"""
    backbone: Literal["mamba2", "llama"] = "mamba2"
    """blocks of all models"""
    expand: opt.Size = 2
    """mamba2: inner width over d_model"""
    heads: opt.Size = 4
    """llama: attention heads"""
    mlp_width: opt.Size = 128
    """llama: hidden width of the feed-forward layer"""
    free_from: opt.Probability = 0.4
    """fraction of the steps after which the fixed point itself is trained"""
    gradient: GradientName = "phantom"
    """estimator of the second phase"""
    phantom_steps: opt.Count = 4
    """steps of the phantom gradient"""
    damping: opt.Damping = 0.8
    """damping of the phantom gradient and of the relaxed solver"""
    train_solver: SolverName = "naive"
    """solver of the second phase"""
    train_sweeps: tuple[SweepName, ...] = ("simultaneous",)
    """sweeps of the second phase, one drawn a step"""
    window: opt.Size = 8
    """tokens of the sliding sweep's window, in training and evaluation"""
    solver: SolverName = "relaxed"
    """solver at evaluation"""
    baselines: Annotated[tuple[opt.Blocks, ...], opt.Distinct] = (1, 2, 4)
    """blocks of the explicit models"""
    output: opt.Output | None = None
    """folder of the results; default: runs/state_tracking_GROUP_SEED[_llama][_quick]"""
    quick: bool = False
    """the implicit model alone, up to length 64"""

    def __post_init__(self) -> None:
        opt.check_options(self)
        for name in ("lengths", "train_sweeps"):
            if not getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} must have at least one value, got none")
        if self.backbone == "llama" and self.d_model % (2 * self.heads):
            raise ValueError(f"--heads must divide --d-model {self.d_model} into even widths, got {self.heads}")
        if self.gradient == "unrolled" and set(self.train_sweeps) != {"simultaneous"}:
            raise ValueError(f"--gradient unrolled needs --train-sweeps simultaneous, got {list(self.train_sweeps)}")
        try:
            vocab_size = training_tasks(self)[0].vocab_size
        except ValueError as error:
            raise ValueError(f"--generators {self.generators}: {error}") from error
        with torch.device("meta"):  # sizes that the library itself refuses
            make_model(self, vocab_size, None)

    @property
    def folder(self) -> str:
        """The folder of the results."""
        suffix = "_llama" * (self.backbone == "llama") + "_quick" * self.quick
        return self.output or f"runs/state_tracking_{self.group}_{self.seed}{suffix}"

    @property
    def longest(self) -> int:
        """The longest trained length."""
        return max(*self.lengths, *self.free_lengths, 0)


def read_options(arguments: list[str]) -> Options:
    """Read the command line; its group's recipe gives the options that it leaves out."""
    given = opt.parse(Options, arguments)
    recipe = recipe_of(given) | ({"baselines": (), "eval_lengths": (16, 32, 64)} if given.quick else {})
    return opt.parse(Options, arguments, replace(Options(), **recipe))


def recipe_of(options: Options) -> dict[str, Any]:
    """The options of the group's recipe; empty: it has none."""
    key = (options.backbone, options.group, options.generators)
    return RECIPES.get(key, RECIPES.get((*key[:2], 0), {}))


def claim(options: Options) -> Path:
    """Make or enter the folder of the results."""
    given = asdict(options)
    return claim_folder(options.folder, "state_tracking", given, fresh=options.fresh, free=MOVABLE, writes=WRITES)


def make_task(options: Options) -> WordProblem:
    """The word problem, over all elements or a generating subset."""
    group = parse_group(options.group)
    inputs = generators(group, options.generators) if options.generators else None
    return WordProblem(group, inputs, identity_probability=options.identity_probability)


def training_tasks(options: Options) -> list[WordProblem]:
    """The same problem with each of the identity probabilities of training."""
    task = make_task(options)
    given = options.train_identity_probability or (options.identity_probability,)
    return [replace(task, identity_probability=probability) for probability in given]


def make_curriculum(options: Options) -> Curriculum:
    """Unrolled iterations first, then the fixed point itself."""
    estimators: dict[GradientName, Callable[[], dq.Gradient]] = {
        "phantom": lambda: dq.Phantom(options.phantom_steps, options.damping),
        "one-step": dq.OneStep,
        "implicit": dq.Implicit,
        "unrolled": dq.Unrolled,
    }
    base, eval_base = (dq.SolveConfig(make_solver(name, options)) for name in (options.train_solver, options.solver))
    first = unrolled(options.unrolled_steps, until=options.free_from or 1.0, base=base, eval_base=eval_base)
    then = free(options.max_steps, rtol=options.rtol, base=base, eval_base=eval_base)
    then = replace(then, solve=replace(then.solve, gradient=estimators[options.gradient]()))
    if options.free_from in (0, 1):
        return Curriculum((first,) if options.free_from else (then,))
    return Curriculum((first, then))


def make_sweep(name: SweepName, options: Options) -> dq.Sweep:
    """Which tokens are solved together."""
    return {"simultaneous": dq.Simultaneous(), "sequential": dq.Sequential()}.get(name) or dq.Sliding(options.window)


def make_solver(name: SolverName, options: Options) -> dq.Solver:
    """The algorithm."""
    plain = {"naive": dq.Naive(), "adaptive": dq.Adaptive(), "anderson": dq.Anderson(), "broyden": dq.Broyden()}
    return cast(dq.Solver, plain.get(name) or dq.Relaxed(options.damping))


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
        return dq.CausalLM(vocab_size, dq.ExplicitModel(backbone))
    return dq.CausalLM(vocab_size, dq.ImplicitModel(backbone))
