"""Documents from files: what is read, in which order, resumed where, and what bad input says."""

import json
import sys

import pytest

from deqseq.tasks.text import LocalDocuments


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def corpus(folder):
    """A folder of three kinds of file, and the documents it has, in order."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (folder / "b").mkdir()
    (folder / "a.TXT").write_bytes("first\r\nné\n".encode())
    (folder / "b" / "one.jsonl").write_text(jsonl({"text": "x", "n": 1}, {"text": ""}, {"text": "y\n"}) + "\n  \n")
    rows = [f"row {i}" for i in range(3000)]  # more than one batch of rows
    parquet.write_table(
        pyarrow.table({"text": [*rows, ""], "n": range(3001)}), folder / "c.parquet", row_group_size=700
    )
    (folder / ".hidden.txt").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text("no")
    return ["first\r\nné\n", "x", "y\n", *rows]


def test_a_folder_is_read_in_order(tmp_path):
    expected = corpus(tmp_path)
    documents = LocalDocuments(tmp_path)
    assert list(documents) == expected
    assert list(documents) == expected  # again from the beginning


@pytest.mark.parametrize("name", ["a.TXT", "b/one.jsonl", "c.parquet"])
def test_a_file_alone(tmp_path, name):
    expected = {"a.TXT": slice(0, 1), "b/one.jsonl": slice(1, 3), "c.parquet": slice(3, None)}[name]
    documents = corpus(tmp_path)[expected]
    assert list(LocalDocuments(str(tmp_path / name))) == documents


@pytest.mark.parametrize("done", [0, 1, 2, 3, 4, 1030, 3003])
def test_resumes_where_the_state_stands(tmp_path, done):
    expected = corpus(tmp_path)
    documents = LocalDocuments(tmp_path)
    iterator = iter(documents)
    assert [next(iterator) for _ in range(done)] == expected[:done]
    state = json.loads(json.dumps(documents.state_dict()))
    resumed = LocalDocuments(tmp_path)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert list(resumed) == expected[done:]
    assert list(resumed) == expected  # a state is used once
    iter(documents)
    assert documents.state_dict() == {"file": "a.TXT", "documents": 0}


def test_state_of_a_single_file(tmp_path):
    (tmp_path / "one.jsonl").write_text(jsonl({"text": "x"}, {"text": "y"}))
    documents = LocalDocuments(tmp_path / "one.jsonl")
    next(iter(documents))
    assert documents.state_dict() == {"file": "one.jsonl", "documents": 1}
    with pytest.raises(ValueError, match=r"no longer has the file 'two.jsonl'"):
        documents.load_state_dict({"file": "two.jsonl", "documents": 1})


def test_reading_is_lazy(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "x"}) + "broken\n")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    assert next(iter(LocalDocuments(tmp_path))) == "x"


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "x"}), encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("y", encoding="utf-8-sig")
    assert list(LocalDocuments(tmp_path)) == ["x", "y"]


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "x", "body": "y"}))
    assert list(LocalDocuments(tmp_path, field="body")) == ["y"]


def test_files_that_are_not_read_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "README.md").write_text("y")
    with pytest.warns(UserWarning, match=r"1 of the files in .* are not read: README.md"):
        documents = LocalDocuments(tmp_path)
    assert list(documents) == ["x"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"", r"a\.txt has no text in it"),
        ("a.jsonl", b"\n \n", r"a\.jsonl has no text in it"),
        ("a.jsonl", b'{"text": ""}\n', r"a\.jsonl has no text in it"),
        ("a.txt", b"ab\nc\xe9d", r"a\.txt, line 2: byte 0xe9 at offset 4 of the file is no UTF-8"),
        (
            "a.jsonl",
            b'{"text": "\xc3\xa9"}\n{"text": "\xe9"}\n',
            r"a\.jsonl, line 2: byte 0xe9 at offset 25 of the file",
        ),
        ("a.jsonl", b'{"text": "ab"}\n{"text": \n', r"a\.jsonl, line 2 is no JSON: Expecting value"),
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl, line 1 is no JSON"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl, line 1 must be an object with the field 'text', got list"),
        ("a.jsonl", b'{"body": "x", "n": 1}\n', r"a\.jsonl, line 1 has no field 'text', only 'body', 'n'"),
        ("a.jsonl", b"{}\n", r"a\.jsonl, line 1 has no field 'text', only none"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl, line 1: 'text' must be a string, got int"),
        ("a.jsonl", b'{"text": null}\n', r"a\.jsonl, line 1: 'text' must be a string, got NoneType"),
        ("a.jsonl", b'{"text": "ab\\ud800"}\n', r"a\.jsonl, line 1: .* lone surrogate '\\ud800' at character 2"),
        ("a.parquet", b"no parquet at all", r"a\.parquet is no parquet file that can be read"),
        ("a.parquet", b"", r"a\.parquet is no parquet file that can be read"),
    ],
)
def test_bad_content(tmp_path, name, content, text):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=text):
        list(LocalDocuments(tmp_path))


def test_bad_parquet_columns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["x", None], "n": [1, 2]}), file)
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'text', only 'body', 'n'"):
        list(LocalDocuments(file))
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: 'body' must be a string, got NoneType"):
        list(LocalDocuments(file, field="body"))
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: 'n' must be a string, got int"):
        list(LocalDocuments(file, field="n"))


def test_bad_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*missing"):
        LocalDocuments(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"has no \.txt, \.jsonl, \.parquet file"):
        LocalDocuments(tmp_path)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"a\.csv must end in \.txt, \.jsonl, \.parquet, got '\.csv'"):
        LocalDocuments(tmp_path / "a.csv")
    (tmp_path / "noname").write_text("x")
    with pytest.raises(ValueError, match=r"got 'no suffix'"):
        LocalDocuments(tmp_path / "noname")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'pip install "deqseq\[data\]"'):
        list(LocalDocuments(tmp_path))
