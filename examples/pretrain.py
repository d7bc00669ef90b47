"""Pretraining on text: implicit language models, bounded ones and explicit ones, on equal terms.

Each model sees the same tokens, and the explicit ones are widened until they have as many parameters. Bounded models
train with few self-iterations throughout, implicit ones go on to the free phase for the last fifth: they share the run
until then. Held-out text is scored in bits per byte, with all tokens solved together and one after the other, and at
several times the trained length. A model directory is written that ``AutoModelForCausalLM`` loads. Interrupt the script
and run it again: it goes on from its last checkpoint.

    python examples/pretrain.py                                              # Shakespeare's plays, six small models
    python examples/pretrain.py --quick                                      # a minute, no download
    python examples/pretrain.py --corpus texts/ --models implicit-llama --d-model 512 --heads 8 --mlp-width 1376
        --layers 8 --tokens 100000000
    torchrun --nproc_per_node 8 examples/pretrain.py --models llama3-130m-implicit --corpus hub:allenai/c4 --subset en
        --tokenizer EleutherAI/gpt-neox-20b --spread fsdp --device cuda --bfloat16 --length 2048 --tokens 10000000000
"""

import argparse
import itertools
import json
import logging
import math
import random
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import matplotlib
import torch
from tqdm import tqdm

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm
from deqseq.models.presets import widened
from deqseq.tasks.text import (
    HubDocuments,
    LocalDocuments,
    PackedBatches,
    PackedStream,
    PackedText,
    load_shakespeare,
    split_shakespeare,
)
from deqseq.tasks.text.scoring import score
from deqseq.tasks.text.tokenizer import TokenizerEncoder, load_tokenizer, train_tokenizer
from deqseq.training import Curriculum, bounded, free, parameter_groups, warmup_constant_decay
from deqseq.training.curves import Curve
from deqseq.training.loop import Batches, Run, Settings
from deqseq.training.processes import Processes, Spread, started, whole_state
from deqseq.training.run_folder import claim_folder

matplotlib.use("Agg")
import matplotlib.pyplot as plt

log = logging.getLogger("pretrain")
Kind = Literal["implicit", "bounded", "explicit"]
SCALED = tuple(f"{kind}-{family}" for family in ("llama", "mamba2") for kind in ("implicit", "bounded", "explicit"))
MOVABLE = (  # may change when a run goes on
    "output", "device", "checkpoint_every", "spread", "eval_tokens", "extrapolation", "sample", "sample_tokens",
)  # fmt: skip
QUICK = {
    "corpus": "babble", "vocab_size": 300, "d_model": 32, "mlp_width": 64, "heads": 2, "d_state": 8, "headdim": 16,
    "length": 32, "batch": 8, "tokens": 15_360, "warmup": 5, "eval_tokens": 1024, "extrapolation": (2,),
    "sample_tokens": 16,
}  # fmt: skip


