r"""A pretrained decoder that gains from loops: its middle layers are iterated, then fine-tuned.

A Llama of six layers, pretrained on stories of one to four swaps of balls and on a text, is looped
in the middle and fine-tuned on longer stories, beside the unlooped original, which gets the same
data and more updates. Stories of up to 32 swaps are then answered after 1 to 64 iterations. Models
are saved for ``AutoModelForCausalLM``; an interrupted run goes on from its last checkpoint.

    python examples/retrofit.py                       # 35 minutes on one core
    python examples/retrofit.py --quick               # seconds: does it run?
    python examples/retrofit.py --injection add --prelude 1 --core 4 --coda 1
    python examples/retrofit.py --model smollm2 --prelude 10 --core 10 --coda 10 --lora 16
"""

import copy
import math
import random
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from corpus import load_tokenizer
from gguf_model import smollm2
from matplotlib.figure import Figure
from run_folder import check_folder, claimed_folder, markdown, naming, read_options, write_rows
from swaps import BYTES, Language, Stories, rows_of_text, tell, text_of
from torch import nn
from training_loop import RunOptions, TrainingBatches, check_options, one_process, train
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, from_decoder, retrofit
from deqseq.training import Curriculum, PoissonLogNormal, unrolled

Kind = tuple[int, tuple[int, int]]
"""Sentences of a story, and from how many to how many of them swap balls."""
FIRST: tuple[Kind, ...] = ((4, (1, 4)),)
PRETRAINING: tuple[Kind, ...] = (*FIRST, *((n, (1, 4)) for n in (8, 16, 32)))
SPARSE: tuple[Kind, ...] = tuple((n, (1, 8)) for n in (8, 16, 32))
DENSE: tuple[Kind, ...] = tuple((n, (8, n)) for n in (8, 16, 32, 32))
SWAPS = (4, 8, 16, 32)  # of the tests' stories, all sentences of which are swaps
BUDGETS = (1, 2, 4, 8, 16, 32, 64)
TEXT_LENGTH = 128  # tokens of a row of the text
RTOL, SHOWN = 0.01, (1, 4, 16)  # of the solve; iterations that the figure shows
WARMUP = 50  # updates
ONCE = 0.5  # of the updates on the text, where the layers run once


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """A pretrained decoder is looped and fine-tuned, beside the unlooped original."""

    # a folder, a name on the hub, or smollm2. Default: a Llama of width 64 is pretrained here
    model: str | None = None
    prelude: int = 2  # first layers, which run once
    core: int = 2  # layers that are iterated
    coda: int = 2  # last layers, which run once
    injection: Literal["concat", "add", "decay"] = "concat"  # how the input enters each iteration
    gate: float = 0.5  # concat: share of the state in what enters an iteration, before training
    depth: float = 6.0  # mean of the drawn number of iterations, less one
    least: int = 4  # iterations of an update at least
    largest: int = 16  # and at most
    last: int = 8  # iterations that are differentiated
    hops: int = 5  # answers through more of them are not scored in training
    text: float = 0.2  # share of the updates that learn the text
    tokens: int = 1024  # of an update
    pretraining: int = 6000  # updates of the model that is pretrained here
    steps: int = 4200  # updates of the looped model
    unlooped_steps: int = 12000  # updates of the unlooped one, which take as long
    pretraining_lr: float = 3e-3  # peak learning rate there
    lr: float = 1.5e-3  # peak learning rate of the looped and the unlooped model
    tests: int = 256  # stories of each test, and a quarter as many rows of held-out text
    lora: int = 0  # rank of LoRA adapters of all linear maps; 0: all weights are trained

    LEAST: ClassVar = {**RunOptions.LEAST, "lora": 0}
    INTERVALS: ClassVar = {"gate": "[0, 1]", "text": "[0, 1)"}

    def __post_init__(self) -> None:
        check_options(self)
        if self.injection != "concat" and self.gate != type(self).gate:
            raise ValueError(f"--gate needs --injection concat, got {self.injection}")
        if self.least > self.largest:
            raise ValueError(f"--least must be at most --largest, {self.largest}, got {self.least}")
        if self.lora and find_spec("peft") is None:
            raise ValueError("--lora needs PEFT: pip install peft")

    @property
    def drawn(self) -> PoissonLogNormal:
        """The number of iterations of an update."""
        return PoissonLogNormal(
            self.depth, smallest=self.least, largest=self.largest, seed=self.seed
        )


QUICK: dict[str, Any] = {"pretraining": 40, "steps": 20, "unlooped_steps": 20}
QUICK |= {"tokens": 256, "tests": 8}


