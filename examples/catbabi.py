"""CatbAbI: stories one after another, loss only on the answers; implicit and explicit models.

CatbAbI (Schlag et al., ICLR 2021, arXiv 2011.07831) is a stream of bAbI's stories (Weston et al.,
arXiv 1502.05698). Here stories of tasks 1 and 15 are generated. Models are trained on the stream,
cut into sequences, and tested on new stories, each by itself, with the trained number of facts
before a question and with two and three times as many, and on a stream, carrying their state over
the cuts. An interrupted run continues when it is started again.

    python examples/catbabi.py                     # minutes on two cores
    python examples/catbabi.py --quick             # under a minute: does it run?
"""

import itertools
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from comparison import Rows, table
from run_folder import claimed_folder, read_options, write_rows
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from training_loop import RunOptions, TrainingBatches, check_options, one_process, train

import deqseq as dq
from deqseq.training import Curriculum, Phase

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
MOVES = ("went to", "went back to", "moved to", "journeyed to", "travelled to")
NAMES = re.findall(
    r"\w+", "Bernhard Brian Emily Gertrude Greg Jeff Jessica Julius Lily Sumit Winona Yann"
)
KINDS = {
    "bear": "bears",
    "cat": "cats",
    "dog": "dogs",
    "fox": "foxes",
    "frog": "frogs",
    "lion": "lions",
}
KINDS |= {
    "mouse": "mice",
    "rhino": "rhinos",
    "sheep": "sheep",
    "snake": "snakes",
    "swan": "swans",
    "wolf": "wolves",
}
UNKNOWN, IGNORED = 1, -100  # a token, a target

FREE = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=0.03, max_steps=32), dq.Phantom(4, 0.8))
UNROLLED = dq.SolveConfig(dq.Naive(), dq.Stop.exactly(4), dq.Unrolled())
TESTED = dq.SolveConfig(dq.Relaxed(0.8), dq.Stop(rtol=0.03, max_steps=128))
CURRICULUM = Curriculum(
    (Phase("unrolled", 0.85, UNROLLED, TESTED), Phase("free", 1.0, FREE, TESTED))
)


@dataclass(frozen=True)
class Options(RunOptions):
    """CatbAbI: models of several sizes learn to answer questions in a stream of stories."""

    train_stories: int = 4000  # generated training stories per task
    test_stories: int = 100  # generated test stories per task and size
    blocks: tuple[int, ...] = (1, 2)  # sizes of the models
    steps: int = 900  # training steps of the implicit models
    explicit_steps: int = 4500  # training steps of the explicit models

    def __post_init__(self) -> None:
        check_options(self)


QUICK: dict[str, Any] = {
    "train_stories": 30,
    "test_stories": 2,
    "blocks": (1,),
    "steps": 6,
    "explicit_steps": 12,
}
Words = list[tuple[str, bool]]
"""Lower-case words and punctuation marks, and whether each is an answer."""


def words_of(sentence: str, answer: str | None = None) -> Words:
    """The words of a fact, or of a question and its answer."""
    words = [(word, False) for word in re.findall(r"\w+|[.?]", sentence.lower())]
    return words if answer is None else [*words, (answer, True)]


def one_fact_story(rng: random.Random, scale: int) -> Words:
    """Task 1: people move. Five questions, each about one person's room."""
    story, where = [], {}
    for _ in range(5):
        for _ in range(2 * scale):
            person = rng.choice(PEOPLE)
            where[person] = rng.choice([room for room in ROOMS if room != where.get(person)])
            story += words_of(f"{person} {rng.choice(MOVES)} the {where[person]}.")
        person = rng.choice(sorted(where))
        story += words_of(f"Where is {person}?", where[person])
    return story


def deduction_story(rng: random.Random, scale: int) -> Words:
    """Task 15: who is of which kind, and which kind fears which; four questions."""
    kinds, names = rng.sample(sorted(KINDS), 4 * scale), rng.sample(NAMES, 4 * scale)
    feared = {kind: rng.choice([other for other in kinds if other != kind]) for kind in kinds}
    kind_of = {name: rng.choice(kinds) for name in names}
    facts = [f"{KINDS[kind]} are afraid of {KINDS[feared[kind]]}." for kind in kinds]
    facts += [f"{name} is a {kind}." for name, kind in kind_of.items()]
    rng.shuffle(facts)
    asked = [
        words_of(f"What is {name} afraid of?", feared[kind_of[name]])
        for name in rng.sample(names, 4)
    ]
    return [word for line in (*map(words_of, facts), *asked) for word in line]


