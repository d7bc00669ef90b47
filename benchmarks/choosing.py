"""What a chooser asks of trained models: solvers, damping, tolerances, sweeps, gradients.

The models come with the library (parity, and A5 from two generators, trained at lengths up to 16)
and are solved at lengths 32 (32 sequences) and 128 (16). Nothing is timed, so a busy machine may
run it: evaluations of the map, updates per token, the peak memory of a step, and what came of it,
the share of the rows that converged and accuracy.

Every question changes one part, and its peer has the others' defaults: ``Adaptive()``, the
simultaneous sweep, each token to a relative residual of 1e-2, a budget of four iterations for each
token of a sequence. Solvers and dampings are also compared in the sequential sweep and in a sliding
window of 8, where a token has 64.

Gradients are those of a training loss, in float64, cosine and norm beside the exact ones (the
adjoint solved to 1e-10 at a fixed point solved to 1e-10): once at that fixed point, so that the
estimator's own bias is left, and once where training would stop. The work of a step is that of the
second. A trained model has nothing left to learn, so the targets are drawn at random.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import Row, benchmark, peak_memory, value_row
from models import RTOL, TASKS, Trained, block_of, trained
from torch import Tensor
from torch.nn import functional as F

import deqseq as dq

SOLVERS: dict[str, dq.Solver[Any]] = {
    "Adaptive()": dq.Adaptive(),
    "Relaxed(0.8)": dq.Relaxed(0.8),
    "Naive()": dq.Naive(),
    "Anderson()": dq.Anderson(),
    "Anderson(mixing=0.8)": dq.Anderson(mixing=0.8),
    "Broyden()": dq.Broyden(),
}
DAMPINGS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
TOLERANCES = (0.3, 0.1, 0.05, 1e-2, 1e-3, 1e-4)
SWEEPS = (
    dq.Simultaneous(),
    dq.Chunked(8),
    dq.Sliding(4),
    dq.Sliding(8),
    dq.Sliding(16),
    dq.Sequential(),
)
BUDGETS = (4, 8, 16, 32, 64, 128, 256, 512)
TIGHT, TRAINING = dq.Stop(rtol=1e-10, max_steps=4000), dq.Stop(rtol=0.03, max_steps=32)
EXACT = dq.Implicit(solver=dq.Relaxed(0.8), stop=replace(TIGHT, norm="row"))
ESTIMATORS: dict[str, dq.Gradient] = {
    "Implicit()": dq.Implicit(),
    "Implicit(Relaxed(0.8))": dq.Implicit(dq.Relaxed(0.8)),
    "OneStep()": dq.OneStep(),
    **{f"Phantom({k}, 0.8)": dq.Phantom(k, 0.8) for k in (1, 2, 4, 8, 16)},
    "Phantom(4, 0.5)": dq.Phantom(4, 0.5),
    "Phantom(4, 1.0)": dq.Phantom(4, 1.0),
    "Phantom(4, 0.8, checkpoint=True)": dq.Phantom(4, 0.8, checkpoint=True),
    "Unrolled()": dq.Unrolled(),
    "Unrolled(checkpoint=True)": dq.Unrolled(checkpoint=True),
}


def settings() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Each question: what was set, what it is compared with, and what that changes."""
    for sweep in (dq.Simultaneous(), dq.Sequential(), dq.Sliding(8)):
        after = "" if sweep == dq.Simultaneous() else f", {sweep}"
        for name, solver in SOLVERS.items():
            yield (
                "solver",
                f"{name}{after}",
                f"Adaptive(){after}",
                {"solver": solver, "sweep": sweep},
            )
    for sweep in (dq.Simultaneous(), dq.Sliding(8)):
        for damping in DAMPINGS:
            how = {"solver": dq.Relaxed(damping), "sweep": sweep}
            yield "damping", f"{damping}, {sweep}", f"0.8, {sweep}", how
    for rtol in TOLERANCES:
        for norm in ("token", "row"):
            yield "tolerance", f"{rtol:g}, {norm}", f"{RTOL:g}, token", {"rtol": rtol, "norm": norm}
    for sweep in SWEEPS:
        yield "sweep", str(sweep), str(SWEEPS[0]), {"sweep": sweep}
    for steps in BUDGETS:
        yield "budget", str(steps), str(BUDGETS[-1]), {"max_steps": steps}


