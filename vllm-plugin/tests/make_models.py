"""Small random models, and the tokens that deqseq generates: ``make_models.py FOLDER``.

Runs where deqseq is installed. ``compare.py`` reads the folder where vLLM is.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, retrofit

VOCABULARY, WIDTH, NEW = 320, 64, 16
STOP = dq.Stop(rtol=1e-5, max_steps=500)
NAIVE = dq.SolveConfig(dq.Naive(), STOP)
LENGTHS = (1, 2, 3, 5, 8, 13, 17, 31, 32, 33, 50, 64, 90, 128, 200)


def llama(layers: int = 1, **options: Any) -> dq.LlamaConfig:
    """Layers of the tests' width."""
    return dq.LlamaConfig(WIDTH, layers, n_heads=2, n_kv_heads=1, mlp_width=128, **options)


def contracting(lm: dq.CausalLM) -> dq.CausalLM:
    """A random model whose iteration has a fixed point, and whose predictions are far apart."""
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if weight.ndim == 2 and "original" not in name:
                weight.normal_(0, 0.06)
            if name.endswith("bias"):
                weight.normal_(0, 0.3)
            if "post_" in name:  # norms, in OLMo 2 of what is added to the state
                weight.fill_(0.3)
            if name.endswith("original0"):  # magnitudes of normalised weights
                weight.mul_(3 if "injection" in name else 0.5)
        lm.embedding.weight.normal_(0, 0.3)
        if lm.head is not None:
            lm.head.weight.normal_(0, 0.3)
        for part in lm.modules():
            if isinstance(part, dq.ConcatInjection):
                width = part.d_model
                state = 0.3 * torch.randn(width, width) / width**0.5
                part.weight.copy_(torch.cat([state, torch.eye(width)], dim=1))
            if isinstance(part, dq.DecayInjection):
                part.projection.weight.copy_(torch.eye(WIDTH))
    return lm.eval()


def implicit(
    solve: dq.SolveConfig | None = dq.SolveConfig(dq.Relaxed(0.8), STOP), **fields: Any
) -> dq.CausalLM:
    """Layers of this library: implicit, or without ``solve`` run once or several times."""
    backbone = fields.pop("backbone", llama())
    return contracting(dq.LanguageModelSpec(VOCABULARY, backbone, solve, **fields).build())


def retrofitted(family: str, injection: str = "concat", **options: Any) -> dq.CausalLM:
    """The middle of a transformers decoder, iterated."""
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, num_hidden_layers=4, **sizes, **tokens, **options
    )
    model = AutoModelForCausalLM.from_config(config)
    return contracting(
        retrofit(model, prelude=1, core=2, coda=1, injection=injection, eval_solve=NAIVE)
    )


def failing() -> dq.CausalLM:
    """A model in which token 2 makes a request diverge, and token 3 makes it oscillate.

    The state's last two channels belong to these tokens: no layer writes to them, and the map
    doubles one and turns the sign of the other.
    """
    backbone = llama(injection=False, weight_norm=False, final_norm=False)
    lm = implicit(NAIVE, backbone=backbone, injection="concat", tied=False)
    core: Any = lm.model
    with torch.no_grad():
        state = core.backbone.injection.weight[:, :WIDTH]
        state[-2:], state[:, -2:] = 0, 0
        state[-2, -2], state[-1, -1] = 2, -1
        for layer in core.backbone.backbone.layers:
            layer.self_attn.o_proj.weight[-2:] = 0
            layer.mlp.down_proj.weight[-2:] = 0
        tokens, head = lm.embedding.weight, lm.head
        tokens[:, -2:] = 0
        tokens[2, -2], tokens[3, -1] = 1, 1
        assert head is not None
        head.weight[:5] = 0  # are not chosen
    return lm


def slot_per_step(lm: dq.CausalLM, steps: int) -> dq.CausalLM:
    """The same weights, looped a fixed number of times."""
    model: Any = lm.model
    core = dq.ExplicitModel(dq.Looped(model.core.backbone, steps, start="zero"))
    vocabulary = lm.embedding.num_embeddings
    looped = dq.CausalLM(
        vocabulary, dq.RecurrentDepth(model.prelude, core, model.coda), tied=lm.head is None
    )
    looped.embedding, looped.head = lm.embedding, lm.head
    return looped.eval()


