"""State tracking: an implicit model learns a word problem, next to explicit models of the same blocks.

A sequence of group elements comes in, the product of each prefix is to come out (for Z2: the parity of the ones so
far). The implicit model is trained on short sequences, which get longer as it learns them: first through a few unrolled
iterations, then at its fixed point with phantom gradients. It is evaluated on longer ones, solved simultaneously,
sequentially and with a sliding window. An explicit model of 4 blocks sees the same batches, in as many steps.
Interrupt it and run it again: it goes on from its last checkpoint. parity.py is a shorter script, to copy.

    python examples/state_tracking.py                                # parity
    python examples/state_tracking.py --quick                        # the implicit model alone
    python examples/state_tracking.py --group S4                     # any group, by the same recipe
    python examples/state_tracking.py --group A5 --generators 2      # the smallest group that is not solvable
    python examples/state_tracking.py --backbone llama               # parity with Transformer blocks
"""

import itertools
import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from accelerate import Accelerator
from common.processes import make_accelerator, one_process
from common.run import Progress, log_to, write_json, write_text
from common.words import Words, claim, fit, solve_numbers
from state_tracking_figure import draw, table
from state_tracking_parts import (
    Options,
    SweepName,
    make_model,
    make_solver,
    make_sweep,
    make_task,
    read_options,
    training_tasks,
)
from torch.nn import functional as F

import deqseq as dq
from deqseq.tasks import WordBatch

log = logging.getLogger("state_tracking")


def with_start(batch: WordBatch, options: Options, vocab_size: int) -> WordBatch:
    """The batch; for a Llama behind a start token, not scored: attention over equal tokens alone cannot count them."""
    if options.backbone != "llama":
        return batch
    return WordBatch(F.pad(batch.inputs, (1, 0), value=vocab_size), F.pad(batch.targets, (1, 0), value=-100))


def train(name: str, lm: dq.CausalLM, options: Options, accelerator: Accelerator, plan: dict | None = None) -> Words:
    """Train to the end; a ``plan`` of another model's run is repeated."""
    tasks = training_tasks(options)
    prepare = partial(with_start, options=options, vocab_size=tasks[0].vocab_size)
    words = Words(tasks, options, plan, device=accelerator.device, prepare=prepare)
    fit(accelerator, name, lm, words, Path(options.folder) / name.replace(" ", "-"), last_token_accuracy)
    return words


def last_token_accuracy(output: dq.CausalLMOutput, batch: WordBatch) -> float:
    """Share of the sequences whose whole product is right."""
    return (output.logits[:, -1].argmax(-1) == batch.targets[:, -1]).float().mean().item()


@torch.no_grad()
def evaluate(label: str, lm: dq.CausalLM, options: Options, words: Words) -> list[dict]:
    """Last-token accuracy at each length, with each sweep if the model is implicit, and what the solves took."""
    sweeps: dict[str, dq.Sweep | None] = {"single pass": None}
    if isinstance(lm.model, dq.ImplicitModel):
        sweeps = {name: make_sweep(name, options) for name in get_args(SweepName)}
    cases, task = [*itertools.product(sweeps, options.eval_lengths)], make_task(options)
    rows, progress = [], Progress(f"evaluate {label}", len(cases))
    lm.eval()
    for name, length in cases:
        # iterations of all tokens together grow with the length: give the longest fewer sequences
        count = max(16, 8192 // length) if name == "simultaneous" and length > 128 else 256
        batch = with_start(
            task.fixed(count, length, seed=1000 + length, device=lm.embedding.weight.device), options, task.vocab_size
        )
        how, begun = {}, time.perf_counter()
        if sweeps[name] is not None:
            budget = max(64, 4 * length) if name == "simultaneous" else 64
            how = {"sweep": sweeps[name], "stop": dq.Stop(rtol=options.eval_rtol, max_steps=budget)}
            how |= {"solver": make_solver(options.solver)}
        output = lm(batch.inputs, **how)
        row = {"model": label, "backbone": options.backbone, "group": options.group, "length": length, "sweep": name}
        row |= {"accuracy": last_token_accuracy(output, batch)} | solve_numbers(output)
        row |= {"seed": options.seed, "sequences": count, "seconds": round(time.perf_counter() - begun, 3)}
        row |= {"solver": options.solver, "rtol": options.eval_rtol, "identity_probability": task.identity_probability}
        row |= words.numbers
        rows.append(row)
        log.info("%s", row)
        progress.to(len(rows), sweep=name, length=length, accuracy=row["accuracy"])
    progress.close()
    return rows


@torch.no_grad()
def accuracy_by_budget(lm: dq.CausalLM, options: Options) -> list[dict]:
    """Accuracy after a given number of iterations, at half and at twice the longest trained length."""
    rows, task, device = [], make_task(options), lm.eval().embedding.weight.device
    for length in (max(1, options.longest // 2), 2 * options.longest):
        batch = with_start(task.fixed(64, length, seed=2000 + length, device=device), options, task.vocab_size)
        for budget in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            output = lm(batch.inputs, solver=make_solver(options.solver), stop=dq.Stop.exactly(budget))
            accuracy = last_token_accuracy(output, batch)
            rows.append({"length": length, "self_iterations": budget, "accuracy": accuracy})
    return rows


def main(arguments: list[str]) -> None:
    """Train, evaluate, and write the table, the figure and the numbers."""
    one_process("state_tracking.py")
    options = read_options(arguments)
    accelerator, task = make_accelerator(options.device), make_task(options)
    output = claim("state_tracking", options, options.folder, "self_iterations.json")
    log_to(output / "log.txt")
    print(f"{options.group}: {len(task.input_ids)} inputs, {task.vocab_size} states; results in {output}/")
    lm = make_model(options, task.vocab_size, None).to(accelerator.device)
    words = train("implicit", lm, options, accelerator)
    rows = evaluate("implicit", lm, options, words)
    for blocks in options.baselines:
        label = f"explicit {blocks} block{'s' * (blocks > 1)}"
        baseline = make_model(options, task.vocab_size, blocks).to(accelerator.device)
        rows += evaluate(label, baseline, options, train(label, baseline, options, accelerator, words.plan))
    compute = accuracy_by_budget(lm, options)
    write_json(output / "results.json", rows)
    write_json(output / "self_iterations.json", compute)
    write_text(output / "table.md", table(rows) + "\n")
    draw(rows, compute, words.reached, task.chance, output / "state_tracking.png")
    print(f"\nlast-token accuracy (mean iterations); {words.step} steps at lengths up to {words.reached}:\n")
    print(table(rows))
    fewer = {row["length"]: row["sequences"] for row in rows if row["sequences"] < 256}
    print("\n256 sequences of each length" + "".join(f", {n} of length {length}" for length, n in fewer.items()))
    print(f"\nfigure: {output}/state_tracking.png   numbers: {output}/results.json   log: {output}/log.txt")


if __name__ == "__main__":
    main(sys.argv[1:])
