"""Tasks in words: balls that change places, and programs whose variables are to be tracked."""

import itertools
import random
from abc import abstractmethod
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from deqseq.arguments import Between, Within, check_ids, checked
from deqseq.tasks.task import Task, WordBatch

Answer = tuple[str, int]
"""An answer in one word, and its number of hops."""


class Answers(NamedTuple):
    """The answers to the questions in stories, as two tensors `(batch, length)`, int64.

    Attributes:
        targets: ids of the answers at the last word of each question, -100 elsewhere.
        hops: how many steps each answer depends on, as the kind of story counts them, -1 elsewhere.
    """

    targets: Int64[Tensor, "batch length"]
    hops: Int64[Tensor, "batch length"]


class Story(Task):
    """A task in words: stories that contain questions, whose answers are not in the text.

    Your own story defines ``words``, ``ends``, ``chance``, ``tell`` and ``follow``. A word's id is
    its position in ``words``; the answer is scored at the last word of a question. Stories of a
    batch have equally many words: shorter ones are filled with empty sentences at random places.

    Example:
        >>> from deqseq.tasks import Story
        >>> class Echo(Story):
        ...     words, ends, chance = ("a", "b", "?", "."), (".", "?"), 1 / 2
        ...
        ...     def tell(self, length, drawn):
        ...         return [f"{drawn.choice('ab')} ." for _ in range(length)] + ["?"]
        ...
        ...     def follow(self, sentences):
        ...         said = ("a", 0)
        ...         for sentence in sentences:
        ...             yield said if sentence == ["?"] else None
        ...             said = (sentence[0], 1) if len(sentence) == 2 else said
        >>> echo = Echo()
        >>> echo.decode(echo.answers(echo.encode("a . b . ?")[None]).targets[0, -1:])
        'b'
    """

    ends: tuple[str, ...]
    """Words that end a sentence; the first one also serves as an empty sentence."""

    @property
    @abstractmethod
    def words(self) -> tuple[str, ...]:
        """All words."""

    @abstractmethod
    def tell(self, length: int, drawn: random.Random) -> list[str]:
        """The sentences of a story of one ``length``, whose randomness comes from ``drawn``.

        The last sentence is a question.
        """

    @abstractmethod
    def follow(self, sentences: Iterable[list[str]]) -> Iterator[Answer | None]:
        """One value for each of the ``sentences``: for a question the answer, None for any other,
        also for the empty sentence, ``[ends[0]]``.

        Raises:
            ValueError: a sentence that this kind of story does not have.
        """

    @property
    def vocab_size(self) -> int:
        """Number of words."""
        return len(self.words)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    @checked
    def encode(self, text: str) -> Int64[Tensor, " length"]:
        """The ids of the words of ``text``, separated by spaces; `(length,)`, int64.

        Raises:
            ValueError: no words, or one that is not in ``words``.
        """
        words = text.split()
        unknown = sorted(set(words).difference(self.words))
        if unknown or not words:
            names, got = " ".join(self.words), " ".join(unknown) or "none"
            raise ValueError(f"text must have these words, with blanks between: {names}; got {got}")
        return torch.tensor([self._ids[word] for word in words], device="cpu")

    @checked
    def decode(self, ids: Int64[Tensor, " length"]) -> str:
        """The words of ``ids``, `(length,)`, int64, as text.

        Raises:
            ValueError: another shape, or an id without a word.
        """
        if ids.ndim != 1:
            raise ValueError(f"ids must have shape (length,), got {tuple(ids.shape)}")
        check_ids("ids", ids[None], self.vocab_size)
        return " ".join(self.words[place] for place in ids.tolist())

    @checked
    def answers(self, inputs: Int64[Tensor, "batch length"]) -> Answers:
        """The right answers to any stories, including your own.

        The ids ``inputs`` are `(batch, length)`, int64. Words after the last sentence are ignored.

        Raises:
            ValueError: an id without a word, or a sentence that cannot be followed.
        """
        check_ids("inputs", inputs, self.vocab_size)
        targets, hops = torch.full_like(inputs, -100), torch.full_like(inputs, -1)
        names = self.words
        for row, ids in enumerate(inputs.tolist()):
            words = [names[place] for place in ids]
            stops = [place for place, word in enumerate(words, 1) if word in self.ends]
            told = self.follow(words[a:b] for a, b in itertools.pairwise([0, *stops]))
            for stop, answer in zip(stops, told, strict=True):
                if answer is not None:
                    targets[row, stop - 1] = self._ids[answer[0]]
                    hops[row, stop - 1] = answer[1]
        return Answers(targets, hops)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> WordBatch:
        """Draw stories, and follow them."""
        drawn = random.Random(int(torch.randint(2**62, (), generator=generator, device="cpu")))
        stories = [self.tell(length, drawn) for _ in range(batch)]
        sizes = [len(" ".join(story).split()) for story in stories]
        for story, size in zip(stories, sizes, strict=True):
            for _ in range(max(sizes) - size):
                story.insert(drawn.randrange(len(story)), self.ends[0])
        inputs = torch.stack([self.encode(" ".join(story)) for story in stories])
        return WordBatch(inputs, self.answers(inputs).targets)


