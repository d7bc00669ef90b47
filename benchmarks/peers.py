"""A small looped language model, trained in deqseq, in TorchDEQ, and by a loop written by hand.

The model is the library's ``text``: one Mamba2 block whose fixed point predicts the next character.
The text is what it writes itself, sampled. It goes on training from the same weights on the same
batches of 24 x 128 characters. All three iterate the same block, with its weights computed once a
solve, and differentiate the last 4 iterations; ``decode.py`` compares the same three in generation.

- **deqseq**: the model as it comes. A solve ends when every token has passed.
- **TorchDEQ**: ``get_deq`` around the block, with its fixed-point iteration damped by 0.8. A solve
  ends when every row has passed.
- **loop by hand**: a fixed number of damped iterations and no test, as in the code of Huginn and of
  retrofitted models (arXiv 2502.05171, 2511.07384).

Each of the three has the cheapest setting that a user finds by trying: the largest of six
tolerances, or the least power of two of iterations, with which the loss is that of the solved
model, to 0.005 nats. The losses after training are compared on other text.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from harness import Row, benchmark, paired_row, peak_memory, take_turns, value_row
from models import block_of
from torch import Tensor
from torch.nn import functional as F
from torchdeq import get_deq

import deqseq as dq
from deqseq.layers import with_weights

DAMPING, DIFFERENTIATED, BUDGET = 0.8, 4, 256
TOLERANCES, ITERATIONS = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001), (8, 16, 32, 64, 128, 256)
SOLVED = 1e-3  # the tolerance of the solved model
SLACK = 0.005  # nats by which losses may differ and count as equal
Map = Callable[[Tensor], Tensor]


class DeqSeq:
    """A model that solves itself."""

    def __init__(self, rtol: float) -> None:
        self.stop = dq.Stop(rtol=rtol, max_steps=BUDGET)

    def loss(self, lm: dq.CausalLM, ids: Tensor) -> Tensor:
        """Mean loss of the next characters, in nats."""
        loss = lm(
            ids, labels=ids, stop=self.stop, gradient=dq.Phantom(DIFFERENTIATED, DAMPING)
        ).loss
        assert loss is not None
        return loss


class Peer:
    """A loop around the block of a model: ``point(f, z)`` iterates ``f`` from ``z``."""

    def __init__(self, point: Callable[[Map, Tensor], Tensor]) -> None:
        self.point = point

    def _solved(self, backbone: dq.Backbone[Any], x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        inputs = backbone.prepare(x, cache)
        z = self.point(lambda z: backbone(z, inputs, cache)[0], torch.zeros_like(x))
        return (z, None) if torch.is_grad_enabled() else backbone(z, inputs, cache, need_aux=True)

    def loss(self, lm: dq.CausalLM, ids: Tensor) -> Tensor:
        """Mean loss of the next characters, in nats."""
        z, _ = self._solved(with_weights(block_of(lm)), lm.embedding(ids), None)
        return F.cross_entropy(lm.logits(z[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    @torch.no_grad()
    def decode(self, lm: dq.CausalLM, prompt: Tensor, new: int) -> Tensor:
        """The characters that follow."""
        backbone, cache, ids, made = with_weights(block_of(lm)), None, prompt, []
        for _ in range(new):
            cache = cache if cache is None else cache.reserve(1)
            z, aux = self._solved(backbone, lm.embedding(ids), cache)
            cache, ids = backbone.advance(cache, aux, ids.shape[1]), lm.logits(z[:, -1:]).argmax(-1)
            made.append(ids)
        return torch.cat(made, dim=1)


def by_hand(iterations: int) -> Peer:
    """So many damped iterations, the last 4 differentiated; evaluation commits the last."""

    def point(f: Map, z: Tensor) -> Tensor:
        training = torch.is_grad_enabled()
        for step in range(iterations if training else iterations - 1):
            with torch.set_grad_enabled(training and step >= iterations - DIFFERENTIATED):
                z = torch.lerp(z, f(z), DAMPING)
        return z

    return Peer(point)


def torchdeq(rtol: float) -> Peer:
    """TorchDEQ's fixed-point iteration and phantom gradient."""
    limits: dict[str, Any] = {"f_max_iter": BUDGET - DIFFERENTIATED, "eval_f_max_iter": BUDGET - 1}
    limits |= {"f_tol": rtol, "f_stop_mode": "rel"}
    deq = get_deq(f_solver="fixed_point_iter", grad=DIFFERENTIATED, tau=DAMPING, **limits)

    def point(f: Map, z: Tensor) -> Tensor:
        return deq.train(torch.is_grad_enabled())(f, z, solver_kwargs={"tau": DAMPING})[0][-1]

    return Peer(point)