@torch.no_grad()
def solved(
    model: Trained, sequences: int, length: int, changed: dict[str, Any]
) -> dict[str, float]:
    """The numbers of one solve, by metric."""
    batch = model.task.fixed(sequences, length, seed=1000 + length)
    how = {
        "solver": dq.Adaptive(),
        "sweep": dq.Simultaneous(),
        "rtol": RTOL,
        "norm": "token",
    } | changed
    budget = max(64, 4 * length) if how["sweep"] == dq.Simultaneous() else 64
    stop = dq.Stop(rtol=how["rtol"], norm=how["norm"], max_steps=how.get("max_steps", budget))
    output = model.lm.eval()(batch.inputs, solver=how["solver"], sweep=how["sweep"], stop=stop)
    assert output.stats is not None and output.stats.forced is not None
    right = (output.logits.argmax(-1) == batch.targets).double()
    return {
        "accuracy, last token": right[:, -1].mean().item(),
        "accuracy, all tokens": right.mean().item(),
        "converged": output.converged.double().mean().item(),
        "evaluations": output.stats.evaluations,
        "updates per token": output.stats.updates.double().mean().item(),
        "forced": output.stats.forced.double().mean().item(),
    }


def answers(model: Trained, sequences: int, length: int) -> Iterator[Row]:
    """A row for each number of each setting, beside the question's peer."""
    found = {
        (question, name): solved(model, sequences, length, how)
        for question, name, _, how in settings()
    }
    for question, name, peer, _ in settings():
        for metric, number in found[question, name].items():
            case = f"{question}, {model.name}, {length}, {name}"
            yield value_row(case, metric, number, peer, found[question, peer][metric])


class Step:
    """The gradient of one training step, and how often the blocks were evaluated for it."""

    def __init__(
        self, lm: dq.CausalLM, inputs: Tensor, targets: Tensor, gradient: dq.Gradient, stop: dq.Stop
    ) -> None:
        evaluated, came_back = [], []  # a checkpointed evaluation begins again and need not end
        backbone = block_of(lm.train())

        def ends(_module: object, _inputs: object, output: tuple[Tensor, object]) -> None:
            if output[0].requires_grad:
                output[0].register_hook(lambda _, number=len(evaluated): came_back.append(number))

        begins = backbone.register_forward_pre_hook(lambda *_: evaluated.append(None))
        with begins, backbone.register_forward_hook(ends):
            loss = lm(
                inputs, targets=targets, solver=dq.Adaptive(), stop=stop, gradient=gradient
            ).loss
            assert loss is not None
            forward = len(evaluated)
            loss.backward()
        with_graph = len(set(came_back))
        self.work = {
            "evaluations without a graph": forward - with_graph,
            "evaluations with a graph": with_graph,
            "evaluations again in the backward pass": len(evaluated) - forward,
            "backward passes": len(came_back),
        }
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in lm.parameters())
        self.flat = torch.cat([gradient.flatten() for gradient in gradients])
        lm.zero_grad()


def estimators(model: Trained, sequences: int, length: int) -> Iterator[Row]:
    """Every estimator beside the exact gradient, and what a step takes where training stops."""
    inputs = model.task.fixed(sequences, length, seed=1000 + length).inputs
    targets = torch.randint(
        model.task.vocab_size, inputs.shape, generator=torch.Generator().manual_seed(0)
    )
    step = partial(Step, copy.deepcopy(model.lm).double(), inputs, targets)
    exact = step(EXACT, TIGHT).flat
    for name, estimator in ESTIMATORS.items():
        case = f"gradient, {model.name}, {length}, {name}"
        at_training = step(estimator, TRAINING)
        for where, flat in (
            ("fixed point", step(estimator, TIGHT).flat),
            ("training's stop", at_training.flat),
        ):
            cosine = F.cosine_similarity(flat, exact, dim=0).item()
            yield value_row(case, f"cosine, {where}", cosine, "exact", 1.0)
            yield value_row(
                case, f"norm, {where}", flat.norm().item(), "exact", exact.norm().item()
            )
        for metric, number in at_training.work.items():
            yield value_row(case, metric, number)
        yield value_row(case, "peak MiB", peak_memory(partial(step, estimator, TRAINING)))


def rows(quick: bool) -> Iterator[Row]:
    """Every question about each model, of fewer sequences where they are long."""
    for name in ("parity",) if quick else TASKS:
        model = trained(name)
        for sequences, length in ((2, 8),) if quick else ((32, 32), (16, 128)):
            yield from answers(model, sequences, length)
        for sequences, length in ((2, 4),) if quick else ((8, 16), (4, 32)):
            yield from estimators(model, sequences, length)


main = benchmark(__doc__, rows)

if __name__ == "__main__":
    main()
