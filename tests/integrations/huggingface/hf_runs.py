"""Small models and a task, for the tests of the Trainer and for the script under torchrun."""

import torch
from hf_models import configured, contract
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

import deqseq as dq
from deqseq.integrations.huggingface import DeqseqForCausalLM

PAD = 0
VOCABULARY = 13
SOLVE = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-6, max_steps=64), dq.Phantom(2))
NAMES = ("mamba2", "llama")


def small(name, **fields):
    """A model of this family in float32 whose map contracts, the same one every time."""
    backbone = {"d_model": 16} | fields.pop("backbone", {})
    defaults = {"backbone": backbone, "solve": SOLVE, "pad_token_id": PAD}
    torch.manual_seed(0)
    return contract(DeqseqForCausalLM(configured(name, **defaults | fields)))


def rows(count, first=0):
    """Arithmetic sequences modulo 12, of 4 to 9 tokens."""
    numbers = range(first, first + count)
    return [
        {"input_ids": [1 + (i + (1 + i % 3) * t) % 12 for t in range(4 + i * 5 % 6)]}
        for i in numbers
    ]


def collate(batch, side="right"):
    """Rows padded to the longest of them, with their labels; without a tokenizer."""
    tokens = [torch.tensor(row["input_ids"]) for row in batch]
    ids = pad_sequence(tokens, batch_first=True, padding_value=PAD, padding_side=side)
    real = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


def trainer(model, folder, **changes):
    """A Trainer of twelve steps of four rows on a CPU that logs every step."""
    options = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    data = {
        "data_collator": collate,
        "train_dataset": rows(48),
        "eval_dataset": rows(10, first=100),
    }
    for name in {*data, "compute_metrics"} & changes.keys():
        data[name] = changes.pop(name)
    return Trainer(model, TrainingArguments(str(folder), **options | changes), **data)


def losses(run):
    """The training loss of every step that was logged."""
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def iterations(output):
    """How many each token took; nothing of an explicit model."""
    return [] if output.stats is None else output.stats.iterations.tolist()


class Witness:
    """Remembers the rows that a model was given in training, and how many iterations each took."""

    def __init__(self, model):
        self.seen = []
        self.steps = []
        model.register_forward_hook(self, with_kwargs=True)

    def __call__(self, model, _, given, output):
        if model.training:
            self.seen += [row[row != PAD].tolist() for row in given["input_ids"]]
            self.steps += iterations(output)


def by_hand(model, steps, rank=0, ranks=1):
    """AdamW on four rows a step, of which each process takes its share.

    Returns its losses, whose mean over processes is that of the whole batch, and the iterations of
    its rows.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shares = []
    taken = []
    share = 4 // ranks
    for step in range(steps):
        four = rows(4, first=4 * step)
        batch = collate(four[rank * share : (rank + 1) * share])
        # padding is behind and has no label
        output = model(batch["input_ids"], labels=batch["labels"])
        mine, all_labels = ((x["labels"][:, 1:] != -100).sum() for x in (batch, collate(four)))
        loss = output.loss * mine / (all_labels / ranks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shares.append(loss.item())
        taken += iterations(output)
    return shares, taken
