"""A pretrained decoder whose middle layers are iterated, fine-tuned beside the unlooped original.

Both see the same batches of a text, with the same updates, in transformers' Trainer. The looped model's number of
iterations is drawn for every update. Held-out text is then scored in bits per byte at budgets from 1 to 64 iterations,
and solved to a tolerance. Models are saved for ``AutoModelForCausalLM``; an interrupted run goes on from the Trainer's
last checkpoint.

    python examples/retrofit.py --quick                              # a tiny Llama, made here; seconds
    python examples/retrofit.py --model meta-llama/Llama-3.2-1B --prelude 4 --core 8 --coda 4 --lora 16
    python examples/retrofit.py --model Qwen/Qwen3-0.6B --prelude 8 --core 12 --coda 8 --bfloat16 --device cuda
"""

import itertools
import math
import sys
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from common import options as opt
from common.adapters import adapted, lora_library, merged
from common.bits_per_byte import Rows, excerpts, rows_in_order, score
from common.processes import one_process
from common.retrofit_report import draw, table
from common.run import claim_folder, log_to, save_whole, write_json, write_text
from common.text import check_corpus, load_corpus
from common.tokenizer import FILES as TOKENIZER_FILES
from common.tokenizer import load_tokenizer, train_tokenizer
from common.tokens import encode
from common.trainer import Shown, collated, train
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

import deqseq as dq
from deqseq.integrations.huggingface import CurriculumCallback, from_causal_lm, from_decoder, retrofit, to_causal_lm
from deqseq.integrations.huggingface.decoder import FAMILIES
from deqseq.training import Curriculum, PoissonLogNormal, unrolled

TINY = "tiny"
BUDGETS = (1, 2, 4, 8, 16, 32, 64)
TRAINED = ("tiny/training", "unlooped/training", "looped/training")
MODELS = ("tiny", "unlooped/model", "looped/model")
FILES = ("config.json", "generation_config.json", "model*.safetensors*", "deqseq_models.py", *TOKENIZER_FILES)
WRITES = (
    *("results.json", "table.md", "retrofit.png", "log.txt"),
    *(f"{folder}/checkpoint-*/*" for folder in TRAINED),
    *(f"{folder}/{file}" for folder in MODELS for file in FILES),
)


@dataclass(frozen=True)
class Options:
    """A pretrained decoder is looped and fine-tuned, beside the unlooped original."""

    quick: bool = False  # a tiny Llama, trained here on made-up sentences: seconds
    model: opt.Pretrained = TINY  # a folder or a name on the hub; tiny: one is trained here first
    corpus: opt.Text = "shakespeare"  # or a file or folder of .txt, .jsonl, .parquet; hub:NAME; babble
    prelude: opt.Blocks = 1  # first layers, which run once
    core: opt.Blocks = 2  # layers that are iterated
    coda: opt.Blocks = 1  # last layers, which run once
    dropped: opt.Natural = 0  # layers between prelude and core that are left out
    injection: Literal["concat", "add", "decay"] = "concat"  # how the prelude's output enters each iteration
    depth: opt.Count = 7  # mean of the drawn number of iterations, less one
    last: opt.Count = 4  # iterations that are differentiated
    steps: opt.Count = 600  # updates of each model
    batch: opt.Size = 8  # rows of a batch in each process
    length: Annotated[int, opt.integer(2, 2**20)] = 128  # tokens of a row
    lr: opt.Positive = 1e-3  # peak learning rate
    lora: opt.Natural = 0  # rank of LoRA adapters of all linear maps; 0: all weights are trained
    vocab_size: Annotated[int, opt.integer(257, 2**20)] = 512  # tokens of the tiny model's BPE
    tiny_steps: opt.Count = 1500  # updates of the tiny model before it is split
    eval_tokens: opt.Natural = 16_384  # held-out tokens that are scored; 0: all
    rtol: opt.Positive = 1e-3  # tolerance of the solve that is scored beside fixed budgets
    bfloat16: bool = False  # compute under autocast to bfloat16
    checkpoint_every: opt.Count = 100  # updates between checkpoints
    seed: opt.Natural = 0  # seed of the batches and of the draws
    device: opt.Device = "cpu"  # where to run
    output: opt.Output = "runs/retrofit"  # folder of the results
    fresh: bool = False  # remove what an earlier run wrote into --output

    def __post_init__(self) -> None:
        opt.check_options(self)
        check_corpus("--corpus", self.corpus)
        if self.lora:
            lora_library()


