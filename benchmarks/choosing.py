"""What a chooser asks of trained models: solvers, damping, tolerances, sweeps, budgets, gradient estimators.

The models are those of ``benchmarks/sweeps.py`` (parity, and A5 from two generators, trained at lengths up to 16),
solved at lengths 32 (32 sequences) and 128 (16). Nothing is timed, so a busy machine may run it: evaluations of the
map, updates per token, the peak memory of a step, and what came of it, the share of the rows that converged and
accuracy.

Every question changes one part, and its peer has the others' defaults: ``Adaptive()``, the simultaneous sweep, each
token to a relative residual of 1e-2, a budget of four iterations for each token of a sequence. Solvers are also
compared in the sequential sweep and in a sliding window of 8, where a token or commit has 64.

Gradients are those of a training loss, in float64, cosine and norm beside the exact ones (the adjoint solved to 1e-10
at a fixed point solved to 1e-10): once at that fixed point, so that the estimator's own bias is left, and once where
training would stop. The work of a step is that of the second. A trained model has nothing left to learn, so the
targets are drawn at random.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from harness import MEBIBYTE, Row, arguments, peak_memory, report, value_row
from sweeps import RTOL, TASKS, Trained, trained
from torch import Tensor
from torch.nn import functional as F

import deqseq as dq
from deqseq.tasks import WordBatch

DEFAULT = dq.Adaptive()
SOLVERS: dict[str, dq.Solver[Any]] = {
    "Adaptive()": DEFAULT,
    "Relaxed(0.8)": dq.Relaxed(0.8),
    "Naive()": dq.Naive(),
    "Anderson()": dq.Anderson(),
    "Anderson(mixing=0.8)": dq.Anderson(mixing=0.8),
    "Broyden()": dq.Broyden(),
}
DAMPINGS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
TOLERANCES = (0.3, 0.1, 0.05, 1e-2, 1e-3, 1e-4)
SWEEPS: tuple[dq.Sweep, ...] = (
    dq.Simultaneous(),
    dq.Chunked(8),
    dq.Sliding(4),
    dq.Sliding(8),
    dq.Sliding(16),
    dq.Sequential(),
)
BUDGETS = (4, 8, 16, 32, 64, 128, 256, 512)
TIGHT = dq.Stop(rtol=1e-10, max_steps=4000)
TRAINING = dq.Stop(rtol=0.03, max_steps=32)
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


@dataclass(frozen=True)
class Case:
    """A model, and sequences of one length."""

    model: Trained
    batch: WordBatch

    @classmethod
    def of(cls, model: Trained, sequences: int, length: int) -> "Case":
        """The sequences that ``benchmarks/sweeps.py`` draws."""
        return cls(model, model.task.fixed(sequences, length, seed=1000 + length))

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.batch.inputs.shape[1]

    def named(self, question: str, setting: str) -> str:
        """How the rows of a setting are found again: four parts, of which the last may hold commas."""
        return f"{question}, {self.model.name}, {self.length}, {setting}"

    def stop(self, sweep: dq.Sweep = dq.Simultaneous()) -> dq.Stop:
        """The tolerance of all; the budget of the whole sequence, of a chunk, or of a commit."""
        budget = max(64, 4 * self.length) if isinstance(sweep, dq.Simultaneous) else 64
        return dq.Stop(rtol=RTOL, max_steps=budget)


@torch.no_grad()
def solved(
    case: Case,
    solver: dq.Solver[Any] = DEFAULT,
    sweep: dq.Sweep = dq.Simultaneous(),
    stop: dq.Stop | None = None,
) -> dict[str, float]:
    """The numbers of one solve, by metric."""
    stop = stop or case.stop(sweep)
    output = case.model.lm.eval()(case.batch.inputs, solver=solver, sweep=sweep, stop=stop)
    assert output.stats is not None and output.stats.forced is not None
    right = (output.logits.argmax(-1) == case.batch.targets).double()
    return {
        "accuracy, last token": right[:, -1].mean().item(),
        "accuracy, all tokens": right.mean().item(),
        "converged": output.converged.double().mean().item(),
        "evaluations": output.stats.evaluations,
        "updates per token": output.stats.updates.double().mean().item(),
        "forced": output.stats.forced.double().mean().item(),
    }


def compared(question: str, case: Case, settings: Mapping[str, dict[str, float]], peer: str) -> Iterator[Row]:
    """A row for each number of each setting, beside the setting that the defaults make."""
    for setting, numbers in settings.items():
        for metric, number in numbers.items():
            yield value_row(case.named(question, setting), metric, number, peer, settings[peer][metric])


def by_solver(case: Case) -> Iterator[Row]:
    """Every solver: all tokens together, token by token, and in a window."""
    peer = next(iter(SOLVERS))
    yield from compared("solver", case, {name: solved(case, one) for name, one in SOLVERS.items()}, peer)
    for sweep in (dq.Sequential(), dq.Sliding(8)):
        found = {f"{name}, {sweep}": solved(case, one, sweep) for name, one in SOLVERS.items()}
        yield from compared("solver", case, found, f"{peer}, {sweep}")


def by_damping(case: Case) -> Iterator[Row]:
    """The relaxed iteration from cautious to overshooting, all tokens together and in a window."""
    for sweep in (dq.Simultaneous(), dq.Sliding(8)):
        found = {f"{damping}, {sweep}": solved(case, dq.Relaxed(damping), sweep) for damping in DAMPINGS}
        yield from compared("damping", case, found, f"0.8, {sweep}")


def by_tolerance(case: Case) -> Iterator[Row]:
    """Each tolerance, of every token, and of the row as a whole."""
    found = {
        f"{rtol:g}, {norm}": solved(case, stop=replace(case.stop(), rtol=rtol, norm=norm))
        for rtol in TOLERANCES
        for norm in ("token", "row")
    }
    yield from compared("tolerance", case, found, f"{RTOL:g}, token")


def by_sweep(case: Case) -> Iterator[Row]:
    """Every sweep to the same tolerance of each token."""
    found = {str(sweep): solved(case, sweep=sweep) for sweep in SWEEPS}
    yield from compared("sweep", case, found, str(SWEEPS[0]))


def by_budget(case: Case) -> Iterator[Row]:
    """What so many iterations at most are worth, all tokens together."""
    found = {f"{steps}": solved(case, stop=replace(case.stop(), max_steps=steps)) for steps in BUDGETS}
    yield from compared("budget", case, found, str(BUDGETS[-1]))


def surprised(case: Case) -> Case:
    """The case in float64 with targets that are drawn anew, so that there is something to learn."""
    targets = torch.randint(
        case.model.task.vocab_size, case.batch.targets.shape, generator=torch.Generator().manual_seed(0)
    )
    return Case(replace(case.model, lm=copy.deepcopy(case.model.lm).double()), case.batch._replace(targets=targets))


class Step:
    """The gradient of one training step, and how often the blocks were evaluated for it."""

    def __init__(self, case: Case, gradient: dq.Gradient, stop: dq.Stop) -> None:
        lm = case.model.lm.train()
        assert isinstance(lm.model, dq.ImplicitModel)
        self._evaluated = 0
        self._came_back: list[int] = []  # numbers of the evaluations that a backward pass went through
        lm.model.solve = dq.SolveConfig(DEFAULT, stop, gradient)
        begins = lm.model.backbone.register_forward_pre_hook(self._begins)  # a checkpointed one need not end again
        ends = lm.model.backbone.register_forward_hook(self._ends)
        try:
            loss = lm(case.batch.inputs, targets=case.batch.targets).loss
            assert loss is not None
            forward = self._evaluated
            loss.backward()
        finally:
            begins.remove()
            ends.remove()
        self.with_graph, self.backward = len(set(self._came_back)), len(self._came_back)
        self.without_graph, self.again = forward - self.with_graph, self._evaluated - forward
        self.flat = torch.cat([_gradient(weight) for weight in lm.parameters()])
        lm.zero_grad()

    def _begins(self, module: object, inputs: object) -> None:
        self._evaluated += 1

    def _ends(self, module: object, inputs: object, output: tuple[Tensor, object]) -> None:
        if output[0].requires_grad:
            output[0].register_hook(partial(self._went_back, self._evaluated))

    def _went_back(self, number: int, gradient: Tensor) -> None:
        self._came_back.append(number)


def _gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight).flatten() if weight.grad is None else weight.grad.flatten().clone()


def by_gradient(case: Case) -> Iterator[Row]:
    """Every estimator beside the exact gradient, and what a step takes where training stops."""
    case = surprised(case)
    exact = Step(case, EXACT, TIGHT)
    for name, estimator in ESTIMATORS.items():
        label = case.named("gradient", name)
        at_fixed_point, trained_so = Step(case, estimator, TIGHT), Step(case, estimator, TRAINING)
        for where, step in (("fixed point", at_fixed_point), ("training's stop", trained_so)):
            cosine = F.cosine_similarity(step.flat, exact.flat, dim=0).item()
            yield value_row(label, f"cosine, {where}", cosine, "exact", 1.0)
            yield value_row(label, f"norm, {where}", step.flat.norm().item(), "exact", exact.flat.norm().item())
        work = {
            "evaluations without a graph": trained_so.without_graph,
            "evaluations with a graph": trained_so.with_graph,
            "evaluations again in the backward pass": trained_so.again,
            "backward passes": trained_so.backward,
            "peak MiB": peak_memory(partial(Step, case, estimator, TRAINING)) / MEBIBYTE,
        }
        for metric, number in work.items():
            yield value_row(label, metric, number, "", None)


def answers(model: Trained, lengths: Sequence[int], sequences: int, trained_length: int) -> Iterator[Row]:
    """Every question about one model, of fewer sequences where they are long."""
    for length in lengths:
        case = Case.of(model, min(sequences, 2048 // length), length)
        for question in (by_solver, by_damping, by_tolerance, by_sweep, by_budget):
            yield from question(case)
    for length in (trained_length, 2 * trained_length):
        yield from by_gradient(Case.of(model, min(sequences, 128 // length), length))


def main() -> None:
    """Measure everything and report."""
    options, rows = arguments(__doc__ or ""), []
    for name in ("parity",) if options.quick else TASKS:
        model = trained(name)
        rows += answers(model, (32,), 8, 4) if options.quick else answers(model, (32, 128), 32, 16)
        print(f"measured: {name}", flush=True)
    report(rows, options)


if __name__ == "__main__":
    main()
