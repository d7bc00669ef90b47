"""What ``model.compile()`` gains: the same model eager and compiled, in turns.

Both backbones with d_model 256 and 2 blocks: a simultaneous solve of 8 sequences of 256 tokens, a sliding solve of the
same, a training step through 4 phantom steps, and generation of 16 tokens at batch 1. Solves run 8 iterations (the
sliding one 8 a commit). The seconds of the first call, which compiles, are reported beside each.
"""

import time
from collections.abc import Callable, Iterator

import torch
from harness import Row, arguments, report, time_row, value_row

import deqseq as dq

VOCABULARY = 1000
Run = Callable[[], object]


def language_model(kind: str) -> dq.CausalLM:
    """The benchmark's sizes, with random weights."""
    torch.manual_seed(0)
    if kind == "Mamba2":
        backbone = dq.Mamba2(dq.Mamba2Config(d_model=256, n_layers=2, d_state=64, headdim=64))
    else:
        backbone = dq.Llama(dq.LlamaConfig(d_model=256, n_layers=2, n_heads=4))
    return dq.CausalLM(
        VOCABULARY, dq.ImplicitModel(backbone, dq.SolveConfig(stop=dq.Stop(rtol=0.0, max_steps=8)))
    ).eval()


def runs_of(lm: dq.CausalLM) -> dict[str, Run]:
    """What is timed."""
    ids = torch.randint(0, VOCABULARY, (8, 256), generator=torch.Generator().manual_seed(0))

    def solve(sweep: dq.Sweep, tokens: int) -> object:
        with torch.no_grad():
            return lm(ids[:, :tokens], sweep=sweep)

    def train() -> None:
        loss = lm(ids, labels=ids).loss
        assert loss is not None
        loss.backward()
        lm.zero_grad()

    return {
        "8 iterations, 8 x 256 tokens": lambda: solve(dq.Simultaneous(), 256),
        "Sliding(8), 8 x 32 tokens": lambda: solve(dq.Sliding(8), 32),
        "training step (8 + 4), 8 x 256 tokens": train,
        "16 new tokens, batch 1, prompt 32": lambda: lm.generate(ids[:1, :32], max_new_tokens=16),
    }


def rows(kind: str, turns: int) -> Iterator[Row]:
    """Every run, eager beside compiled."""
    eager, compiled = language_model(kind), language_model(kind)
    compiled.compile()
    theirs, ours = runs_of(eager), runs_of(compiled)
    for name, run in ours.items():
        begun = time.perf_counter()
        run()
        first = time.perf_counter() - begun
        run()  # kinds of call that only a second run meets
        case = f"{kind}, {name}"
        yield value_row(case, "s, first call", first, "", None)
        yield time_row(case, run, "eager", theirs[name], runs=turns)


def main() -> None:
    """Measure both backbones."""
    options = arguments(__doc__ or "")
    turns = 3 if options.quick else 15
    report([row for kind in ("Mamba2", "Llama") for row in rows(kind, turns)], options)


if __name__ == "__main__":
    main()
