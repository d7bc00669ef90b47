r"""A pretrained decoder whose middle layers are iterated, fine-tuned beside the unlooped original.

Both see the same rows of a text, with the same updates, in transformers' Trainer. The looped
model's number of iterations is drawn for every update. Held-out text is then scored in bits per
byte at budgets from 1 to 32 iterations, and solved to a tolerance. Models are saved for
``AutoModelForCausalLM``. An interrupted run continues from its last checkpoint when the script is
started again.

    python examples/retrofit.py --quick               # seconds: a tiny Llama, made here
    python examples/retrofit.py --model meta-llama/Llama-3.2-1B --prelude 4 --core 8 --coda 4 \
        --lora 16
    python examples/retrofit.py --model Qwen/Qwen3-0.6B --prelude 8 --core 12 --coda 8 \
        --bfloat16 --device cuda
    python examples/retrofit.py --model smollm2 --prelude 12 --core 2 --coda 6 --dropped 10 \
        --distil --gate 0.15
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from bits_per_byte import cell, excerpts, load_model, score
from gguf_model import smollm2
from run_folder import (
    check_folder,
    claimed_folder,
    markdown,
    naming,
    read_options,
    write_rows,
    write_whole,
)
from text_training import TextOptions, end_of_training, prepare, train
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, retrofit, to_causal_lm
from deqseq.training import Curriculum, PoissonLogNormal, unrolled

BUDGETS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions):
    """A pretrained decoder is looped and fine-tuned, beside the unlooped original."""

    model: str | None = (
        None  # a folder, a name on the hub, or smollm2. Default: a tiny Llama is trained here first
    )
    prelude: int = 1  # first layers, which run once
    core: int = 2  # layers that are iterated
    coda: int = 1  # last layers, which run once
    dropped: int = 0  # layers between prelude and core that are left out
    injection: Literal["concat", "add", "decay"] = (
        "concat"  # how the prelude's output enters each iteration
    )
    # of concat: share of the state in the core's input, before training; the rest is the prelude's
    gate: float = 0.0
    # train only the core, to predict as the pretrained model does; unlooped: the core runs once
    distil: bool = False
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
    INTERVALS: ClassVar = {"gate": "[0, 1]"}
    FREE: ClassVar = (*TextOptions.FREE, "rtol")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate and self.injection != "concat":
            raise ValueError(f"--gate needs --injection concat, got {self.injection}")
        if self.lora and self.distil:
            raise ValueError(
                f"--distil trains the weights of the core: leave out --lora, got {self.lora}"
            )
        if self.lora and find_spec("peft") is None:
            raise ValueError("--lora needs PEFT: pip install peft")


QUICK: dict[str, Any] = {
    "corpus": "babble", "vocab_size": 290, "steps": 60, "length": 32, "tiny_steps": 150,
    "eval_tokens": 1024,
    "lr": 2e-3, "checkpoint_every": 20, "output": "runs/retrofit_quick",
}  # fmt: skip


def split(model: Any, options: Options) -> dq.CausalLM:
    """The model with its middle layers as a core that is iterated."""
    sizes: Any = {name: getattr(options, name) for name in ("prelude", "core", "coda", "dropped")}
    lm = retrofit(model, **sizes, injection=options.injection)
    core: Any = lm.model.core  # pyright: ignore[reportAttributeAccessIssue]
    if options.gate:
        # solves begin at the prelude's output, of which one iteration is then the core's pass
        with torch.no_grad():
            same = torch.eye(core.d_model)
            core.backbone.injection.weight.copy_(
                torch.cat([options.gate * same, (1 - options.gate) * same], dim=1)
            )
        core.solve, core.eval_solve = (
            replace(way, start="input") for way in (core.solve, core.eval_solve)
        )
    if options.distil:
        lm.requires_grad_(False)
        core.requires_grad_(True)
    return lm


def tiny(options: Options, vocab_size: int) -> LlamaForCausalLM:
    """A Llama of width 64, to be trained and then split."""
    size: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    layers = options.prelude + options.dropped + options.core + options.coda
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_hidden_layers=layers, **size))


def adapted(model: nn.Module, rank: int) -> Any:
    """The model with LoRA adapters if a rank is given; a new injection is trained whole."""
    if not rank:
        return model
    peft: Any = import_module("peft")
    names = sorted(
        {
            name.rpartition(".")[2]
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear)
        }
    )
    injected = any(name.endswith("injection") for name, _ in model.named_modules())
    whole = ["injection"] if injected else None
    targets = [name for name in names if name not in ("lm_head", "embed_out")]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, target_modules=targets, modules_to_save=whole
    )
    return peft.get_peft_model(model, config)


def divergence(source: str | Path, options: Options) -> Callable[..., torch.Tensor]:
    """How far predictions are from the pretrained model's, as a loss of the Trainer."""
    teacher = load_model(source, options.device)
    teacher = teacher.bfloat16() if options.bfloat16 else teacher

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(labels).logits.float().log_softmax(dim=-1)
        found = outputs.logits.float().log_softmax(dim=-1)
        total = F.kl_div(found, wanted, reduction="sum", log_target=True)
        return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    return loss


