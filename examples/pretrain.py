"""Pretraining on text: implicit language models, bounded ones and explicit ones, on equal terms.

Each model sees the same tokens, and the explicit ones are widened until they have as many parameters. Bounded models
train with few iterations throughout; implicit ones share their run until the free phase. Held-out text is scored in
bits per byte, swept at once and token by token, and at several times the trained length. Models are saved for
``AutoModelForCausalLM``. An interrupted run continues from its last checkpoint.

    python examples/pretrain.py                                              # Shakespeare's plays, six small models
    python examples/pretrain.py --quick                                      # a minute, no download
    python examples/pretrain.py --corpus texts/ --models implicit-llama --d-model 512 --heads 8 --tokens 100000000
    torchrun --nproc_per_node 8 examples/pretrain.py --models llama3-130m-implicit --corpus hub:allenai/c4 --subset en
        --tokenizer EleutherAI/gpt-neox-20b --spread fsdp --device cuda --bfloat16 --length 2048 --tokens 10000000000
"""

import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from common import options as opt
from common.bits_per_byte import excerpts, rows_in_order, score
from common.language_models import curriculum_of, kind_of, lr_factor, spec_of
from common.loop import Settings, train
from common.pretrain_report import draw, table
from common.processes import make_accelerator
from common.run import Log, Progress, claim_folder, log_to, save_whole, write_json, write_text
from common.text import Corpus, load_corpus
from common.tokenizer import end_of_text, load_tokenizer, saved_tokenizer
from common.tokens import Batches, Stream, encode, tokenised
from datasets import Dataset, IterableDataset
from pretrain_options import FREE, WRITES, Options, read_options
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm
from deqseq.training import parameter_groups

log = logging.getLogger("examples")


