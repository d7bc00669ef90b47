"""What a training step costs beside the block evaluations that it is made of.

A step is the loss and its gradients, without the optimizer's part. It makes N iterations without a
graph and k phantom steps with one: 4 and 1 when bounded, 24 and 4 when free. Each takes turns with

- a loop written by hand: N evaluations without a graph and k differentiated;
- the same blocks unrolled: N + k evaluations by hand, all of them differentiated.

Embedding, head and loss are on both sides. N is counted in updates per token: rows that have
converged are dropped, and a sliding window updates only its own tokens. The peers evaluate the
whole sequence at once, as no window does.

With random weights N is fixed: nothing is measured before the last iteration, and a sliding window
then commits all its tokens whatever their residual. The parity model that comes with the library
has a free step to its own tolerance instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from harness import Row, benchmark, memory_row, paired_row, take_turns, value_row
from models import KINDS, block_of, iterated, language_model, random_ids, trained
from torch.nn import functional as F

import deqseq as dq
from deqseq.tasks import WordBatch

SWEEPS: tuple[dq.Sweep, ...] = (dq.Simultaneous(), dq.Sliding())
ANYTHING = 1e6  # a relative residual that every token passes


def fixed(steps: int, phantom: int) -> Iterator[dq.SolveConfig]:
    """A fixed number of iterations of every token, with each sweep."""
    for sweep in SWEEPS:
        stop = dq.Stop.exactly(steps)
        stop = replace(stop, rtol=ANYTHING) if isinstance(sweep, dq.Sliding) else stop
        yield dq.SolveConfig(stop=stop, gradient=dq.Phantom(phantom), sweep=sweep)


def converging(length: int) -> Iterator[dq.SolveConfig]:
    """As many iterations as it takes, with each sweep."""
    for sweep, budget in zip(SWEEPS, (4 * length, 32), strict=True):
        yield dq.SolveConfig(
            stop=dq.Stop(rtol=0.03, max_steps=budget), gradient=dq.Phantom(4), sweep=sweep
        )


def step(lm: dq.CausalLM, batch: WordBatch, solve: dq.SolveConfig) -> dq.CausalLMOutput:
    """The loss of a batch and its gradients, which are dropped."""
    output = lm.train()(batch.inputs, targets=batch.targets, solve=solve)
    assert output.loss is not None
    output.loss.backward()
    lm.zero_grad()
    return output


def by_hand(lm: dq.CausalLM, batch: WordBatch, plain: int, differentiated: int) -> None:
    """The same from so many evaluations without a graph, and so many with one."""
    z = iterated(block_of(lm), lm.embedding(batch.inputs), plain, differentiated)
    F.cross_entropy(lm.logits(z).flatten(0, 1), batch.targets.flatten()).backward()
    lm.zero_grad()


def compared(
    name: str,
    lm: dq.CausalLM,
    batch: WordBatch,
    phases: Mapping[str, Iterator[dq.SolveConfig]],
    turns: int,
) -> Iterator[Row]:
    """Each phase with each sweep beside its peers: work, time and peak memory."""
    for phase, solve in ((phase, solve) for phase, solves in phases.items() for solve in solves):
        case = f"{name}, {' x '.join(map(str, batch.inputs.shape))}, {phase}, {solve.sweep}"
        output, ours = step(lm, batch, solve), partial(step, lm, batch, solve)
        assert output.stats is not None and isinstance(solve.gradient, dq.Phantom)
        updates, k = output.stats.updates.double().mean().item(), solve.gradient.steps
        yield value_row(case, "updates per token", updates)
        yield value_row(case, "evaluations", output.stats.evaluations)
        yield value_row(case, "converged", output.converged.double().mean().item())
        peers = {
            f"by hand: {updates:.0f} + {k}": partial(by_hand, lm, batch, round(updates), k),
            f"unrolled: {updates + k:.0f}": partial(by_hand, lm, batch, 0, round(updates) + k),
        }
        times = take_turns({"ours": ours} | peers, turns)
        for peer, theirs in peers.items():
            yield paired_row(case, times["ours"], peer, times[peer])
            yield memory_row(case, ours, peer, theirs)


def language_models(width: int, batch: int, length: int, turns: int) -> Iterator[Row]:
    """Both backbones with random weights."""
    for kind in KINDS:
        data = WordBatch(random_ids(batch, length), random_ids(batch, length, seed=1))
        phases = {"bounded (4+1)": fixed(4, 1), "free (24+4)": fixed(24, 4)}
        yield from compared(f"{kind} {width} x 2", language_model(kind, width), data, phases, turns)


def rows(quick: bool) -> Iterator[Row]:
    """The trained parity model at four times its trained length, and both backbones."""
    size, length, turns = (2, 16, 2) if quick else (64, 64, 3)
    model = trained("parity")
    phases = {"bounded (4+1)": fixed(4, 1), "free (to 0.03, +4)": converging(length)}
    yield from compared(
        "parity, Mamba2 64", model.lm, model.task.fixed(size, length, seed=78), phases, turns
    )
    yield from language_models(*((64, 2, 16) if quick else (256, 8, 256)), turns=turns)


main = benchmark(__doc__, rows)

if __name__ == "__main__":
    main()
