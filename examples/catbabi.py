"""CatbAbI: stories one after another, loss on the answers alone; implicit against explicit models of 1 and 2 blocks.

The stories are made from a seed, in the form of bAbI's (or read from its files); models are trained on the stream of
them, cut into sequences. They are tested on new stories of the trained size and of two and three times as many
facts before each question, each story alone, and on the stream itself, whose state they then carry over. Interrupt it
and run it again: it goes on from its last checkpoint.

    python examples/catbabi.py                     # minutes on two cores
    python examples/catbabi.py --quick             # under a minute: that everything runs; nothing is learned
    python examples/catbabi.py --paper --device cuda --data tasks_1-20_v1-2/en-10k
"""

import argparse
import itertools
import json
import logging
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import matplotlib
import torch
from tqdm import tqdm

import deqseq as dq
from deqseq.tasks import babi
from deqseq.training import Curriculum, Phase, load_latest, save_checkpoint
from deqseq.training.run_folder import claim_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

log = logging.getLogger("catbabi")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run. The defaults are the small setting."""

    tasks: tuple[int, ...] = (1, 15)
    train_stories: int = 4000  # of each task, where they are generated
    test_stories: int = 100
    d_model: int = 32
    d_state: int = 16
    headdim: int = 32
    expand: int = 2
    blocks: tuple[int, ...] = (1, 2)
    batch: int = 16
    length: int = 96
    steps: int = 900
    explicit_steps: int = 4500
    lr: float = 2e-3
    explicit_lr: float = 4e-3
    warmup: int = 50
    clip: float = 0.25
    unrolled_steps: int = 4  # self-iterations of the first phase, all differentiated
    free_from: float = 0.85  # fraction of the steps after which the fixed point itself is trained
    rtol: float = 0.03
    max_steps: int = 32
    eval_max_steps: int = 128
    phantom_steps: int = 4
    damping: float = 0.8  # of the phantom gradient
    stream_windows: int = 8  # of 200 words, at the test on the stream
    seed: int = 0
    data: str = ""  # a folder of official files; empty: generated stories


SMALL = Recipe()
QUICK = replace(
    SMALL, train_stories=30, test_stories=2, steps=6, explicit_steps=12, blocks=(1,), eval_max_steps=8, stream_windows=1
)
PAPER = Recipe(  # Schöne et al.: phases, tolerance, phantom gradient, state-tracking widths; Schlag et al.: batch, rate
    tasks=tuple(babi.GENERATORS),
    train_stories=10_000,
    test_stories=200,
    d_model=256,
    d_state=128,
    headdim=64,
    expand=4,
    batch=32,
    length=200,
    steps=15_000,
    explicit_steps=15_000,
    lr=1e-3,
    explicit_lr=1e-3,
    unrolled_steps=32,
    free_from=1 / 3,
    max_steps=50,
    eval_max_steps=200,
    phantom_steps=6,
    damping=0.5,
    stream_windows=50,
)


def parse(arguments: list[str]) -> tuple[Recipe, str, Path]:
    """Read the command line; returns the recipe, the device and the folder of the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="under a minute; nothing is learned")
    size.add_argument("--paper", action="store_true", help="the paper's hyperparameters: for a GPU")
    parser.add_argument("--data", default="", help="a folder of official files, such as tasks_1-20_v1-2/en-10k")
    parser.add_argument("--tasks", type=int, nargs="+", help="tasks (default: the recipe's; all of --data)")
    parser.add_argument("--steps", type=int, help="training steps of the implicit models")
    parser.add_argument("--explicit-steps", type=int, help="training steps of the explicit models")
    parser.add_argument("--blocks", type=int, nargs="+", help="sizes of the models")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    parser.add_argument("--device", default="cpu", help="where to run")
    parser.add_argument("--output", help="folder of the results (default: runs/catbabi_SEED, with _quick or _paper)")
    given = vars(parser.parse_args(arguments))
    quick, paper, device, output = (given.pop(name) for name in ("quick", "paper", "device", "output"))
    if given["data"] and given["tasks"] is None:
        given["tasks"] = tuple(babi.TASK_NAMES)
    changes = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    recipe = replace(QUICK if quick else PAPER if paper else SMALL, **changes)
    folder = Path(output or f"runs/catbabi_{recipe.seed}" + "_quick" * quick + "_paper" * paper)
    for name, values in {
        "steps": [recipe.steps],
        "explicit-steps": [recipe.explicit_steps],
        "blocks": recipe.blocks,
    }.items():
        if min(values) < 1:
            parser.error(f"--{name} must be at least 1, got {min(values)}")
    possible = babi.TASK_NAMES if recipe.data else babi.GENERATORS
    if not set(recipe.tasks) <= set(possible):
        parser.error(f"--tasks must be among {', '.join(map(str, possible))}, got {list(recipe.tasks)}")
    return recipe, device, folder