@checked
@dataclass(frozen=True)
class Balls(Story):
    """Balls in cups are swapped: where is each of them?

    The length is the number of swaps. Ball 1 begins in cup 1, ball 2 in cup 2, and so on. A hop is
    a swap that an answer depends on: the last one that moved the ball, before it the last one that
    moved the ball whose place it took, and so on back to the beginning.

    Args:
        n: number of balls, 2 to 9.
        questions: questions per swap, above 0 and at most 1, at random places and one at the end.

    Example:
        >>> from deqseq.tasks import Balls
        >>> task = Balls()
        >>> story = task.encode("swap 1 and 3 . swap 3 and 5 . where is 5 ?")
        >>> targets, hops = task.answers(story[None])
        >>> task.decode(targets[0, -1:]), hops[0, -1].item()
        ('1', 2)
    """

    n: Annotated[int, Between(2, 9)] = 5
    questions: Annotated[float, Within("(0, 1]")] = 0.5
    ends = (".", "?")

    @property
    def words(self) -> tuple[str, ...]:
        """All words."""
        return ("swap", "and", ".", "where", "is", "?", *self.balls)

    @property
    def balls(self) -> tuple[str, ...]:
        """The balls, and the cups: both have numbers."""
        return tuple(str(ball) for ball in range(1, self.n + 1))

    @property
    def chance(self) -> float:
        """One over the number of cups."""
        return 1 / self.n

    def tell(self, length: int, drawn: random.Random) -> list[str]:
        """Swaps and questions in a random order."""
        asked = max(1, round(length * self.questions))
        story = ["swap {} and {} ."] * length + ["where is {} ?"] * (asked - 1)
        drawn.shuffle(story)
        story.append("where is {} ?")
        return [form.format(*drawn.sample(self.balls, 2)) for form in story]

    def follow(self, sentences: Iterable[list[str]]) -> Iterator[Answer | None]:
        """The cups of the balls that are asked for."""
        found = {ball: (ball, 0) for ball in self.balls}
        for sentence in sentences:
            match sentence:
                case ["."]:
                    pass
                case ["where", "is", ball, "?"] if ball in found:
                    yield found[ball]
                    continue
                case ["swap", a, "and", b, "."] if {a, b} <= found.keys() and a != b:
                    (there, before), (here, so_far) = found[b], found[a]
                    found[a], found[b] = (there, before + 1), (here, so_far + 1)
                case _:
                    raise _unknown(sentence, "'swap 1 and 2 .', with two balls, or 'where is 1 ?'")
            yield None


DIGITS = "0123456789"
NUMBERS = ("t = 0 ;", "t = 0 + 0 ;")
FORMS = {
    "t = 0 ;": 3,
    "t = v ;": 1,
    "t = v + 0 ;": 2,
    "t = v + w ;": 3,
    "repeat n : t = t + 0 ;": 2,
    "repeat n : t = t + w ;": 5,
}
"""How often each form is drawn: t is assigned, v and w are two variables that have values."""


