"""Checkpoints that do not fit: an error that names the weights."""

from collections.abc import Iterable
from typing import Any

REFERENCE = "word_emb.emb.weight"
"""The embedding in checkpoints of the paper's reference code."""
EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")
"""What may be drawn anew if the caller has asked transformers to ignore other shapes."""


def refuse_misfit(report: dict[str, Any], source: object, *, extra: bool) -> None:
    """Refuse a checkpoint that leaves weights of a model as they happen to be, or that holds more than the model.

    transformers goes on with freshly drawn weights where some are missing, and without those that it does not know. An
    implicit model would then run and find other fixed points.

    Args:
        report: what ``from_pretrained`` found: keys that are missing, unexpected, and of another shape.
        source: where the checkpoint came from, for the error.
        extra: whether unexpected keys are refused too.

    Raises:
        ValueError: names the weights.

    Example:
        >>> refuse_misfit({"missing_keys": {"lm_head.weight"}}, "checkpoint", extra=True)
        Traceback (most recent call last):
        ValueError: the weights in checkpoint do not fit: missing lm_head.weight. Does its config.json describe them?
    """
    shapes = (key for key, *_ in report.get("mismatched_keys", ()) if not key.endswith(EMBEDDINGS))
    found = {
        "missing": _named(report.get("missing_keys", ())),
        "of another shape": _named(shapes),
        "unexpected": _named(report.get("unexpected_keys", ())) if extra else "",
    }
    faults = "; ".join(f"{fault} {names}" for fault, names in found.items() if names)
    if REFERENCE in report.get("unexpected_keys", ()):
        raise ValueError(
            f"the weights in {source} have the names of the paper's reference code: load them with "
            "deqseq.integrations.huggingface.from_reference_folder"
        )
    if faults:
        raise ValueError(f"the weights in {source} do not fit: {faults}. Does its config.json describe them?")


def _named(keys: Iterable[str]) -> str:
    """The first of some keys, and how many there are."""
    known = sorted(keys)
    return ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
