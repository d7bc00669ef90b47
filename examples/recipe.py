"""One recipe for all synthetic tasks: lengths that grow as the accuracy does.

An implicit model starts on strings of 2 tokens, through a few unrolled iterations, all
differentiated. When nearly all answers are right, the next length follows; from ``--lengths`` it
goes on to ``--free-lengths``, where the fixed point itself is trained, solved with a sliding window
from random states. When the last length is learned, the learning rate falls to the end. Explicit
models see the same batches at the same steps; torch's RNNs have lessons of their own.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from run_folder import flag
from torch import Tensor, nn
from torch.nn import functional as F
from training_loop import RunOptions, TrainingBatches, check_options

import deqseq as dq
from deqseq.tasks import Task, WordBatch
from deqseq.training import Curriculum, free, unrolled

Accuracy = Callable[[dq.CausalLMOutput, WordBatch], float]

WARMUP = 50  # steps in which the learning rate rises
FALLING = 600  # steps in which it falls, at least
RECENT = 10  # batches whose accuracy decides whether a length is learned
WINDOW = 8  # tokens of the sliding window
RNNS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}
ZERO = ("generators", "batch_tokens", "mlp_width", "falling")  # the least they may be
SHARES = (
    "dropout",
    "full_share",
    "learned",
    "identity_probability",
    "eval_identity_probability",
)


@dataclass(frozen=True)
class Recipe(RunOptions):
    """Models and training: one recipe for all synthetic tasks."""

    backbone: Literal["mamba2", "llama"] = "mamba2"  # blocks of all models
    d_model: int = 64  # width
    d_state: int = 32  # mamba2: state size of each channel
    headdim: int = 32  # mamba2: channels per head
    mlp_width: int = 0  # hidden width of a feed-forward layer in each block; llama: 2 d_model if 0
    layers: int = 1  # blocks of the implicit model
    skip_scale: float = 1.0  # of the residual path, in (0, 1]: below 1 solves take fewer iterations
    # of the blocks, one mask per solve: keeps small errors from adding up over the tokens
    dropout: float = 0.2
    embedding_std: float = 0.02  # of the initial embedding
    batch: int = 128  # sequences per training step
    # tokens per step at most: in lessons of longer sequences there are fewer; 0: any
    batch_tokens: int = 0
    lengths: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)  # lengths of the first phase, unrolled
    free_lengths: tuple[int, ...] = (8, 10, 12, 14, 16, 20, 24, 28, 32)  # lengths when solved
    full_share: float = 0.5  # of the batches have a lesson's length, the others one up to it
    learned: float = 0.95  # accuracy at which the next length follows
    steps: int = 8000  # training steps at most
    # steps in which the learning rate falls; 0: 2/5 of those before, 600 to 2/7 of all
    falling: int = 0
    lr: float = 3e-3  # peak learning rate
    # of the learning rate in the last lesson: it falls from lesson to lesson at the fixed point
    lr_factor: float = 1.0
    start: float = 0.5  # standard deviation of the states at which solves begin, at the fixed point
    rtol: float = 0.03  # relative tolerance of the solves at the fixed point
    unrolled_steps: int = 8  # iterations of the first phase
    # standard deviation of the states at which those begin; 0: at zeros
    unrolled_start: float = 0.0
    phantom_steps: int = 4  # steps of the gradient at the fixed point
    label_smoothing: float = 0.0  # there: the share of each target that is spread over all words
    implicit: bool = True  # whether the implicit model is trained, or its baselines alone
    baselines: tuple[str, ...] = ("4",)  # blocks of explicit models; lstm, gru: equal parameters
    baseline_lrs: tuple[float, ...] = ()  # theirs, of which the best is shown; default: --lr
    eval_lengths: tuple[int, ...] = (16, 32, 64, 128, 256)  # evaluation lengths

    LEAST: ClassVar = RunOptions.LEAST | dict.fromkeys(ZERO, 0)
    INTERVALS: ClassVar = dict.fromkeys(SHARES, "[0, 1]") | {
        "skip_scale": "(0, 1]",
        "lr_factor": "(0, 1]",
        "embedding_std": "[0, inf)",
        "unrolled_start": "[0, inf)",
        "label_smoothing": "[0, 1)",
    }
    FREE: ClassVar = (
        *RunOptions.FREE,
        "baselines",
        "baseline_lrs",
        "eval_lengths",
        "eval_identity_probability",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("lengths", "free_lengths", "eval_lengths"):
            if list(value := getattr(self, name)) != sorted(value):
                raise ValueError(f"{flag(name)} must ascend, got {value}")
        for kind in self.baselines:
            if kind not in RNNS and not (kind.isdecimal() and 0 < int(kind) < 1000):
                known = ", ".join(RNNS)
                raise ValueError(f"--baselines must be numbers of blocks, {known}, got {kind!r}")
        with torch.device("meta"):  # sizes that the library itself refuses
            make_model(self, 2, None)


class LengthSchedule(TrainingBatches):
    """Batches in lessons: one for each length, which ends when the length is learned.

    A share of the batches has the lesson's length, the others one drawn up to it. When all lengths
    are learned, or the steps are nearly over, the learning rate falls. At every step one of the
    ``tasks`` is drawn from, in unrolled lessons the first one; the ``plan`` of a run that has ended
    is repeated, if given.
    """

    saved = (*TrainingBatches.saved, "ends", "decay", "recent", "full")

    def __init__(
        self,
        tasks: Sequence[Task],
        options: Recipe,
        accuracy: Accuracy,
        plan: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(options.steps)
        self.tasks, self.options, self.accuracy, self.given = tasks, options, accuracy, plan
        self.lengths = (*options.lengths, *options.free_lengths)
        self.ends: list[int] = []  # steps after which a lesson was over
        self.decay: int | None = None  # steps after which the learning rate falls
        self.recent: list[float] = []  # accuracies of this lesson's batches of full length
        self.full = False  # whether the last batch was one

    @property
    def length(self) -> int:
        """That of the lesson."""
        return self.lengths[min(len(self.ends), len(self.lengths) - 1)]

    @property
    def reached(self) -> int:
        """The longest length of the lessons so far."""
        return max(self.lengths[: len(self.ends) + 1])

    @property
    def last(self) -> int:
        """Steps of the whole run, as far as it is known."""
        return self.options.steps if self.decay is None else self._last(self.decay)

    @property
    def progress(self) -> float:
        """The share of the lessons that are over; the falling learning rate is one more."""
        if self.step >= self.last:
            return 1.0
        left = len(self.lengths) + 1 - len(self.ends)
        falling = 0.0
        if self.decay is not None:
            falling = (self.step - self.decay) / max(1, self.last - self.decay)
        return (len(self.ends) + falling * left) / (len(self.lengths) + 1)

    @property
    def lr(self) -> float:
        """The next learning rate: linear warm-up, constant, a cosine."""
        factor = min(1.0, (self.step + 1) / WARMUP)
        if self.decay is not None:
            fallen = (self.step - self.decay) / max(1, self.last - self.decay)
            factor = min(factor, max(0.02, 0.5 + 0.5 * math.cos(math.pi * min(1.0, fallen))))
        over = max(0, len(self.ends) - len(self.options.lengths))
        factor *= self.options.lr_factor ** (over / len(self.options.free_lengths))
        return self.options.lr * factor

    @property
    def plan(self) -> dict[str, Any]:
        """When the lessons were over, and the learning rate fell."""
        return {"ends": self.ends, "decay": self.decay}

    def __next__(self) -> WordBatch:
        # a run that goes on draws the same
        drawn = random.Random(f"data {self.options.seed} {self.step}")
        full = drawn.random() < self.options.full_share
        length = self.length if full else drawn.randint(1, self.length)
        tasks = self.tasks[:1] if len(self.ends) < len(self.options.lengths) else self.tasks
        task, seed = drawn.choice(tasks), drawn.getrandbits(61) % 2**31
        self.step, self.full = self.step + 1, length == self.length
        rows, most = self.options.batch, self.options.batch_tokens
        rows = min(rows, max(1, most // self.length)) if most else rows
        stream = task.batches(rows, length, seed=seed, device=self.options.device)
        return with_start(next(stream), task, self.options)

    def loss(self, output: dq.CausalLMOutput, batch: WordBatch) -> Tensor | None:
        """Cross-entropy, after the first phase with smoothed labels."""
        if len(self.ends) < len(self.options.lengths) or not self.options.label_smoothing:
            return output.loss
        return F.cross_entropy(
            output.logits.flatten(0, 1),
            batch.targets.flatten(),
            label_smoothing=self.options.label_smoothing,
        )

    def record(self, output: dq.CausalLMOutput, batch: WordBatch) -> dict[str, Any]:
        """Learn the accuracy of the last batch, which may end the lesson."""
        numbers = {"length": self.length, "accuracy": self.accuracy(output, batch)}
        if self.given is not None:
            self.ends = [end for end in self.given["ends"] if end <= self.step]
            self.decay = (
                self.given["decay"] if (self.given["decay"] or math.inf) <= self.step else None
            )
            return numbers
        if self.full and self.decay is None:
            self.recent = [*self.recent[1 - RECENT :], numbers["accuracy"]]
            if len(self.recent) == RECENT and sum(self.recent) >= self.options.learned * RECENT:
                self.ends.append(self.step)
                self.recent = []
        late = self._last(self.step) == self.options.steps
        if self.decay is None and (late or len(self.ends) == len(self.lengths)):
            self.decay = self.step
        return numbers

    def _last(self, decay: int) -> int:
        """The step at which the run ends if the learning rate falls after ``decay`` of them."""
        rule = min(max(FALLING, 2 * decay // 5), 2 * self.options.steps // 7)
        return min(self.options.steps, decay + (self.options.falling or rule))


def with_start(batch: WordBatch, task: Task, options: Recipe) -> WordBatch:
    """The batch; for a Llama behind an unscored start token, without which it cannot count."""
    if options.backbone != "llama":
        return batch
    return WordBatch(
        F.pad(batch.inputs, (1, 0), value=task.vocab_size), F.pad(batch.targets, (1, 0), value=-100)
    )


def make_curriculum(options: Recipe) -> Curriculum:
    """Unrolled iterations first, then the fixed point; each phase has a lesson for each length."""
    adaptive = dq.SolveConfig(dq.Adaptive())
    windowed = dq.SolveConfig(
        dq.Adaptive(), sweep=dq.Sliding(WINDOW), start=dq.RandomStart(options.start)
    )
    until = len(options.lengths) / (len(options.lengths) + len(options.free_lengths) + 1)
    begin = dq.RandomStart(options.unrolled_start) if options.unrolled_start else "zero"
    relaxed = dq.SolveConfig(dq.Relaxed(0.8), start=begin)
    first = unrolled(options.unrolled_steps, until=until, base=relaxed, eval_base=adaptive)
    then = free(16, options.phantom_steps, rtol=options.rtol, base=windowed, eval_base=adaptive)
    return Curriculum((first, then))


class Recurrent(dq.Backbone[Any]):
    """One of torch's RNNs, run once over all tokens: what an implicit model is compared with."""

    def __init__(self, kind: str, d_model: int) -> None:
        super().__init__()
        self.d_model, self.rnn = d_model, RNNS[kind](d_model, d_model, batch_first=True)

    def prepare(self, x: Tensor, cache: Any = None, mask: Tensor | None = None) -> Tensor:
        """The input itself."""
        return x

    def forward(
        self, z: Tensor, inputs: Tensor, cache: Any = None, *, need_aux: bool = False
    ) -> tuple[Tensor, None]:
        """The states after each token."""
        return self.rnn(inputs)[0], None