def option(default: Any, text: str, choices: Any = None) -> Any:
    """A field that is also a command-line option."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Options:
    """Everything that decides a run."""

    corpus: str = option("shakespeare", "shakespeare; a file or folder of .txt, .jsonl, .parquet; hub:NAME, streamed")
    held_out: str = option("", "file or folder of held-out text; empty: whole plays, or the end of the corpus")
    subset: str = option("", "hub: configuration of the data set")
    text_field: str = option("text", "name of the text in .jsonl, .parquet and data sets")
    tokenizer: str = option("bpe", "bpe: a byte-level BPE is trained on the corpus; else a folder or a name on the hub")
    vocab_size: int = option(2048, "tokens of the trained BPE")
    models: tuple[str, ...] = option(SCALED, f"presets, or any of {', '.join(SCALED)}")
    d_model: int = option(160, "width of the scaled-down models")
    layers: int = option(2, "their blocks")
    heads: int = option(5, "llama: attention heads")
    mlp_width: int = option(432, "llama: hidden width of the feed-forward layer")
    d_state: int = option(32, "mamba2: state size of each channel")
    headdim: int = option(32, "mamba2: channels a head")
    length: int = option(256, "tokens of a training sequence")
    batch: int = option(8, "sequences of a batch, of all processes together")
    accumulate: int = option(1, "batches an update")
    tokens: int = option(1_228_800, "tokens that each model is trained on")
    lr: float = option(3e-3, "peak learning rate")
    warmup: int = option(50, "updates until the peak")
    decay: float = option(0.2, "share of the run in which the learning rate falls as 1 - sqrt")
    weight_decay: float = option(0.1, "of linear maps and convolutions")
    clip: float = option(1.0, "largest gradient norm")
    bounded_steps: int = option(4, "self-iterations of the bounded phase")
    bounded_share: float = option(0.8, "share of an implicit model's run that is bounded")
    budget: int = option(0, "self-iterations of the free phase at most; 0: the paper's, 32 for Llama, 24 for Mamba2")
    phantom: int = option(4, "phantom steps of the free phase; the bounded one has 1")
    rtol: float = option(0.05, "relative tolerance of each token")
    eval_tokens: int = option(16_384, "held-out tokens that are scored, spread over the text; 0: all")
    extrapolation: tuple[int, ...] = option((2, 4), "multiples of the trained length that are scored too")
    sample: str = option("\n\n  HAMLET. ", "beginning of the samples")
    sample_tokens: int = option(120, "tokens of each sample")
    spread: str = option("ddp", "several processes: ddp, or fsdp, which shares the weights out", ("ddp", "fsdp"))
    bfloat16: bool = option(False, "compute under autocast to bfloat16")
    tensorboard: bool = option(False, "write curves for TensorBoard too")
    checkpoint_every: int = option(100, "updates between checkpoints")
    seed: int = option(0, "seed of weights and of the order of the text")
    device: str = option("cpu", "where to run")
    output: str = option("runs/pretrain", "folder of the results")

    @property
    def steps(self) -> int:
        """Updates of a run."""
        return max(1, self.tokens // (self.batch * self.accumulate * self.length))


def parse(arguments: list[str]) -> tuple[Options, bool]:
    """Read the command line: the options, and whether to begin anew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    for item in fields(Options):
        default: Any = item.default
        kind: dict[str, Any] = {"type": type(default[0] if isinstance(default, tuple) else default)}
        if isinstance(default, bool):
            kind = {"action": "store_true"}
        elif isinstance(default, tuple):
            kind |= {"nargs": "+"}
        if item.metadata["choices"]:
            kind |= {"choices": item.metadata["choices"]}
        flag = f"--{item.name.replace('_', '-')}"
        parser.add_argument(flag, default=argparse.SUPPRESS, help=f"{item.metadata['help']} ({default!r})", **kind)
    parser.add_argument("--quick", action="store_true", help="tiny models on words made up for it, in a minute")
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier run left in the output folder")
    given = vars(parser.parse_args(arguments))
    quick, fresh = given.pop("quick"), given.pop("fresh")
    chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    values: dict[str, Any] = (QUICK if quick else {}) | chosen
    options = Options(**values)
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    return options, fresh


