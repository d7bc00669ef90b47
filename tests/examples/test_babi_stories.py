"""Stories, and the official files: read, and refused with file and line."""

import pytest
from babi import (
    GENERATORS,
    TASK_NAMES,
    Line,
    Story,
    generate_stories,
    read_folder,
    read_stories,
)
from babi_files import write_stories

OFFICIAL = (
    "1 Mary moved to the bathroom.\n"
    "2 John went to the hallway.\n"
    "3 Where is Mary? \tbathroom\t1\n"
    "4 Daniel went back to the hallway.\n"
    "5 What is Daniel carrying? \tmilk,football\t1 4\n"
    "1 Sandra journeyed to the garden.\n"
    "2 Where is Sandra? \tgarden\t1\n"
)


def test_official_lines(tmp_path):
    path = tmp_path / "qa1.txt"
    path.write_text(OFFICIAL)
    first, second = read_stories(path, 1)
    assert first.lines == (
        Line("Mary moved to the bathroom."),
        Line("John went to the hallway."),
        Line("Where is Mary?", "bathroom", (1,)),
        Line("Daniel went back to the hallway."),
        Line("What is Daniel carrying?", "milk,football", (1, 4)),
    )
    assert second.lines == (Line("Sandra journeyed to the garden."), Line("Where is Sandra?", "garden", (1,)))
    assert first.questions == (first.lines[2], first.lines[4])
    assert first.words()[11:18] == (".", "where", "is", "mary", "?", "bathroom", "daniel")
    assert first.words()[-2:] == ("?", "milk,football")


def test_words_are_lower_case_and_punctuation_stands_apart():
    assert Line("  Then she said: go!").words() == ("then", "she", "said", ":", "go", "!")
    assert Line("How, then?", "S,w").words() == ("how", ",", "then", "?", "s,w")


@pytest.mark.parametrize("change", [lambda t: t.replace("\n", "\r\n"), lambda t: "\ufeff" + t, lambda t: t.rstrip()])
def test_line_ends_and_marks_do_not_matter(tmp_path, change):
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    plain.write_bytes(OFFICIAL.encode())
    changed.write_bytes(change(OFFICIAL).encode())
    assert read_stories(plain, 1) == read_stories(changed, 1)


@pytest.mark.parametrize("task", GENERATORS)
def test_generated_stories_survive_a_round_trip(tmp_path, task):
    stories = [story for scale in (1, 2) for story in generate_stories(task, 25, seed=0, scale=scale)]
    path = write_stories(tmp_path / "new" / "en", "test", stories)
    assert path.name == f"qa{task}_{TASK_NAMES[task]}_test.txt"
    assert read_stories(path, task) == stories == read_folder(path.parent, "test", [task])
    assert write_stories(tmp_path / "again", "test", read_stories(path, task)).read_text() == path.read_text()


def test_a_folder_of_all_twenty_tasks(tmp_path):
    for task, name in TASK_NAMES.items():
        (tmp_path / f"qa{task}_{name}_train.txt").write_text(OFFICIAL)
        (tmp_path / f"qa{task}_{name}_test.txt").write_text("1 Nobody is here.\n")
    assert [story.task for story in read_folder(tmp_path, "train")] == [task for task in range(1, 21) for _ in range(2)]
    assert [len(story.lines) for story in read_folder(tmp_path, "test", (3, 20))] == [1, 1]


def test_short_names_of_the_folders_with_validation_data(tmp_path):
    (tmp_path / "qa1_valid.txt").write_text(OFFICIAL)
    (tmp_path / "qa11_valid.txt").write_text("1 Nobody is here.\n")
    assert len(read_folder(tmp_path, "valid", [1])) == 2
    assert read_folder(tmp_path, "valid", [11])[0].task == 11


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("Mary moved.\n", 1, "must begin with its id"),
        ("1 Mary moved.\nx Mary moved.\n", 2, "must begin with its id"),
        ("-1 Mary moved.\n", 1, "must begin with its id"),
        ("2 Mary moved.\n", 1, "the id must be 1, .*, got 2"),
        ("1 Mary moved.\n\n3 Mary moved.\n", 3, "the id must be 2, .*, got 3"),
        ("0 Mary moved.\n", 1, "the id must be 1, .*, got 0"),
        ("1\n", 1, "text must be .*, got ''"),
        ("1 A.\n2 Who?\ta\n", 2, "question<tab>answer<tab>ids.*, got 2 fields"),
        ("1 A.\n2 Who?\ta\t1\tb\n", 2, "question<tab>answer<tab>ids.*, got 4 fields"),
        ("1 A.\n2 Who?\t\t1\n", 2, "answer must be .*, got ''"),
        ("1 A.\n2 Who?\ta\t1,2\n", 2, "supporting facts must be .*, got '1,2'"),
        ("1 A.\n2 Who?\ta\t2\n", 2, r"support must name lines before .*, got \(2,\)"),
        ("1 A.\n2 \ta\t1\n", 2, "text must be .*, got ''"),
    ],
)
def test_malformed_lines_are_named(tmp_path, text, line, message):
    path = tmp_path / "qa1_bad.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"qa1_bad\.txt, line {line}: .*{message}"):
        read_stories(path, 1)


@pytest.mark.parametrize("content", [b"", b" \n\n", b"1 caf\xe9.\n"])
def test_files_without_stories_are_named(tmp_path, content):
    path = tmp_path / "qa1.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"qa1\.txt (contains no story|is not UTF-8)"):
        read_stories(path, 1)


def test_missing_and_ambiguous_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder must be a folder of bAbI files"):
        read_folder(tmp_path / "none", "train")
    with pytest.raises(FileNotFoundError, match=r"has no file qa1_single-supporting-fact_train\.txt"):
        read_folder(tmp_path, "train")
    (tmp_path / "qa1_train.txt").write_text(OFFICIAL)
    (tmp_path / "qa1_single-supporting-fact_train.txt").write_text(OFFICIAL)
    with pytest.raises(ValueError, match=r"several files of task 1: qa1_single-supporting-fact_train.txt, qa1_train"):
        read_folder(tmp_path, "train")
    with pytest.raises(ValueError, match=r"task must be an integer in 1..20, got 21"):
        read_folder(tmp_path, "train", [21])
    with pytest.raises(ValueError, match=r"task must be an integer in 1..20, got 0"):
        read_stories(tmp_path / "qa1_train.txt", 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Line(" "), "text must be one line"),
        (lambda: Line("a\tb"), "text must be one line"),
        (lambda: Line("Who\nis?", "a"), "text must be one line"),
        (lambda: Line("The <eos> is here."), "must not contain .* <eos>"),
        (lambda: Line("Who?", ""), "answer must be one word"),
        (lambda: Line("Who?", "s, w"), "answer must be one word"),
        (lambda: Line("Who?", "<UNK>"), "must not contain .* <unk>"),
        (lambda: Story(0, (Line("a"),)), r"task must be an integer in 1..20, got 0"),
        (lambda: Story(1, ()), "lines must hold at least one"),
        (lambda: Story(1, (Line("a"), Line("b?", "c", (2,)))), r"support must name lines before line 2.*\(2,\)"),
        (lambda: Story(1, (Line("a"), Line("b?", "c", (0,)))), r"support must name lines before line 2.*\(0,\)"),
    ],
)
def test_invalid_stories_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
