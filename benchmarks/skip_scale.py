"""How much of the state the residual path needs, and how fast a text model then converges.

One block of Mamba2 or Llama, 96 wide, predicts the next character of Shakespeare's plays: 2,400
updates of 24 rows of 128 characters, with a whole residual path (``skip_scale`` 1), a quarter of
it, and on one seed a tenth. Each is solved by ``Naive`` and by ``Adaptive``, which may take longer
steps than 1, on plays that are held out: iterations of a token, one token at a time, and
evaluations and updates of a token in a window of 8; how many of 96 continuations by 64 characters
are those of one token at a time; and the spectral radius at the last of 48 tokens.

A model is trained in 12 minutes on one core; its weights are kept in the folder of ``--weights``,
and a later run goes on from there.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from harness import Row, command_line, report, value_row
from torch import Tensor
from tqdm import trange

import deqseq as dq
from deqseq.diagnostics import model_spectral_radius
from deqseq.training import Curriculum, bounded, check_finite, free

SCALES = {0: (1.0, 0.25, 0.1), 1: (1.0, 0.25), 2: (1.0, 0.25)}  # of each seed
WINDOWS, STEPS = (1, 4, 8, 16), 2400
BACKBONES = {
    "mamba2": dq.Mamba2Config(d_model=96, d_state=16, headdim=32),
    "llama": dq.LlamaConfig(d_model=96, n_heads=4, mlp_width=192),
}
LICENCE = 3000
"""Characters at the beginning of the held-out plays that are none of Shakespeare's."""
DAMPED = dq.SolveConfig(dq.Relaxed(0.8))
PHASES = bounded(4, 1, until=0.8, base=DAMPED), free(24, 4, rtol=0.03, base=DAMPED)


def plays(quick: bool) -> tuple[Tensor, Tensor]:
    """The characters to train on, and those of the plays that are held out."""
    if quick:
        made = torch.arange(64).repeat(200)
        return made, made
    from corpus import download_plays, read_plays  # needs datasets and tokenizers

    corpus = read_plays(download_plays())
    known = "\n".join(str(record["text"]) for record in corpus.train)  # pyright: ignore[reportArgumentType, reportCallIssue]
    held_out = "".join(corpus.held_out)
    train, test = (torch.tensor(list(text.encode("ascii"))) for text in (known, held_out))
    return train, test


def spec(name: str, scale: float) -> dq.LanguageModelSpec:
    """The model, not yet trained; solved to a relative tolerance of 0.01."""
    solve = dq.SolveConfig(stop=dq.Stop(rtol=1e-2, max_steps=256))
    return dq.LanguageModelSpec(128, replace(BACKBONES[name], skip_scale=scale), solve)


def trained(model: dq.LanguageModelSpec, text: Tensor, seed: int, steps: int) -> dq.CausalLM:
    """Train a model on random rows of 128 characters."""
    torch.manual_seed(seed)
    lm, curriculum = model.build(), Curriculum(PHASES)
    drawn = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(lm.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in trange(steps, mininterval=5):
        progress = step / steps
        curriculum.at(progress).apply(lm.train())
        rate = min(1.0, (step + 1) / 100, 0.02 + 3 * (1 - progress))
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        ids = rows(text, 24, 128, drawn, first=0)
        loss = lm(ids, labels=ids).loss
        check_finite(loss, step=step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
    return lm.eval()


def rows(text: Tensor, count: int, length: int, drawn: torch.Generator, first: int) -> Tensor:
    """Random rows that begin at ``first`` or later."""
    start = torch.randint(first, len(text) - length, (count, 1), generator=drawn)
    return text[start + torch.arange(length)]


@torch.no_grad()
def measured(lm: dq.CausalLM, case: str, text: Tensor, quick: bool) -> Iterator[Row]:
    """All that is said of one model."""
    count, length, most = (1, 8, 8) if quick else (16, 64, 256)

    def some(count: int, length: int, seed: int) -> Tensor:
        return rows(text, count, length, torch.Generator().manual_seed(seed), LICENCE)

    long = some(3 * count, 4 * length, 1)
    solved = lm(
        long, labels=long, sweep=dq.Sliding(32), stop=dq.Stop(rtol=1e-4, max_steps=4 * most)
    )
    yield value_row(case, "bits per character", solved.loss.item() / math.log(2))
    yield value_row(case, "rows converged to 1e-4", solved.converged.float().mean().item())
    stop, short = dq.Stop(rtol=1e-3, max_steps=most), some(count, length, 2)
    for solver in (dq.Naive(), dq.Adaptive()):
        name = type(solver).__name__
        alone = lm(short, sweep=dq.Sequential(), solver=solver, stop=stop).stats
        iterations = alone.iterations[:, length // 4 :].float().mean().item()
        yield value_row(case, f"iterations, one token at a time, {name}", iterations)
        window = lm(short, sweep=dq.Sliding(8), solver=solver, stop=stop).stats
        yield value_row(case, f"evaluations / token, window 8, {name}", window.evaluations / length)
        updates = window.updates.float().mean().item()
        yield value_row(case, f"updates / token, window 8, {name}", updates)
    radius = model_spectral_radius(lm, some(count, 3 * length // 4, 3), products=96).radius[:, -1]
    yield value_row(case, "spectral radius, 95th percentile", radius.quantile(0.95).item())
    prompts = some(6 * count, 24, 7)
    for rtol in (1e-3,) if quick else (1e-3, 1e-4):
        stop = dq.Stop(rtol=rtol, max_steps=most)
        for kind, options in (("greedy", {}), ("sampled", {"temperature": 0.8, "seed": 3})):
            go_on = partial(lm.generate, prompts, max_new_tokens=length, stop=stop, **options)
            texts = [go_on(window=width).tokens for width in WINDOWS]
            for width, made in zip(WINDOWS[1:], texts[1:], strict=True):
                same = (made == texts[0]).all(dim=1).sum().item()
                metric = f"equal of {len(prompts)}, {kind}, rtol {rtol:g}, window {width}"
                yield value_row(case, metric, same)


def all_rows(folder: Path | None, quick: bool) -> Iterable[Row]:
    """Train what is not in the folder, and measure."""
    train, held_out = plays(quick)
    names = ("mamba2",) if quick else tuple(BACKBONES)
    for name in names:
        for seed, scales in list(SCALES.items())[: 1 if quick else None]:
            for scale in scales:
                lm, case = spec(name, scale).build(), f"{name}, skip_scale {scale:g}, seed {seed}"
                file = None if folder is None else folder / f"{name}_{scale:g}_{seed}.pt"
                if file is not None and file.exists():
                    lm.load_state_dict(torch.load(file))
                else:
                    lm = trained(spec(name, scale), train, seed, 2 if quick else STEPS)
                    if file is not None:
                        file.parent.mkdir(parents=True, exist_ok=True)
                        torch.save(lm.state_dict(), file)
                yield from measured(lm.eval(), case, held_out, quick)


def main() -> None:
    """Measure all models."""
    parser = command_line(__doc__)
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="where trained models are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report(all_rows(options.weights, options.quick), options)


if __name__ == "__main__":
    main()
