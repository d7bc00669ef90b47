"""Pretraining on text: the options, and the files that a run writes."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from common import options as opt
from common.checkpoints import FILES
from common.language_models import SCALED, Sizes, curriculum_of, kind_of, spec_of
from common.loop import Compile
from common.text import check_corpus
from common.tokenizer import FILES as TOKENIZER_FILES

import deqseq as dq


@dataclass(frozen=True)
class Options(Sizes):
    """Language models are trained on text: implicit, bounded and explicit ones."""

    quick: bool = False  # tiny models on made-up sentences: a minute
    corpus: opt.Text = "shakespeare"  # or a file or folder of .txt, .jsonl, .parquet; hub:NAME, streamed; babble
    held_out: opt.Existing | None = None  # held-out text. Default: whole plays, or the end of the corpus
    subset: opt.Text | None = None  # hub: configuration of the data set
    text_field: opt.Text = "text"  # name of the text in .jsonl, .parquet and data sets
    tokenizer: opt.Pretrained = "bpe"  # bpe: one is trained on the corpus; bytes; a folder; a name on the hub
    vocab_size: Annotated[int, opt.integer(257, 2**20)] = 2048  # tokens of the trained BPE
    models: Annotated[tuple[str, ...], opt.Some] = SCALED  # presets, or {implicit, bounded, explicit}-{llama, mamba2}
    length: opt.Size = 256  # tokens of a training row
    batch: opt.Size = 8  # rows of a batch, of all processes together
    accumulate: opt.Count = 1  # batches of an update
    tokens: Annotated[int, opt.integer(1, 10**15)] = 1_228_800  # tokens that each model is trained on
    lr: opt.Positive = 3e-3  # peak learning rate
    warmup: opt.Natural = 50  # updates until the peak
    decay: opt.Share = 0.2  # share of the run in which the learning rate falls as 1 - sqrt
    weight_decay: opt.NotNegative = 0.1  # of linear maps and convolutions
    clip: opt.Positive = 1.0  # largest gradient norm
    eval_tokens: opt.Natural = 16_384  # held-out tokens that are scored, spread over the text; 0: all
    extrapolation: Annotated[tuple[opt.Size, ...], opt.Distinct] = (2, 4)  # multiples of the length, scored too
    sample: opt.Text = "\n\n  HAMLET. "  # beginning of the samples
    sample_tokens: opt.Size = 120  # tokens of each sample
    spread: Literal["ddp", "fsdp"] = "ddp"  # several processes: copies of the weights, or shards
    bfloat16: bool = False  # compute under autocast to bfloat16
    compile: Compile = "auto"  # the blocks; auto: if more than an hour is left after 20 updates
    checkpoint_every: opt.Count = 100  # updates between checkpoints
    seed: opt.Natural = 0  # seed of weights and of the order of the text
    device: opt.Device = "cpu"  # where to run: cpu or cuda
    output: opt.Output = "runs/pretrain"  # folder of the results
    fresh: bool = False  # remove what an earlier run wrote into --output

    def __post_init__(self) -> None:
        opt.check_options(self)
        if self.warmup + math.ceil(self.decay * self.steps) > self.steps:
            raise ValueError(f"--warmup {self.warmup} and --decay {self.decay} must fit into {self.steps} updates")
        check_corpus("--corpus", self.corpus)
        for name in self.models:
            kind_of(name)
            try:
                spec_of(name.replace("explicit-", "implicit-"), self, 300)  # without the search for equal parameters
            except ValueError as error:
                raise ValueError(f"--models {name}: {error}") from error
            if self.first_free(name) == self.steps:
                remedy = "give more --tokens, or a smaller --bounded-share"
                raise ValueError(f"--models {name} has no update of {self.steps} left for its free phase: {remedy}")

    @property
    def step_tokens(self) -> int:
        """Tokens of an update."""
        return self.batch * self.accumulate * self.length

    @property
    def steps(self) -> int:
        """Updates of a run."""
        return max(1, self.tokens // self.step_tokens)

    def first_free(self, name: str) -> int:
        """The first step of a model's last phase; ``steps``: there is none."""
        curriculum = curriculum_of(name, self)
        last = curriculum.phases[-1]
        return bisect_left(range(self.steps), True, key=lambda step: curriculum.at(step / self.steps) == last)


QUICK: dict[str, Any] = {
    "corpus": "babble", "vocab_size": 300, "d_model": 32, "mlp_width": 64, "heads": 2, "d_state": 8, "headdim": 16,
    "length": 32, "batch": 8, "tokens": 15_360, "warmup": 5, "eval_tokens": 1024, "extrapolation": (2,),
    "sample_tokens": 16, "output": "runs/pretrain_quick",
}  # fmt: skip
FREE = (  # may change when a run is continued
    "output", "fresh", "device", "checkpoint_every", "spread", "compile", "eval_tokens", "extrapolation", "sample",
    "sample_tokens",
)  # fmt: skip
RUNS = (*SCALED, *dq.PRESETS, "trunk-llama", "trunk-mamba2")
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors*", "deqseq_models.py")
WRITES = (
    *("results.json", "table.md", "samples.md", "pretrain.png", "log.txt"),
    *(f"curves/{name}.jsonl" for name in RUNS),
    *(f"checkpoints/{name}/{file}" for name in RUNS for file in FILES),
    *(f"{folder}/{file}" for folder in ("tokenizer", "tokenizer.unfinished") for file in TOKENIZER_FILES),
    *(f"models/{name}/{file}" for name in RUNS for file in (*TOKENIZER_FILES, *MODEL_FILES)),
)


def idle(options: Options) -> dict[str, tuple[str, ...]]:
    """Options without effect, by what makes them so."""
    kinds = {kind for kind, _ in map(kind_of, options.models)}
    families = {kind_of(name)[1] for name in options.models if name in SCALED}
    free = ("bounded_share", "budget", "phantom", "rtol")
    return {
        f"with --tokenizer {options.tokenizer}": ("vocab_size",) * (options.tokenizer != "bpe"),
        f"with --corpus {options.corpus}": (
            *("subset",) * (not options.corpus.startswith("hub:")),
            *("text_field",) * (options.corpus in ("shakespeare", "babble") or options.corpus.endswith(".txt")),
        ),
        "without a small model in --models": ("d_model", "layers") * (not families),
        "without a small llama in --models": ("heads", "mlp_width") * ("llama" not in families),
        "without a small mamba2 in --models": ("d_state", "headdim") * ("mamba2" not in families),
        "without an implicit or bounded model in --models": ("bounded_steps",) * (kinds == {"explicit"}),
        "without an implicit model in --models": free * ("implicit" not in kinds),
    }


def read_options(arguments: list[str]) -> Options:
    """Read the command line; --quick changes the defaults."""
    return opt.parse(Options, arguments, idle, quick=QUICK)