@dataclass(frozen=True)
class Data:
    """Training stories, test stories by the name of the test, and the words of the training stories."""

    train: list[babi.Story]
    tests: dict[str, list[babi.Story]]
    vocabulary: babi.Vocabulary


def read_data(recipe: Recipe) -> Data:
    """Stories from a seed, or from official files; the tests are named by their size."""
    if recipe.data:
        train, test = (babi.read_folder(Path(recipe.data), split, recipe.tasks) for split in ("train", "test"))
        return Data(train, {"1x": test}, babi.Vocabulary.of(train, replace_unknown=True))

    def made(count: int, seed: int, scale: int) -> list[babi.Story]:
        return [s for task in recipe.tasks for s in babi.generate_stories(task, count, seed=seed, scale=scale)]

    train = made(recipe.train_stories, 2 * recipe.seed, 1)
    tests = {f"{scale}x": made(recipe.test_stories, 2 * recipe.seed + 1, scale) for scale in babi.SCALES}
    return Data(train, tests, babi.Vocabulary.of(train, replace_unknown=True))


def make_model(recipe: Recipe, vocab_size: int, blocks: int, implicit: bool) -> dq.CausalLM:
    """A Mamba2 of some blocks."""
    torch.manual_seed(recipe.seed)
    config = dq.Mamba2Config(
        recipe.d_model, n_layers=blocks, d_state=recipe.d_state, headdim=recipe.headdim, expand=recipe.expand
    )
    eval_stop = dq.Stop(rtol=recipe.rtol, max_steps=recipe.eval_max_steps)
    solving = dq.Solving(solver=dq.Naive(), eval_solver=dq.Relaxed(0.8), eval_stop=eval_stop) if implicit else None
    return dq.LanguageModelSpec(vocab_size, config, solving, embedding_std=recipe.d_model**-0.5).build()


def make_curriculum(recipe: Recipe) -> Curriculum:
    """Unrolled steps first, then the fixed point itself."""
    unrolled = Phase("unrolled", recipe.free_from, dq.Stop.exactly(recipe.unrolled_steps), dq.Unrolled())
    stop = dq.Stop(rtol=recipe.rtol, max_steps=recipe.max_steps)
    return Curriculum((unrolled, Phase("free", 1.0, stop, dq.Phantom(recipe.phantom_steps, recipe.damping))))


