"""Training with a drawn number of iterations, beside training with a fixed number: quality at every test-time budget.

Recurrent-depth language models of four Llama layers of width 64 (one in the prelude, two in the core, one in the coda),
on Shakespeare's plays: trained from scratch, and retrofitted, which is a pretrained Llama that is split and trained on.
The two models of a pair start from the same weights and see the same batches. One makes 8 iterations in every update;
the other's number is drawn from a log-normal Poisson distribution with mean 8. The last 4 are differentiated. Each seed
decides the weights, the batches and the draws.

Held-out plays are scored in bits per byte after 1 to 64 iterations, in the way of training: from zero, undamped, all
tokens together. They are also solved to a relative tolerance of 1e-3 within 128 iterations. The goal: past its training
depth, drawn depth does not get worse by more than 0.005 bits per byte.

A model that is finished leaves its scores in ``--folder``; the same command continues with the next one.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Row, command_line, report, value_row

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from common.bits_per_byte import Rows, excerpts, rows_in_order, score
from common.run import Progress, write_json
from common.text import load_corpus
from common.tokenizer import train_tokenizer
from common.tokens import encode
from jaxtyping import Int64
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import deqseq as dq
from deqseq.integrations.huggingface import from_decoder, retrofit
from deqseq.training import Curriculum, PoissonLogNormal, unrolled

KINDS, DEPTHS = ("from scratch", "retrofitted"), ("drawn", "fixed")
MEAN, LAST = 8, 4  # iterations of an update, and how many of them are differentiated
BUDGETS = (1, 2, 4, 8, 16, 32, 64)
SOLVED = dq.Stop(rtol=1e-3, max_steps=128)
PEAK = 4e-3  # learning rate
SLACK = 0.005  # bits per byte by which a score may differ and count as equal

Scores = dict[str, dict[str, float]]  # by run ("8 iterations", "solved to 0.001") and metric


@dataclass(frozen=True)
class Sizes:
    """How much is trained and scored."""

    seeds: tuple[int, ...] = (0, 1, 2)
    corpus: str = "shakespeare"
    vocab_size: int = 512  # tokens of the BPE
    width: int = 64
    length: int = 64  # tokens of a row; 8 rows are a batch
    from_scratch: int = 800  # updates of a new model
    pretrained: int = 800  # updates of the model that is split
    retrofitted: int = 300  # updates after it was split
    scored: int = 4096  # held-out tokens


QUICK = Sizes((0,), "babble", 290, width=16, length=16, from_scratch=3, pretrained=3, retrofitted=3, scored=64)


@dataclass(frozen=True)
class Text:
    """Tokens to train on, and rows to score."""

    ids: Int64[Tensor, " tokens"]
    held_out: Rows
    vocab_size: int

    @classmethod
    def of(cls, sizes: Sizes) -> "Text":
        """The corpus under a tokenizer that is trained on it."""
        corpus = load_corpus(sizes.corpus)
        documents = corpus.train["text"]  # pyright: ignore[reportIndexIssue]
        tokenizer = train_tokenizer(documents, sizes.vocab_size)
        ids = torch.from_numpy(encode(documents, tokenizer).ids).long()
        rows = rows_in_order(encode(corpus.held_out, tokenizer), sizes.length)
        return cls(ids, excerpts(rows, sizes.scored, [sizes.length]), len(tokenizer))


@dataclass(frozen=True)
class Run:
    """The models of one seed."""

    seed: int
    sizes: Sizes
    text: Text
    folder: Path

    def train(self, name: str, lm: dq.CausalLM, steps: int, lr: float, depth: str | None = None) -> float:
        """Train a model, with drawn or fixed depth if any of it is iterated; CPU minutes."""
        iterations = PoissonLogNormal(MEAN - 1, seed=self.seed) if depth == "drawn" else MEAN
        phase = unrolled(iterations, last=LAST, until=None, base=dq.SolveConfig(solver=dq.Naive()))
        curriculum = Curriculum((phase,))
        optimizer = torch.optim.AdamW(lm.parameters(), lr, betas=(0.9, 0.95))
        schedule = OneCycleLR(optimizer, lr, steps, pct_start=0.1)
        random, length = torch.Generator().manual_seed(self.seed), self.sizes.length
        progress, begun = Progress(f"{name}, seed {self.seed}", steps), time.process_time()
        lm.train()
        for step in range(steps):
            starts = torch.randint(len(self.text.ids) - length, (8, 1), generator=random)
            rows = self.text.ids[starts + torch.arange(length + 1)]
            curriculum.at(step / steps).apply(lm)
            loss = lm(rows[:, :-1], targets=rows[:, 1:]).loss
            assert loss is not None
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.to(step + 1, loss=loss.item())
        progress.close()
        return (time.process_time() - begun) / 60

    def llama(self) -> LlamaForCausalLM:
        """Four layers with new weights."""
        width = self.sizes.width
        sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4}
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(LlamaConfig(vocab_size=self.text.vocab_size, num_hidden_layers=4, **sizes))

    def pretrained(self) -> LlamaForCausalLM:
        """The same, trained the first time."""
        saved = self.folder / f"pretrained_{self.seed}"
        if not saved.exists():
            model = self.llama()
            self.train("pretrained", from_decoder(model), self.sizes.pretrained, PEAK)
            unfinished = saved.with_name(f"{saved.name}.unfinished")
            model.save_pretrained(unfinished)
            unfinished.replace(saved)
        return LlamaForCausalLM.from_pretrained(saved)

    def split(self, kind: str) -> dq.CausalLM:
        """One layer, two that are iterated, one layer; a new model's injection is drawn, so that the state counts."""
        new, injection = kind == "from scratch", dq.ConcatInjection(self.sizes.width)
        model = self.llama() if new else self.pretrained()
        if new:
            torch.nn.init.normal_(injection.weight, std=(2 * self.sizes.width) ** -0.5)
        return retrofit(model, prelude=1, core=2, coda=1, injection=injection)

    def scores(self, kind: str, depth: str) -> Scores:
        """Train and score a model, or read its scores."""
        name = f"{kind}, {depth} depth"
        path = self.folder / f"{name}, seed {self.seed}.json".replace(", ", "_").replace(" ", "_")
        if not path.exists():
            new, lm = kind == "from scratch", self.split(kind)
            steps, lr = (self.sizes.from_scratch, PEAK) if new else (self.sizes.retrofitted, PEAK / 4)
            minutes = self.train(name, lm, steps, lr, depth)
            write_json(path, {"training": {"CPU minutes": minutes}} | self.measured(lm))
        return json.loads(path.read_text())

    def measured(self, lm: dq.CausalLM) -> Scores:
        """A model's scores at every budget, and solved."""
        stops = {f"{budget} iterations": dq.Stop.exactly(budget) for budget in BUDGETS}
        stops[f"solved to {SOLVED.rtol:g}"] = SOLVED
        found: Scores = {}
        for name, stop in stops.items():
            one = score(lm, self.text.held_out, batch_size=8, solver=dq.Naive(), stop=stop)
            found[name] = {"bits per byte": one.bits_per_byte}
            if stop == SOLVED:
                assert one.converged is not None and one.iterations is not None
                found[name] |= {"converged": one.converged, "iterations": one.iterations}
        return found

    def rows(self, kind: str) -> Iterator[Row]:
        """Drawn depth beside fixed depth."""
        drawn, fixed = (self.scores(kind, depth) for depth in DEPTHS)
        limit = drawn[f"{MEAN} iterations"]["bits per byte"] + SLACK
        deeper = {f"{budget} iterations" for budget in BUDGETS if budget > MEAN}
        for name, numbers in drawn.items():
            goal = f"ours <= {limit:.4f}" if name in deeper else None
            for metric, ours in numbers.items():
                case = f"{kind}, seed {self.seed}, {name}"
                yield value_row(case, metric, ours, "fixed depth", fixed[name][metric], goal=goal)


def main() -> None:
    """Train and score whatever is not there yet, and report."""
    parser = command_line(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="finished models' scores; default: runs/depth, or runs/depth_quick")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    folder = options.folder or Path("runs", "depth_quick" if options.quick else "depth")
    disable_progress_bar()
    text = Text.of(sizes)
    runs = [Run(seed, sizes, text, folder) for seed in sizes.seeds]
    report([row for run in runs for kind in KINDS for row in run.rows(kind)], options)


if __name__ == "__main__":
    main()
