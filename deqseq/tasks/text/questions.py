"""Questions made from text: the last word of a passage, or how a passage goes on."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from deqseq.tasks.text.packing import check_at_least

LEAST_WORDS = 4
"""A sentence of fewer words ends no passage and is no option: a heading, the name of a speaker."""
DRAWN = 16
"""Sentences drawn for each wrong option, of which the nearest in length is taken."""

_SENTENCE = re.compile(
    r"""\S.*?(?: (?<=[.!?…]) ["'”’)\]]* (?=\s|\Z)  # ends with a mark and closing quotes,
             | (?<=\S) (?=\s*(?:\n\s*\n|\Z)) )     # or with its paragraph""",
    re.DOTALL | re.VERBOSE,
)
_WORD = r"[^\W\d_]+(?:['’-][^\W\d_]+)*"
_LAST_WORD = re.compile(rf"(?<!\s)\s+({_WORD})[^\w\s]*\Z")

T = TypeVar("T")


@dataclass(frozen=True)
class Cloze:
    """A passage without its last word; ``context + target`` is how its document has it.

    Attributes:
        context: the passage up to the end of the word before the last.
        target: the last word, behind the white space that parts it from the context.
    """

    context: str
    target: str


@dataclass(frozen=True)
class Choice:
    """A passage, and sentences of which one follows it; ``context + options[answer]`` is how its document has it.

    Attributes:
        context: some sentences.
        options: a sentence each, all behind the white space that parts the right one from the context.
        answer: which option follows, from 0.
    """

    context: str
    options: tuple[str, ...]
    answer: int


class _Passage(NamedTuple):
    """Consecutive sentences: the text, and where the last of them begins in it."""

    text: str
    last: int


def cloze_questions(
    documents: Sequence[str], count: int, *, seed: int, sentences: int = 4, repeated: bool = False
) -> tuple[Cloze, ...]:
    """Ask for the last word of passages, as LAMBADA does.

    A sentence ends with ``.``, ``!``, ``?`` or ``…`` before white space, or with its paragraph. A passage is a run of
    sentences of one document, and no sentence is in two of them. It ends with at least four words, of which the last
    has letters only (apostrophes and hyphens within it); the marks after it are left out.

    Args:
        documents: texts; those too short for a passage are passed over.
        count: questions wanted, at least 1.
        seed: which passages are drawn, and in which order; 0 or more.
        sentences: sentences of a passage, at least 1.
        repeated: whether the word must have occurred before in its passage, whatever the case of its letters.

    Returns:
        ``count`` questions.

    Raises:
        TypeError: ``documents`` is a text instead of a sequence of texts.
        ValueError: a number out of its range, or fewer passages in ``documents`` than ``count``.

    References:
        Paperno et al., The LAMBADA dataset: Word prediction requiring a broad discourse context, ACL 2016, arXiv
        1606.06031.

    Example:
        >>> story = "Ann has a red ball. She likes to play. Tom would like to have the ball."
        >>> cloze_questions([story], 1, seed=0, sentences=3, repeated=True)[0].target
        ' ball'
    """
    check_at_least("sentences", sentences, 1)
    found = _passages(documents, sentences, lambda passage: _cloze(passage, repeated))
    wanted = f"passages of {sentences} sentences" + " whose last word occurred before" * repeated
    return tuple(_drawn(found, count, random.Random(_checked_seed(seed)), wanted))


