"""What examples/evaluate.py --quick evaluates: two tiny models, trained for seconds on stories from a grammar."""

import json
import random
from pathlib import Path

import torch
from tqdm import tqdm

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm
from deqseq.tasks.text import PackedText
from deqseq.tasks.text.tokenizer import TokenizerEncoder, train_tokenizer

OWNED = {
    "Anna": "ball",
    "Ben": "boat",
    "Clara": "book",
    "David": "drum",
    "Emma": "kite",
    "Felix": "lamp",
    "Greta": "ring",
    "Hugo": "shell",
}
COLOURS = ["red", "blue", "green", "white", "black", "yellow"]
TIMES = ["It was cold.", "It was dark.", "The sun shone.", "It rained.", "Snow fell.", "The wind blew."]
STEPS, BATCH, LENGTH, PEAK = 250, 16, 24, 1e-2


def story(rng: random.Random) -> str:
    """Four sentences; the last word is the thing of the first, and everybody has a thing of their own."""
    name, friend = rng.sample(list(OWNED), 2)
    first, last = f"{name} has a {rng.choice(COLOURS)} {OWNED[name]}.", f"Then {name} gave {friend} the {OWNED[name]}."
    return f"{first} {rng.choice(TIMES)} {name} met {friend}. {last}"


def train_and_save(output: Path) -> tuple[tuple[str, ...], str]:
    """Train an implicit Mamba2 and an explicit one on the same stories, and save them.

    Args:
        output: folder for models and stories.

    Returns:
        The models' folders, and a file of stories that they have not seen.
    """
    rng = random.Random(0)
    seen = [story(rng) for _ in range(800)]
    new = [text for text in dict.fromkeys(story(rng) for _ in range(400)) if text not in set(seen)]
    held_out = output / "stories.jsonl"
    held_out.write_text("".join(json.dumps({"text": text}) + "\n" for text in new))
    tokenizer = train_tokenizer(seen, vocab_size=370)
    encoder = TokenizerEncoder(tokenizer)
    text = PackedText.pack(seen, encoder, LENGTH)
    sizes = dq.Mamba2Config(d_model=64, n_layers=1, d_state=16, headdim=32)
    solving = dq.Solving(
        stop=dq.Stop(rtol=0.05, max_steps=6), gradient=dq.Phantom(3, 0.8), eval_stop=dq.Stop(rtol=1e-2, max_steps=64)
    )
    spec = dq.LanguageModelSpec(encoder.vocab_size, sizes, solving)
    for name, kind in (("implicit", spec), ("explicit", spec.explicit())):
        torch.manual_seed(0)
        lm = train(kind.build(), text, name)
        from_causal_lm(lm, eos_token_id=encoder.eos).save_pretrained(output / name)
        tokenizer.save_pretrained(output / name)
    return (str(output / "implicit"), str(output / "explicit")), str(held_out)


def train(lm: dq.CausalLM, text: PackedText, name: str) -> dq.CausalLM:
    """A few hundred steps at a learning rate that falls to zero."""
    optimizer = torch.optim.AdamW(lm.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, STEPS, pct_start=0.1)
    for step in (bar := tqdm(range(STEPS), desc=f"train {name}", disable=None)):
        batch = text.batch(step, batch_size=BATCH, seed=0)
        loss = lm(batch.inputs, targets=batch.targets).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return lm.eval()
