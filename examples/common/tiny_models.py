"""Two tiny models, trained for seconds on stories from a grammar: what ``examples/evaluate.py --quick`` evaluates."""

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import OneCycleLR

import deqseq as dq
from common.loop import Settings, train
from common.processes import make_accelerator
from common.run import Progress
from common.tokenizer import train_tokenizer
from common.tokens import Batches, tokenised
from deqseq.integrations.huggingface import from_causal_lm
from deqseq.training import Curriculum, Phase

THINGS = {"Anna": "ball", "Ben": "boat", "Clara": "book", "David": "drum"}
THINGS |= {"Emma": "kite", "Felix": "lamp", "Greta": "ring", "Hugo": "shell"}
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
WEATHER = ("It was cold.", "It was dark.", "The sun shone.", "It rained.", "Snow fell.", "The wind blew.")
STEPS, PEAK = 250, 1e-2


def tiny_story(rng: random.Random) -> str:
    """Four sentences. The last word is the thing of the person in the first; everybody has a thing of their own."""
    name, friend = rng.sample(list(THINGS), 2)
    first, last = (
        f"{name} has a {rng.choice(COLOURS)} {THINGS[name]}.",
        f"Then {name} gave {friend} the {THINGS[name]}.",
    )
    return f"{first} {rng.choice(WEATHER)} {name} met {friend}. {last}"


def train_tiny_models(output: Path) -> tuple[tuple[str, ...], str]:
    """Train an implicit and an explicit Mamba2 on the same tiny stories for seconds, and save them.

    Returns:
        The models' folders, and a file of stories that they have not seen.
    """
    rng = random.Random(0)
    seen = [tiny_story(rng) for _ in range(800)]
    new = [text for text in dict.fromkeys(tiny_story(rng) for _ in range(400)) if text not in set(seen)]
    held_out = output / "stories.jsonl"
    held_out.write_text("".join(json.dumps({"text": text}) + "\n" for text in new))
    tokenizer = train_tokenizer(seen, vocab_size=370)
    sizes = dq.Mamba2Config(d_model=64, n_layers=1, d_state=16, headdim=32)
    solve = dq.SolveConfig(dq.Relaxed(0.8), dq.Stop(rtol=0.05, max_steps=6), dq.Phantom(3, 0.8))
    phase = Phase("free", 1.0, solve, replace(solve, stop=dq.Stop(rtol=1e-2, max_steps=64)))
    spec = dq.LanguageModelSpec(len(tokenizer), sizes, phase.solve, phase.eval_solve)
    eos, documents = tokenizer.eos_token_id, tokenised(Dataset.from_dict({"text": seen}), tokenizer)
    assert isinstance(eos, int)
    accelerator, folders = make_accelerator(), (output / "implicit", output / "explicit")
    for folder, kind in zip(folders, (spec, spec.explicit()), strict=True):
        torch.manual_seed(0)
        lm = kind.build()
        optimizer = torch.optim.AdamW(lm.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0)
        schedule = OneCycleLR(optimizer, PEAK, STEPS, pct_start=0.1)
        batches = Batches(documents, eos, length=24, batch_size=16)
        settings, progress = Settings(STEPS, checkpoint_every=STEPS), Progress(f"train {folder.name}", STEPS)
        run = (lm, optimizer, schedule, batches, Curriculum((phase,)), settings, folder / "training")
        for update in train(accelerator, *run):
            progress.to(update.step, loss=update.loss)
        progress.close()
        from_causal_lm(lm.eval(), eos_token_id=eos).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return tuple(map(str, folders)), str(held_out)