def choice_questions(
    documents: Sequence[str], count: int, *, seed: int, sentences: int = 3, options: int = 4
) -> tuple[Choice, ...]:
    """Ask which sentence follows a passage, as HellaSwag does.

    The wrong options are sentences from elsewhere in the documents, none of which is in the passage and no two of
    which are the same: the nearest in length to the right one of some drawn at random, so that the length tells
    little. Sentences and passages are those of :func:`cloze_questions`.

    Args:
        documents: texts; those too short for a passage and a sentence are passed over.
        count: questions wanted, at least 1.
        seed: which passages and sentences are drawn, and in which order; 0 or more.
        sentences: sentences of a context, at least 1.
        options: sentences to choose from, at least 2.

    Returns:
        ``count`` questions.

    Raises:
        TypeError: ``documents`` is a text instead of a sequence of texts.
        ValueError: a number out of its range, fewer passages in ``documents`` than ``count``, or too few different
            sentences to choose from.

    References:
        Zellers et al., HellaSwag: Can a Machine Really Finish Your Sentence?, ACL 2019, arXiv 1905.07830.

    Example:
        >>> stories = ["It rained all day long. So we stayed at home.", "The cat sat there. It saw a small mouse."]
        >>> question = choice_questions(stories, 1, seed=0, sentences=1, options=2)[0]
        >>> question.context + question.options[question.answer] in stories
        True
    """
    check_at_least("sentences", sentences, 1)
    check_at_least("options", options, 2)
    found = _passages(documents, sentences + 1, lambda passage: passage)
    rng = random.Random(_checked_seed(seed))
    passages = _drawn(found, count, rng, f"passages of {sentences} sentences and one that follows")
    pool = list({_key(text): text for document in documents for text in _sentences(document) if _long(text)}.values())
    return tuple(_choice(passage, pool, options, rng) for passage in passages)


def _cloze(passage: _Passage, repeated: bool) -> Cloze | None:
    found = _LAST_WORD.search(passage.text)
    if found is None:
        return None
    context = passage.text[: found.start()]
    if repeated and found[1].casefold() not in {word.casefold() for word in re.findall(_WORD, context)}:
        return None
    return Cloze(context, passage.text[found.start() : found.end(1)])


def _choice(passage: _Passage, pool: list[str], options: int, rng: random.Random) -> Choice:
    context, truth = passage.text[: passage.last].rstrip(), passage.text[passage.last :]
    own = {_key(text) for text in _sentences(passage.text)}
    drawn = rng.sample(pool, min(len(pool), DRAWN * (options - 1) + len(own)))
    others = [text for text in drawn if _key(text) not in own]
    if len(others) < options - 1:
        raise ValueError(
            f"documents must hold {options - 1} different sentences outside of a passage for options={options}, "
            f"got {len(others)}: give more documents, or fewer options"
        )
    chosen = sorted(others, key=lambda text: abs(len(text) - len(truth)))[: options - 1]
    rng.shuffle(chosen)
    answer = rng.randrange(options)
    chosen.insert(answer, truth)
    gap = passage.text[len(context) : passage.last]
    return Choice(context, tuple(gap + text for text in chosen), answer)


def _passages(documents: Sequence[str], sentences: int, question: Callable[[_Passage], T | None]) -> list[T]:
    """What can be asked of runs of sentences that share none: the first run that will do, then on behind it."""
    if isinstance(documents, str):
        raise TypeError("documents must be a sequence of texts, got one text: give [text]")
    found: list[T] = []
    for document in documents:
        spans = [match.span() for match in _SENTENCE.finditer(document)]
        first = 0
        while first + sentences <= len(spans):
            (start, _), (last, end) = spans[first], spans[first + sentences - 1]
            asked = question(_Passage(document[start:end], last - start)) if _long(document[last:end]) else None
            found += [] if asked is None else [asked]
            first += 1 if asked is None else sentences
    return found


def _sentences(document: str) -> Iterator[str]:
    return (match[0] for match in _SENTENCE.finditer(document))


def _drawn(found: list[T], count: int, rng: random.Random, wanted: str) -> list[T]:
    check_at_least("count", count, 1)
    if len(found) < count:
        raise ValueError(
            f"documents hold {len(found)} {wanted}, fewer than count={count}: give more or longer documents, or a "
            "smaller count"
        )
    return rng.sample(found, count)


def _long(sentence: str) -> bool:
    return len(sentence.split(maxsplit=LEAST_WORDS - 1)) == LEAST_WORDS


def _key(sentence: str) -> str:
    """What two sentences that differ in white space alone share."""
    return " ".join(sentence.split())


def _checked_seed(seed: int) -> int:
    check_at_least("seed", seed, 0)  # random.Random takes -1 for 1
    return seed
