"""The code of tutorials/parity.md, whose training is run once and saved in runs/site/."""

import functools
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

import deqseq as dq
from deqseq.tasks import WordProblem, cyclic
from deqseq.training import Curriculum, free, unrolled

# --8<-- [start:task]
task = WordProblem(cyclic(2))
# --8<-- [end:task]


# --8<-- [start:implicit]
def implicit_model(seed: int = 0) -> dq.CausalLM:
    """One Mamba2 block, iterated, under a head of two tokens."""
    torch.manual_seed(seed)
    backbone = dq.Mamba2(dq.Mamba2Config(d_model=32, d_state=16, headdim=32))
    return dq.CausalLM(2, dq.ImplicitModel(backbone))


# --8<-- [end:implicit]


# --8<-- [start:explicit]
def explicit_model(blocks: int, seed: int = 0) -> dq.CausalLM:
    """Several such blocks, each run once."""
    torch.manual_seed(seed)
    config = dq.Mamba2Config(
        d_model=32,
        d_state=16,
        headdim=32,
        n_layers=blocks,
        injection=False,  # the tokens are the first block's input
    )
    return dq.CausalLM(2, dq.ExplicitModel(dq.Mamba2(config)))


# --8<-- [end:explicit]

# --8<-- [start:curriculum]
plain = dq.SolveConfig(solver=dq.Naive())
first = unrolled(8, until=0.4, base=plain)
second = free(32, rtol=0.03, base=plain)
curriculum = Curriculum((first, second))
# --8<-- [end:curriculum]

# --8<-- [start:train]
History = list[dict[str, float]]


def train(
    lm: dq.CausalLM,
    curriculum: Curriculum,
    *,
    steps: int = 400,
    seconds: float | None = None,
    seed: int = 0,
) -> History:
    """Train at length 16 for some steps, or for some seconds."""
    weights = lm.parameters()
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0)
    history, progress, begun = [], 0.0, time.perf_counter()
    for batch in task.batches(32, 16, seed=seed):
        curriculum.at(progress).apply(lm)  # how to solve and differentiate
        output = lm(batch.inputs, targets=batch.targets)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.25)
        warmup, decay = (len(history) + 1) / 50, 5 * (1 - progress)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, warmup, decay)
        optimizer.step()

        spent = time.perf_counter() - begun
        history.append({"loss": output.loss.item(), "seconds": spent})
        if output.stats is not None:
            mean = output.stats.iterations.float().mean().item()
            history[-1]["iterations"] = mean
        done = len(history) / steps if seconds is None else spent / seconds
        progress = min(1.0, done)
        if progress == 1:
            break
    return history


# --8<-- [end:train]

FOLDER = Path(__file__).parents[2] / "runs" / "site"


def saved(train: Callable[..., History]) -> Callable[..., History]:
    """``train`` with its results saved in runs/site/, and used until this file, the library or torch changes."""

    @functools.wraps(train)
    def read_or_train(lm: dq.CausalLM, curriculum: Curriculum, **options: float | None) -> History:
        path = FOLDER / f"parity_{_key(lm, curriculum, options)}.pt"
        if not path.exists():
            history = train(lm, curriculum, **options)
            if not path.exists():  # another build may have been faster
                _save({"weights": lm.state_dict(), "history": history}, path)
        content = torch.load(path)
        lm.load_state_dict(content["weights"])
        curriculum.at(1.0).apply(lm)
        return content["history"]

    return read_or_train


def _key(lm: dq.CausalLM, curriculum: Curriculum, options: dict[str, float | None]) -> str:
    """A name for a run, from this file, the library, torch's version, the initial weights and the options."""
    known = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(Path(dq.__file__).parent.rglob("*.py")):
        known.update(source.read_bytes())
    known.update(f"{torch.__version__} {curriculum} {sorted(options.items())}".encode())
    for name, tensor in lm.state_dict().items():
        known.update(name.encode() + tensor.numpy().tobytes())
    return known.hexdigest()[:16]


def _save(content: object, path: Path) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save(content, unfinished)
    unfinished.replace(path)