GENERATORS = {1: one_fact_story, 15: deduction_story}


def generate(count: int, seed: int, scale: int) -> list[tuple[int, Words]]:
    """Stories of every task; ``scale`` multiplies the facts before each question."""
    rngs = (
        (task, random.Random(f"babi {task} {scale} {seed} {n}"))
        for task in GENERATORS
        for n in range(count)
    )
    return [(task, GENERATORS[task](rng, scale)) for task, rng in rngs]


def encode(task: int, story: Words, vocabulary: dict[str, int]) -> Tensor:
    """Inputs, targets and task of each token, (3, length); an answer is the target at its "?"."""
    words = ["<eos>", *(word for word, _ in story)]  # the first ends the story before
    inputs = [vocabulary.get(word, UNKNOWN) for word in words]
    targets = [
        token if answer else IGNORED for token, (_, answer) in zip(inputs[1:], story, strict=True)
    ]
    return torch.tensor([inputs, [*targets, IGNORED], [task] * len(inputs)])


class Batch(NamedTuple):
    """Inputs, targets (-100: not scored), tasks, a mask of real tokens, all (batch, length)."""

    inputs: Tensor
    targets: Tensor
    tasks: Tensor
    mask: Tensor

    @classmethod
    def of(cls, rows: Sequence[Tensor], device: str) -> "Batch":
        """A batch of encoded stories."""
        padded = pad_sequence([row.T for row in rows], batch_first=True, padding_value=IGNORED).to(
            device
        )
        inputs, targets, tasks = padded.unbind(-1)
        return cls(inputs.clamp(min=0), targets, tasks.clamp(min=0), inputs != IGNORED)


def stream(
    stories: Sequence[Tensor], batch: int, length: int, seed: int, device: str
) -> Iterator[Batch]:
    """Stories in random order, dealt to the rows; each row continues in the next batch."""
    rng, rows = random.Random(f"babi stream {seed}"), [torch.empty(3, 0, dtype=torch.int64)] * batch
    order = itertools.chain.from_iterable(
        rng.sample(range(len(stories)), len(stories)) for _ in itertools.count()
    )
    while True:
        for i in range(batch):
            while rows[i].shape[1] < length:
                rows[i] = torch.cat([rows[i], stories[next(order)]], dim=1)
        yield Batch.of([row[:, :length] for row in rows], device)
        rows = [row[:, length:] for row in rows]


