"""A pretrained decoder whose middle layers are iterated, fine-tuned beside the unlooped original.

Both see the same rows of a text, with the same updates, in transformers' Trainer. The looped model's number of
iterations is drawn for every update. Held-out text is then scored in bits per byte at budgets from 1 to 64 iterations,
and solved to a tolerance. Models are saved for ``AutoModelForCausalLM``. An interrupted run continues from its last
checkpoint when the script is started again.

    python examples/retrofit.py --quick                              # a tiny Llama, made here; seconds
    python examples/retrofit.py --model meta-llama/Llama-3.2-1B --prelude 4 --core 8 --coda 4 --lora 16
    python examples/retrofit.py --model Qwen/Qwen3-0.6B --prelude 8 --core 12 --coda 8 --bfloat16 --device cuda
"""

import math
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from bits_per_byte import cell, excerpts, load_model, score
from matplotlib.figure import Figure
from run_folder import check_folder, claimed_folder, markdown, naming, read_options, write_rows, write_whole
from text_training import TextOptions, end_of_training, prepare, train
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, retrofit
from deqseq.training import Curriculum, PoissonLogNormal, unrolled

BUDGETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions):
    """A pretrained decoder is looped and fine-tuned, beside the unlooped original."""

    model: str | None = None  # a folder, or a name on the hub. Default: a tiny Llama is trained here first
    prelude: int = 1  # first layers, which run once
    core: int = 2  # layers that are iterated
    coda: int = 1  # last layers, which run once
    dropped: int = 0  # layers between prelude and core that are left out
    injection: Literal["concat", "add", "decay"] = "concat"  # how the prelude's output enters each iteration
    depth: int = 7  # mean of the drawn number of iterations, less one
    last: int = 4  # iterations that are differentiated
    lora: int = 0  # rank of LoRA adapters of all linear maps; 0: all weights are trained
    tiny_steps: int = 1500  # updates of the tiny model before it is split
    rtol: float = 1e-3  # tolerance of the solve that is scored beside fixed budgets
    vocab_size: int = 512  # tokens of the tiny model's BPE
    length: int = 128  # tokens of a training row
    lr: float = 1e-3  # peak learning rate
    output: str = "runs/retrofit"  # folder of the results

    LEAST: ClassVar = {**TextOptions.LEAST, "dropped": 0, "lora": 0}
    FREE: ClassVar = (*TextOptions.FREE, "rtol")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora:
            try:
                import_module("peft")
            except ImportError as error:
                raise ValueError("--lora needs PEFT: pip install peft") from error


QUICK: dict[str, Any] = {
    "corpus": "babble", "vocab_size": 290, "steps": 60, "length": 32, "tiny_steps": 150, "eval_tokens": 1024,
    "lr": 2e-3, "checkpoint_every": 20, "output": "runs/retrofit_quick",
}  # fmt: skip


def split(model: Any, options: Options) -> dq.CausalLM:
    """The model with its middle layers as a core that is iterated."""
    sizes: Any = {name: getattr(options, name) for name in ("prelude", "core", "coda", "dropped")}
    return retrofit(model, **sizes, injection=options.injection)


def tiny(options: Options, vocab_size: int) -> LlamaForCausalLM:
    """A Llama of width 64, to be trained and then split."""
    size: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    layers = options.prelude + options.dropped + options.core + options.coda
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_hidden_layers=layers, **size))


def adapted(model: nn.Module, rank: int) -> Any:
    """The model with LoRA adapters of its linear maps, if a rank is given; a new injection is trained whole."""
    if not rank:
        return model
    peft: Any = import_module("peft")
    names = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
    whole = ["injection"] if any(name.endswith("injection") for name, _ in model.named_modules()) else None
    targets = [name for name in names if name not in ("lm_head", "embed_out")]
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=targets, modules_to_save=whole)
    return peft.get_peft_model(model, config)