def train(name: str, lm: dq.CausalLM, data: Data, recipe: Recipe, folder: Path) -> tuple[list[dict], float]:
    """Train a model; returns its curve, the share of right answers every 1/50 of the steps, and the seconds it took."""
    implicit, device = isinstance(lm.model, dq.ImplicitModel), lm.embedding.weight.device
    steps, lr = (recipe.steps, recipe.lr) if implicit else (recipe.explicit_steps, recipe.explicit_lr)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    done, spent, curve = 0, 0.0, []
    if (saved := load_latest(folder / name, device)) is not None:
        lm.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.optimizer)
        done, spent, curve = saved.step, saved.meta["seconds"], saved.meta["curve"]
        log.info("%s: going on from step %d", name, done)
    batches = babi.stream_batches(
        data.train, data.vocabulary, batch=recipe.batch, length=recipe.length, seed=recipe.seed
    )
    counts, began = babi.Count(0, 0), time.perf_counter() - spent
    bar = tqdm(itertools.islice(batches, done, steps), name, steps, initial=done, disable=None)
    for step, batch in enumerate(bar, done + 1):
        progress = (step - 1) / steps
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / recipe.warmup, max(0.05, 5 * (1 - progress)))
        if isinstance(lm.model, dq.ImplicitModel):
            make_curriculum(recipe).at(progress).apply(lm.model)
        right = train_step(lm.train(), batch.to(device), optimizer, data.vocabulary, recipe.clip)
        counts = babi.total((counts, right))
        if step % max(1, steps // 50) == 0 or step == steps:
            spent = time.perf_counter() - began
            curve.append({"model": name, "step": step, "seconds": spent, "accuracy": counts.accuracy})
            log.info("%s", curve[-1])
            bar.set_postfix(accuracy=f"{curve[-1]['accuracy']:.3f}")
            counts = babi.Count(0, 0)
            save_checkpoint(folder / name, step, lm, optimizer, {"seconds": spent, "curve": curve})
    return curve, spent


def train_step(
    lm: dq.CausalLM, batch: babi.StoryBatch, optimizer: torch.optim.Optimizer, vocabulary: babi.Vocabulary, clip: float
) -> babi.Count:
    """One step on the answers of a batch; returns how many were right."""
    output = lm(batch.inputs, targets=batch.targets)
    assert output.loss is not None
    if not torch.isfinite(output.loss):
        raise FloatingPointError(f"the loss is {output.loss.item()}; the last checkpoint is intact")
    optimizer.zero_grad()
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), clip)
    optimizer.step()
    return babi.total(babi.count_right(output.logits.detach(), batch, vocabulary).values())


@torch.no_grad()
def test(lm: dq.CausalLM, batches: Iterable[babi.StoryBatch], vocabulary: babi.Vocabulary, carry: bool) -> list[dict]:
    """Accuracy of each task and of all, and what the solves took; ``carry``: each batch goes on from the last one."""
    counts, steps, converged, cache = [], [], [], None
    lm.eval()
    for batch in batches:
        batch = batch.to(lm.embedding.weight.device)
        output = lm(batch.inputs, mask=None if carry else batch.mask, cache=cache, return_cache=carry)
        cache = output.cache
        counts.append(babi.count_right(output.logits, batch, vocabulary))
        if output.stats is not None and output.status is not None:
            steps += output.stats.steps.tolist()
            converged += (output.status == dq.Status.CONVERGED).tolist()
    solve = {
        "self_iterations": sum(steps) / len(steps) if steps else None,
        "converged": sum(converged) / len(converged) if converged else None,
    }
    return [row | solve for row in as_rows(babi.merge_counts(counts))]


def as_rows(counts: dict[int, babi.Count]) -> list[dict]:
    """A row for each task, and one for all."""
    named = {str(task): count for task, count in counts.items()} | {"all": babi.total(counts.values())}
    return [{"task": task, "accuracy": n.accuracy, "questions": n.questions} for task, n in named.items()]


def evaluate(lm: dq.CausalLM, data: Data, recipe: Recipe) -> list[dict]:
    """All tests: stories alone, by size, and the stream of stories of the trained size with the state carried over."""
    rows = []
    for name, stories in data.tests.items():
        batches = babi.story_batches(stories, data.vocabulary, batch=50)
        rows += [{"test": name} | row for row in test(lm, batches, data.vocabulary, carry=False)]
    endless = babi.stream_batches(data.tests["1x"], data.vocabulary, batch=10, length=200, seed=recipe.seed)
    windows = itertools.islice(endless, recipe.stream_windows)
    return rows + [{"test": "stream"} | row for row in test(lm, windows, data.vocabulary, carry=True)]


