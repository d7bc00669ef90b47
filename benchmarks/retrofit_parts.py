"""What a retrofit needs: ``examples/retrofit.py`` with one part of it changed at a time.

The model is pretrained as there, with seed 3, on which the recipe was chosen. Its middle is then
looped and fine-tuned, once for every change. Shares of the last answers that are right in 256
stories of 16 swaps, after 1, 16 and 32 iterations; bits per byte of a held-out text, at one
iteration and solved; and what :func:`deqseq.diagnostics.extrapolation` finds up to 56 iterations,
on 64 of the stories. The unlooped model is run once.

A change takes 11 minutes on one core. Runs are kept in the folder of ``--runs``, and a later one
goes on from there.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from harness import Row, command_line, report, value_row
from torch import Tensor
from transformers import LlamaForCausalLM

import deqseq as dq
from deqseq.diagnostics import extrapolation
from deqseq.integrations.huggingface import from_causal_lm, from_decoder
from deqseq.training import Curriculum, Phase, unrolled

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import retrofit
from swaps import BYTES, Language, tell

SEED, SWAPS, TRAINED = 3, 16, 7
QUICK: dict[str, Any] = retrofit.QUICK | dict.fromkeys(
    ("steps", "unlooped_steps", "pretraining"), 2
)


@dataclass(frozen=True)
class ToldOnce(Language):
    """A swap is ``+13``, and both new cups have to be found at its last ball."""

    def sentence(self, swap: Sequence[str], ball: str) -> str:
        """A swap of two balls, or of none, and a question."""
        return f"{'+' if swap else '-'}{''.join(swap) or '..'}{ball}"


def by(gradient: dq.Gradient, **solve: Any) -> Callable[[Phase], Phase]:
    """Another gradient, and other fields of what is solved in training."""
    return lambda phase: replace(
        phase, solve=replace(phase.solve, gradient=gradient, **solve), depth=None
    )


def from_zero(phase: Phase) -> Phase:
    """The same, with solves that begin at zero."""
    assert phase.eval_solve is not None
    solves = [replace(solve, start="zero") for solve in (phase.solve, phase.eval_solve)]
    return replace(phase, solve=solves[0], eval_solve=solves[1])


class NoInjection(dq.Injection):
    """The input of the loop is only where it begins."""

    def prepare(self, x: Tensor) -> Tensor:
        """What :meth:`enter` gets, and does not need."""
        return x

    def enter(self, z: Tensor, prepared: Tensor) -> Tensor:
        """The state alone."""
        return z


SETTLED = dq.Stop(rtol=0.01, max_steps=16)
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a swap is told once": {"language": ToldOnce(BYTES.encode, BYTES.vocab_size, words=False)},
    "gate 0 for 0.5": {"gate": 0.0},
    "starts at zero": {"phase": from_zero},
    "injection: add": {"injection": "add"},
    "injection: decay": {"injection": "decay"},
    "no injection": {"inject": NoInjection()},
    "layers 1 / 4 / 1 for 2 / 2 / 2": {"prelude": 1, "core": 4, "coda": 1},
    "always 7 iterations": {"least": 7, "largest": 7},
    "solved, Phantom(4)": {"phase": by(dq.Phantom(4), stop=SETTLED)},
    "solved, Implicit()": {"phase": by(dq.Implicit(), stop=SETTLED)},
    "not looped, answers of any depth": {"loops": False, "hops": 32},
    "LoRA of rank 16": {"lora": 16},
    "Mamba2 for Llama": {"mamba2": True},
}


def measured(name: str, folder: Path, quick: bool) -> Iterator[Row]:
    """Train one model, or load it, and score it."""
    change = dict(CHANGES[name])
    language, phase = change.pop("language", BYTES), change.pop("phase", None)
    injection, mamba2 = change.pop("inject", None), change.pop("mamba2", False)
    kind = "looped" if change.pop("loops", True) else "unlooped"
    settings: dict[str, Any] = {"seed": SEED} | (QUICK if quick else {}) | change
    options = retrofit.Options(**settings)
    if mamba2:
        lm = pretrained_mamba2(options, language, folder)
    else:
        model = pretrained(options, language, folder)
        lm = retrofit.looped(model, options) if kind == "looped" else from_decoder(model)
    folder, curriculum = folder / name.replace("/", "-"), retrofit.curriculum(options)
    if phase is not None:
        curriculum = Curriculum(tuple(map(phase, curriculum.phases)))
    if injection is not None:
        core: Any = lm.core
        core.backbone.injection = injection
    steps = options.steps if kind == "looped" else options.unlooped_steps
    batches = retrofit.Mixture(options, language, kind, steps)
    adapted = retrofit.adapted(from_causal_lm(lm), options.lora) if options.lora else None
    retrofit.train(kind, lm, batches, curriculum, folder, options)
    if adapted is not None:
        adapted.merge_and_unload()
    yield value_row(name, "CPU minutes", batches.cpu_seconds / 60)
    rows = {row["budget"] or 1: row for row in retrofit.evaluated(kind, lm, language, options)}
    for count in sorted({1, 16, 32} & rows.keys()):
        metric = f"right after {SWAPS} swaps, iterations: {count}"
        yield value_row(name, metric, rows[count]["accuracy"][SWAPS])
    yield value_row(name, "bits per byte of text, once", rows[1]["bits_per_byte"])
    if kind == "unlooped":
        return
    yield value_row(name, "bits per byte of text, solved", rows["solved"]["bits_per_byte"])
    told = tell(language, 8 if quick else 64, SWAPS, (SWAPS, SWAPS), random.Random(1000 + SWAPS))
    found = extrapolation(lm, told.inputs, targets=told.targets, trained=TRAINED)
    for depth in found.depths:
        for metric in ("loss", "residual", "difference"):
            label = f"{metric} after {depth.iterations} iterations"
            yield value_row(name, label, getattr(depth, metric))


def pretrained(options: retrofit.Options, language: Language, folder: Path) -> LlamaForCausalLM:
    """The model before it is looped; those that read alike share it."""
    folder = folder / f"pretrained_{type(language).__name__}"
    model, _ = retrofit.source(options)
    lm = from_decoder(model)
    batches = retrofit.Mixture(options, language, "pretrained", options.pretraining)
    retrofit.train("pretrained", lm, batches, retrofit.curriculum(options), folder, options)
    return copy.deepcopy(model)


def pretrained_mamba2(options: retrofit.Options, language: Language, folder: Path) -> dq.CausalLM:
    """Six blocks of Mamba2, of which the middle two are pretrained with one iteration."""
    sizes: dict[str, Any] = {"d_model": 64, "n_layers": 2, "d_state": 32, "headdim": 32}
    config = dq.Mamba2Config(**sizes, injection=False, weight_norm=False)
    torch.manual_seed(options.seed)
    prelude, core, coda = (dq.Mamba2(config) for _ in range(3))
    core = dq.ImplicitModel(dq.Injected(core, dq.ConcatInjection(64, options.gate)))
    model = dq.RecurrentDepth(dq.ExplicitModel(prelude), core, dq.ExplicitModel(coda))
    lm = dq.CausalLM(language.vocab_size, model)
    batches = retrofit.Mixture(options, language, "pretrained", options.pretraining)
    once = unrolled(1, until=None, base=dq.SolveConfig(dq.Naive(), start="input"))
    folder = folder / "pretrained_mamba2"
    retrofit.train("pretrained", lm, batches, Curriculum((once,)), folder, options)
    return lm


def all_rows(names: Sequence[str], folder: Path, quick: bool) -> Iterable[Row]:
    """Every change in turn."""
    for name in names:
        yield from measured(name, folder, quick)


def main() -> None:
    """Measure all changes, or those that are named."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="where runs are kept")
    parser.add_argument("--only", nargs="+", choices=CHANGES, metavar="CHANGE", help="some of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only or [*CHANGES][:: 4 if options.quick else 1]
    with TemporaryDirectory() as scratch:
        report(all_rows(names, options.runs or Path(scratch), options.quick), options)


if __name__ == "__main__":
    main()
