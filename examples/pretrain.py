r"""Pretraining on text: implicit language models by the paper's curriculum, and explicit ones.

Each model sees the same rows of text, in transformers' Trainer. Held-out text is then scored in
bits per byte, solved at once and token by token, and at several times the trained length. Models
are saved for ``AutoModelForCausalLM``. An interrupted run continues from its last checkpoint when
the script is started again.

    python examples/pretrain.py                       # Shakespeare's plays, four small models
    python examples/pretrain.py --quick               # a minute, no download
    python examples/pretrain.py --corpus texts/ --models implicit-llama --d-model 512 --heads 8
    torchrun --nproc_per_node 8 examples/pretrain.py --models llama3-130m-implicit \
        --corpus hub:allenai/c4:en --tokenizer EleutherAI/gpt-neox-20b --length 2048 --batch 256 \
        --steps 20000 --device cuda --bfloat16 --fsdp
"""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from bits_per_byte import cell, excerpts, load_model, score
from matplotlib.figure import Figure
from run_folder import (
    check_folder,
    claimed_folder,
    markdown,
    naming,
    read_options,
    write_rows,
    write_whole,
)
from text_training import TextOptions, end_of_training, prepare, say, train

import deqseq as dq
from deqseq.arguments import Choice
from deqseq.integrations.huggingface import from_causal_lm
from deqseq.training import Curriculum, bounded, free

SMALL = ("implicit-llama", "explicit-llama", "implicit-mamba2", "explicit-mamba2")
PRESETS = tuple(name for name in dq.PRESETS if not name.endswith("state-tracking"))
COLOURS = {"llama": "#0b6e4f", "mamba2": "#e4572e"}