def table(rows: list[dict]) -> str:
    """Accuracies, models down, tests and tasks across, as Markdown."""
    columns = list(dict.fromkeys((row["test"], row["task"]) for row in rows))
    lines = ["| model | " + " | ".join(f"{test}, {task}" for test, task in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for model in dict.fromkeys(row["model"] for row in rows):
        found = {(row["test"], row["task"]): f"{row['accuracy']:.3f}" for row in rows if row["model"] == model}
        lines.append(f"| {model} | " + " | ".join(found.get(column, "") for column in columns) + " |")
    return "\n".join(lines)


def draw(rows: list[dict], curve: list[dict], path: Path) -> None:
    """Two panels: right answers during training, and at the tests."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4), layout="constrained")
    tests = list(dict.fromkeys(row["test"] for row in rows))
    colours = {"implicit": ("#5b2a86", "#0b6e4f"), "explicit": ("#e4572e", "#7a8ca0")}  # even and odd numbers of blocks
    for model in dict.fromkeys(row["model"] for row in rows):
        kind, number = model.split()[:2]
        style = {"color": colours[kind][int(number) % 2] if kind in colours else "#999999"}
        points = [row for row in curve if row["model"] == model]
        left.plot([row["step"] for row in points], [row["accuracy"] for row in points], **style)
        found = {row["test"]: row["accuracy"] for row in rows if row["model"] == model and row["task"] == "all"}
        sizes = [name for name in found if name != "stream"]
        line = {"ls": "-" if kind == "implicit" else "--", "marker": "o", "label": model}
        right.plot([tests.index(name) for name in sizes], [found[name] for name in sizes], **line, **style)
        if "stream" in found:
            right.plot([tests.index("stream")], [found["stream"]], marker="D", ls="", **style)
    left.set(xlabel="training steps", ylabel="right answers, training stream", ylim=(0, 1.03))
    right.set(xlabel="facts before a question; the stream", ylabel="right answers, new stories", ylim=(0, 1.03))
    right.set_xticks(range(len(tests)), tests)
    right.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    """Train, test, and write the table, the figure and the numbers."""
    recipe, device, folder = parse(arguments)
    data = read_data(recipe)
    try:
        claim_folder(folder, asdict(recipe))
    except (ValueError, FileExistsError) as error:
        raise SystemExit(f"{error} (--output)") from error
    logging.basicConfig(filename=folder / "log.txt", level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    print(f"{len(data.train)} stories of tasks {recipe.tasks}, {len(data.vocabulary)} words; results in {folder}/")
    guess = {"model": "most frequent answer"}
    guesses = {name: babi.count_most_frequent(data.train, stories) for name, stories in data.tests.items()}
    rows = [guess | {"test": name} | row for name, counts in guesses.items() for row in as_rows(counts)]
    curves: list[dict] = []
    for kind, blocks in itertools.product(("explicit", "implicit"), recipe.blocks):
        name = f"{kind} {blocks} block{'s' * (blocks > 1)}"
        lm = make_model(recipe, len(data.vocabulary), blocks, kind == "implicit").to(device)
        curve, seconds = train(name, lm, data, recipe, folder)
        curves += curve
        about = {"model": name, "steps": curve[-1]["step"], "seconds": round(seconds, 1), "seed": recipe.seed}
        rows += [about | row for row in evaluate(lm, data, recipe)]
        log.info("%s", rows[-1])
    (folder / "results.json").write_text(json.dumps(rows, indent=1))
    (folder / "curve.json").write_text(json.dumps(curves, indent=1))
    (folder / "table.md").write_text(table(rows) + "\n")
    draw(rows, curves, folder / "catbabi.png")
    print(f"\nshare of right answers, by test and task:\n\n{table(rows)}")
    print(f"\nfigure: {folder}/catbabi.png   numbers: {folder}/results.json   log: {folder}/log.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