def train_models(options: Options, tokenizer: Any, rows: Any) -> str | Path:
    """Train the unlooped and the looped model, and before them the tiny one if none is given; where theirs is."""
    source: str | Path | None = options.model
    schedule: dict[str, Any] = {"lr_scheduler_type": "cosine"}
    if source is None:
        warmup = math.ceil(options.tiny_steps / 10)
        first = schedule | {"max_steps": options.tiny_steps, "warmup_steps": warmup, "learning_rate": 4e-3}
        source = train(options, "tiny", lambda: tiny(options, len(tokenizer)), rows, tokenizer, **first)
    schedule["warmup_steps"] = math.ceil(options.steps / 10)
    if options.lora:
        schedule["finish"] = lambda model: model.merge_and_unload()

    def unlooped() -> Any:
        return adapted(load_model(source, options.device), options.lora)

    def looped() -> Any:
        return adapted(from_causal_lm(split(load_model(source, options.device), options)), options.lora)

    train(options, "unlooped", unlooped, rows, tokenizer, **schedule)
    drawn = PoissonLogNormal(options.depth, seed=options.seed)
    phase = unrolled(drawn, last=options.last, until=None, base=dq.SolveConfig(dq.Naive()))
    train(options, "looped", looped, rows, tokenizer, curriculum=Curriculum((phase,)), **schedule)
    return source


def evaluate(options: Options, source: str | Path, held_out: Any) -> list[dict[str, Any]]:
    """Held-out scores of the original and the unlooped model, and of the looped one at each budget and solved."""
    cases: list[tuple[str, int | None, dict[str, Any]]] = [("pretrained", None, {}), ("unlooped", None, {})]
    cases += [("looped", n, {"solve": {"stop": dq.Stop.exactly(n), "solver": dq.Naive()}}) for n in BUDGETS]
    cases.append(("looped", None, {"solve": {"stop": dq.Stop(rtol=options.rtol, max_steps=4 * BUDGETS[-1])}}))
    folders = {name: Path(options.output, name, "model") for name in ("unlooped", "looped")} | {"pretrained": source}
    models = {name: load_model(path, options.device) for name, path in folders.items()}
    rows = []
    for name, budget, how in cases:
        found = score(models[name], held_out, options.length, options.batch, **how)
        rows.append({"model": name, "budget": budget, "seed": options.seed} | found)
    return rows


def table(rows: list[dict[str, Any]], rtol: float) -> str:
    """Bits per byte of held-out text, as Markdown."""
    lines = []
    for row in rows:
        solved = row["self_iterations"] is not None
        way = f"iterations: {row['budget']}" if row["budget"] else f"solved to {rtol:g}" if solved else "one pass"
        shown = row | {"self_iterations": None, "converged": None} if row["budget"] else row
        lines.append((row["model"], way, cell(shown)))
    return markdown(["model", "run", "bits per byte"], lines)


def draw(path: Path, rows: list[dict[str, Any]], mean: int) -> None:
    """The looped model's score against the budget, beside the two models that run once."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for name, style in (("pretrained", "-"), ("unlooped", "--")):
        (value,) = [row["bits_per_byte"] for row in rows if row["model"] == name]
        axis.axhline(value, color="#7a8ca0", linestyle=style, label=name)
    scores = {row["budget"]: row["bits_per_byte"] for row in rows if row["budget"]}
    axis.plot(list(scores), list(scores.values()), "o-", color="#e4572e", label="looped")
    axis.axvspan(1, mean, color="#f2efe6", zorder=0)
    axis.set(xscale="log", xticks=list(scores), xticklabels=list(scores), ylabel="held-out bits per byte")
    axis.set_xlabel("iterations at test time; shaded: up to the mean in training")
    axis.minorticks_off()
    axis.legend()
    figure.savefig(path, dpi=150)


def main(arguments: list[str]) -> None:
    """Train both, score both, and write the table, the figure and the numbers."""
    options = read_options(Options, arguments, QUICK)
    folder = Path(options.output)
    check_folder("retrofit.py", options, folder)
    if options.model is not None:
        # whether it can be split, without its weights
        with naming(f"--model {options.model}", SystemExit), torch.device("meta"):
            split(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model)), options)
    tokenizer, rows, documents = prepare(options, options.model)
    with naming("--held-out, --length", SystemExit):
        held_out = excerpts(documents, tokenizer, [options.length], options.eval_tokens)
    with claimed_folder("retrofit.py", options, folder):
        source = train_models(options, tokenizer, rows)
        if not end_of_training():
            return
        scored = evaluate(options, source, held_out)
        text = table(scored, options.rtol) + "\n\nA --quick run: too short to compare the models." * options.quick
        write_rows(folder, scored)
        write_whole(folder / "table.md", f"{text}\n")
        draw(folder / "retrofit.png", scored, options.depth + 1)
    print(f"\n{text}\n\nresults in {folder}/, models in {folder}/*/model")


if __name__ == "__main__":
    main(sys.argv[1:])
