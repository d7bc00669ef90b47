"""Models that several benchmarks share, and loops over their blocks as written by hand."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import deqseq as dq
from deqseq.layers import with_weights
from deqseq.tasks import WordProblem, generators, parse_group
from deqseq.training import Curriculum, bounded, free, parameter_groups

sys.path.append(str(Path(__file__).parents[1] / "examples"))

VOCABULARY = 1000
KINDS = ("Mamba2", "Llama")
TASKS = {
    "parity": WordProblem(parse_group("Z2")),
    "A5": WordProblem(parse_group("A5"), generators(parse_group("A5"), 2)),
}
RTOL = 1e-2  # of every token that a trained model solves


class Trained(NamedTuple):
    """A model that comes with the library, and its task."""

    name: str
    lm: dq.CausalLM
    task: WordProblem


def trained(name: str) -> Trained:
    """The model of parity, or of A5 from two generators; trained at lengths up to 16."""
    return Trained(name, dq.load_example(name.lower()), TASKS[name])


def stop_for(sweep: dq.Sweep, length: int) -> dq.Stop:
    """One tolerance for all; the budget is that of a sequence, of a chunk, or of a token."""
    budget = max(64, 8 * length) if isinstance(sweep, dq.Simultaneous) else 64
    return dq.Stop(rtol=RTOL, max_steps=budget)


def language_model(kind: str, width: int = 256, solve: dq.SolveConfig | None = None) -> dq.CausalLM:
    """Two blocks with random weights."""
    torch.manual_seed(0)
    if kind == "Mamba2":
        backbone = dq.Mamba2(dq.Mamba2Config(d_model=width, n_layers=2, d_state=64, headdim=64))
    else:
        backbone = dq.Llama(dq.LlamaConfig(d_model=width, n_layers=2, n_heads=width // 64))
    return dq.CausalLM(VOCABULARY, dq.ImplicitModel(backbone, solve or dq.SolveConfig())).eval()


def random_ids(batch: int, length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    """Tokens without any meaning, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator, device="cpu")
    return ids.to(torch.get_default_device())


def character_models(quick: bool) -> tuple[dict[str, dq.CausalLM], Tensor]:
    """Three models of Shakespeare's plays, a character per token, and held-out text, ``(8, 128)``.

    They are the library's ``text``, and two that are trained here by the paper's curriculum, 600
    updates of 16 rows of 128 characters; a few of the rows of ``text`` itself if ``quick``.
    """
    text = dq.load_example("text")
    if quick:
        start = torch.full((8, 1), ord("\n"))
        train = held_out = text.generate(start, max_new_tokens=128, temperature=1.0, seed=0).tokens
    else:
        from corpus import download_plays, read_plays  # needs datasets and tokenizers

        plays = read_plays(download_plays())
        known = [str(record["text"]) for record in plays.train]  # pyright: ignore[reportArgumentType, reportCallIssue]
        train, held_out = (
            torch.tensor(list("".join(works).encode())).unfold(0, 128, 128)
            for works in (known, plays.held_out)
        )
        held_out = held_out[:: len(held_out) // 8][:8]
    attention = dq.LlamaConfig(
        d_model=96, n_heads=3, mlp_width=256, weight_norm=False, injection=False
    )
    llama = dq.LanguageModelSpec(
        128, dq.LlamaConfig(d_model=96, n_layers=2, n_heads=3, mlp_width=256)
    )
    parts = replace(llama, backbone=attention, injection="add", prelude=attention, coda=attention)
    models = {"llama": llama.build(), "recurrent depth": parts.build()}
    return {"text": text} | {
        name: _trained(lm, train, 2 if quick else 600) for name, lm in models.items()
    }, held_out


def _trained(lm: dq.CausalLM, rows: Tensor, steps: int) -> dq.CausalLM:
    base, generator = dq.SolveConfig(dq.Relaxed(0.8)), torch.Generator().manual_seed(0)
    curriculum = Curriculum((bounded(4, 1, until=0.7, base=base), free(32, 4, base=base)))
    optimizer = torch.optim.AdamW(parameter_groups(lm, 0.1), lr=1e-3, betas=(0.9, 0.95))
    for step in range(steps):
        curriculum.at(step / steps).apply(lm.train())
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 2e-3 * min(
            1, step / 50, 3 * (1 - step / steps)
        )
        drawn = torch.randint(len(rows), (16,), generator=generator, device="cpu")
        ids = rows[drawn.to(rows.device)]
        loss = lm(ids, labels=ids).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
    assert lm.core is not None
    lm.core.solve = dq.SolveConfig()
    return lm.eval()


def block_of(lm: dq.CausalLM) -> dq.Backbone[Any]:
    """What a model iterates."""
    assert isinstance(lm.model, dq.ImplicitModel)
    return lm.model.backbone


def iterated(backbone: dq.Backbone[Any], x: Tensor, plain: int, differentiated: int = 0) -> Tensor:
    """The state after some evaluations without a graph and some with one."""
    backbone = with_weights(backbone)
    inputs, z = backbone.prepare(x), torch.zeros_like(x, requires_grad=False)
    with torch.no_grad():
        for _ in range(plain):
            z, _ = backbone(z, inputs)
    for _ in range(differentiated):
        z, _ = backbone(z, inputs)
    return z


@torch.no_grad()
def one_by_one(
    backbone: dq.Backbone[Any], x: Tensor, cache: Any, tokens: int, iterations: int
) -> None:
    """So many evaluations for each of so many tokens ``x``, with a growing cache."""
    backbone = with_weights(backbone)
    for _ in range(tokens):
        cache, z, aux = cache.reserve(1), torch.zeros_like(x), None
        inputs = backbone.prepare(x, cache)
        for step in range(iterations):
            z, aux = backbone(z, inputs, cache, need_aux=step == iterations - 1)
        cache = backbone.advance(cache, aux, 1)