def size(lm: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in lm.parameters())


def make_model(options: Recipe, vocab_size: int, kind: str | None) -> dq.CausalLM:
    """The implicit model, an explicit one of so many blocks, or an RNN of no more parameters."""
    if kind in RNNS:
        with torch.device("meta"):
            ours = make_model(options, vocab_size, None)
            words, most = ours.embedding.num_embeddings, size(ours)
            models = (make_rnn(kind, words, width) for width in itertools.count(8, 4))
            *_, last = itertools.takewhile(lambda lm: size(lm) <= most, models)
        torch.manual_seed(options.seed)
        return make_rnn(kind, words, last.model.d_model)
    torch.manual_seed(options.seed)
    sizes: dict[str, Any] = {"d_model": options.d_model, "n_layers": int(kind or options.layers)}
    sizes |= {"dropout": options.dropout, "injection": kind is None}
    sizes |= {"skip_scale": 1.0 if kind else options.skip_scale}
    sizes |= {"mlp_width": options.mlp_width}
    if options.backbone == "llama":
        vocab_size += 1  # the start token
        sizes["mlp_width"] = options.mlp_width or 2 * options.d_model
        backbone = dq.Llama(dq.LlamaConfig(n_heads=4, **sizes))
    else:
        backbone = dq.Mamba2(
            dq.Mamba2Config(d_state=options.d_state, headdim=options.headdim, **sizes)
        )
    model = dq.ImplicitModel(backbone) if kind is None else dq.ExplicitModel(backbone)
    return dq.CausalLM(vocab_size, model, embedding_std=options.embedding_std)


def make_rnn(kind: str, vocab_size: int, width: int) -> dq.CausalLM:
    """An RNN of a width, with an embedding as large as torch's, without which it learns nothing."""
    rnn = dq.ExplicitModel(Recurrent(kind, width))
    return dq.CausalLM(vocab_size, rnn, embedding_std=1.0)
