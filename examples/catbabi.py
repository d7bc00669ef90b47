"""CatbAbI: stories one after another, loss on the answers alone; implicit and explicit models of 1 and 2 blocks.

The stories are generated in the form of bAbI's (or read from its files). Models are trained on the stream of stories,
cut into sequences. They are tested on new stories, each alone, with the trained number of facts before a question and
with two and three times as many, and on the stream itself, carrying their state over the cuts. An interrupted run
continues from its last checkpoint when it is started again.

    python examples/catbabi.py                     # minutes on two cores
    python examples/catbabi.py --quick             # under a minute: shows that everything runs; nothing is learned
    python examples/catbabi.py --paper --device cuda --data tasks_1-20_v1-2/en-10k
"""

import itertools
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import babi
import torch
from accelerate import Accelerator
from common import options as opt
from common.checkpoints import FILES
from common.loop import Settings, train
from common.processes import make_accelerator, one_process
from common.run import Log, Progress, claim_folder, curve_rows, log_to, write_json, write_text
from common.tables import GREEN, GREY, ORANGE, PURPLE, figure, markdown
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import deqseq as dq
from deqseq.check import check_choice
from deqseq.training import Curriculum, Phase

Tests = dict[str, list[babi.Story]]  # by the number of facts, as a multiple of the training stories'


@dataclass(frozen=True)
class Options:
    """CatbAbI: implicit and explicit models of several sizes learn to answer questions in a stream of stories."""

    quick: bool = False  # a tiny setting: under a minute; nothing is learned
    paper: bool = False  # the paper's setting: for a GPU
    data: opt.Folder | None = None  # official files, such as tasks_1-20_v1-2/en-10k; default: generated stories
    tasks: Annotated[tuple[int, ...], opt.Distinct] = ()  # default: 1 and 15; with --paper: 5; with --data: all 20
    train_stories: opt.Count = 4000  # generated training stories per task
    test_stories: opt.Count = 100  # generated test stories per task and size
    d_model: opt.Size = 32  # width of the models
    d_state: opt.Size = 16  # state size of the models
    headdim: opt.Size = 32  # head width of the models
    expand: opt.Size = 2  # inner width as a multiple of --d-model
    blocks: Annotated[tuple[opt.Blocks, ...], opt.Some] = (1, 2)  # sizes of the models
    batch: opt.Size = 16  # rows of a training batch
    length: opt.Size = 96  # tokens per row of a training batch
    steps: opt.Count = 900  # training steps of the implicit models
    explicit_steps: opt.Count = 4500  # training steps of the explicit models
    lr: opt.Positive = 2e-3  # learning rate of the implicit models
    explicit_lr: opt.Positive = 4e-3  # learning rate of the explicit models
    warmup: opt.Count = 50  # steps in which the learning rate rises
    clip: opt.Positive = 0.25  # largest gradient norm
    unrolled_steps: opt.Count = 4  # iterations in the first phase, all differentiated
    free_from: opt.Share = 0.85  # fraction of the steps after which the fixed point itself is trained
    rtol: opt.Positive = 0.03  # relative tolerance
    max_steps: opt.Count = 32  # most iterations of a solve in training
    eval_max_steps: opt.Count = 128  # most iterations of a solve in tests
    phantom_steps: opt.Count = 4  # iterations of the phantom gradient
    damping: opt.Damping = 0.8  # damping of the phantom gradient
    stream_windows: opt.Count = 8  # batches of 10 x 200 tokens in the test on the stream
    seed: opt.Natural = 0  # seed of weights and data
    device: opt.Device = "cpu"  # where to run
    output: opt.Output | None = None  # folder of the results; default: runs/catbabi_SEED, with _quick or _paper
    fresh: bool = False  # remove what an earlier run wrote into --output

    def __post_init__(self) -> None:
        if self.quick and self.paper:
            raise ValueError("--quick and --paper cannot be combined: give one of them")
        opt.check_options(self)
        for task in self.tasks:
            check_choice("--tasks", task, babi.GENERATORS if self.data is None else babi.TASK_NAMES)
        if (width := self.expand * self.d_model) % self.headdim:
            raise ValueError(f"--headdim must divide --expand x --d-model, {width}, got {self.headdim}")


QUICK: dict[str, Any] = {"train_stories": 30, "test_stories": 2, "blocks": (1,), "steps": 6, "explicit_steps": 12}
QUICK |= {"eval_max_steps": 8, "stream_windows": 1}
# Schöne et al., 2025: phases, tolerance, phantom gradient, state-tracking widths. Schlag et al., 2021: batch, rate.
PAPER: dict[str, Any] = {"train_stories": 10_000, "test_stories": 200, "stream_windows": 50, "batch": 32, "length": 200}
PAPER |= {"d_model": 256, "d_state": 128, "headdim": 64, "expand": 4, "lr": 1e-3, "explicit_lr": 1e-3}
PAPER |= {"steps": 15_000, "explicit_steps": 15_000, "unrolled_steps": 32, "free_from": 1 / 3}
PAPER |= {"max_steps": 50, "eval_max_steps": 200, "phantom_steps": 6, "damping": 0.5}