class Mixture(TrainingBatches):
    """Stories of some kinds, and the text beside them; the learning rate falls at the end."""

    def __init__(self, options: Options, language: Language, name: str, steps: int) -> None:
        super().__init__(steps)
        self.options, self.language = options, language
        self.pretraining, self.looped = name == "pretrained", name == "looped"
        self.text = rows_of_text(language, TEXT_LENGTH, held_out=False)

    @property
    def lr(self) -> float:
        """The next learning rate: linear warm-up, constant, then linear to the end."""
        peak, falling = (
            (self.options.pretraining_lr, 0.5) if self.pretraining else (self.options.lr, 0.7)
        )
        left = max(0.02, (1 - self.progress) / falling)
        return peak * min(1.0, (self.step + 1) / WARMUP, left)

    def __next__(self) -> Stories:
        # the unlooped model sees the looped one's batches, and then more
        drawn = random.Random(f"{self.options.seed} {self.pretraining} {self.step}")
        self.solve = {}
        share = 0.25 if self.pretraining else self.options.text
        early, self.step = self.progress < 0.35, self.step + 1
        if drawn.random() < share:
            rows = drawn.sample(
                range(len(self.text.inputs)), max(1, self.options.tokens // TEXT_LENGTH)
            )
            batch = Stories(*(part[rows] for part in self.text))
            once = self.looped and drawn.random() < ONCE
            if once:
                self.solve = {"stop": dq.Stop.exactly(1), "gradient": dq.Unrolled()}
        else:
            kinds = (
                (FIRST if early else PRETRAINING)
                if self.pretraining
                else drawn.choice((SPARSE, DENSE))
            )
            sentences, swaps = drawn.choice(kinds)
            one = tell(self.language, 1, sentences, swaps, drawn).inputs.numel()
            batch = tell(self.language, max(4, self.options.tokens // one), sentences, swaps, drawn)
            deep = batch.hops > self.options.hops
            batch = batch._replace(targets=batch.targets.masked_fill(deep, -100))
        return Stories(*(part.to(self.options.device) for part in batch))

    def record(self, output: dq.CausalLMOutput, batch: Stories) -> dict[str, Any]:
        """Share of the right answers that depend on a swap."""
        scored = (batch.targets != -100) & (batch.hops > 0)
        right = (output.logits.argmax(-1) == batch.targets)[scored]
        return {"accuracy": right.float().mean().item()} if len(right) else {}


def looped(model: Any, options: Options) -> dq.CausalLM:
    """The model with its middle layers as a core that is iterated."""
    injection: Any = options.injection
    if injection == "concat":
        injection = dq.ConcatInjection(model.config.hidden_size, options.gate)
    return retrofit(
        model,
        prelude=options.prelude,
        core=options.core,
        coda=options.coda,
        injection=injection,
    )


def curriculum(options: Options) -> Curriculum:
    """So many iterations as are drawn for each update, from the prelude's output on."""
    start: Any = "input" if options.injection == "concat" else "zero"
    base = dq.SolveConfig(dq.Naive(), start=start)
    phase = unrolled(options.drawn, last=options.last, until=None, base=base)
    solved = replace(base, stop=dq.Stop(rtol=RTOL, max_steps=BUDGETS[-1]))
    return Curriculum((replace(phase, eval_solve=solved),))


def adapted(model: Any, rank: int) -> Any:
    """A model of transformers with LoRA adapters, if any; its injection is trained whole."""
    if not rank:
        return model
    peft: Any = import_module("peft")
    linear = {
        name.rpartition(".")[2]
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
    }
    whole = ["injection"] * any(name.endswith("injection") for name, _ in model.named_modules())
    targets = sorted(linear - {"lm_head", "embed_out"})
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, target_modules=targets, modules_to_save=whole or None
    )
    return peft.get_peft_model(model, config)


def named(model: str) -> str:
    """A folder, or a name on the hub."""
    return str(smollm2()) if model == "smollm2" else model


def source(options: Options) -> tuple[Any, Language]:
    """The model that is to be looped, and how stories are written for it."""
    if options.model is None:
        torch.manual_seed(options.seed)
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
        sizes |= {"num_hidden_layers": options.prelude + options.core + options.coda}
        sizes |= {"num_attention_heads": 4, "vocab_size": BYTES.vocab_size}
        # with transformers' default of .02 hardly a story is learned at this width
        sizes |= {"initializer_range": 0.1, "tie_word_embeddings": True}
        return LlamaForCausalLM(LlamaConfig(bos_token_id=0, eos_token_id=0, **sizes)), BYTES
    with naming(f"--model {options.model}", SystemExit):
        name = named(options.model)
        with torch.device("meta"):  # whether it can be looped, without its weights
            looped(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name)), options)
        tokenizer = load_tokenizer(name)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    text = text_of(held_out=True)
    bytes_a_token = len(text.encode()) / len(encode(text))
    return model, Language(encode, len(tokenizer), bytes_a_token=bytes_a_token)


