"""A small looped language model, trained and decoded in deqseq, in TorchDEQ, and by the loop that people write by hand.

The model is the library's ``text``: one Mamba2 block whose fixed point predicts the next character of Shakespeare's
plays. It goes on training from the same weights on the same batches of 24 x 128 characters, and continues 1 and 8
prompts of 128 characters by 128. All three iterate the same block, with its weights computed once a solve, and
differentiate the last 4 iterations.

- **deqseq**: the model as it comes, and ``generate``. A solve ends when every token has passed.
- **TorchDEQ**: ``get_deq`` around the block, with its fixed-point iteration damped by 0.8. A solve ends when every row
  has passed.
- **loop by hand**: a fixed number of damped iterations and no test, as in the code of Huginn and of retrofitted models
  (arXiv 2502.05171, 2511.07384).

Both peers decode as ``generate`` does: the block on one token with the cache that the tokens before it left. They solve
the prompt, which counts in time and memory, all tokens together. So does ours with equal iterations; to a tolerance it
takes its window, which needs less memory.

For the rows "equal loss" each of the three has the cheapest setting that a user finds by trying: the largest of four
tolerances, or the least power of two of iterations, with which the loss is that of the solved model, to 0.005 nats. The
other rows make the loop's number of iterations in all three. The losses after training are compared on other plays.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import MEBIBYTE, Row, arguments, paired, paired_row, peak_memory, report, take_turns, value_row
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional as F
from torchdeq import get_deq

import deqseq as dq
from deqseq.layers import with_weights

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from common.text import load_corpus

DAMPING, DIFFERENTIATED, BUDGET = 0.8, 4, 256
TOLERANCES, ITERATIONS = (0.3, 0.1, 0.03, 0.01), (8, 16, 32, 64, 128)
SOLVED = 1e-3  # the tolerance of the solved model
SLACK = 0.005  # nats by which losses may differ and count as equal
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much is trained and decoded."""

    corpus: str = "shakespeare"
    rows: int = 24
    length: int = 128
    steps: int = 40
    held_out: int = 64
    prompt: int = 128
    new: int = 128
    turns: int = 7


QUICK = Sizes("babble", rows=2, length=32, steps=4, held_out=4, prompt=32, new=8, turns=2)


@dataclass(frozen=True)
class Text:
    """Characters to train on, and rows of others: to choose settings with, and to report on."""

    ids: Int64[Tensor, " characters"]
    tuning: Int64[Tensor, "rows length"]
    held_out: Int64[Tensor, "rows length"]

    @classmethod
    def of(cls, sizes: Sizes) -> "Text":
        """The corpus as ASCII."""
        corpus = load_corpus(sizes.corpus)
        train, rest = (
            torch.tensor(list("\n".join(part).encode("ascii", "ignore")))
            for part in (corpus.train["text"], corpus.held_out)  # pyright: ignore[reportIndexIssue]
        )
        first, last = rest[: sizes.held_out * sizes.length], rest[-sizes.held_out * sizes.length :]
        return cls(train, *(part.reshape(sizes.held_out, sizes.length) for part in (first, last)))

    def batch(self, step: int, sizes: Sizes) -> Int64[Tensor, "rows length"]:
        """The rows of a training step."""
        drawn = torch.Generator().manual_seed(step)
        places = torch.randint(len(self.ids) - sizes.length, (sizes.rows, 1), generator=drawn)
        return self.ids[places + torch.arange(sizes.length)]


@dataclass(frozen=True)
class DeqSeq:
    """A model that solves itself."""

    stop: dq.Stop
    in_training: dq.Stop
    solver: dq.Solver[Any] = dq.Adaptive()
    prompt: dq.Sweep = dq.Sliding(16)

    def loss(self, lm: dq.CausalLM, ids: Tensor) -> Tensor:
        """Mean loss of the next characters, in nats."""
        stop = self.in_training if lm.training else self.stop
        loss = lm(ids, labels=ids, solver=self.solver, stop=stop, gradient=dq.Phantom(DIFFERENTIATED, DAMPING)).loss
        assert loss is not None
        return loss

    def decode(self, lm: dq.CausalLM, prompt: Tensor, new: int) -> Tensor:
        """The characters that follow."""
        how: dict[str, Any] = {"solver": self.solver, "stop": self.stop, "sweep": self.prompt}
        return lm.generate(prompt, max_new_tokens=new, **how).tokens


