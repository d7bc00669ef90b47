"""What each sweep costs on trained models, at equal tolerance per token.

The models come with the library (parity, and A5 from two generators), were trained at lengths up to
16, and are solved at 64, 128 and 512, for a batch of 64 and a single sequence. A token has
converged at a relative residual of 1e-2, and every solver is ``Adaptive()``. All sweeps of a case
take turns, three of them; one at length 512 and batch 64, where the simultaneous sweep takes
minutes. Accuracy is that of the timed sequences.
"""

from collections.abc import Iterator

import torch
from harness import Row, benchmark, paired_row, take_turns, value_row
from models import TASKS, Trained, stop_for, trained

import deqseq as dq

SWEEPS: tuple[dq.Sweep, ...] = (
    dq.Simultaneous(),
    dq.Sequential(),
    dq.Chunked(8),
    *(dq.Sliding(window) for window in (4, 8, 16, 32)),
)
GOALS = {("Simultaneous()", 128): "ratio <= 0.1", ("Simultaneous()", 512): "ratio <= 0.025"}
# the default window's, at batch 64
GOALS |= {("Sequential()", length): "ratio <= 0.5" for length in (64, 128, 512)}


def measured(model: Trained, length: int, batch: int, turns: int) -> Iterator[Row]:
    """The sweeps of one case: numbers, and times beside the simultaneous and sequential one."""
    data = model.task.fixed(batch, length, seed=1000 + length)
    outputs: dict[str, dq.CausalLMOutput] = {}

    @torch.no_grad()
    def solve(sweep: dq.Sweep) -> None:
        outputs[str(sweep)] = model.lm(data.inputs, sweep=sweep, stop=stop_for(sweep, length))

    works = {str(sweep): lambda sweep=sweep: solve(sweep) for sweep in SWEEPS}
    times = take_turns(works, turns, warm_up=turns > 1)
    right = {
        name: (output.logits[:, -1].argmax(-1) == data.targets[:, -1]).double().mean().item()
        for name, output in outputs.items()
    }
    best = max(right.values())
    for sweep in SWEEPS:
        name = str(sweep)
        case, stats = f"{model.name}, length {length}, batch {batch}, {name}", outputs[name].stats
        assert stats is not None
        near = f"ours >= {best - 0.005:.4f}" if sweep == dq.Sliding() else None
        yield value_row(case, "last-token accuracy", right[name], "best of all", best, goal=near)
        yield value_row(case, "updates per token", stats.updates.double().mean().item())
        yield value_row(case, "evaluations", stats.evaluations)
        yield value_row(case, "converged", outputs[name].converged.double().mean().item())
        judged = sweep == dq.Sliding() and batch == 64
        for peer in ("Simultaneous()", "Sequential()"):
            if peer != name:
                goal = GOALS.get((peer, length)) if judged else None
                yield paired_row(
                    case, times[name], peer, times[peer], metric="s", scale=1, goal=goal
                )


def rows(quick: bool) -> Iterator[Row]:
    """Every case of both models."""
    for name in TASKS:
        model = trained(name)
        for length in (16,) if quick else (64, 128, 512):
            for batch in (1, 4) if quick else (1, 64):
                turns = 1 if length * batch > 128 * 64 else 2 if quick else 3
                yield from measured(model, length, batch, turns)


main = benchmark(__doc__, rows)

if __name__ == "__main__":
    main()