@checked
@dataclass(frozen=True)
class Programs(Story):
    """Programs of three variables, whose values are numbers modulo 10.

    The right side of an assignment is a variable, a number, or a sum of two of them. Assignments
    may be repeated; drawn programs repeat, 2 to 4 times, only those that add to their variable.
    Their first three assignments are numbers, or sums of two, and a sum of variables has two
    different ones. The length is the number of assignments; equally many values are printed, one of
    them at the end: that assigned last, or one drawn. Hops count the assignments on the longest
    path to a value, repetitions separately.

    Short programs are made to be first lessons: up to a length of five, all values are printed at
    the end, and only one assignment reads a variable, in those of four without a repetition.

    Example:
        >>> from deqseq.tasks import Programs
        >>> task = Programs()
        >>> program = task.encode("x = 3 ; y = x + 9 ; repeat 2 : x = x + y ; print x ;")
        >>> targets, hops = task.answers(program[None])
        >>> task.decode(targets[0, -1:]), hops[0, -1].item()
        ('7', 4)
    """

    ends = (";",)

    @property
    def words(self) -> tuple[str, ...]:
        """All words."""
        return ("=", "+", ";", ":", "repeat", "print", *"xyz", *DIGITS)

    @property
    def chance(self) -> float:
        """One over the number of digits."""
        return 0.1

    def tell(self, length: int, drawn: random.Random) -> list[str]:
        """Three numbers, then assignments and prints in a random order, and a print."""
        forms = [dict.fromkeys(NUMBERS, 1)] * 3 + [FORMS] * (length - 3)
        kinds = ["assign"] * (length - 1) + ["print"] * (length - 1)
        if length == 4:
            forms[3] = {form: FORMS[form] for form in ("t = v ;", "t = v + 0 ;", "t = v + w ;")}
        elif length == 5:
            forms[3:] = forms[0], FORMS | {"t = 0 ;": 0}
        elif length > 5:
            drawn.shuffle(kinds)
        story, named, target, order = [], list[str](), "", drawn.sample("xyz", 3)
        for kind in ("assign", *kinds, "print"):
            read = drawn.sample(named, min(2, len(named)))
            if kind == "print":
                form, read = "print v ;", [drawn.choice([target, *read])]
            else:
                weights = forms.pop(0)
                form = drawn.choices([*weights], [*weights.values()])[0]
                new = order[len(named)] if len(named) < 3 else drawn.choice(order)
                target = read[0] if "t +" in form else new
            choices = {"t": [target], "v": read[:1], "w": read[1:], "0": DIGITS, "n": "234"}
            story.append(" ".join(drawn.choice(choices.get(c, [c])) for c in form.split()))
            named += [target] * (target not in named)
        return story

    def follow(self, sentences: Iterable[list[str]]) -> Iterator[Answer | None]:
        """What is printed."""
        found = {digit: (int(digit), 0) for digit in DIGITS}
        for sentence in sentences:
            times, rest = "1", sentence
            match sentence:
                case ["repeat", digit, ":", *after] if digit in DIGITS:
                    times, rest = digit, after
            match rest:
                case [";"] if rest is sentence:
                    pass
                case ["print", name, ";"] if name in found and rest is sentence:
                    value, hops = found[name]
                    yield str(value), hops
                    continue
                case [("x" | "y" | "z") as name, "=", *terms, ";"] if _is_sum(terms, found):
                    for _ in range(int(times)):
                        values, hops = zip(*(found[term] for term in terms[::2]), strict=True)
                        found[name] = sum(values) % 10, max(hops) + 1
                case _:
                    forms = "'x = 3 ;', 'x = y + 2 ;', 'repeat 2 : x = x + y ;' or 'print x ;'"
                    raise _unknown(sentence, f"{forms}, where the variables read have values")
            yield None


def _is_sum(words: list[str], known: Container[str]) -> bool:
    """Whether words are a variable or a number, or two of them and a plus."""
    right = len(words) == 1 or (len(words) == 3 and words[1] == "+")
    return right and all(word in known for word in words[::2])


def _unknown(sentence: list[str], forms: str) -> ValueError:
    return ValueError(f"inputs must have sentences like {forms}; got '{' '.join(sentence)}'")
