"""Bits per byte of held-out text, whatever the tokenizer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from corpus import tokenized
from jaxtyping import Int64
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase


def load_model(source: str | Path, device: str) -> Any:
    """A saved model of transformers in float32, in eval mode."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model.to(device).eval()


class HeldOut(NamedTuple):
    """Excerpts of a text with its end-of-text tokens, and the UTF-8 bytes of their targets."""

    inputs: Int64[Tensor, "rows length"]
    targets: Int64[Tensor, "rows length"]
    text_bytes: int


def token_stream(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray]:
    """Documents as one stream of tokens with ends of text, and the bytes of text in each token.

    Where a character is split into several tokens, its bytes count with the first of them; what the
    tokenizer drops counts with the next token, or with the end of text.
    """
    ids: list[Any] = [[tokenizer.eos_token_id]]
    byte_counts = [np.zeros(1, int)]
    for text in documents:
        found = tokenized([text], tokenizer, return_offsets_mapping=True)
        content = np.frombuffer(text.encode(), np.uint8)
        # where each character begins, in bytes
        starts = np.append(np.flatnonzero(content & 0xC0 != 0x80), len(content))
        ends = starts[[*(end for _, end in found["offset_mapping"][0]), -1]]
        ids.append([*found["input_ids"][0], tokenizer.eos_token_id])
        byte_counts.append(np.diff(np.maximum.accumulate(ends), prepend=0))
    return np.concatenate(ids).astype(np.int64), np.concatenate(byte_counts)


def excerpts(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    tokens: int,
) -> HeldOut:
    """Excerpts of held-out documents, spread evenly, with about ``tokens`` tokens; 0: all.

    An excerpt has as many tokens as the least common multiple of the ``lengths`` of the rows that
    will be scored.
    """
    (ids, byte_counts), span = token_stream(documents, tokenizer), math.lcm(*lengths)
    whole = (len(ids) - 1) // span
    if not whole:
        raise ValueError(
            f"the held-out text has {len(ids)} tokens, fewer than an excerpt of {span}: give more "
            "text"
        )
    count = min(whole, max(1, tokens // span)) if tokens else whole
    starts = [n * whole // count * span for n in range(count)]
    cut = torch.from_numpy(np.stack([ids[start : start + span + 1] for start in starts]))
    text_bytes = sum(int(byte_counts[start + 1 : start + span + 1].sum()) for start in starts)
    return HeldOut(cut[:, :-1], cut[:, 1:], text_bytes)


@torch.no_grad()
def score(model: nn.Module, text: HeldOut, length: int, batch: int, **how: Any) -> dict[str, Any]:
    r"""How well a model predicts a text that is cut into rows, each by itself.

    .. math:: \mathrm{bits\ per\ byte} = \frac{-\sum \ln p(\mathrm{target})}{\ln 2 \cdot
    \mathrm{bytes\ of\ text}}

    ``by_position`` is the mean loss in nats at each position of a row; ``self_iterations`` and
    ``converged`` are means over rows, None for an explicit model. The options ``how`` are those of
    the model's call.
    """
    device, losses, solves = next(model.parameters()).device, [], []
    rows, answers = (part.reshape(-1, length).split(batch) for part in (text.inputs, text.targets))
    for inputs, targets in zip(rows, answers, strict=True):
        output = model(inputs.to(device), use_cache=False, **how)
        logits = output.logits.transpose(1, 2).float()
        losses.append(F.cross_entropy(logits, targets.to(device), reduction="none").double().cpu())
        if output.get("stats") is not None:
            solves.append(
                torch.stack(
                    [output.stats.iterations.double().mean(dim=1), output.converged.double()]
                ).cpu()
            )
    loss = torch.cat(losses)
    iterations, converged = (
        torch.cat(solves, dim=1).mean(dim=1).tolist() if solves else (None, None)
    )
    return {
        "length": length,
        "bits_per_byte": loss.sum().item() / math.log(2) / text.text_bytes,
        "perplexity": loss.mean().exp().item(),
        "tokens": loss.numel(),
        "self_iterations": iterations,
        "converged": converged,
        "by_position": loss.mean(dim=0).tolist(),
    }


def cell(row: Mapping[str, Any]) -> str:
    """A score with mean iterations, and the share of solves that converged if not all did."""
    solves = "" if row["self_iterations"] is None else f" ({row['self_iterations']:.1f})"
    doubt = "" if row["converged"] in (None, 1.0) else f", {row['converged']:.1%} converged"
    return f"{row['bits_per_byte']:.3f}{solves}{doubt}"