class Stream(TrainingBatches):
    """The training batches of a model."""

    def __init__(
        self, stories: Sequence[Tensor], steps: int, peak: float, options: Options
    ) -> None:
        super().__init__(steps)
        self.peak = peak
        self.batches = stream(stories, 16, 96, options.seed, options.device)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the batches that are past are drawn again."""
        super().load_state_dict(state)
        self.batches = itertools.islice(self.batches, self.step, None)

    @property
    def lr(self) -> float:
        """The learning rate: it rises, is constant, and falls in the last fifth of the steps."""
        return self.peak * min(1.0, (self.step + 1) / 50, max(0.05, 5 * (1 - self.progress)))

    def __next__(self) -> Batch:
        self.step += 1
        return next(self.batches)

    def record(self, output: dq.CausalLMOutput, batch: Batch) -> dict[str, Any]:
        """The share of right answers, to be shown."""
        return {"accuracy": right_answers(output.logits.argmax(-1), batch)[0].float().mean().item()}


def make_model(seed: int, vocab_size: int, blocks: int, implicit: bool) -> dq.CausalLM:
    """A Mamba2 language model."""
    torch.manual_seed(seed)
    config = dq.Mamba2Config(32, n_layers=blocks, d_state=16, headdim=32)
    spec = dq.LanguageModelSpec(vocab_size, config, embedding_std=32**-0.5)
    return (spec if implicit else spec.explicit()).build()


def right_answers(guesses: Tensor, batch: Batch) -> Tensor:
    """Of each question whether the answer is right, and the number of its task, (2, questions)."""
    scored = batch.targets != IGNORED
    return torch.stack([(guesses == batch.targets)[scored], batch.tasks[scored]]).cpu()


def rows_of(answers: Tensor, **more: Any) -> Rows:
    """A row per task, and one for all tasks."""
    chosen = {str(task): answers[1] == task for task in GENERATORS} | {"all": answers[1] > 0}
    rights = {task: answers[0, questions].float() for task, questions in chosen.items()}
    return [
        {"task": task, "accuracy": x.mean().item(), "questions": len(x)} | more
        for task, x in rights.items()
    ]


@torch.no_grad()
def score(lm: dq.CausalLM, batches: Sequence[Batch], carry: bool) -> Rows:
    """Right answers, mean iterations, share of converged solves; ``carry`` keeps the state."""
    answers, iterations, converged, cache = [], [], [], None
    for batch in batches:
        output = lm(
            batch.inputs, mask=None if carry else batch.mask, cache=cache, return_cache=carry
        )
        cache = output.cache
        answers.append(right_answers(output.logits.argmax(-1), batch))
        if output.stats is not None:
            iterations.append(output.stats.iterations[batch.mask])
            converged.append(output.converged)
    means = [
        torch.cat(parts).float().mean().item() if parts else None
        for parts in (iterations, converged)
    ]
    return rows_of(torch.cat(answers, dim=1), self_iterations=means[0], converged=means[1])


def most_frequent(stories: Sequence[Tensor], batches: Sequence[Batch]) -> Rows:
    """The scores of a model that always gives the most frequent answer of a task in training."""
    best = torch.zeros(max(GENERATORS) + 1, dtype=torch.int64)
    for task in GENERATORS:
        answers = torch.cat([row[1] for row in stories if row[2, 0] == task])
        best[task] = answers[answers != IGNORED].mode().values
    found = [right_answers(best.to(batch.tasks.device)[batch.tasks], batch) for batch in batches]
    return rows_of(torch.cat(found, dim=1), self_iterations=None, converged=None)


def make_tests(options: Options, vocabulary: dict[str, int]) -> dict[str, list[Batch]]:
    """New stories by their number of facts, a multiple of that in training, and their stream."""
    new = {f"{n}x": generate(options.test_stories, 2 * options.seed + 1, n) for n in (1, 2, 3)}
    rows = {
        test: [encode(*story, vocabulary) for story in stories] for test, stories in new.items()
    }
    windows = itertools.islice(stream(rows["1x"], 10, 200, options.seed, options.device), 8)
    return {test: [Batch.of(row, options.device)] for test, row in rows.items()} | {
        "stream": [*windows]
    }


def compare(options: Options, folder: Path) -> Rows:
    """Train and test the models."""
    generated = generate(options.train_stories, 2 * options.seed, 1)
    words = ("<eos>", "<unk>", *sorted({word for _, story in generated for word, _ in story}))
    vocabulary = {word: number for number, word in enumerate(words)}
    stories, tests = (
        [encode(*story, vocabulary) for story in generated],
        make_tests(options, vocabulary),
    )
    about = {"model": "most frequent answer"}
    rows = [
        about | {"test": test} | row
        for test in tests
        for row in most_frequent(stories, tests[test])
    ]
    # steps and learning rate
    kinds = {"explicit": (options.explicit_steps, 4e-3), "implicit": (options.steps, 2e-3)}
    for (kind, (steps, lr)), blocks in itertools.product(kinds.items(), options.blocks):
        name = f"{kind} {blocks} block{'s' * (blocks > 1)}"
        lm = make_model(options.seed, len(words), blocks, kind == "implicit").to(options.device)
        train(name, lm, run := Stream(stories, steps, lr, options), CURRICULUM, folder, options)
        about = {
            "model": name,
            "seed": options.seed,
            "steps": run.step,
            "cpu_seconds": round(run.cpu_seconds, 1),
        }
        found = {
            test: score(lm.eval(), batches, carry=test == "stream")
            for test, batches in tests.items()
        }
        rows += [about | {"test": test} | row for test in tests for row in found[test]]
    return rows


def main(arguments: Sequence[str]) -> None:
    """Train and test the models, print the table, write the numbers."""
    one_process("catbabi.py")
    options = read_options(Options, arguments, QUICK)
    folder = Path(options.output or f"runs/catbabi_{options.seed}{'_quick' * options.quick}")
    with claimed_folder("catbabi.py", options, folder):
        rows = compare(options, folder)
        write_rows(folder, rows)
    print(f"\n{table(rows, ('model', 'task'), 'test')}\n\nnumbers: {folder}/results.json")


if __name__ == "__main__":
    main(sys.argv[1:])