def read_options(arguments: list[str]) -> Options:
    """Read the command line; --quick and --paper change the defaults."""
    names = ("train_stories", "test_stories")
    options = opt.parse(Options, arguments, lambda o: {"with --data": names * bool(o.data)}, quick=QUICK, paper=PAPER)
    tasks = tuple(babi.TASK_NAMES) if options.data else tuple(babi.GENERATORS) if options.paper else (1, 15)
    folder = f"runs/catbabi_{options.seed}" + "_quick" * options.quick + "_paper" * options.paper
    return replace(options, tasks=options.tasks or tasks, output=folder if options.output is None else options.output)


def read_stories(options: Options) -> tuple[list[babi.Story], Tests]:
    """The training stories and the test stories."""
    if options.data is not None:
        with opt.naming(f"--data {options.data}"):
            train, test = (babi.read_folder(Path(options.data), split, options.tasks) for split in ("train", "test"))
            if not all(any(story.questions for story in stories) for stories in (train, test)):
                raise ValueError("the stories for training and for tests must each have a question")
        return train, {"1x": test}

    def generate(count: int, seed: int, scale: int) -> list[babi.Story]:
        return [s for task in options.tasks for s in babi.generate_stories(task, count, seed=seed, scale=scale)]

    tests = {f"{scale}x": generate(options.test_stories, 2 * options.seed + 1, scale) for scale in babi.SCALES}
    return generate(options.train_stories, 2 * options.seed, 1), tests


def make_model(options: Options, vocab_size: int, blocks: int, implicit: bool) -> dq.CausalLM:
    """A Mamba2 language model."""
    torch.manual_seed(options.seed)
    sizes = {name: getattr(options, name) for name in ("d_model", "d_state", "headdim", "expand")}
    config = dq.Mamba2Config(n_layers=blocks, **sizes)
    spec = dq.LanguageModelSpec(vocab_size, config, embedding_std=options.d_model**-0.5)
    return (spec if implicit else spec.explicit()).build()


def make_curriculum(options: Options) -> Curriculum:
    """A fixed number of unrolled iterations first, then the fixed point itself."""
    stop, eval_stop = (dq.Stop(rtol=options.rtol, max_steps=n) for n in (options.max_steps, options.eval_max_steps))
    unrolled = dq.SolveConfig(dq.Naive(), dq.Stop.exactly(options.unrolled_steps), dq.Unrolled())
    free = dq.SolveConfig(dq.Naive(), stop, dq.Phantom(options.phantom_steps, options.damping))
    evaluated = dq.SolveConfig(dq.Relaxed(0.8), eval_stop)
    return Curriculum((Phase("unrolled", options.free_from, unrolled, evaluated), Phase("free", 1.0, free, evaluated)))


def fit(
    accelerator: Accelerator, name: str, lm: dq.CausalLM, stream: babi.StoryStream, options: Options, folder: Path
) -> list[dict]:
    """Train a model; returns its curve: the share of right answers in every 50th of the steps."""
    implicit = isinstance(lm.model, dq.ImplicitModel)
    steps, lr = (options.steps, options.lr) if implicit else (options.explicit_steps, options.explicit_lr)
    every = max(1, steps // 50)
    settings = Settings(steps, clip=options.clip, checkpoint_every=every, seed=options.seed)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / options.warmup, max(0.05, 5 * (1 - step / steps)))

    counts: list[Tensor] = []

    def call(model: torch.nn.Module, batch: babi.StoryBatch, phase: Phase, step: int) -> dq.CausalLMOutput:
        batch = batch.to(accelerator.device)
        answered = bool(batch.targets.max() >= 0)  # a batch may end before the first question
        output = model(batch.inputs, targets=batch.targets if answered else None)
        counts.append(babi.count_right(output.logits.detach(), batch).sum(1))
        return output if answered else replace(output, loss=0 * output.logits.sum())

    curve, spent = Log(folder / name / "curve.jsonl", name, steps, shown=("accuracy",)), None
    run = (lm, optimizer, LambdaLR(optimizer, rate), stream, make_curriculum(options), settings, folder / name)
    for update in train(accelerator, *run, call=call):
        if spent is None:  # the steps after the checkpoint are made again
            spent = max((row["seconds"] for row in curve_rows(curve.path) if row["step"] < update.step), default=0.0)
        spent += update.seconds
        if update.step % every == 0 or update.step == steps:
            right, questions = sum(counts).tolist()  # type: ignore[union-attr]
            curve.add({"step": update.step, "seconds": spent, "accuracy": right / max(1, questions)})
            counts.clear()
    curve.close()
    return [{"model": name} | row for row in curve_rows(curve.path)]


