"""What a window gains in generation: the same tokens, in fewer evaluations one after another.

The library's ``text`` model continues 1, 8 and 32 prompts of 18 characters by 64, greedily, at three tolerances. Each
window is compared with decoding one by one (``window=1``): evaluations and updates (evaluations of one token) of a row
for each new character, the rows whose characters are the same, and time. At batch 32 there is also a window with two
iterations between choices. ``peers.py`` compares the default with other people's loops.
"""

from collections.abc import Iterator
from functools import partial

import torch
from harness import Row, benchmark, time_row, value_row
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
GOALS = {  # at a tolerance of 1e-3, with a window of 8
    (1, "evaluations"): "ours <= 5",
    (8, "evaluations"): "ours <= 5",
    (1, "time"): "ratio <= 0.4",
    (8, "time"): "ratio <= 0.4",
    (32, "time"): "ratio <= 0.75",
}


def prompts(batch: int) -> Tensor:
    """The eight beginnings, and then pieces that begin anywhere in them."""
    size = len(BEGINNINGS[0])
    further = (TEXT[start : start + size] for start in range(4, len(TEXT) - size, 5))
    chosen = [*BEGINNINGS, *further][:batch]
    return torch.tensor([list(text.encode()) for text in chosen])


def compared(lm: dq.CausalLM, batch: int, rtol: float, window: int, every: int, new: int, runs: int) -> Iterator[Row]:
    """A window beside decoding one by one."""
    label = f"batch {batch}, rtol {rtol:g}, window {window}" + f", a choice every {every} iterations" * (every > 1)
    decode = partial(lm.generate, prompts(batch), max_new_tokens=new)
    ours = partial(decode, window=window, stop=dq.Stop(rtol=rtol, max_steps=256, check_every=every))
    theirs = partial(decode, window=1, stop=dq.Stop(rtol=rtol, max_steps=256))
    some, one, peer = ours(), theirs(), "one by one"
    goals = {kind: goal for (rows, kind), goal in GOALS.items() if (rows, rtol, window, every) == (batch, 1e-3, 8, 1)}
    counts = _per_token(some, new), _per_token(one, new)
    for metric, mine, other in zip(("evaluations", "updates"), *counts, strict=True):
        yield value_row(label, f"{metric} / token", mine, peer, other, goal=goals.get(metric))
    same = (some.tokens == one.tokens).all(dim=1).sum().item()
    yield value_row(label, "rows that are equal", same, goal=f"ours == {batch}" if rtol <= 1e-3 else None)
    yield time_row(label, ours, peer, theirs, runs=runs, goal=goals.get("time"))


def _per_token(found: dq.Generation, new: int) -> tuple[float, float]:
    """Evaluations and updates of a row."""
    assert found.evaluations is not None and found.updates is not None
    return found.evaluations / new, found.updates.float().mean().item() / new


def rows(quick: bool) -> Iterator[Row]:
    """Windows of three sizes at three tolerances."""
    lm = dq.load_example("text").to(torch.get_default_device())
    if quick:
        yield from compared(lm, 2, 1e-3, 8, 1, new=8, runs=2)
        return
    for batch in (1, 8, 32):
        for rtol in (1e-2, 1e-3, 1e-4):
            for window in (4, 8, 16):
                yield from compared(lm, batch, rtol, window, 1, new=64, runs=7)
        yield from compared(lm, batch, 1e-3, 8, 2, new=64, runs=7)


main = benchmark(__doc__, rows)

if __name__ == "__main__":
    main()
