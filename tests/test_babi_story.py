"""What a story is, and what is none."""

import pytest

from deqseq.tasks.babi import TASK_NAMES, Fact, Question, Story


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fact(" "), "Fact.text must be one line of text without tabs, got ' '"),
        (lambda: Fact("a\tb"), "Fact.text must be one line of text without tabs, got 'a\\tb'"),
        (lambda: Fact("The <eos> is here."), "Fact.text must not hold <eos>, which is no word of a story, got 'the"),
        (lambda: Question("Who?", "", ()), "Question.answer must be one word or a comma list without blanks, got ''"),
        (lambda: Question("Who?", "s, w", ()), "Question.answer must be one word or a comma list without blanks"),
        (lambda: Question("Who?", "<UNK>", ()), "Question.answer must not hold <unk>, which is no word of a story"),
        (lambda: Question("Who\nis?", "a", ()), "Question.text must be one line of text without tabs, got 'Who\\nis?'"),
        (lambda: Story(0, (Fact("a"),)), "Story.task must be one of 1 to 20, got 0"),
        (lambda: Story(1, ()), "Story.lines must hold at least one line, got none"),
        (
            lambda: Story(1, (Fact("a"), Question("b?", "c", (2,)))),
            "Question.support must name lines before the question's own, 2, got (2,)",
        ),
        (
            lambda: Story(1, (Fact("a"), Question("b?", "c", (0,)))),
            "Question.support must name lines before the question's own, 2, got (0,)",
        ),
    ],
)
def test_what_is_no_story(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


def test_twenty_tasks():
    assert list(TASK_NAMES) == list(range(1, 21))
