"""State tracking: the options, and what they make: tasks, phases, models."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from common import options as opt
from common.words import WordOptions

import deqseq as dq
from deqseq.tasks import WordProblem, generators, parse_group
from deqseq.training import Curriculum

SweepName = Literal["simultaneous", "sequential", "sliding"]
SolverName = Literal["relaxed", "naive", "adaptive", "anderson", "broyden"]
GradientName = Literal["phantom", "one-step", "implicit"]

QUICK: dict[str, Any] = {"free_lengths": (8, 10, 12, 14, 16), "steps": 600}
QUICK |= {"baselines": (), "eval_lengths": (16, 32, 64)}


def check_group(name: str, value: str) -> None:
    """Refuse what is no group's name."""
    try:
        parse_group(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True)
class Options(WordOptions):
    """An implicit model learns a word problem, next to explicit models of the same blocks."""

    group: Annotated[str, opt.Rule(check_group)] = "Z2"
    """a group or product: Z2, S3, A5, D5, Q8, Z2xZ3, A5xM"""
    generators: Annotated[int, opt.integer(0, 1024)] = 0
    """inputs: a generating subset of this size; 0: every element"""
    identity_probability: Annotated[tuple[opt.Probability, ...], opt.Some] = (0.0,)
    """probability that a token's group element is the identity, in training; of several, one is drawn for each batch"""
    eval_identity_probability: opt.Probability | None = None
    """the same at evaluation; default: the last one of training"""
    eval_lengths: Annotated[tuple[opt.Size, ...], opt.Ascending] = (16, 32, 64, 128, 256, 512)
    """evaluation lengths"""
    backbone: Literal["mamba2", "llama"] = "mamba2"
    """blocks of all models"""
    expand: opt.Size = 2
    """mamba2: inner width over d_model"""
    heads: opt.Size = 4
    """llama: attention heads"""
    mlp_width: opt.Size = 128
    """llama: hidden width of the feed-forward layer"""
    gradient: GradientName = "phantom"
    """estimator of the second phase"""
    solver: SolverName = "adaptive"
    """solver at evaluation"""
    baselines: Annotated[tuple[opt.Blocks, ...], opt.Distinct] = (4,)
    """blocks of the explicit models"""
    output: opt.Output | None = None
    """folder of the results; default: runs/state_tracking_GROUP_SEED[_llama][_quick]"""
    quick: bool = False
    """the implicit model alone, trained up to length 16"""

    def __post_init__(self) -> None:
        opt.check_options(self)
        if self.backbone == "llama" and self.d_model % (2 * self.heads):
            raise ValueError(f"--heads must divide --d-model {self.d_model} into even widths, got {self.heads}")
        makers = {
            "generators": make_inputs,
            "identity-probability": training_tasks,
            "eval-identity-probability": make_task,
        }
        for name, make in makers.items():
            try:
                make(self)
            except ValueError as error:
                raise ValueError(f"--{name}: {error}") from error
        vocab_size = make_task(self).vocab_size
        with torch.device("meta"):  # sizes that the library itself refuses
            make_model(self, vocab_size, None)

    @property
    def folder(self) -> str:
        """The folder of the results."""
        suffix = "_llama" * (self.backbone == "llama") + "_quick" * self.quick
        return self.output or f"runs/state_tracking_{self.group}_{self.seed}{suffix}"

    @property
    def curriculum(self) -> Curriculum:
        """Unrolled iterations first, then the fixed point itself."""
        first, then = super().curriculum.phases
        other = {"one-step": dq.OneStep(), "implicit": dq.Implicit()}.get(self.gradient)
        return Curriculum((first, replace(then, solve=replace(then.solve, gradient=other or then.solve.gradient))))


def read_options(arguments: list[str]) -> Options:
    """Read the command line; --quick changes the defaults."""

    def idle(options: Options) -> dict[str, tuple[str, ...]]:
        other = {"llama": ("d_state", "headdim", "expand"), "mamba2": ("heads", "mlp_width")}
        return {
            f"with --backbone {options.backbone}": other[options.backbone],
            f"with --gradient {options.gradient}": ("phantom_steps",) * (options.gradient != "phantom"),
        }

    return opt.parse(Options, arguments, idle, quick=QUICK)


def make_inputs(options: Options) -> tuple[int, ...] | None:
    """A generating subset; None: all elements."""
    return generators(parse_group(options.group), options.generators) if options.generators else None


def make_task(options: Options) -> WordProblem:
    """The word problem of the evaluation, over all elements or a generating subset."""
    given = options.eval_identity_probability
    probability = options.identity_probability[-1] if given is None else given
    return WordProblem(parse_group(options.group), make_inputs(options), identity_probability=probability)


def training_tasks(options: Options) -> list[WordProblem]:
    """The same problem with each of the identity probabilities of training."""
    monoid, inputs = parse_group(options.group), make_inputs(options)
    return [WordProblem(monoid, inputs, identity_probability=p) for p in options.identity_probability]


def make_sweep(name: SweepName, options: Options) -> dq.Sweep:
    """Which tokens are solved together."""
    return {"simultaneous": dq.Simultaneous(), "sequential": dq.Sequential()}.get(name) or dq.Sliding(options.window)


def make_solver(name: SolverName) -> dq.Solver:
    """The algorithm."""
    solvers = {"relaxed": dq.Relaxed(), "naive": dq.Naive(), "adaptive": dq.Adaptive()}
    return {**solvers, "anderson": dq.Anderson(), "broyden": dq.Broyden()}[name]


def make_model(options: Options, vocab_size: int, blocks: int | None) -> dq.CausalLM:
    """The implicit model, or an explicit one of ``blocks`` blocks."""
    torch.manual_seed(options.seed)
    sizes: dict[str, Any] = {"n_layers": blocks or options.layers, "injection": blocks is None}
    sizes["dropout"] = options.dropout
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