def train_models(options: Options, tokenizer: Any, rows: Any) -> str | Path:
    """Train the unlooped and the looped model, and the tiny pretrained one if none is given."""
    source: str | Path | None = options.model
    schedule: dict[str, Any] = {"lr_scheduler_type": "cosine"}
    if source is None:
        warmup = math.ceil(options.tiny_steps / 10)
        first = schedule | {
            "max_steps": options.tiny_steps,
            "warmup_steps": warmup,
            "learning_rate": 4e-3,
        }
        source = train(
            options, "tiny", lambda: tiny(options, len(tokenizer)), rows, tokenizer, **first
        )
    schedule["warmup_steps"] = math.ceil(options.steps / 10)
    if options.lora:
        schedule["finish"] = lambda model: model.merge_and_unload()
    if options.distil:
        schedule["loss"] = divergence(source, options)

    def looped() -> Any:
        return adapted(
            from_causal_lm(split(load_model(source, options.device), options)), options.lora
        )

    def unlooped() -> Any:
        if not options.distil:
            return adapted(load_model(source, options.device), options.lora)
        core = (model := looped()).model.core.core
        core.solve = core.eval_solve = replace(
            core.solve, stop=dq.Stop.exactly(1), gradient=dq.Unrolled()
        )
        return model

    train(options, "unlooped", unlooped, rows, tokenizer, **schedule)
    drawn = PoissonLogNormal(options.depth, seed=options.seed)
    base = dq.SolveConfig(dq.Naive(), start="input" if options.gate else "zero")
    phase = unrolled(drawn, last=options.last, until=None, base=base)
    train(options, "looped", looped, rows, tokenizer, curriculum=Curriculum((phase,)), **schedule)
    return source


def evaluate(options: Options, source: str | Path, held_out: Any) -> list[dict[str, Any]]:
    """Held-out scores of the original, the unlooped and the looped model at each budget."""
    cases: list[tuple[str, int | None, dict[str, Any]]] = [
        ("pretrained", None, {}),
        ("unlooped", None, {}),
    ]
    cases += [
        ("looped", n, {"solve": {"stop": dq.Stop.exactly(n), "solver": dq.Naive()}})
        for n in BUDGETS
    ]
    cases.append(
        ("looped", None, {"solve": {"stop": dq.Stop(rtol=options.rtol, max_steps=4 * BUDGETS[-1])}})
    )
    folders = {name: Path(options.output, name, "model") for name in ("unlooped", "looped")} | {
        "pretrained": source
    }
    models = {name: load_model(path, options.device) for name, path in folders.items()}
    rows = []
    for name, budget, how in cases:
        found = score(models[name], held_out, options.length, options.batch, **how)
        rows.append({"model": name, "budget": budget, "seed": options.seed} | found)
    return [*rows, *decode(models["looped"], held_out.inputs[:1, : options.length // 2], options)]


@torch.no_grad()
def decode(model: Any, prompt: torch.Tensor, options: Options) -> list[dict[str, Any]]:
    """Evaluations and CPU seconds per token of a greedy continuation, and of one in a window."""
    lm, rows, first, count = to_causal_lm(model), [], None, 32
    how: dict[str, Any] = {
        "start": "zero",
        "stop": dq.Stop(rtol=options.rtol, max_steps=4 * BUDGETS[-1]),
    }
    prompt = prompt.to(options.device)
    cache = lm(prompt[:, :-1], return_cache=True, **how).cache
    for window in (1, 8):
        begun = time.process_time()
        made = lm.generate(prompt[:, -1:], cache=cache, max_new_tokens=count, window=window, **how)
        assert made.evaluations is not None and made.converged is not None
        row = {"model": "looped", "window": window, "evaluations": made.evaluations / count}
        row |= {
            "cpu_seconds": (time.process_time() - begun) / count,
            "converged": made.converged.all().item(),
        }
        first = made.tokens if first is None else first
        rows.append(row | {"equal": made.tokens.equal(first)})
    return rows


def table(rows: list[dict[str, Any]], rtol: float) -> str:
    """Bits per byte of held-out text, as Markdown."""
    lines = []
    for row in (row for row in rows if "bits_per_byte" in row):
        solved = row["model"] == "looped" and not row["budget"]
        way = f"solved to {rtol:g}" if solved else "one pass"
        if row["budget"]:
            way = f"iterations: {row['budget']}"
        shown = row if solved else row | {"self_iterations": None, "converged": None}
        lines.append((row["model"], way, cell(shown)))
    return markdown(["model", "run", "bits per byte"], lines)


def main(arguments: list[str]) -> None:
    """Train both, score both, and write the table and the numbers."""
    options = read_options(Options, arguments, QUICK)
    if options.model == "smollm2":
        with naming("--model smollm2", SystemExit):
            options = replace(options, model=str(smollm2()))
    folder = Path(options.output)
    check_folder("retrofit.py", options, folder)
    if options.model is not None:
        # whether it can be split, without its weights
        with naming(f"--model {options.model}", SystemExit), torch.device("meta"):
            split(
                AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model)), options
            )
    tokenizer, rows, documents = prepare(options, options.model)
    with naming("--held-out, --length", SystemExit):
        held_out = excerpts(documents, tokenizer, [options.length], options.eval_tokens)
    with claimed_folder("retrofit.py", options, folder):
        source = train_models(options, tokenizer, rows)
        if not end_of_training():
            return
        scored = evaluate(options, source, held_out)
        text = (
            table(scored, options.rtol)
            + "\n\nA --quick run: too short to compare the models." * options.quick
        )
        write_rows(folder, scored)
        write_whole(folder / "table.md", f"{text}\n")
    print(f"\n{text}\n\nresults in {folder}/, models in {folder}/*/model")


if __name__ == "__main__":
    main(sys.argv[1:])
