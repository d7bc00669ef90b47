"""What a training step costs beside the block evaluations that it is made of.

A step is the loss and its gradients, without the optimizer's part. It makes N iterations without a graph and k
phantom steps with one: 4 and 1 when bounded, 24 and 4 when free. Each takes turns with

- its floor, N + 3 k evaluations of the blocks without a graph, since a forward pass with its backward costs about
  three forward ones; here embedding and injection are on both sides, head and loss are not;
- loops written by hand, N evaluations without a graph and k differentiated, in which they are on both sides too;
- the same blocks unrolled: N + k evaluations by hand, all of them differentiated.

N is counted in updates per token, the work that was done, whoever the tokens were updated with: rows that have
converged are dropped, and a sliding window updates its own tokens alone. A share of an evaluation is one of so many
tokens. All peers evaluate the whole sequence at once, as no window does. Compiled steps have compiled peers.

With random weights N is fixed: nothing is measured before the last iteration, and the sliding window, which could
not move on, then commits all its tokens whatever their residual. The parity model of ``benchmarks/sweeps.py`` has a
free step to its own tolerance instead, as in ``benchmarks/training_sweeps.py``. It then goes on training with either
sweep, from the same weights, on the same batches, to compare time and loss; there a step includes the optimizer's. Its
loss is zero to begin with, so the same is done once more after noise on its weights.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from compile import VOCABULARY, language_model
from equal_loss import SWEEPS, both_arms, equal_loss, shaken
from harness import MEBIBYTE, Row, arguments, paired, paired_row, peak_memory, report, take_turns, value_row
from sweeps import trained
from torch import Tensor
from torch.nn import functional as F
from training_sweeps import BATCH, LENGTH

import deqseq as dq
from deqseq.layers import with_weights
from deqseq.rows import map_tensors
from deqseq.tasks import WordBatch

ANYTHING = 1e6  # a relative residual that every token passes


@dataclass(frozen=True)
class Way:
    """How a step solves and differentiates."""

    phase: str
    sweep: dq.Sweep
    stop: dq.Stop
    phantom: int
    fixed: bool

    def __str__(self) -> str:
        return f"{self.phase}, {self.sweep}"


class Peer(NamedTuple):
    """What a step is compared with."""

    name: str
    run: Callable[[], None]
    differentiates: bool


@dataclass(frozen=True)
class Work:
    """A model, a batch, and what can be done with them."""

    lm: dq.CausalLM
    batch: WordBatch

    @property
    def backbone(self) -> dq.Backbone[Any]:
        """The block."""
        assert not isinstance(self.lm.model, dq.RecurrentDepth)
        return self.lm.model.backbone

    def step(self, way: Way) -> dq.CausalLMOutput:
        """The loss of a batch and its gradients, which are dropped."""
        assert isinstance(self.lm.model, dq.ImplicitModel)
        how = {"sweep": way.sweep, "stop": way.stop, "gradient": dq.Phantom(way.phantom)}
        output = self.lm.train()(self.batch.inputs, targets=self.batch.targets, **how)
        assert output.loss is not None
        output.loss.backward()
        self.lm.zero_grad()
        return output

    def by_hand(self, solved: float, differentiated: int) -> None:
        """The same from so many evaluations without a graph, and so many with one."""
        backbone = with_weights(self.backbone)
        z, inputs = self._evaluated(backbone, solved)
        for _ in range(differentiated):
            z, _ = backbone(z, inputs)
        F.cross_entropy(self.lm.logits(z).flatten(0, 1), self.batch.targets.flatten()).backward()
        self.lm.zero_grad()

    @torch.no_grad()
    def bare(self, evaluations: float) -> None:
        """So many evaluations, and nothing else."""
        self._evaluated(with_weights(self.backbone), evaluations)

    def _evaluated(self, backbone: dq.Backbone[Any], times: float) -> tuple[Tensor, dq.Inputs]:
        """The state after so many evaluations without a graph, the last perhaps of the first tokens alone."""
        x = self.lm.embedding(self.batch.inputs)
        length, inputs, z = x.shape[1], backbone.prepare(x), torch.zeros_like(x, requires_grad=False)
        whole, rest = divmod(round(times * length), length)
        with torch.no_grad():
            for _ in range(whole):
                z, _ = backbone(z, inputs)
            if rest:
                backbone(z[:, :rest].contiguous(), map_tensors(lambda tokens: tokens[:, :rest], inputs))
        return z, inputs

    def peers(self, updates: float, phantom: int) -> Iterator[Peer]:
        """What a step of so many updates per token is compared with."""
        floor, all_of_them = updates + 3 * phantom, round(updates) + phantom
        yield Peer(f"floor: {floor:.4g} evaluations", partial(self.bare, floor), False)
        yield Peer(f"by hand: {updates:.4g} + {phantom}", partial(self.by_hand, updates, phantom), True)
        yield Peer(f"unrolled: {all_of_them}", partial(self.by_hand, 0, all_of_them), True)


class Step(NamedTuple):
    """A step that has been made, with its peers."""

    case: str
    run: Callable[[], object]
    first: float | None
    stats: dq.SolveStats
    converged: float | None
    peers: tuple[Peer, ...]

    @property
    def updates(self) -> float:
        """How often a token was updated, on average."""
        return self.stats.updates.double().mean().item()


def bounded(sweep: dq.Sweep, steps: int = 4, phantom: int = 1, phase: str = "bounded") -> Way:
    """A fixed number of iterations of every token."""
    stop = dq.Stop.exactly(steps)
    if isinstance(sweep, dq.Sliding):
        stop = replace(stop, rtol=ANYTHING)
    return Way(f"{phase} ({steps}+{phantom})", sweep, stop, phantom, fixed=True)


def converging(sweep: dq.Sweep, rtol: float = 0.03, phantom: int = 4) -> Way:
    """As many iterations as it takes at the longer length."""
    budget = 4 * LENGTH if isinstance(sweep, dq.Simultaneous) else 32
    stop = dq.Stop(rtol=rtol, max_steps=budget)
    return Way(f"free (to {rtol:g}, +{phantom})", sweep, stop, phantom, fixed=False)


def made(name: str, works: dict[str, Work], way: Way) -> Iterator[Step]:
    """The step of each model, once; of a compiled model it is the call that compiles."""
    for kind, work in works.items():
        begun = time.perf_counter()
        output = work.step(way)
        first = time.perf_counter() - begun if kind == "compiled" else None
        assert output.stats is not None and output.status is not None
        passed = output.converged.double().mean().item()
        case, run = f"{name}, {way}, {kind}", partial(work.step, way)
        step = Step(case, run, first, output.stats, None if way.fixed else passed, ())
        peers = work.peers(step.updates, way.phantom)
        yield step._replace(peers=tuple(peer._replace(name=f"{peer.name}, {kind}") for peer in peers))


def measure(name: str, works: dict[str, Work], ways: Sequence[Way], turns: int) -> list[Row]:
    """Every way of every model and its peers, in turns; peers that several share are measured once."""
    steps = [step for way in ways for step in made(name, works, way)]
    runs: dict[str, Callable[[], object]] = {}
    for step in steps:
        runs |= {step.case: step.run} | {peer.name: peer.run for peer in step.peers}
    bare = {peer.name for step in steps for peer in step.peers if not peer.differentiates}
    peaks = {key: peak_memory(run) / MEBIBYTE for key, run in runs.items() if key not in bare}
    times = take_turns(runs, turns)
    return [row for step in steps for row in rows_of(step, times, peaks)]


def rows_of(step: Step, times: dict[str, list[float]], peaks: dict[str, float]) -> Iterator[Row]:
    """The numbers of a step: its work, its time and its peak memory."""
    case = step.case
    yield value_row(case, "updates per token", step.updates, "", None)
    yield value_row(case, "evaluations", step.stats.evaluations, "", None)
    if step.converged is not None:
        yield value_row(case, "converged", step.converged, "", None)
    if step.first is not None:
        yield value_row(case, "s, first call", step.first, "", None)
    for peer in step.peers:
        yield paired_row(case, "ms", paired(times[case], times[peer.name]), peer.name)
    for peer in step.peers:
        if peer.differentiates:
            yield value_row(case, "peak MiB", peaks[case], peer.name, peaks[peer.name])


def works_of(lm: dq.CausalLM, batch: WordBatch, *, compiles: bool) -> dict[str, Work]:
    """The model as it is, and a compiled copy."""
    works = {"eager": Work(lm, batch)}
    if compiles:
        compiled = copy.deepcopy(lm)
        compiled.compile()
        works["compiled"] = Work(compiled, batch)
    return works


def random_batch(batch: int, length: int) -> WordBatch:
    """Tokens and targets without any meaning."""
    generator = torch.Generator().manual_seed(0)
    return WordBatch(*(torch.randint(0, VOCABULARY, (batch, length), generator=generator) for _ in range(2)))


def language_models(quick: bool, turns: int) -> Iterator[list[Row]]:
    """Both backbones of ``benchmarks/compile.py``."""
    size = (2, 32) if quick else (8, 256)
    for kind in ("Mamba2", "Llama"):
        works = works_of(language_model(kind), random_batch(*size), compiles=not quick)
        name = f"{kind} 256 x 2, {size[0]} x {size[1]}"
        yield measure(name, works, [bounded(sweep) for sweep in SWEEPS], turns)
        yield measure(name, works, [bounded(sweep, 24, 4, "free") for sweep in SWEEPS], turns)


def parity(quick: bool, turns: int) -> Iterator[list[Row]]:
    """The trained model at the longer length; of its steps the quick run compiles one, since that takes longest."""
    model, batch = trained("parity"), 8 if quick else BATCH
    name, data = f"parity, Mamba2 64, {batch} x {LENGTH}", model.task.fixed(batch, LENGTH, seed=78)
    works = works_of(model.lm, data, compiles=True)
    yield measure(name, works, [bounded(SWEEPS[0])], turns)
    works = {"eager": works["eager"]} if quick else works
    yield measure(name, works, [bounded(SWEEPS[1])], turns)
    yield measure(name, works, [converging(sweep) for sweep in SWEEPS], turns)


def main() -> None:
    """Measure everything and report."""
    options = arguments(__doc__ or "")
    turns = 2 if options.quick else 3
    rows: list[Row] = []
    for measured in chain(parity(options.quick, turns), language_models(options.quick, turns)):
        rows += measured
        print(f"measured: {measured[0].case} and others", flush=True)
    rows += equal_loss("parity", both_arms(), 5 if options.quick else 100)
    if not options.quick:
        rows += equal_loss("parity, shaken", [shaken(one) for one in both_arms()], 100)
    report(rows, options)


if __name__ == "__main__":
    main()