@torch.no_grad()
def evaluated(
    name: str, lm: dq.CausalLM, language: Language, options: Options
) -> list[dict[str, Any]]:
    """Answers, residuals and bits per byte at each number of iterations, and solved."""
    lm.eval()
    ways: dict[Any, dict[str, Any]] = {None: {}}
    if lm.core is not None:
        ways = {n: {"stop": dq.Stop.exactly(n)} for n in BUDGETS} | {"solved": {}}
    text, rows = rows_of_text(language, TEXT_LENGTH, held_out=True), []
    text = Stories(*(part[: -(-options.tests // 4)].to(options.device) for part in text))
    told = {
        swaps: tell(language, options.tests, swaps, (swaps, swaps), random.Random(1000 + swaps))
        for swaps in SWAPS
    }
    for budget, how in ways.items():
        row: dict[str, Any] = {"model": name, "seed": options.seed, "budget": budget}
        row["accuracy"] = {}
        for swaps, stories in told.items():
            output = lm(stories.inputs.to(options.device), **how)
            right = output.logits.argmax(-1).cpu() == stories.targets
            row["accuracy"][swaps] = right[:, -1].float().mean().item()
            if output.stats is not None:
                row["residual"] = output.stats.residual.amax(dim=1).median().item()
                row["iterations"] = output.stats.iterations.float().mean().item()
                row["converged"] = output.converged.float().mean().item()
            counts = [(hops, right[stories.hops == hops]) for hops in range(17)]
            row["by_hops"] = {hops: [int(part.sum()), len(part)] for hops, part in counts}
        output = lm(text.inputs, targets=text.targets, **how)
        row["bits_per_byte"] = output.loss.item() / math.log(2) / language.bytes_a_token
        rows.append(row)
        print(f"{name}, iterations {budget}: {row['accuracy']}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracy of the last answers, and bits per byte, as Markdown."""
    lines = []
    for row in rows:
        way = {None: "once", "solved": f"to {RTOL:g}"}.get(row["budget"], row["budget"])
        if row["budget"] == "solved":
            way = f"{way}: {row['iterations']:.1f}, {row['converged']:.0%} converged"
        accuracy = [f"{share:.3f}" for share in row["accuracy"].values()]
        lines.append([row["model"], way, *accuracy, f"{row['bits_per_byte']:.3f}"])
    header = ["model", "iterations", *(f"{swaps} swaps" for swaps in SWAPS), "text, bits per byte"]
    return markdown(header, lines)


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Accuracy against the number of swaps."""
    figure = Figure(figsize=(5.25, 3.6), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        if row["model"] == "looped" and row["budget"] not in SHOWN:
            continue
        looped = row["model"] == "looped"
        label = f"looped, {row['budget']} iterations" if looped else row["model"]
        style: dict[str, Any] = {"marker": "o"}
        if not looped:
            style = {"marker": "s", "linestyle": "--", "color": "grey"}
        axis.plot(SWAPS, list(row["accuracy"].values()), label=label, **style)
    axis.set(xlabel="swaps", ylabel="last answers that are right", xscale="log", ylim=(0, 1.03))
    axis.set_xticks(SWAPS, list(map(str, SWAPS)))
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def run(options: Options, model: Any, language: Language, folder: Path) -> list[dict[str, Any]]:
    """Train and score the pretrained, the unlooped and the looped model."""
    rows, first = [], options.pretraining if options.model is None else 0
    steps = {"pretrained": first, "unlooped": options.unlooped_steps, "looped": options.steps}
    for name, count in steps.items():
        ours = (model if name == "pretrained" else copy.deepcopy(model)).to(options.device)
        lm = looped(ours, options) if name == "looped" else from_decoder(ours)
        about = {"steps": count, "cpu_minutes": 0.0}
        if count:
            saved = from_causal_lm(lm) if name == "looped" else ours
            saved = saved if name == "pretrained" else adapted(saved, options.lora)
            batches = Mixture(options, language, name, count)
            train(name, lm, batches, curriculum(options), folder, options)
            about["cpu_minutes"] = round(batches.cpu_seconds / 60, 2)
            saved = saved.merge_and_unload() if hasattr(saved, "merge_and_unload") else saved
            saved.save_pretrained(folder / name / "model")
            if options.model is not None:
                load_tokenizer(named(options.model)).save_pretrained(folder / name / "model")
        rows += [row | about for row in evaluated(name, lm, language, options)]
    return rows


def main(arguments: list[str]) -> None:
    """Train all three, and write the numbers, the table and the figure."""
    one_process("retrofit.py")
    options = read_options(Options, arguments, QUICK)
    folder = Path(options.output or f"runs/retrofit_{options.seed}" + "_quick" * options.quick)
    check_folder("retrofit.py", options, folder)
    model, language = source(options)
    with claimed_folder("retrofit.py", options, folder):
        rows = run(options, model, language, folder)
        write_rows(folder, rows)
        draw(folder / "retrofit.png", rows)
    print(f"\n{table(rows)}\n\nnumbers, figure and models: {folder}/")


if __name__ == "__main__":
    main(sys.argv[1:])
