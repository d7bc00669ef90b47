"""The official file format: read, written, and refused with file and line."""

import pytest

from deqseq.tasks.babi import (
    GENERATORS,
    TASK_NAMES,
    BabiFormatError,
    Fact,
    Question,
    generate_stories,
    read_folder,
    read_stories,
    write_stories,
)

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
        Fact("Mary moved to the bathroom."),
        Fact("John went to the hallway."),
        Question("Where is Mary?", "bathroom", (1,)),
        Fact("Daniel went back to the hallway."),
        Question("What is Daniel carrying?", "milk,football", (1, 4)),
    )
    assert second.lines == (Fact("Sandra journeyed to the garden."), Question("Where is Sandra?", "garden", (1,)))
    assert first.words()[11:18] == (".", "where", "is", "mary", "?", "bathroom", "daniel")
    assert first.words()[-2:] == ("?", "milk,football")


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
    ("text", "message"),
    [
        ("Mary moved.\n", "line 1: a line must begin with its id and a blank, got 'Mary moved.'"),
        ("1 Mary moved.\nx Mary moved.\n", "line 2: a line must begin with its id and a blank, got 'x Mary moved.'"),
        ("-1 Mary moved.\n", "line 1: a line must begin with its id and a blank"),
        ("2 Mary moved.\n", "line 1: the id must be 1, or 1 for a new story, got 2"),
        ("1 Mary moved.\n\n3 Mary moved.\n", "line 3: the id must be 2, or 1 for a new story, got 3"),
        ("0 Mary moved.\n", "line 1: the id must be 1, or 1 for a new story, got 0"),
        ("1\n", "line 1: Fact.text must be one line of text without tabs, got ''"),
        ("1 A.\n2 Who?\ta\n", "line 2: a question must be 'question<tab>answer<tab>supporting facts', got 2 fields"),
        ("1 A.\n2 Who?\ta\t1\tb\n", "line 2: a question must be 'question<tab>answer<tab>supporting facts', got 4"),
        ("1 A.\n2 Who?\t\t1\n", "line 2: Question.answer must be one word or a comma list without blanks, got ''"),
        ("1 A.\n2 Who?\ta\t1,2\n", "line 2: supporting facts must be ids with blanks between, got '1,2'"),
        ("1 A.\n2 Who?\ta\t2\n", "line 2: Question.support must name lines before the question's own, 2, got (2,)"),
        ("1 A.\n2 \ta\t1\n", "line 2: Question.text must be one line of text without tabs, got ''"),
        ("", "holds no story"),
        (" \n\n", "holds no story"),
    ],
)
def test_malformed_files_are_named_with_their_line(tmp_path, text, message):
    path = tmp_path / "qa1_bad.txt"
    path.write_text(text)
    with pytest.raises(BabiFormatError) as caught:
        read_stories(path, 1)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_what_is_no_text(tmp_path):
    path = tmp_path / "qa1.txt"
    path.write_bytes(b"1 caf\xe9.\n")
    with pytest.raises(BabiFormatError, match="is not UTF-8 text"):
        read_stories(path, 1)


def test_missing_and_doubtful_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder must be a folder of bAbI files"):
        read_folder(tmp_path / "none", "train")
    with pytest.raises(FileNotFoundError, match=r"has no file qa1_single-supporting-fact_train\.txt"):
        read_folder(tmp_path, "train")
    (tmp_path / "qa1_train.txt").write_text(OFFICIAL)
    (tmp_path / "qa1_single-supporting-fact_train.txt").write_text(OFFICIAL)
    with pytest.raises(ValueError, match=r"several files of task 1: qa1_single-supporting-fact_train.txt, qa1_train"):
        read_folder(tmp_path, "train")
    with pytest.raises(ValueError, match="task must be one of 1 to 20, got 21"):
        read_folder(tmp_path, "train", [21])
    with pytest.raises(ValueError, match="task must be one of 1 to 20, got 0"):
        read_stories(tmp_path / "qa1_train.txt", 0)


def test_a_file_holds_stories_of_one_task(tmp_path):
    with pytest.raises(ValueError, match=r"stories must be of one task, got tasks \[1, 15\]"):
        write_stories(tmp_path, "train", generate_stories(1, 1, seed=0) + generate_stories(15, 1, seed=0))
    with pytest.raises(ValueError, match=r"stories must be of one task, got tasks \[\]"):
        write_stories(tmp_path, "train", [])