@dataclass(frozen=True)
class Run:
    """What all models of a run share."""

    options: Options
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    documents: Dataset | IterableDataset
    held_out: Stream

    def train(self, name: str, folder: str, *, origin: str | None = None, until: int | None = None) -> dq.CausalLM:
        """Train a model, or go on; its numbers go to ``curves/FOLDER.jsonl``, the progress bar and the log."""
        options, accelerator, output = self.options, self.accelerator, Path(self.options.output)
        torch.manual_seed(options.seed)
        lm = spec_of(name, options, len(self.tokenizer)).build()
        optimizer = torch.optim.AdamW(parameter_groups(lm, options.weight_decay), options.lr, betas=(0.9, 0.95))
        ends = {"warmup": options.warmup, "decay": math.ceil(options.decay * options.steps)}
        factor = partial(lr_factor, steps=options.steps, **ends, floor=min(1e-5 / options.lr, 0.1))
        share = {"seed": options.seed, "rank": accelerator.process_index, "world": accelerator.num_processes}
        batches = Batches(self.documents, end_of_text(self.tokenizer), options.length, options.batch, **share)
        numbers = (options.steps, options.accumulate, options.clip, options.checkpoint_every)
        parts = (lm, optimizer, LambdaLR(optimizer, factor), batches, curriculum_of(name, options))
        settings = Settings(*numbers, seed=options.seed, compile=options.compile)
        place, first = output / "checkpoints" / folder, None if origin is None else output / "checkpoints" / origin
        shown, main = ("loss", "iterations", "converged"), accelerator.is_main_process
        curve = Log(output / "curves" / f"{folder}.jsonl", folder, until or options.steps, shown=shown, main=main)
        for update in train(accelerator, *parts, settings, place, origin=first, until=until):
            curve.add(asdict(update))
            log.info("%s %s", folder, update)
        curve.close()
        return lm

    def train_all(self) -> Iterator[tuple[str, dq.CausalLM]]:
        """Train every model; an implicit and a bounded one of a family share the run until the free phase begins."""
        for name in (options := self.options).models:
            family = kind_of(name)[1]
            siblings = {f"bounded-{family}", f"implicit-{family}"}
            trunk = f"trunk-{family}" if name in siblings <= set(options.models) else None
            if trunk is not None:
                self.train(f"bounded-{family}", trunk, until=options.first_free(f"implicit-{family}"))
            yield name, self.train(name, name, origin=trunk)

    def evaluate(self, name: str, lm: dq.CausalLM) -> list[dict[str, Any]]:
        """Held-out scores at the trained length, with each sweep, and at several times that."""
        options, (kind, family) = self.options, kind_of(name)
        lengths = [options.length * n for n in (1, *options.extrapolation)]
        cases: list[tuple[int, str, dict[str, Any]]] = [(length, "single pass", {}) for length in lengths]
        if kind != "explicit":
            cases = [(length, "simultaneous", {"sweep": dq.Simultaneous()}) for length in lengths]
            cases.insert(1, (options.length, "sequential", {"sweep": dq.Sequential()}))
        parameters = dq.parameter_count(spec_of(name, options, len(self.tokenizer)))
        shared = {"model": name, "kind": kind, "family": family, "seed": options.seed, "parameters": parameters}
        shared |= {"train_tokens": options.steps * options.step_tokens}
        found, world, first = [], self.accelerator.num_processes, self.accelerator.is_main_process
        for length, sweep, how in cases:
            rows = excerpts(rows_in_order(self.held_out, length), options.eval_tokens, lengths)
            batch = max(1, options.batch * options.length // length // world) * world
            bar = Progress(f"{name} {sweep} {length}", len(rows.inputs), shown=first)
            result = score(lm, rows, batch_size=batch, accelerator=self.accelerator, progress=bar.to, **how)
            bar.close()
            row = shared | {"sweep": sweep, "length": length, "bits_per_byte": result.bits_per_byte}
            row |= {"perplexity": result.perplexity, "tokens": result.tokens, "self_iterations": result.iterations}
            row |= {"updates": result.updates, "converged": result.converged}
            log.info("%s", row)
            found.append(row | {"by_position": result.by_position.tolist()})
        return found

    def save(self, name: str, lm: dq.CausalLM) -> str:
        """Write a directory that ``AutoModelForCausalLM`` loads; returns a continuation of ``--sample``."""
        options, tokenizer, folder = self.options, self.tokenizer, Path(self.options.output) / "models" / name
        weights = get_model_state_dict(lm, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if not self.accelerator.is_main_process:
            return ""
        whole = spec_of(name, options, len(tokenizer)).build()
        whole.load_state_dict(weights)
        curriculum_of(name, options).at(1.0).apply(whole)
        end = end_of_text(tokenizer)
        save_whole(folder, from_causal_lm(whole, eos_token_id=end, bos_token_id=end), tokenizer)
        ids = torch.tensor([tokenizer(options.sample).input_ids])
        made = whole.generate(ids, max_new_tokens=options.sample_tokens, temperature=0.8, top_p=0.95, seed=options.seed)
        return str(tokenizer.decode(made.tokens[0]))


def prepare(options: Options, accelerator: Accelerator, corpus: Corpus) -> Run:
    """Encode the corpus; the main process trains the tokenizer, the others follow.

    Raises:
        SystemExit: the corpus is shorter than a row.
    """
    main, folder = accelerator.is_main_process, Path(options.output) / "tokenizer"
    with accelerator.main_process_first():
        texts = (record["text"] for record in islice(corpus.train, 20_000))
        tokenizer = saved_tokenizer(folder, options.tokenizer, texts, options.vocab_size, save=main)
        documents = tokenised(corpus.train, tokenizer)
    with opt.naming(f"--corpus {options.corpus}, --length {options.length}"):
        next(Batches(documents, end_of_text(tokenizer), options.length, batch_size=1))
        return Run(options, accelerator, tokenizer, documents, encode(corpus.held_out, tokenizer))


def main(arguments: list[str]) -> None:
    """Train, evaluate, and write models, table, figure, samples and numbers."""
    options = read_options(arguments)
    accelerator = make_accelerator(options.device, bfloat16=options.bfloat16, fsdp=options.spread == "fsdp")
    if options.batch % accelerator.num_processes:
        raise SystemExit(f"--batch must be a multiple of the processes {accelerator.num_processes}: {options.batch}")
    accelerator.print(f"reading {options.corpus}; tokenizer: {options.tokenizer}", flush=True)
    with accelerator.main_process_first():
        with opt.naming(f"--corpus {options.corpus}" + f", --held-out {options.held_out}" * bool(options.held_out)):
            held_out, subset, field = options.held_out, options.subset, options.text_field
            corpus = load_corpus(options.corpus, held_out=held_out, subset=subset, field=field)
        with opt.naming("--tokenizer"):
            if options.tokenizer != "bpe":
                load_tokenizer(options.tokenizer)
    output = Path(options.output)
    if accelerator.is_main_process:
        claim_folder(output, "pretrain", asdict(options), fresh=options.fresh, free=FREE, writes=WRITES)
        log_to(output / "log.txt")
    accelerator.wait_for_everyone()
    run, rows, samples = prepare(options, accelerator, corpus), [], []
    for name, lm in run.train_all():
        rows += run.evaluate(name, lm)
        samples.append(f"# {name}\n\n{run.save(name, lm)}\n")
    if accelerator.is_main_process:
        text = table(rows) + "\n\nA --quick run: too few updates to compare the models." * options.quick
        write_json(output / "results.json", rows)
        write_text(output / "table.md", f"{text}\n")
        write_text(output / "samples.md", "\n".join(samples))
        draw(output, rows, options.step_tokens, options.length)
        print(f"\nheld-out bits per byte (mean iterations); {options.steps} updates; results in {output}/\n")
        print(text)
    accelerator.wait_for_everyone()  # a process that ends while another still talks to it can abort it
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1:])
