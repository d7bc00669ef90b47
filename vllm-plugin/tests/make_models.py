"""Small models with random weights, saved by deqseq, and the tokens that deqseq generates: ``make_models.py FOLDER``.

Runs where deqseq is installed. ``compare.py`` reads the folder where vLLM is.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, retrofit

VOCABULARY, WIDTH, NEW = 320, 64, 16
STOP = dq.Stop(rtol=1e-5, max_steps=500)
LENGTHS = (1, 2, 3, 5, 8, 13, 17, 31, 32, 33, 50, 64, 90, 128, 200)


def llama(layers: int = 1, **options: Any) -> dq.LlamaConfig:
    """Layers of the tests' width."""
    return dq.LlamaConfig(WIDTH, layers, n_heads=2, n_kv_heads=1, mlp_width=128, **options)


def contracting(lm: dq.CausalLM) -> dq.CausalLM:
    """The model with random weights whose iteration has a fixed point, and whose predictions are far apart."""
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if weight.ndim == 2 and "original" not in name:
                weight.normal_(0, 0.06)
            if name.endswith("bias"):
                weight.normal_(0, 0.3)
            if name.endswith("original0"):  # magnitudes of normalised weights
                weight.mul_(3 if "injection" in name else 0.5)
        lm.embedding.weight.normal_(0, 0.3)
        if lm.head is not None:
            lm.head.weight.normal_(0, 0.3)
        for part in lm.modules():
            if isinstance(part, dq.ConcatInjection):
                half = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
                part.weight.copy_(torch.cat([0.3 * half, torch.eye(WIDTH)], dim=1))
            if isinstance(part, dq.DecayInjection):
                part.projection.weight.copy_(torch.eye(WIDTH))
    return lm.eval()


def implicit(solver: Any = dq.Relaxed(0.8), **options: Any) -> dq.CausalLM:
    """Implicit layers, with the injection into queries, keys and values."""
    spec = dq.LanguageModelSpec(VOCABULARY, llama(**options), dq.SolveConfig(solver, STOP))
    return contracting(spec.build())


def looped(family: str, injection: str = "concat", **options: Any) -> dq.CausalLM:
    """The middle of a transformers decoder, iterated."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, num_hidden_layers=4, **sizes, **tokens, **options)
    solve = dq.SolveConfig(dq.Naive(), STOP)
    made = retrofit(
        AutoModelForCausalLM.from_config(config), prelude=1, core=2, coda=1, injection=injection, eval_solve=solve
    )
    return contracting(made)


def models() -> dict[str, dq.CausalLM]:
    """All models, by name."""
    return {
        "implicit": implicit(),
        "llama-concat": looped("llama"),
    }


def main(folder: Path) -> None:
    """Save every model, and its tokens."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCABULARY, (1, n), generator=draws) for n in LENGTHS * 4]
    for name, lm in models().items():
        from_causal_lm(lm, bos_token_id=0, eos_token_id=1).save_pretrained(folder / name)
        rows = []
        for prompt in prompts:
            made = lm.generate(prompt, max_new_tokens=NEW, window=1)
            whole = torch.cat([prompt, made.tokens], dim=1)
            logits = lm(whole).logits[0, prompt.shape[1] - 1 : -1]
            top = logits.topk(2, dim=-1).values
            rows.append(
                {
                    "prompt": prompt[0].tolist(),
                    "tokens": made.tokens[0].tolist(),
                    "logprobs": logits.log_softmax(-1).amax(-1).tolist(),
                    "gap": (top[:, 0] - top[:, 1]).min().item(),
                    "iterations": None if made.iterations is None else made.iterations[0].tolist(),
                    "converged": made.converged is None or bool(made.converged.all()),
                }
            )
        (folder / name / "reference.json").write_text(json.dumps(rows))
        print(f"{name}: up to {max(max(row['iterations'] or [0]) for row in rows)} iterations", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