def evaluate(name: str, lm: dq.CausalLM, tests: Tests, vocabulary: babi.Vocabulary, options: Options) -> list[dict]:
    """All tests: stories alone, by size, and the stream of stories of the trained size with the state carried over."""
    batches = {test: [*babi.story_batches(stories, vocabulary, batch=50)] for test, stories in tests.items()}
    endless = babi.StoryStream(tests["1x"], vocabulary, batch=10, length=200, seed=options.seed)
    batches["stream"] = [*itertools.islice(endless, options.stream_windows)]
    progress, rows = Progress(f"test {name}", sum(map(len, batches.values()))), []
    for test, some in batches.items():
        rows += [{"test": test} | row for row in babi.score(lm, progress.over(some), carry=test == "stream")]
    progress.close()
    return rows


def table(rows: list[dict]) -> str:
    """Accuracies: a line per model, a column per test and task."""
    columns = list(dict.fromkeys((row["test"], row["task"]) for row in rows))
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        found = {(row["test"], row["task"]): f"{row['accuracy']:.3f}" for row in rows if row["model"] == model}
        lines.append([model, *(found.get(column, "") for column in columns)])
    return markdown(["model", *(f"{test}, {task}" for test, task in columns)], lines)


def draw(rows: list[dict], curves: list[dict], path: Path) -> None:
    """Two panels: right answers during training, and in the tests."""
    tests = list(dict.fromkeys(row["test"] for row in rows))
    colours = {"implicit": (PURPLE, GREEN), "explicit": (ORANGE, GREY)}  # even and odd numbers of blocks
    with figure(path, 2, 11.5) as (left, right):
        for model in dict.fromkeys(row["model"] for row in rows):
            kind, number = model.split()[:2]
            colour = colours[kind][int(number) % 2] if kind in colours else "#999999"
            points = [row for row in curves if row["model"] == model]
            left.plot([row["step"] for row in points], [row["accuracy"] for row in points], color=colour)
            found = {row["test"]: row["accuracy"] for row in rows if row["model"] == model and row["task"] == "all"}
            sizes = [name for name in found if name != "stream"]
            line = {"ls": "-" if kind == "implicit" else "--", "marker": "o", "label": model, "color": colour}
            right.plot([tests.index(name) for name in sizes], [found[name] for name in sizes], **line)
            if "stream" in found:
                right.plot([tests.index("stream")], [found["stream"]], marker="D", ls="", color=colour)
        left.set(xlabel="training steps", ylabel="right answers, training stream", ylim=(0, 1.03))
        right.set(xlabel="facts before a question; the stream", ylabel="right answers, new stories", ylim=(0, 1.03))
        right.set_xticks(range(len(tests)), tests)
        right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def main(arguments: list[str]) -> None:
    """Train and test the models, and write the table, the figure and the numbers."""
    one_process("catbabi.py")
    stories, tests = read_stories(options := read_options(arguments))
    decisive = {name: value for name, value in asdict(options).items() if name not in ("output", "fresh")}
    writes = ["results.json", "table.md", "catbabi.png", "log.txt"]
    writes += [f"{kind} * block*/{file}" for kind in ("explicit", "implicit") for file in ("curve.jsonl", *FILES)]
    output = options.output or ""
    folder = claim_folder(output, "catbabi", decisive, fresh=options.fresh, free=("device",), writes=writes)
    log_to(folder / "log.txt")
    vocabulary = babi.Vocabulary.of(stories)
    print(f"{len(stories)} stories of tasks {options.tasks}, {len(vocabulary)} words; results in {folder}/")
    rows, curves = [], []
    for name, test_stories in tests.items():
        guesses = babi.score_rows(babi.count_most_frequent(stories, test_stories))
        rows += [{"model": "most frequent answer", "test": name} | row for row in guesses]
    accelerator = make_accelerator(options.device)
    for kind, blocks in itertools.product(("explicit", "implicit"), options.blocks):
        name = f"{kind} {blocks} block{'s' * (blocks > 1)}"
        lm = make_model(options, len(vocabulary), blocks, kind == "implicit")
        stream = babi.StoryStream(stories, vocabulary, batch=options.batch, length=options.length, seed=options.seed)
        curves += (curve := fit(accelerator, name, lm, stream, options, folder))
        about = {"model": name, "steps": curve[-1]["step"], "seconds": round(curve[-1]["seconds"], 1)}
        rows += [about | {"seed": options.seed} | row for row in evaluate(name, lm, tests, vocabulary, options)]
    write_json(folder / "results.json", rows)
    text = table(rows) + "\n\nA --quick run: a few steps, in which nothing is learned." * options.quick
    write_text(folder / "table.md", f"{text}\n")
    draw(rows, curves, folder / "catbabi.png")
    print(f"\nshare of right answers, by test and task:\n\n{text}")
    print(f"\nfigure: {folder}/catbabi.png   numbers: {folder}/results.json   log: {folder}/log.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