QUICK: dict[str, Any] = {
    "corpus": "babble", "vocab_size": 290, "steps": 60, "length": 32, "tiny_steps": 150, "eval_tokens": 1024,
    "lr": 2e-3, "checkpoint_every": 20, "output": "runs/retrofit_quick",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What both models share."""

    options: Options
    output: Path
    rows: list[dict[str, list[int]]]
    held_out: Rows

    def train(self, name: str, model: nn.Module, steps: int, lr: float, curriculum: Curriculum | None = None) -> None:
        """Train a model of transformers, or go on from its last checkpoint."""
        options, folder = self.options, self.output / name
        arguments = TrainingArguments(
            output_dir=str(folder / "training"),
            max_steps=steps,
            per_device_train_batch_size=options.batch,
            learning_rate=lr,
            lr_scheduler_type="cosine",
            warmup_steps=math.ceil(steps / 10),
            adam_beta2=0.95,
            save_steps=options.checkpoint_every,
            save_total_limit=2,
            logging_steps=max(1, steps // 20),
            report_to=[],
            seed=options.seed,
            use_cpu=options.device == "cpu",
            bf16=options.bfloat16,
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        callbacks = [Shown(name, steps), *([] if curriculum is None else [CurriculumCallback(curriculum)])]
        trainer = Trainer(model, arguments, train_dataset=self.rows, data_collator=collated, callbacks=callbacks)  # pyright: ignore[reportArgumentType]
        train(trainer, folder / "training")

    def row(self, name: str, budget: int | None, lm: dq.CausalLM, **how: Any) -> dict[str, Any]:
        """The score of held-out text, as a row of the results."""
        found = score(lm, self.held_out, batch_size=self.options.batch, **how)
        row = {"model": name, "budget": budget, "seed": self.options.seed, "bits_per_byte": found.bits_per_byte}
        return row | {"self_iterations": found.iterations, "converged": found.converged}


def read(options: Options) -> tuple[Any, list[dict[str, Any]], Rows]:
    """The tokenizer, rows to train on, and rows to score."""
    with opt.naming(f"--model {options.model}"):
        tokenizer = None if options.model == TINY else load_tokenizer(options.model)
    with opt.naming(f"--corpus {options.corpus}, --length {options.length}"):
        corpus = load_corpus(options.corpus)
        if tokenizer is None:
            texts = map(itemgetter("text"), itertools.islice(corpus.train, 20_000))
            tokenizer = train_tokenizer(texts, options.vocab_size)
        steps = options.steps + options.tiny_steps * (options.model == TINY)
        characters, some = 8 * options.length * options.batch * steps, []
        for text in map(itemgetter("text"), corpus.train):  # of a stream, only as many as are needed
            some.append(text)
            characters -= len(text or "")
            if characters < 0:
                break
        ids = encode(some, tokenizer).ids
        if len(ids) < options.length:
            raise ValueError(f"the text has {len(ids)} tokens, fewer than a row: give more text, or a smaller length")
        kept = rows_in_order(encode(corpus.held_out, tokenizer), options.length)
    cut = ids[: len(ids) // options.length * options.length].reshape(-1, options.length)
    rows = [{"input_ids": row.tolist()} for row in cut]
    return tokenizer, rows, excerpts(kept, options.eval_tokens, [options.length])


def read_options(arguments: list[str]) -> Options:
    """Read the command line; --quick changes the defaults."""
    names = ("vocab_size", "tiny_steps")
    return opt.parse(Options, arguments, lambda o: {f"with --model {o.model}": names * (o.model != TINY)}, quick=QUICK)


def check(options: Options) -> None:
    """Refuse several GPUs, a model that is not there, and layers that do not add up, before anything is written."""
    if options.device == "cuda" and torch.cuda.device_count() > 1:  # which the Trainer would all use, by DataParallel
        raise SystemExit("--device cuda: retrofit.py runs on one GPU: set CUDA_VISIBLE_DEVICES=0, or another number")
    if options.model == TINY:
        return
    with opt.naming(f"--model {options.model}"):
        config = AutoConfig.from_pretrained(options.model)
    if config.model_type not in FAMILIES:
        raise SystemExit(f"--model must be of one of the families {', '.join(FAMILIES)}, got {config.model_type}")
    layers = config.num_hidden_layers
    sizes = {name: getattr(options, name) for name in ("prelude", "core", "coda", "dropped")}
    if sum(sizes.values()) != layers:
        given = " + ".join(f"--{name} {size}" for name, size in sizes.items())
        raise SystemExit(f"{given} must add up to the {layers} layers of --model {options.model}")


def main(arguments: list[str]) -> None:
    """Train both, score both, and write the table, the figure and the numbers."""
    one_process("retrofit.py")
    options = read_options(arguments)
    check(options)
    tokenizer, texts, held_out = read(options)
    free = ("output", "fresh", "device", "checkpoint_every", "eval_tokens")
    output = claim_folder(options.output, "retrofit", asdict(options), free=free, fresh=options.fresh, writes=WRITES)
    log_to(output / "log.txt")
    disable_progress_bar()
    run, source = Run(options, output, texts, held_out), options.model
    if source == TINY:
        size: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        layers = options.prelude + options.dropped + options.core + options.coda
        torch.manual_seed(options.seed)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=layers, **size))
        run.train("tiny", model, options.tiny_steps, 4e-3)
        source = str(output / "tiny")
        save_whole(Path(source), model, tokenizer)

    def load() -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        return model.to(options.device)

    rows = [run.row("pretrained", None, from_decoder(load()))]
    unlooped = adapted(load(), options.lora)
    run.train("unlooped", unlooped, options.steps, options.lr)
    unlooped = merged(unlooped, options.lora)
    save_whole(output / "unlooped" / "model", unlooped, tokenizer)
    rows.append(run.row("unlooped", None, from_decoder(unlooped)))
    split: Any = {"prelude": options.prelude, "core": options.core, "coda": options.coda, "dropped": options.dropped}
    lm = retrofit(load(), **split, injection=options.injection)
    assert lm.core is not None
    phase = unrolled(
        PoissonLogNormal(options.depth, seed=options.seed), last=options.last, until=None, base=lm.core.solve
    )
    looped = adapted(from_causal_lm(lm), options.lora)
    run.train("looped", looped, options.steps, options.lr, Curriculum((phase,)))
    looped = merged(looped, options.lora)
    save_whole(output / "looped" / "model", looped, tokenizer)
    lm, naive = to_causal_lm(looped), dq.Naive()
    rows += [run.row("looped", n, lm, stop=dq.Stop.exactly(n), solver=naive) for n in BUDGETS]
    rows.append(run.row("looped", None, lm, stop=dq.Stop(rtol=options.rtol, max_steps=4 * BUDGETS[-1])))
    write_json(output / "results.json", rows)
    note = "\n\nA --quick run: too short to compare the models." * options.quick
    write_text(output / "table.md", (shown := table(rows, options.rtol) + note) + "\n")
    draw(output / "retrofit.png", rows, options.depth + 1)
    print(f"{shown}\n\nfigure: {output}/retrofit.png   numbers: {output}/results.json   models: {output}/*/model")


if __name__ == "__main__":
    main(sys.argv[1:])
