"""Misspelt names: an error that says which one was meant."""

import difflib
from collections.abc import Collection


def check_known(what: str, word: object, known: Collection[str]) -> None:
    """Refuse a word that is none of the known ones.

    Args:
        what: what the word is, as the error is to call it.
        word: what was given.
        known: what may be given.

    Raises:
        ValueError: names the word, the nearest known one and all known ones.

    Example:
        >>> check_known("colour", "bleu", ["red", "blue"])
        Traceback (most recent call last):
        ValueError: colour 'bleu' is unknown; did you mean 'blue'? (known: red, blue)
    """
    if word not in known:
        near = difflib.get_close_matches(str(word), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what} {word!r} is unknown{hint} (known: {', '.join(known)})")