def models() -> dict[str, dq.CausalLM]:
    """All models, by name."""
    bare, closed = {"injection": False, "weight_norm": False}, {"norms": "closed", "qk_bias": True}
    outer = llama(**bare, **closed, final_norm=True)
    inner = llama(2, **bare, **closed, final_norm=False)
    concat, stretched = retrofitted("llama"), dq.layers.RotaryScaling(original_length=64)
    return {
        "implicit": implicit(backbone=llama(skip_scale=0.25)),
        "implicit-add": implicit(
            replace(NAIVE, start="input"),
            backbone=llama(2, **bare, rope_scaling=stretched),
            injection="add",
            tied=False,
        ),
        "explicit": implicit(None, backbone=llama(2), tied=False),
        "llama-concat": concat,
        "llama-decay": retrofitted("llama", "decay", attention_bias=True),
        "llama-looped": slot_per_step(concat, 8),
        "mistral-concat": retrofitted("mistral", sliding_window=None),
        "qwen2-concat": retrofitted("qwen2"),
        "qwen3-decay": retrofitted("qwen3", "decay", head_dim=32),
        "olmo2-concat": retrofitted("olmo2"),
        "huginn": implicit(
            NAIVE,
            backbone=inner,
            prelude=replace(outer, final_norm=False),
            coda=outer,
            norm="coda",
            injection="concat",
            embedding_scale=8.0,
            tied=False,
            logit_softcap=20.0,
        ),
        "ouro": implicit(
            None, backbone=llama(2, **bare, norms="sandwich", qk_norm=True), steps=4, tied=False
        ),
    }


def reference(
    lm: dq.CausalLM, batches: Sequence[torch.Tensor], **solve: Any
) -> list[dict[str, Any]]:
    """What deqseq generates, one token after another."""
    rows = []
    for prompts in batches:
        made = lm.generate(prompts, max_new_tokens=NEW, window=1, **solve)
        if not solve and made.converged is not None and not made.converged.all():
            raise RuntimeError("a model of the tests must converge")
        logits = lm(torch.cat([prompts, made.tokens], dim=1)).logits[:, prompts.shape[1] - 1 : -1]
        top = logits.topk(2, dim=-1).values
        gaps, logprobs = (top[..., 0] - top[..., 1]).amin(dim=1), logits.log_softmax(-1).amax(-1)
        for row, prompt in enumerate(prompts):
            # after a fixed number of iterations, the logits above are not those of generation
            compared = None if solve else logprobs[row].tolist()
            numbers = {"prompt": prompt, "tokens": made.tokens[row], "gap": gaps[row]}
            rows.append(
                {name: value.tolist() for name, value in numbers.items()} | {"logprobs": compared}
            )
    return rows


def save_for_throughput(folder: Path) -> None:
    """A larger Llama: with its middle layers iterated, unlooped, and with a slot for each loop."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
    }
    theirs = LlamaForCausalLM(
        LlamaConfig(vocab_size=4096, num_hidden_layers=12, head_dim=64, **sizes)
    ).eval()
    solve = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-3))
    lm = contracting(retrofit(theirs, prelude=4, core=4, coda=4, eval_solve=solve))
    theirs.save_pretrained(folder / "speed-once")  # the same layers
    from_causal_lm(lm, eos_token_id=1).save_pretrained(folder / "speed-fixed")
    prompts = torch.randint(2, 4096, (32, 32))
    (folder / "speed-fixed" / "prompts.json").write_text(json.dumps(prompts.tolist()))
    made = lm.generate(prompts[:4], max_new_tokens=16, window=1)
    assert made.iterations is not None
    loops = round(made.iterations.float().mean().item())
    from_causal_lm(slot_per_step(lm, loops), eos_token_id=1).save_pretrained(folder / "speed-loops")


def main(folder: Path) -> None:
    """Save every model, and its tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCABULARY, (4, length), generator=draws) for length in LENGTHS]
    for name, lm in models().items():
        from_causal_lm(lm, bos_token_id=0, eos_token_id=1).save_pretrained(folder / name)
        (folder / name / "reference.json").write_text(json.dumps(reference(lm, prompts)))
        if name == "llama-concat":
            rows = reference(lm, prompts, stop=dq.Stop.exactly(8), sweep=dq.Simultaneous())
            (folder / name / "exactly.json").write_text(json.dumps(rows))
        print(name, flush=True)
    lm, usual = failing(), [batch + 5 * (batch < 5) for batch in prompts[:8]]
    from_causal_lm(lm, bos_token_id=0, eos_token_id=1).save_pretrained(folder / "failing")
    (folder / "failing" / "usual.json").write_text(json.dumps(reference(lm, usual)))
    refused = dq.LanguageModelSpec(VOCABULARY, dq.Mamba2Config(WIDTH, headdim=32))
    from_causal_lm(refused.build()).save_pretrained(folder / "refused-mamba2")
    refused = dq.LanguageModelSpec(VOCABULARY, llama(), replace(NAIVE, solver=dq.Anderson()))
    from_causal_lm(refused.build()).save_pretrained(folder / "refused-solver")
    save_for_throughput(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