@dataclass(frozen=True, kw_only=True)
class Options(TextOptions):
    """Language models are trained on text: implicit and explicit ones."""

    models: tuple[str, ...] = SMALL  # {implicit, explicit}-{llama, mamba2}, or names of presets
    # a folder, or a name on the hub. Default: a BPE is trained on the corpus
    tokenizer: str | None = None
    d_model: int = 160  # width of the small models
    layers: int = 2  # their blocks
    heads: int = 5  # llama: attention heads
    mlp_width: int = 432  # llama: hidden width of the feed-forward layer
    d_state: int = 32  # mamba2: state size of each channel
    headdim: int = 32  # mamba2: channels of a head
    bounded_steps: int = 4  # iterations of the bounded phase
    bounded_share: float = 0.8  # share of the run that is bounded; 1: all of it
    # iterations of the free phase at most; 0: the paper's, 32 for Llama, 24 for Mamba2
    budget: int = 0
    phantom: int = 4  # phantom steps of the free phase; the bounded one has 1
    rtol: float = 0.05  # relative tolerance of each token
    warmup: int = 50  # updates until the peak of the learning rate
    decay: float = 0.2  # share of the run in which the learning rate falls as 1 - sqrt
    weight_decay: float = 0.1  # of linear maps and convolutions
    fsdp: bool = False  # shard the weights over the processes (FSDP2) instead of copying them (DDP)
    extrapolation: tuple[int, ...] = (2, 4)  # multiples of the length, scored too
    output: str = "runs/pretrain"  # folder of the results

    LEAST: ClassVar = {**TextOptions.LEAST, "warmup": 0, "budget": 0}
    INTERVALS: ClassVar = {"bounded_share": "(0, 1]", "decay": "(0, 1)", "weight_decay": "[0, inf)"}
    FREE: ClassVar = (*TextOptions.FREE, "fsdp", "extrapolation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup + math.ceil(self.decay * self.steps) > self.steps:
            raise ValueError(
                f"--warmup {self.warmup} and --decay {self.decay} must fit into {self.steps} "
                "updates"
            )
        if self.fsdp and self.device == "cpu":
            raise ValueError("--fsdp needs --device cuda: on CPUs accelerate has DDP only")
        if not self.models or len(set(self.models)) < len(self.models):
            raise ValueError(
                "--models must be one or more different names, got "
                f"{' '.join(self.models) or 'none'}"
            )
        for name in self.models:
            Choice((*SMALL, *PRESETS))("--models", name)
            with_free = curriculum_of(name, self).phases[-1].name == "free"
            if with_free and self.bounded_share * self.steps > self.steps - 1:
                raise ValueError(
                    f"--bounded-share {self.bounded_share} leaves no update of {self.steps} for "
                    "the free phase: give "
                    "more --steps, a smaller share, or 1"
                )
            try:
                spec_of(name, self, 300)
            except ValueError as error:
                raise ValueError(f"--models {name}: {error}") from error


QUICK: dict[str, Any] = {
    "corpus": "babble", "vocab_size": 290, "d_model": 32, "mlp_width": 64,
    "heads": 2, "d_state": 8, "headdim": 16,
    "length": 32, "steps": 60, "warmup": 5, "eval_tokens": 1024, "extrapolation": (2,),
    "checkpoint_every": 20,
    "output": "runs/pretrain_quick",
}  # fmt: skip


def spec_of(name: str, options: Options, vocab_size: int) -> dq.LanguageModelSpec:
    """A model, as data."""
    if name in PRESETS:
        return replace(dq.preset(name), vocab_size=vocab_size)
    shared: dict[str, Any] = {"d_model": options.d_model, "n_layers": options.layers}
    if name.endswith("llama"):
        backbone = dq.LlamaConfig(**shared, n_heads=options.heads, mlp_width=options.mlp_width)
    else:
        backbone = dq.Mamba2Config(**shared, d_state=options.d_state, headdim=options.headdim)
    implicit = dq.LanguageModelSpec(vocab_size, backbone)
    if name.startswith("implicit"):
        return implicit
    return replace(
        implicit.explicit(), backbone=replace(backbone, weight_norm=False, injection=False)
    )


def curriculum_of(name: str, options: Options) -> Curriculum:
    """The paper's phases, both damped: bounded, then free; pretraining presets stay bounded."""
    base, budget = (
        dq.SolveConfig(dq.Relaxed(0.8)),
        options.budget or (32 if "llama" in name else 24),
    )
    if options.bounded_share == 1 or name.endswith("-pretrain") or "explicit" in name:
        return Curriculum((bounded(options.bounded_steps, 1, until=None, base=base),))
    first = bounded(options.bounded_steps, 1, until=options.bounded_share, base=base)
    return Curriculum((first, free(budget, options.phantom, rtol=options.rtol, base=base)))


def train_model(name: str, options: Options, tokenizer: Any, rows: Any) -> Path:
    """Train a model, or go on; its folder."""
    spec, end = spec_of(name, options, len(tokenizer)), tokenizer.eos_token_id
    fsdp: dict[str, Any] = {}
    if options.fsdp:
        # one group: every iteration uses all weights, so they are gathered once a step
        fsdp = {
            "fsdp": True,
            "fsdp_config": {"auto_wrap_policy": "NO_WRAP", "reshard_after_forward": False},
        }
    decay = {"num_decay_steps": math.ceil(options.decay * options.steps), "decay_type": "1-sqrt"}
    return train(
        options,
        name,
        lambda: from_causal_lm(spec.build(), eos_token_id=end, bos_token_id=end),
        rows,
        tokenizer,
        curriculum=curriculum_of(name, options),
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs=decay | {"min_lr_ratio": min(1e-5 / options.lr, 0.1)},
        warmup_steps=options.warmup,
        weight_decay=options.weight_decay,
        **fsdp,
    )


def evaluate(name: str, options: Options, held_out: Any) -> list[dict[str, Any]]:
    """Held-out scores at the trained length, with each sweep, and at several times that length."""
    model = load_model(Path(options.output, name, "model"), options.device)
    lengths = [options.length * n for n in (1, *options.extrapolation)]
    cases: list[tuple[int, str, dict[str, Any]]] = [(length, "one pass", {}) for length in lengths]
    if "explicit" not in name:
        cases = [
            (length, "simultaneous", {"solve": {"sweep": dq.Simultaneous()}}) for length in lengths
        ]
        cases.insert(1, (options.length, "sequential", {"solve": {"sweep": dq.Sequential()}}))
        trained = curriculum_of(name, options).phases[-1].solve
        if not trained.stop.has_tolerance:  # bounded to the end: also as deep as in training
            depth = trained.stop.max_steps + getattr(trained.gradient, "steps", 0)
            cases.insert(
                2,
                (
                    options.length,
                    f"{depth} iterations",
                    {"solve": {"stop": dq.Stop.exactly(depth)}},
                ),
            )
    shared = {
        "model": name,
        "seed": options.seed,
        "parameters": sum(part.numel() for part in model.parameters()),
    }
    rows = []
    for length, sweep, how in cases:
        batch = max(1, options.batch * options.length // length)
        rows.append(shared | {"sweep": sweep} | score(model, held_out, length, batch, **how))
        print(f"{name}, {length} tokens, {sweep}: {cell(rows[-1])}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Bits per byte as Markdown: models down, lengths across, mean iterations in brackets."""
    lengths, lines = sorted({row["length"] for row in rows}), []
    for model, sweep in dict.fromkeys((row["model"], row["sweep"]) for row in rows):
        scored = {
            row["length"]: row for row in rows if (row["model"], row["sweep"]) == (model, sweep)
        }
        cells = [cell(scored[length]) if length in scored else "" for length in lengths]
        lines.append([model, f"{next(iter(scored.values()))['parameters']:,}", sweep, *cells])
    return markdown(["model", "parameters", "solved", *map(str, lengths)], lines)


def draw(folder: Path, rows: list[dict[str, Any]], length: int) -> None:
    """Write ``pretrain.png``: training loss, and held-out loss by position."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    training, by_position = figure.subplots(1, 2)
    longest = max(row["length"] for row in rows)
    for row in rows:
        if row["length"] != longest or row["sweep"] not in ("one pass", "simultaneous"):
            continue
        style: dict[str, Any] = {"color": COLOURS["llama" if "llama" in row["model"] else "mamba2"]}
        style |= {"linestyle": ":" if "explicit" in row["model"] else "-", "label": row["model"]}
        history = json.loads((folder / row["model"] / "trainer_state.json").read_text())[
            "log_history"
        ]
        steps = [entry for entry in history if "loss" in entry]
        training.plot(
            [entry["step"] for entry in steps], [entry["loss"] for entry in steps], **style
        )
        window = max(1, longest // 24)
        means = [
            sum(row["by_position"][n : n + window]) / window for n in range(longest - window + 1)
        ]
        by_position.plot(range(window, longest + 1), means, **style)
    by_position.axvspan(1, length, color="#f2efe6", zorder=0)
    training.set(xlabel="update", ylabel="training loss (nats per token)")
    by_position.set(
        xlabel="position in the sequence; shaded: trained", ylabel="held-out loss (nats per token)"
    )
    training.legend(fontsize=8)
    figure.savefig(folder / "pretrain.png", dpi=150)


def main(arguments: list[str]) -> None:
    """Train, evaluate, and write models, table, figure and numbers."""
    options = read_options(Options, arguments, QUICK)
    folder = Path(options.output)
    check_folder("pretrain.py", options, folder)
    tokenizer, rows, documents = prepare(options, options.tokenizer)
    lengths = [options.length * n for n in (1, *options.extrapolation)]
    with naming("--held-out, --length, --extrapolation", SystemExit):
        held_out = excerpts(documents, tokenizer, lengths, options.eval_tokens)
    with claimed_folder("pretrain.py", options, folder):
        say(f"models: {', then '.join(options.models)}; results: {folder}/")
        for name in options.models:
            train_model(name, options, tokenizer, rows)
        if not end_of_training():
            return
        scored = [row for name in options.models for row in evaluate(name, options, held_out)]
        text = (
            table(scored)
            + "\n\nA --quick run: too few updates to compare the models." * options.quick
        )
        write_rows(folder, scored)
        write_whole(folder / "table.md", f"{text}\n")
        draw(folder, scored, options.length)
    print(
        f"\nheld-out bits per byte (mean iterations); {options.steps} updates; results in "
        f"{folder}/\n\n{text}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