class Peer:
    """A loop around the block of a model: ``point(f, z, differentiate)`` iterates ``f`` from ``z``."""

    def __init__(self, point: Callable[[Map, Tensor, bool], Tensor]) -> None:
        self.point = point

    def loss(self, lm: dq.CausalLM, ids: Tensor) -> Tensor:
        """Mean loss of the next characters, in nats."""
        backbone, x = block(lm), lm.embedding(ids)
        backbone = with_weights(backbone)
        f = partial(evaluated, backbone, backbone.prepare(x), None)
        z = self.point(f, torch.zeros_like(x), torch.is_grad_enabled())
        z = z if torch.is_grad_enabled() else f(z)
        return F.cross_entropy(lm.logits(z[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    @torch.no_grad()
    def decode(self, lm: dq.CausalLM, prompt: Tensor, new: int) -> Tensor:
        """The characters that follow."""
        backbone, cache, ids, made = block(lm), None, prompt, []
        backbone = with_weights(backbone)
        for _ in range(new):
            cache = cache if cache is None else cache.reserve(1)
            x = lm.embedding(ids)
            inputs = backbone.prepare(x, cache)
            f = partial(evaluated, backbone, inputs, cache)
            z, aux = backbone(self.point(f, torch.zeros_like(x), False), inputs, cache, need_aux=True)
            cache, ids = backbone.advance(cache, aux, ids.shape[1]), lm.logits(z[:, -1:]).argmax(-1)
            made.append(ids)
        return torch.cat(made, dim=1)


def evaluated(backbone: dq.Backbone[Any], inputs: Any, cache: Any, z: Tensor) -> Tensor:
    """One iteration."""
    return backbone(z, inputs, cache)[0]


def by_hand(iterations: int) -> Peer:
    """So many damped iterations, the last 4 differentiated; in evaluation the last is the one that is committed."""

    def point(f: Map, z: Tensor, differentiate: bool) -> Tensor:
        for step in range(iterations if differentiate else iterations - 1):
            with torch.set_grad_enabled(differentiate and step >= iterations - DIFFERENTIATED):
                z = torch.lerp(z, f(z), DAMPING)
        return z

    return Peer(point)


def torchdeq(rtol: float, iterations: int) -> Peer:
    """TorchDEQ's fixed-point iteration and phantom gradient."""
    limits: dict[str, Any] = {"f_max_iter": iterations - DIFFERENTIATED, "eval_f_max_iter": iterations - 1}
    limits |= {"f_tol": rtol, "f_stop_mode": "rel"}
    deq = get_deq(f_solver="fixed_point_iter", grad=DIFFERENTIATED, tau=DAMPING, **limits)

    def point(f: Map, z: Tensor, differentiate: bool) -> Tensor:
        return deq.train(differentiate)(f, z, solver_kwargs={"tau": DAMPING})[0][-1]

    return Peer(point)


Way = DeqSeq | Peer


def block(lm: dq.CausalLM) -> dq.Backbone[Any]:
    """What is iterated."""
    assert isinstance(lm.model, dq.ImplicitModel)
    return lm.model.backbone


@dataclass
class Arm:
    """A copy of the model that is trained in one way."""

    way: Way
    lm: dq.CausalLM = field(default_factory=partial(dq.load_example, "text"))

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=3e-4, betas=(0.9, 0.95))

    def step(self, ids: Tensor) -> None:
        """One training step."""
        loss = self.way.loss(self.lm.train(), ids)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
        self.optimizer.step()

    @torch.no_grad()
    def nats(self, ids: Tensor) -> float:
        """The loss, without dropout."""
        return self.way.loss(self.lm.eval(), ids).item()


def to_a_tolerance(rtol: float) -> DeqSeq:
    """Ours, with Adaptive."""
    stop = dq.Stop(rtol=rtol, max_steps=BUDGET)
    return DeqSeq(stop, stop)


def cheapest(ways: Mapping[Any, Way], text: Text) -> Any:
    """The first setting that gives the loss of the solved model, to :data:`SLACK`."""
    limit = Arm(to_a_tolerance(SOLVED)).nats(text.tuning) + SLACK
    for setting, way in ways.items():
        if Arm(way).nats(text.tuning) <= limit:
            return setting
    raise RuntimeError(f"none of {list(ways)} gives the loss of the solved model, {limit - SLACK:.4f}, to {SLACK}")


def training(part: str, ways: Mapping[str, Way], text: Text, sizes: Sizes) -> Iterator[Row]:
    """Steps in turns on the same batches: seconds and memory of a step, and the loss afterwards."""
    arms = {name: Arm(way) for name, way in ways.items()}
    batch = text.batch(0, sizes)
    peaks = {name: peak_memory(partial(copy.deepcopy(arm).step, batch)) / MEBIBYTE for name, arm in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for step in range(0, sizes.steps, 2):
        runs = {name: partial(arm.step, text.batch(step, sizes)) for name, arm in arms.items()}
        for name, times in take_turns(runs, 1).items():  # a step that is not timed, and one that is
            seconds[name] += times
    losses = {name: arm.nats(text.held_out) for name, arm in arms.items()}
    yield from compared(f"training, {part}", "ms a step", seconds, peaks)
    (_, ours), *others = losses.items()
    for peer, theirs in others:
        goal = f"ours <= {theirs + SLACK:.4f}"
        yield value_row(f"training, {part}", "nats, held out", ours, peer, theirs, goal=goal)


def decoding(part: str, ways: Mapping[str, Way], text: Text, sizes: Sizes, batch: int) -> Iterator[Row]:
    """Continuations in turns: seconds and memory, those of the prompt included."""
    lm, prompt = dq.load_example("text"), text.held_out[:batch, : sizes.prompt]
    few = {name: partial(way.decode, lm, prompt, min(8, sizes.new)) for name, way in ways.items()}
    peaks = {name: peak_memory(run) / MEBIBYTE for name, run in few.items()}
    runs = {name: partial(way.decode, lm, prompt, sizes.new) for name, way in ways.items()}
    seconds = take_turns(runs, sizes.turns)
    per_character = {name: [one / sizes.new for one in times] for name, times in seconds.items()}
    yield from compared(f"decoding, batch {batch}, {part}", "ms a character", per_character, peaks)


def compared(case: str, metric: str, seconds: Mapping[str, list[float]], peaks: Mapping[str, float]) -> Iterator[Row]:
    """Ours, which is the first, beside each peer: time and memory."""
    mine, *peers = seconds
    for peer in peers:
        times = paired(seconds[mine], seconds[peer])
        yield paired_row(case, metric, times, peer, goal="ratio <= 1.0")
        yield value_row(case, "peak MiB", peaks[mine], peer, peaks[peer], goal="ratio <= 1.0")


def main() -> None:
    """Choose the settings, measure both parts and report."""
    options = arguments(__doc__ or "")
    sizes = QUICK if options.quick else Sizes()
    text = Text.of(sizes)
    mine = cheapest({rtol: to_a_tolerance(rtol) for rtol in TOLERANCES}, text)
    theirs = cheapest({rtol: torchdeq(rtol, BUDGET) for rtol in TOLERANCES}, text)
    fixed = cheapest({count: by_hand(count) for count in ITERATIONS}, text)
    stops = dq.Stop.exactly(fixed), dq.Stop.exactly(fixed - DIFFERENTIATED)
    ours = {
        f"equal loss, rtol {mine:g}": to_a_tolerance(mine),
        f"{fixed} iterations": DeqSeq(*stops, dq.Relaxed(DAMPING), dq.Simultaneous()),
    }
    peers: tuple[dict[str, Way], ...] = (
        {f"torchdeq, rtol {theirs:g}": torchdeq(theirs, BUDGET), f"loop by hand, {fixed}": by_hand(fixed)},
        {"torchdeq": torchdeq(0.0, fixed), "loop by hand": by_hand(fixed)},
    )
    found: list[Row] = []
    for (part, way), others in zip(ours.items(), peers, strict=True):
        ways = {"deqseq": way} | others
        found += training(part, ways, text, sizes)
        for batch in (1, 8):
            found += decoding(part, ways, text, sizes, batch)
    report(found, options)


if __name__ == "__main__":
    main()