def check(options: Options) -> None:
    """Refuse, before anything is downloaded or written, what would fail later.

    Raises:
        ValueError: names the option.
    """
    for name in ("length", "batch", "accumulate", "tokens", "sample_tokens", "bounded_steps", "phantom"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.eval_tokens < 0 or min(options.extrapolation, default=1) < 1:
        given = f"--eval-tokens {options.eval_tokens} and --extrapolation {list(options.extrapolation)}"
        raise ValueError(f"{given} must be at least 0 and 1")
    for name in ("decay", "bounded_share"):
        if not 0 < getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must lie between 0 and 1, got {getattr(options, name)}")
    if options.warmup + math.ceil(options.decay * options.steps) > options.steps:
        used = f"--warmup {options.warmup} and --decay {options.decay}"
        raise ValueError(f"{used} leave nothing of {options.steps} updates")
    for name in options.models:
        spec_of(name, options, 300)
        curriculum_of(name, options)


# text


def documents_of(options: Options) -> tuple[list[str] | HubDocuments, list[str]]:
    """What is trained on, and what is held out."""
    if options.corpus == "shakespeare":
        train, held_out = (list(part.values()) for part in split_shakespeare(load_shakespeare()))
    elif options.corpus == "babble":
        train, held_out = babble(400), babble(40, seed=1)
    elif options.corpus.startswith("hub:"):
        data = partial(HubDocuments, options.corpus.removeprefix("hub:"), subset=options.subset or None)
        train = data(field=options.text_field)
        held_out = list(itertools.islice(data(field=options.text_field, split="validation"), 1000))
    else:
        train, held_out = list(LocalDocuments(options.corpus, field=options.text_field)), []
        if not options.held_out:
            train, held_out = cut(train)
    if options.held_out:
        held_out = list(LocalDocuments(options.held_out, field=options.text_field))
    return train, held_out


def cut(documents: list[str], share: float = 0.05) -> tuple[list[str], list[str]]:
    """Hold out the end of a corpus: whole documents, or a part of the only one."""
    if len(documents) == 1:
        at = int(len(documents[0]) * (1 - share))
        return [documents[0][:at]], [documents[0][at:]]
    at = min(len(documents) - 1, math.ceil(len(documents) * (1 - share)))
    return documents[:at], documents[at:]


def babble(count: int, seed: int = 0) -> list[str]:
    """Made-up sentences, for a run without any text."""
    words, draw = ["the", "king", "queen", "fool", "sees", "hears", "mocks", "a", "ghost", "and"], random.Random(seed)
    return [" ".join(draw.choice(words) for _ in range(40)) + "." for _ in range(count)]


@dataclass(frozen=True)
class Text:
    """A corpus in tokens."""

    encoder: TokenizerEncoder
    train: PackedText | HubDocuments
    held_out: list[str]

    def batches(self, options: Options, processes: Processes) -> Batches:
        """Training batches of this process, from the beginning."""
        rank, world = processes.rank, processes.world
        if isinstance(self.train, PackedText):
            return PackedBatches(self.train, options.batch, options.seed, rank, world)
        more: dict[str, Any] = {"batch_size": options.batch, "rank": rank, "world": world, "repeat": True}
        return PackedStream(self.train, self.encoder, options.length, **more)


def prepare(options: Options, processes: Processes) -> Text:
    """Read, tokenise and pack; the first process downloads and trains the tokenizer, the others follow."""
    folder = Path(options.output) / "tokenizer"
    if not processes.first:
        processes.wait()
    train, held_out = documents_of(options)
    if options.tokenizer != "bpe":
        tokenizer = load_tokenizer(options.tokenizer)
    elif folder.exists():
        tokenizer = load_tokenizer(str(folder))
    else:
        tokenizer = train_tokenizer(itertools.islice(train, 20_000), options.vocab_size)
    if processes.first:
        tokenizer.save_pretrained(folder)
        processes.wait()
    encoder = TokenizerEncoder(tokenizer)
    packed = PackedText.pack(train, encoder, options.length) if isinstance(train, list) else train
    return Text(encoder, packed, held_out)


# models


def parts_of(name: str) -> tuple[Kind, str]:
    """Kind and family that a name stands for; a preset's name has them too."""
    if name not in SCALED and (name not in dq.preset_names() or name.endswith("-state-tracking")):
        raise ValueError(f"--models must be presets of language models or any of {', '.join(SCALED)}, got {name!r}")
    words = name.split("-")
    kind = {"pretrain": "bounded"}.get(words[-1], words[-1]) if name in dq.preset_names() else words[0]
    return cast(Kind, kind), "llama" if "llama" in name else "mamba2"


def spec_of(name: str, options: Options, vocab_size: int) -> dq.LanguageModelSpec:
    """The model, as data."""
    kind, family = parts_of(name)
    if name in dq.preset_names():
        return replace(dq.preset(name), vocab_size=vocab_size)
    sizes: dict[str, Any] = {"d_model": options.d_model, "n_layers": options.layers}
    if family == "llama":
        backbone = dq.LlamaConfig(**sizes, n_heads=options.heads, mlp_width=options.mlp_width)
    else:
        backbone = dq.Mamba2Config(**sizes, d_state=options.d_state, headdim=options.headdim)
    implicit = dq.LanguageModelSpec(vocab_size, backbone)
    if kind != "explicit":
        return implicit
    plain = replace(implicit.explicit(), backbone=replace(backbone, weight_norm=False))
    return widened(plain, dq.parameter_count(implicit).total)


def curriculum_of(name: str, options: Options) -> Curriculum:
    """Bounded throughout, or bounded and then free; an explicit model has nothing to solve."""
    kind, family = parts_of(name)
    if kind != "implicit":
        return Curriculum((bounded(options.bounded_steps, 1, until=None),))
    budget = options.budget or {"llama": 32, "mamba2": 24}[family]
    first = bounded(options.bounded_steps, 1, until=options.bounded_share)
    return Curriculum((first, free(budget, options.phantom, rtol=options.rtol)))


# training


def make_run(
    name: str,
    options: Options,
    text: Text,
    processes: Processes,
    *,
    origin: str | None = None,
    folder: str | None = None,
) -> Run:
    """A run in a folder of its own, which goes on if it was interrupted."""
    torch.manual_seed(options.seed)
    lm = spec_of(name, options, text.encoder.vocab_size).build().to(processes.device)
    model = processes.spread(lm, cast(Spread, options.spread))
    groups = parameter_groups(model, options.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    scheduler = warmup_constant_decay(
        optimizer,
        total_steps=options.steps,
        warmup_steps=options.warmup,
        decay_steps=math.ceil(options.decay * options.steps),
        final_lr=min(1e-5, options.lr / 10),
    )
    settings = Settings(
        options.steps,
        options.accumulate,
        options.clip,
        options.bfloat16,
        options.checkpoint_every,
        seed=options.seed,
    )
    output = Path(options.output)
    return Run(
        model,
        text.batches(options, processes),
        optimizer,
        scheduler,
        curriculum_of(name, options),
        settings,
        output / "checkpoints" / (folder or name),
        processes,
        origin=None if origin is None else output / "checkpoints" / origin,
    )


def train(name: str, run: Run, options: Options, until: int) -> None:
    """Go on to ``until`` updates; their numbers go to ``curves/NAME.jsonl``, the progress bar and the log."""
    first, output = run.processes.first, Path(options.output)
    curve = Curve(output / "curves" / f"{name}.jsonl", output / "tensorboard" / name if options.tensorboard else None)
    if first:
        curve.go_on(run.step)
    bar = tqdm(total=until, initial=run.step, desc=name, disable=None if first else True, unit="update")
    for update in run if run.step < until else ():
        numbers = {key: value for key, value in asdict(update).items() if value is not None}
        shown = {key: numbers[key] for key in ("loss", "self_iterations", "converged") if key in numbers}
        bar.set_postfix({key: f"{value:.3g}" for key, value in shown.items()})
        bar.update(1)
        if first:
            curve.add(numbers)
            log.info("%s %s", name, numbers)
        if update.step == until:
            break
    bar.close()


def train_all(options: Options, text: Text, processes: Processes) -> dict[str, Run]:
    """Train every model; an implicit and a bounded one of a family share the run until the free phase begins."""
    branch, runs = math.ceil(options.bounded_share * options.steps), {}
    for name in options.models:
        family = parts_of(name)[1]
        siblings = {f"bounded-{family}", f"implicit-{family}"}
        trunk = f"trunk-{family}" if name in siblings and siblings <= set(options.models) else None
        if trunk is not None and trunk not in runs:
            runs[trunk] = make_run(f"bounded-{family}", options, text, processes, folder=trunk)
            train(trunk, runs[trunk], options, branch)
            if runs[trunk].step % options.checkpoint_every:
                runs[trunk].save()
        runs[name] = make_run(name, options, text, processes, origin=trunk)
        train(name, runs[name], options, options.steps)
    return {name: runs[name] for name in options.models}


# results


def evaluate(name: str, run: Run, options: Options, text: Text) -> list[dict[str, Any]]:
    """Held-out scores at the trained length, with each sweep, and at several times that."""
    kind, family = parts_of(name)
    lengths = [options.length * n for n in (1, *options.extrapolation)]
    cases: list[tuple[int, str, dict[str, Any]]] = [(length, "single pass", {}) for length in lengths]
    if kind != "explicit":
        cases = [(length, "simultaneous", {"sweep": dq.Simultaneous()}) for length in lengths]
        cases.insert(1, (options.length, "sequential", {"sweep": dq.Sequential()}))
    parameters = dq.parameter_count(spec_of(name, options, text.encoder.vocab_size)).total
    shared = {"model": name, "kind": kind, "family": family, "parameters": parameters, "seed": options.seed}
    shared |= {"train_tokens": options.steps * options.batch * options.accumulate * options.length}
    rows = []
    for length, label, how in tqdm(cases, desc=f"evaluate {name}", disable=None if run.processes.first else True):
        packed = PackedText.pack(text.held_out, text.encoder, length)
        batch = max(run.processes.world, options.batch * options.length // length)
        found = score(
            run.model,
            packed,
            batch_size=batch,
            rows=rows_to_score(packed, options, math.lcm(*lengths)),
            processes=run.processes,
            **how,
        )
        row = shared | {"sweep": label, "length": length, "bits_per_byte": found.bits_per_byte}
        row |= {"perplexity": found.perplexity, "tokens": found.tokens, "self_iterations": found.self_iterations}
        row |= {"updates": found.updates, "converged": found.converged, "by_position": found.by_position.tolist()}
        rows.append(row)
        log.info("%s", {key: value for key, value in row.items() if key != "by_position"})
    return rows


def rows_to_score(packed: PackedText, options: Options, span: int) -> list[int]:
    """Excerpts of ``span`` tokens, evenly spread over a text: the same ones whatever the length of its rows."""
    tokens = len(packed.tokens) - 1
    whole, parts = math.ceil(tokens / span), span // packed.length
    count = min(whole, max(1, options.eval_tokens // span)) if options.eval_tokens else whole
    chosen = (n * whole // count * parts + part for n in range(count) for part in range(parts))
    return [row for row in chosen if row * packed.length < tokens]


def save(name: str, run: Run, options: Options, text: Text) -> str:
    """Write a directory that ``AutoModelForCausalLM`` loads, and continue the beginning; the continuation."""
    weights, _ = whole_state(run.model, run.optimizer)
    if not run.processes.first:
        return ""
    lm = spec_of(name, options, text.encoder.vocab_size).build()
    lm.load_state_dict(weights)
    curriculum_of(name, options).at(1.0).apply(lm)
    tokenizer, folder = text.encoder.tokenizer, Path(options.output) / "models" / name
    from_causal_lm(lm, eos_token_id=text.encoder.eos, bos_token_id=text.encoder.eos).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = torch.tensor([tokenizer(options.sample).input_ids])
    made = lm.generate(ids, max_new_tokens=options.sample_tokens, temperature=0.8, top_p=0.95, seed=options.seed)
    return str(tokenizer.decode(made.tokens[0]))


def table(rows: list[dict[str, Any]]) -> str:
    """Bits per byte, models down, lengths across, with mean self-iterations, as Markdown."""
    lengths = sorted({row["length"] for row in rows})
    lines = ["| model | parameters | solved | " + " | ".join(map(str, lengths)) + " |"]
    lines += ["|---" * (len(lengths) + 3) + "|"]
    for model, sweep in dict.fromkeys((row["model"], row["sweep"]) for row in rows):
        chosen = {row["length"]: row for row in rows if (row["model"], row["sweep"]) == (model, sweep)}
        cells = [cell(chosen[length]) if length in chosen else "" for length in lengths]
        size = next(iter(chosen.values()))["parameters"]
        lines.append(f"| {model} | {size:,} | {sweep} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    """Bits per byte, and what the solves took."""
    solve = "" if row["self_iterations"] is None else f" ({row['self_iterations']:.1f})"
    doubt = "" if row["converged"] in (None, 1.0) else f", {row['converged']:.1%} converged"
    return f"{row['bits_per_byte']:.3f}{solve}{doubt}"


def draw(rows: list[dict[str, Any]], options: Options, path: Path) -> None:
    """Training loss, held-out loss by position, and self-iterations in training."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    colours = {"llama": "#0b6e4f", "mamba2": "#e4572e"}
    dashes = {"implicit": "-", "bounded": "--", "explicit": ":"}
    longest = max(row["length"] for row in rows)
    for name in options.models:
        kind, family = parts_of(name)
        style = {"color": colours[family], "linestyle": dashes[kind], "label": name, "linewidth": 1.6}
        curves = Path(options.output) / "curves"
        own, trunk = (Curve(curves / f"{run}.jsonl").rows() for run in (name, f"trunk-{family}"))
        points = own if kind == "explicit" else [row for row in trunk if row["step"] < own[0]["step"]] + own
        seen = [row["step"] * options.batch * options.accumulate * options.length for row in points]
        axes[0].plot(seen, smooth([row["loss"] for row in points]), **style)
        for row in rows:
            if row["model"] == name and row["length"] == longest and row["sweep"] != "sequential":
                axes[1].plot(range(1, longest + 1), smooth(row["by_position"], longest // 24), **style)
        if kind != "explicit":
            axes[2].plot(seen, smooth([row["self_iterations"] for row in points]), **style)
    axes[1].axvspan(1, options.length, color="#f2efe6", zorder=0)
    for axis, x, y in zip(
        axes,
        ("training tokens", "position in the sequence; shaded: trained", "training tokens"),
        ("training loss (nats a token)", "held-out loss (nats a token)", "self-iterations in training"),
        strict=True,
    ):
        axis.set(xlabel=x, ylabel=y)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def smooth(values: list[float], window: int = 20) -> list[float]:
    """Means over a window that ends at each place; what is not finite is left out."""
    parts = ([v for v in values[max(0, n - window + 1) : n + 1] if math.isfinite(v)] for n in range(len(values)))
    return [sum(part) / len(part) if part else math.nan for part in parts]


def main(arguments: list[str]) -> None:
    """Train, evaluate, and write models, table, figure, samples and numbers."""
    options, fresh = parse(arguments)
    with started(options.device) as processes:
        output = Path(options.output)
        if processes.first:
            try:
                claim_folder(output, asdict(options), free=MOVABLE, fresh=fresh)
            except (ValueError, FileExistsError) as error:
                raise SystemExit(f"{error} (--output, --fresh)") from error
            target = {"filename": output / "log.txt", "format": "%(asctime)s %(message)s"}
            logging.basicConfig(level=logging.INFO, force=True, **target)
        processes.wait()
        text = prepare(options, processes)
        runs = train_all(options, text, processes)
        rows, samples = [], []
        for name, run in runs.items():
            rows += evaluate(name, run, options, text)
            samples.append(f"# {name}\n\n{save(name, run, options, text)}\n")
        if processes.first:
            (output / "results.json").write_text(json.dumps(rows, indent=1))
            (output / "table.md").write_text(table(rows) + "\n")
            (output / "samples.md").write_text("\n".join(samples))
            draw(rows, options, output / "pretrain.png")
            print(f"\nheld-out bits per byte (mean self-iterations); {options.steps} updates; results in {output}/\n")
            print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
