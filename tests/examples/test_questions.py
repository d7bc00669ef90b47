"""Questions made from text: every one stands in its document, and none can be answered by its form."""

import re
import time

import pytest
from common.questions import Choice, Cloze, choice_questions, cloze_questions
from hypothesis import given
from hypothesis import strategies as st

STORIES = (
    "Ann has a red ball. She likes to play. Tom would like to have the ball.",
    'It was late. "Where are all the others?" she asked him.\nNobody knew where they had gone! So they went home…',
)


def numbered(documents: int, sentences: int) -> list[str]:
    """Documents in which every sentence is different, and says where it stands."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "many"]
    return [
        " ".join(f"Here stands the sentence {words[i]} of story {words[d]}." for i in range(sentences))
        for d in range(documents)
    ]


def test_cloze_is_the_passage_and_its_last_word():
    asked = cloze_questions(STORIES[:1], 1, seed=0, sentences=3)
    assert asked == (Cloze("Ann has a red ball. She likes to play. Tom would like to have the", " ball"),)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("They saw the big dog.", " dog"),
        ("They saw the big dog", " dog"),
        ('He said: "We saw the dog!"', " dog"),
        ("He walked with his\nbrother-in-law…)", "\nbrother-in-law"),
        ("This is what they  don’t?", "  don’t"),
        ("Она очень любит читать.", " читать"),
    ],
)
def test_last_words(text, target):
    assert cloze_questions([text], 1, seed=0, sentences=1) == (Cloze(text[: text.rindex(target)], target),)


@pytest.mark.parametrize(
    "text",
    [
        "It was in the year 1599.",
        'They called all this "progress".',
        "Three words only.",
        "He reads file a_b.",
        "...",
        "",
    ],
)
def test_what_has_no_last_word_is_passed_over(text):
    with pytest.raises(ValueError, match=r"^documents hold 0 passages of 1 sentences, fewer than count=1: give more"):
        cloze_questions([text], 1, seed=0, sentences=1)


def test_sentences_end_at_marks_and_at_paragraphs_but_not_within_numbers():
    text = "The price rose to 3.14 that day. Act one, the second scene\r\n \r\nEnter the old king and his men"
    contexts = {asked.context for asked in cloze_questions([text], 3, seed=0, sentences=1)}
    assert contexts == {"The price rose to 3.14 that", "Act one, the second", "Enter the old king and his"}


def test_a_repeated_word_has_occurred_before_whatever_its_case():
    stories = [STORIES[0], STORIES[0].replace("a red ball", "a red BALL"), STORIES[0].replace("a red ball", "balls")]
    asked = cloze_questions(stories, 2, seed=0, sentences=3, repeated=True)
    assert all("ball." in question.context.casefold() for question in asked)
    assert len(cloze_questions(stories, 3, seed=0, sentences=3)) == 3
    with pytest.raises(ValueError, match="hold 2 passages of 3 sentences whose last word occurred before, fewer than"):
        cloze_questions(stories, 3, seed=0, sentences=3, repeated=True)


def test_choice_is_the_next_sentence_among_others():
    stories = numbered(6, 9)
    for asked in choice_questions(stories, 12, seed=3, sentences=2, options=5):
        document = next(text for text in stories if asked.context in text)
        assert asked.context + asked.options[asked.answer] in document
        assert len(set(asked.options)) == len(asked.options) == 5
        for option in asked.options:
            assert option.startswith(" Here") and option.endswith(".")
            assert any(option.strip() in text for text in stories)
            assert option.strip() not in asked.context


def test_options_share_the_white_space_of_the_right_one():
    stories = ["One fine day it rained.\n\nThe cat then came inside.", "A dog saw the cat. It ran away very fast."]
    asked = choice_questions(stories, 2, seed=0, sentences=1, options=2)
    for question in asked:
        gap = "\n\n" if question.context == "One fine day it rained." else " "
        assert all(option == gap + option.lstrip() for option in question.options)


def test_wrong_options_are_nearest_in_length():
    long, short = "This one goes on and on and on for ever.", "All of these are short."
    stories = [f"{long[:-1]} {word}. {short[:-1]} {word}." for word in ("red", "blue", "gold", "grey", "pink", "teal")]
    for asked in choice_questions(stories, 6, seed=1, sentences=1, options=3):
        assert all("All of these" in option for option in asked.options)


def test_wrong_options_do_not_stand_in_the_order_of_their_lengths():
    shuffled = 0
    stories = [f"Here it begins at once. It then goes on {'very ' * n}well." for n in range(30)]
    for asked in choice_questions(stories, 18, seed=2, sentences=1, options=5):
        right = asked.options[asked.answer]
        distances = [abs(len(option) - len(right)) for option in asked.options if option != right]
        shuffled += distances != sorted(distances)
    assert shuffled > 3


def test_every_place_is_the_right_one_about_as_often():
    asked = choice_questions(numbered(12, 13), 72, seed=0, sentences=1, options=3)
    for place in range(3):
        assert 12 <= sum(question.answer == place for question in asked) <= 36


def test_no_sentence_is_in_two_passages():
    stories = numbered(3, 12)
    asked = choice_questions(stories, 12, seed=0, sentences=2)
    used = [part for question in asked for part in re.findall("[^.]+", question.context)]
    used += [question.options[question.answer].strip(". ") for question in asked]
    assert len({part.strip() for part in used}) == len(used) == 36
    with pytest.raises(ValueError, match="hold 12 passages of 2 sentences and one that follows, fewer than count=13"):
        choice_questions(stories, 13, seed=0, sentences=2)


@pytest.mark.parametrize("make", [cloze_questions, choice_questions])
def test_the_seed_alone_decides(make):
    stories = numbered(6, 12)
    assert make(stories, 9, seed=5) == make(stories, 9, seed=5)
    assert make(stories, 9, seed=5) != make(stories, 9, seed=6)


PIECES = ["ab", "ba", "Ab", "é-b", "a'b", "中", "a1", "'b'", "it", "."]
SENTENCES = st.builds(
    lambda words, gap, mark, after: gap.join(words) + mark + after,
    st.lists(st.sampled_from(PIECES), min_size=2, max_size=6),
    st.sampled_from([" ", "\n", "  "]),
    st.sampled_from([".", '!"', "…)", "", " ."]),
    st.sampled_from([" ", "\n\n", "", "\r\n \t\r\n"]),
)
TEXTS = st.lists(st.lists(SENTENCES, max_size=8).map("".join) | st.text(max_size=80), max_size=4)


@given(TEXTS, st.integers(1, 3), st.booleans())
def test_whatever_the_text_questions_stand_in_it(texts, sentences, repeated):
    try:
        (asked,) = cloze_questions(texts, 1, seed=0, sentences=sentences, repeated=repeated)
    except ValueError as error:
        assert str(error).startswith("documents hold 0 passages")
        return
    assert any(asked.context + asked.target in text for text in texts)
    assert asked.context == asked.context.rstrip() != ""
    assert asked.target != asked.target.lstrip() == asked.target.strip() != ""
    if repeated:
        assert asked.target.strip().casefold() in asked.context.casefold()


@given(TEXTS, st.integers(1, 2), st.integers(2, 3))
def test_whatever_the_text_options_are_different_and_one_follows(texts, sentences, options):
    try:
        (asked,) = choice_questions(texts, 1, seed=0, sentences=sentences, options=options)
    except ValueError as error:
        assert str(error).startswith(("documents hold 0 passages", "documents must hold"))
        return
    assert any(asked.context + asked.options[asked.answer] in text for text in texts)
    assert len({" ".join(option.split()) for option in asked.options}) == options
    assert 0 <= asked.answer < options


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cloze_questions(STORIES, 0, seed=0), "count must be an integer >= 1, got 0"),
        (lambda: cloze_questions(STORIES, 1, seed=-1), "seed must be an integer >= 0, got -1"),
        (lambda: cloze_questions(STORIES, 1, seed=0, sentences=0), "sentences must be an integer >= 1, got 0"),
        (lambda: choice_questions(STORIES, -3, seed=0), "count must be an integer >= 1, got -3"),
        (lambda: choice_questions(STORIES, 1, seed=-1), "seed must be an integer >= 0, got -1"),
        (lambda: choice_questions(STORIES, 1, seed=0, sentences=0), "sentences must be an integer >= 1, got 0"),
        (lambda: choice_questions(STORIES, 1, seed=0, options=1), "options must be an integer >= 2, got 1"),
        (lambda: choice_questions([], 1, seed=0), "documents hold 0 passages of 3 sentences and one that follows,"),
        (
            lambda: choice_questions(STORIES, 1, seed=0, sentences=1, options=9),
            "documents must hold 8 different sentences outside of a passage for options=9, got ",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.parametrize("make", [cloze_questions, choice_questions])
def test_one_text_is_no_sequence_of_texts(make):
    with pytest.raises(TypeError, match=r"^documents must be a sequence of texts, got one text: give \[text\]$"):
        make(STORIES[0], 1, seed=0)


def test_questions_cannot_be_changed():
    with pytest.raises(AttributeError):
        Cloze("a", " b").target = " c"
    assert hash(Choice("a", (" b", " c"), 0)) == hash(Choice("a", (" b", " c"), 0))


ODD = [" " * 100_000 + "x", "word " * 20_000, "\n" * 100_000 + "x", "." * 100_000, "a b" + " " * 50_000 + "c d."]


@pytest.mark.parametrize("text", ODD, ids=range(5))
def test_odd_texts_take_no_longer_than_others(text):
    begun = time.perf_counter()
    with pytest.raises(ValueError, match=r"^documents hold"):
        cloze_questions([text, text], 3, seed=0, sentences=1)
    assert time.perf_counter() - begun < 2
