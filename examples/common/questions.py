"""Questions made from text: the last word of a passage, or the sentence that follows it."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deqseq.check import check_integer

LEAST_WORDS = 4  # shorter sentences, such as headings and names of speakers, end no passage and are no option
DRAWN = 16  # sentences drawn per wrong option, of which the nearest in length is taken

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
    """A passage without its last word. ``context + target`` stands in the document; ``target`` begins with a space."""

    context: str
    target: str


@dataclass(frozen=True)
class Choice:
    """A passage, and sentences of which number ``answer``, from 0, follows it.

    ``context + options[answer]`` stands in the document; all options begin with the white space of the right one.
    """

    context: str
    options: tuple[str, ...]
    answer: int


def cloze_questions(
    documents: Sequence[str], count: int, *, seed: int, sentences: int = 4, repeated: bool = False
) -> tuple[Cloze, ...]:
    """Ask for the last word of passages, as LAMBADA does (Paperno et al., 2016, arXiv 1606.06031).

    A sentence ends with ``.``, ``!``, ``?`` or ``…`` before white space, or with its paragraph. A passage is a run of
    sentences of one document; no sentence is in two passages. Its last sentence has at least four words. The last word
    has letters only (with apostrophes and hyphens inside); marks after it are left out.

    Args:
        documents: texts. Documents that are too short are skipped.
        count: number of questions, at least 1.
        seed: at least 0.
        sentences: sentences per passage, at least 1.
        repeated: whether the word must have occurred before in its passage, in any case.

    Raises:
        ValueError: a number is out of its range, or the documents have fewer passages than ``count``.
    """
    _check_numbers(count, seed, sentences)

    def question(text: str, last: int) -> Cloze | None:
        found = _LAST_WORD.search(text)
        if found is None:
            return None
        context = text[: found.start()]
        if repeated and found[1].casefold() not in {word.casefold() for word in re.findall(_WORD, context)}:
            return None
        return Cloze(context, text[found.start() : found.end(1)])

    wanted = f"passages of {sentences} sentences" + " whose last word occurred before" * repeated
    return tuple(_draw(_passages(documents, sentences, question), count, random.Random(seed), wanted))


def choice_questions(
    documents: Sequence[str], count: int, *, seed: int, sentences: int = 3, options: int = 4
) -> tuple[Choice, ...]:
    """Ask which sentence follows a passage, as HellaSwag does (Zellers et al., 2019, arXiv 1905.07830).

    Sentences and passages are those of :func:`cloze_questions`. The wrong options are distinct sentences from elsewhere
    in the documents. For each, several are drawn and the nearest in length to the right option is taken, so that the
    length tells little.

    Args:
        documents: texts. Documents that are too short are skipped.
        count: number of questions, at least 1.
        seed: at least 0.
        sentences: sentences per context, at least 1.
        options: sentences to choose from, at least 2.

    Raises:
        ValueError: a number is out of its range, or the documents have too few passages or distinct sentences.
    """
    _check_numbers(count, seed, sentences)
    check_integer("options", options, 2)
    rng = random.Random(seed)
    found = _passages(documents, sentences + 1, lambda text, last: (text, last))
    passages = _draw(found, count, rng, f"passages of {sentences} sentences and one that follows")
    texts = (text for document in documents for text in _SENTENCE.findall(document) if _is_long(text))
    pool = list({_key(text): text for text in texts}.values())
    return tuple(_choice(text, last, pool, options, rng) for text, last in passages)


def _choice(text: str, last: int, pool: list[str], options: int, rng: random.Random) -> Choice:
    context, right = text[:last].rstrip(), text[last:]
    own = {_key(sentence) for sentence in _SENTENCE.findall(text)}
    drawn = rng.sample(pool, min(len(pool), DRAWN * (options - 1) + len(own)))
    others = [sentence for sentence in drawn if _key(sentence) not in own]
    if len(others) < options - 1:
        raise ValueError(
            f"documents must hold {options - 1} different sentences outside of a passage for options={options}, got "
            f"{len(others)}: give more documents, or fewer options"
        )
    chosen = sorted(others, key=lambda other: abs(len(other) - len(right)))[: options - 1]
    rng.shuffle(chosen)
    answer = rng.randrange(options)
    chosen.insert(answer, right)
    gap = text[len(context) : last]
    return Choice(context, tuple(gap + option for option in chosen), answer)


def _passages(documents: Sequence[str], sentences: int, question: Callable[[str, int], T | None]) -> list[T]:
    """Questions about runs of sentences that do not overlap; ``question`` gets a text and where its last one begins."""
    if isinstance(documents, str):
        raise TypeError("documents must be a sequence of texts, got one text: give [text]")
    found: list[T] = []
    for document in documents:
        spans = [match.span() for match in _SENTENCE.finditer(document)]
        first = 0
        while first + sentences <= len(spans):
            (start, _), (last, end) = spans[first], spans[first + sentences - 1]
            asked = question(document[start:end], last - start) if _is_long(document[last:end]) else None
            found += [] if asked is None else [asked]
            first += 1 if asked is None else sentences
    return found


def _draw(found: list[T], count: int, rng: random.Random, wanted: str) -> list[T]:
    if len(found) < count:
        raise ValueError(
            f"documents hold {len(found)} {wanted}, fewer than count={count}: give more or longer documents, or a "
            "smaller count"
        )
    return rng.sample(found, count)


def _is_long(sentence: str) -> bool:
    return len(sentence.split(maxsplit=LEAST_WORDS - 1)) == LEAST_WORDS


def _key(sentence: str) -> str:
    """The same for sentences that differ in white space alone."""
    return " ".join(sentence.split())


def _check_numbers(count: int, seed: int, sentences: int) -> None:
    check_integer("count", count, 1)
    check_integer("seed", seed, 0)
    check_integer("sentences", sentences, 1)
