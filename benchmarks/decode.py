"""What a window gains in generation: the same tokens, in fewer evaluations one after another.

Three models of one character per token, trained on Shakespeare's plays: the library's ``text``, one
Mamba2 block; an implicit Llama of two layers; and a recurrent-depth model, a Llama layer before and
after a core of one. The last two are trained here, for a few minutes. They continue 1, 8 and 32
prompts of 18 characters by 64, greedily. The prompts are solved before, but for their last
characters.

- Each window is compared with decoding one by one (``window=1``) at the same tolerance: evaluations
  and updates (evaluations of one token) of a row for each new character, the rows whose characters
  are the same, and time. ``text`` is measured at three tolerances and with three windows, the
  others at a tolerance of 1e-3 with a window of 8, and the recurrent-depth model with 1, 2 and 4
  iterations of the core to each run of the layers around it.
- On a GPU, where minutes count, that is all, for ``text`` with a tolerance of 1e-3 and a window of
  8.
- The exact choice: the share of the characters of a window that are also chosen where the text
  before is solved to a tolerance of 1e-6, token by token.
- Other people's loops, as in ``peers.py``: TorchDEQ, and a fixed number of iterations by hand. Each
  has the cheapest setting with the loss of the solved model to 0.005 nats; deqseq has a window of
  8, and a tolerance of 1e-3 or the largest with that loss.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from harness import Row, benchmark, memory_row, on_gpu, time_row, value_row
from models import character_models
from peers import ITERATIONS, SOLVED, TOLERANCES, DeqSeq, by_hand, cheapest, nats, torchdeq
from torch import Tensor

import deqseq as dq

BEGINNINGS = (
    "ROMEO: my love is ",
    "First Citizen:\nBe ",
    "KING HENRY:\nI am a",
    "To be, or not to b",
    "JULIET:\nO Romeo, R",
    "GLOUCESTER:\nNow is",
    "The quality of mer",
    "HAMLET:\nWhat a pie",
)
TEXT = "\n".join(BEGINNINGS)
GOALS = {  # of the text model at a tolerance of 1e-3, with a window of 8
    (1, "evaluations"): "ours <= 5",
    (8, "evaluations"): "ours <= 5",
    (1, "time"): "ratio <= 0.4",
    (8, "time"): "ratio <= 0.4",
    (32, "time"): "ratio <= 0.75",
}
EXACT, CLOSE = dq.Stop(rtol=1e-6, max_steps=2000), dq.Stop(rtol=1e-4, max_steps=2000)


class Case(NamedTuple):
    """How many prompts, how closely they are solved, and in which windows."""

    batch: int
    rtol: float = 1e-3
    window: int = 8
    every: int = 1

    @property
    def stop(self) -> dq.Stop:
        """Ends a solve, and says how many iterations lie between two choices."""
        return dq.Stop(rtol=self.rtol, max_steps=256, check_every=self.every)

    def __str__(self) -> str:
        text = f"batch {self.batch}, rtol {self.rtol:g}, window {self.window}"
        return text + f", a choice every {self.every} iterations" * (self.every > 1)


def prompts(batch: int) -> Tensor:
    """The eight beginnings, and then pieces that begin anywhere in them."""
    size = len(BEGINNINGS[0])
    further = (TEXT[start : start + size] for start in range(4, len(TEXT) - size, 5))
    chosen = [*BEGINNINGS, *further][:batch]
    return torch.tensor([list(text.encode()) for text in chosen])


def after_prompts(lm: dq.CausalLM, batch: int, new: int) -> Callable[..., dq.Generation]:
    """Decoding alone: the prompts are solved here, closely."""
    ids = prompts(batch)
    cache = lm(ids[:, :-1], return_cache=True, stop=CLOSE).cache
    return partial(lm.generate, ids[:, -1:], cache=cache, max_new_tokens=new)


def compared(name: str, lm: dq.CausalLM, case: Case, new: int, runs: int) -> Iterator[Row]:
    """A window beside decoding one by one."""
    decode = after_prompts(lm, case.batch, new)
    ours = partial(decode, window=case.window, stop=case.stop)
    theirs = partial(decode, window=1, stop=case._replace(every=1).stop)
    some, one, peer, label = ours(), theirs(), "one by one", f"{name}, {case}"
    usual = name == "text" and case == Case(case.batch)
    goals = {kind: goal for (batch, kind), goal in GOALS.items() if usual and batch == case.batch}
    counts = _per_token(some, new), _per_token(one, new)
    for metric, mine, other in zip(("evaluations", "updates"), *counts, strict=True):
        yield value_row(label, f"{metric} / token", mine, peer, other, goal=goals.get(metric))
    same = (some.tokens == one.tokens).all(dim=1).sum().item()
    yield value_row(
        label,
        "rows that are equal",
        same,
        goal=f"ours == {case.batch}" if case.rtol <= 1e-3 else None,
    )
    yield time_row(label, ours, peer, theirs, runs=runs, goal=goals.get("time"))


def _per_token(found: dq.Generation, new: int) -> tuple[float, float]:
    """Evaluations and updates of a row."""
    assert found.evaluations is not None and found.updates is not None
    return found.evaluations / new, found.updates.float().mean().item() / new


@torch.no_grad()
def exact_choices(name: str, lm: dq.CausalLM, case: Case, new: int) -> Row:
    """The share of the tokens that the exact fixed point chooses after the same text."""
    prompt = prompts(case.batch)
    tokens = lm.generate(prompt, max_new_tokens=new, window=case.window, stop=case.stop).tokens
    output = lm(torch.cat([prompt, tokens], dim=1), stop=EXACT, sweep=dq.Sliding(16))
    choices = output.logits[:, prompt.shape[1] - 1 : -1].argmax(dim=-1)
    share = (choices == tokens).double().mean().item()
    return value_row(
        f"{name}, {case}",
        "exact choices",
        share,
        goal="ours >= 0.995" if case.rtol <= 1e-3 else None,
    )


def beside_loops(
    name: str, lm: dq.CausalLM, text: Tensor, new: int, runs: int, batches: Sequence[int]
) -> Iterator[Row]:
    """Time and memory beside the loops of others, at equal loss."""
    mine, theirs = (cheapest(way, TOLERANCES, text, lm) for way in (DeqSeq, torchdeq))
    fixed, loss = int(cheapest(by_hand, ITERATIONS, text, lm)), nats(DeqSeq(SOLVED), lm, text)
    ways = {
        f"torchdeq, rtol {theirs:g}": torchdeq(theirs),
        f"loop by hand, {fixed}": by_hand(fixed),
    }
    for case in (Case(batch, rtol) for batch in batches for rtol in sorted({SOLVED, mine})):
        prompt = prompts(case.batch)
        ours = partial(lm.generate, prompt, max_new_tokens=new, window=case.window, stop=case.stop)
        for peer, way in ways.items():
            label, loop = f"{name}, {case}, loss {loss:.3f}", partial(way.decode, lm, prompt, new)
            yield time_row(label, ours, peer, loop, runs=runs, goal="ratio <= 1.0")
            yield memory_row(label, ours, peer, loop, goal="ratio <= 1.0")


def rows(quick: bool) -> Iterator[Row]:
    """Windows of three sizes at three tolerances; then the other models, and the other loops."""
    if on_gpu() and not quick:
        for batch in (1, 8, 32):
            yield from compared("text", dq.load_example("text"), Case(batch), 64, 7)
        return
    models, held_out = character_models(quick)
    new, runs = (4, 2) if quick else (64, 7)
    for name, lm in models.items():
        cases = [Case(batch) for batch in (1, 8, 32)]
        if name == "text":
            cases = [
                Case(n, rtol, w)
                for n in (1, 8, 32)
                for rtol in (1e-2, 1e-3, 1e-4)
                for w in (4, 8, 16)
            ]
        cases += [
            Case(batch, every=every)
            for batch in (1, 8, 32)
            for every in ((2,) if name == "text" else (2, 4))
        ]
        for case in [Case(2)] if quick else cases:
            yield from compared(name, lm, case, new, runs)
        for case in (
            [Case(2)] if quick else [Case(32, rtol, w) for rtol in (1e-2, 1e-3) for w in (1, 8, 16)]
        ):
            yield exact_choices(name, lm, case, new)
        if isinstance(lm.model, dq.ImplicitModel):
            batches = (1,) if quick else (1, 8)
            yield from beside_loops(name, lm, held_out, new, runs, batches)


main = benchmark(__doc__, rows, device=True)

if __name__ == "__main__":
    main()
