"""Tiny saved models with tokenizers of every kind, and their log-likelihoods computed by hand."""

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

import deqseq as dq

sys.path.append(str(Path(__file__).parents[1] / "integrations" / "huggingface"))

from common.tokenizer import train_tokenizer
from hf_models import made

SCRIPT = Path(__file__).parents[2] / "examples" / "evaluate.py"
STORIES = [
    f"{name} has a {colour} {thing}. {weather} {name} met {friend}. Then {name} gave {friend} the {thing}."
    for name, friend, thing in (("Ann", "Bo", "ball"), ("Bo", "Christopher", "umbrella"), ("Christopher", "Ann", "hat"))
    for colour in ("red", "blue")
    for weather in ("It rained.", "The sun was shining all day long.")
]
Mamba2, Llama = "mamba2", "llama"
KINDS = {
    "Mamba2-implicit": (Mamba2, True),
    "Mamba2-explicit": (Mamba2, False),
    "Llama-implicit": (Llama, True),
    "Llama-explicit": (Llama, False),
}


def script():
    """examples/evaluate.py as a module, under another name: lm-eval imports a package that is called evaluate."""
    if "evaluate_script" not in sys.modules:
        spec = importlib.util.spec_from_file_location("evaluate_script", SCRIPT)
        sys.modules["evaluate_script"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["evaluate_script"])
    return sys.modules["evaluate_script"]


@cache
def tokenizer(kind="plain"):
    """A byte-level BPE whose BOS token nobody asks for; ``adds bos``; ``adds eos``; or ``none``: no special token."""
    made = train_tokenizer(STORIES, 300)
    if kind == "plain":
        return made
    if kind == "none":
        made.bos_token = made.eos_token = made.pad_token = None
        return made
    single = {"adds bos": "<|endoftext|> $A", "adds eos": "$A <|endoftext|>"}[kind]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[("<|endoftext|>", 0)])
    return made


def save(folder, kind, *, implicit, words="plain", **fields):
    """A model in float64 whose solves converge, with a tokenizer, as save_pretrained leaves them."""
    text, solve = tokenizer(words), dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-7, max_steps=200))
    fields = {"vocab_size": len(text), "solve": solve} | fields
    made(kind, implicit=implicit, **fields).save_pretrained(folder)
    text.save_pretrained(folder)
    return str(folder)


def stories(folder):
    """The stories as a file of documents."""
    path = Path(folder) / "stories.txt"
    path.write_text("\n\n".join(STORIES))
    return str(path)


class ByHand:
    """A saved model, asked about one text at a time."""

    def __init__(self, folder, prefix=(), **solve):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.prefix, self.solve, self.outputs = list(prefix), solve, {}

    def predicted(self, ids):
        """Log-probabilities of the next token after each one, (length, vocabulary)."""
        with torch.no_grad():
            output = self.model(torch.tensor([ids]), **self.solve)
        self.outputs[tuple(ids)] = output
        return output.logits[0].log_softmax(-1)

    def scored(self, before, after):
        """Log-probability of tokens behind others, and whether each is the likeliest."""
        table = self.predicted([*before, *after[:-1]])[-len(after) :]
        score = sum(row[token].item() for row, token in zip(table, after, strict=True))
        return score, table.argmax(-1).tolist() == after

    def continuation(self, words, context, target):
        """The same of a text behind another."""
        whole, before = (words.encode(text, add_special_tokens=False) for text in (context + target, context))
        return self.scored(self.prefix + before, whole[len(before) :])


def whole_texts(tmp_path, texts):
    """A task of one's own: perplexity of whole texts."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (folder / "own.yaml").write_text(json.dumps(task))
    return folder