Way = DeqSeq | Peer


class Arm:
    """A copy of the model that is trained in one way."""

    def __init__(self, way: Way) -> None:
        self.way, self.lm = way, dq.load_example("text")
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=3e-4, betas=(0.9, 0.95))

    def step(self, ids: Tensor) -> None:
        """One training step."""
        loss = self.way.loss(self.lm.train(), ids)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.lm.parameters(), 1.0)
        self.optimizer.step()


@torch.no_grad()
def nats(way: Way, lm: dq.CausalLM, ids: Tensor) -> float:
    """The loss of a model that is solved in one way."""
    return way.loss(lm.eval(), ids).item()


def cheapest(
    make: Callable[[Any], Way], settings: tuple[float, ...], ids: Tensor, lm: dq.CausalLM
) -> float:
    """The first setting that gives the loss of the solved model, to :data:`SLACK`."""
    limit = nats(DeqSeq(SOLVED), lm, ids) + SLACK
    for setting in settings:
        if nats(make(setting), lm, ids) <= limit:
            return setting
    raise RuntimeError(
        f"none of {settings} gives the loss of the solved model, {limit - SLACK:.4f}, to {SLACK}"
    )


def training(
    case: str, ways: Mapping[str, Way], train: Tensor, held_out: Tensor, steps: int
) -> Iterator[Row]:
    """Steps in turns on the same batches: seconds and memory of a step, and the loss afterwards."""
    arms, size = {name: Arm(way) for name, way in ways.items()}, len(held_out)
    peaks = {
        name: peak_memory(partial(copy.deepcopy(arm).step, train[:size]))
        for name, arm in arms.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for step in range(steps):
        drawn = torch.randperm(
            len(train), generator=torch.Generator().manual_seed(step), device="cpu"
        )[:size]
        batch = train[drawn.to(train.device)]
        works = {name: partial(arm.step, batch) for name, arm in arms.items()}
        for name, times in take_turns(works, 1, warm_up=False).items():
            seconds[name] += times
    losses = {name: nats(arm.way, arm.lm, held_out) for name, arm in arms.items()}
    mine, *peers = arms
    for peer in peers:
        yield paired_row(
            case, seconds[mine], peer, seconds[peer], metric="ms a step", goal="ratio <= 1.0"
        )
        yield value_row(case, "peak MiB", peaks[mine], peer, peaks[peer], goal="ratio <= 1.0")
        goal = f"ours <= {losses[peer] + SLACK:.4f}"
        yield value_row(case, "nats, held out", losses[mine], peer, losses[peer], goal=goal)


def rows(quick: bool) -> Iterator[Row]:
    """Choose the settings, and measure training."""
    size, length, steps = (2, 16, 2) if quick else (24, 128, 40)
    start = torch.full((4 * size, 1), ord("\n"))
    lm = dq.load_example("text")
    written = lm.generate(start, max_new_tokens=length, temperature=1.0, seed=0).tokens
    tuning, held_out, train = written[:size], written[size : 2 * size], written[2 * size :]
    mine, theirs = (
        cheapest(DeqSeq, TOLERANCES, tuning, lm),
        cheapest(torchdeq, TOLERANCES, tuning, lm),
    )
    fixed = int(cheapest(by_hand, ITERATIONS, tuning, lm))
    ways: dict[str, Way] = {"deqseq": DeqSeq(mine), f"torchdeq, rtol {theirs:g}": torchdeq(theirs)}
    ways[f"loop by hand, {fixed}"] = by_hand(fixed)
    yield from training(f"training, equal loss, rtol {mine:g}", ways, train, held_out, steps)


main = benchmark(__doc__, rows)

if __name__ == "__main__":
    main()
