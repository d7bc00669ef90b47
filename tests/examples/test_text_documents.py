"""Documents from files and data sets: what is read, in which order, what is held out, and what bad input says."""

import json

import datasets
import pyarrow
import pytest
from common.text import babble, hub_documents, load_corpus, local_documents
from pyarrow import parquet


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def corpus(folder):
    """A folder with three kinds of file, and its documents in order."""
    (folder / "b").mkdir()
    (folder / "z.TXT").write_bytes("first\n\nné\n".encode())
    (folder / "b" / "one.jsonl").write_text(jsonl({"text": "x", "n": 1}, {"text": "y\n", "n": 2}))
    (folder / "b" / "two.jsonl").write_text("\n" + jsonl({"text": "z"}) + "\n  \n")
    rows = [f"row {i}" for i in range(3000)]
    table = pyarrow.table({"n": range(3000), "text": rows})
    parquet.write_table(table, folder / "c.parquet", row_group_size=700)
    (folder / ".hidden.txt").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text("no")
    return ["first\n\nné\n", "x", "y\n", "z", *rows]


def test_a_folder_is_read_whole(tmp_path):
    expected = corpus(tmp_path)
    documents = local_documents(tmp_path)
    assert documents.column_names == ["text"]
    assert documents["text"][:] == expected


@pytest.mark.parametrize(
    ("name", "part"), [("z.TXT", slice(0, 1)), ("b/one.jsonl", slice(1, 3)), ("c.parquet", slice(4, None))]
)
def test_a_file_alone(tmp_path, name, part):
    expected = corpus(tmp_path)[part]
    assert local_documents(str(tmp_path / name))["text"][:] == expected


def test_a_changed_file_is_read_again(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "old"}))
    assert local_documents(tmp_path)["text"][:] == ["old"]
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "new"}))
    assert local_documents(tmp_path)["text"][:] == ["new"]


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "x"}), encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("y", encoding="utf-8-sig")
    assert sorted(local_documents(tmp_path)["text"]) == ["x", "y"]


def test_other_fields_do_not_matter(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "x", "n": 1}, {"text": "y", "n": "1"}, {"n": [1], "text": "z"}))
    assert local_documents(tmp_path)["text"][:] == ["x", "y", "z"]


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl({"text": "x", "body": "y"}))
    (tmp_path / "b.txt").write_text("z")
    assert sorted(local_documents(tmp_path, "body")["text"]) == ["y", "z"]


def test_files_of_other_kinds_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "README.md").write_text("y")
    with pytest.warns(UserWarning, match=r"skipped: README\.md"):
        assert local_documents(tmp_path)["text"][:] == ["x"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\nc\xe9d", r"\.txt files of .*: 'utf-8' codec can't decode byte 0xe9"),
        ("a.jsonl", b'{"text": "\xc3\xa9"}\n{"text": "\xe9"}\n', "utf-8.*0xe9"),
        ("a.jsonl", b'{"text": "ab"}\n{"text": \n', r"\.jsonl files of .*: JSON parse error"),
        ("a.jsonl", b"", r"\.jsonl files of .*: no records"),
        ("a.jsonl", b'{"body": "x", "n": 1}\n', r"no field 'text', only 'body', 'n'"),
        ("a.jsonl", b'{"text": 3}\n', r"'text' must be text, got int"),
        ("a.parquet", b"no parquet at all", r"\.parquet files of .*: .*not a parquet file"),
        ("a.csv", b"x", r"a\.csv must end in \.txt, \.jsonl, \.parquet"),
    ],
)
def test_bad_content(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(local_documents(tmp_path / name)["text"])


def test_bad_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        local_documents(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"has no \.txt, \.jsonl, \.parquet file"):
        local_documents(tmp_path)


def hub_folder(folder):
    """A data set as the hub has them; `datasets` treats a local folder in the same way."""
    for split in ("train", "validation"):
        for part in range(2):
            lines = [{"id": i, "body": f"{split} {part} {i}"} for i in range(5)]
            (folder / f"{split}-{part}.jsonl").write_text(jsonl(*lines))


def test_a_data_set_of_the_hub_is_streamed(tmp_path):
    hub_folder(tmp_path)
    documents = hub_documents(str(tmp_path), field="body")
    assert isinstance(documents, datasets.IterableDataset)
    expected = [{"text": f"train {part} {i}"} for part in range(2) for i in range(5)]
    assert list(documents) == list(documents) == expected
    found = load_corpus(f"hub:{tmp_path}", field="body")
    assert list(found.train) == expected
    assert found.held_out == [f"validation {part} {i}" for part in range(2) for i in range(5)]
    with pytest.raises(ValueError, match=r"no field 'text', only 'id', 'body'"):
        hub_documents(str(tmp_path))
    with pytest.raises(ValueError, match=r"'id' must be text, got int"):
        hub_documents(str(tmp_path), field="id")
    with pytest.raises(ValueError, match="test"):
        hub_documents(str(tmp_path), split="test", field="body")


@pytest.mark.parametrize(("count", "held"), [(2, 1), (20, 1), (39, 1), (40, 2), (100, 5)])
def test_the_last_documents_of_a_corpus_are_held_out(tmp_path, count, held):
    texts = [f"document {i}" for i in range(count)]
    (tmp_path / "a.jsonl").write_text(jsonl(*({"text": text} for text in texts)))
    train, held_out = load_corpus(str(tmp_path))
    assert [*train["text"], *held_out] == texts
    assert len(held_out) == held


def test_the_end_of_the_only_document_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i:03d}" for i in range(100)))
    train, held_out = load_corpus(str(tmp_path))
    assert train["text"][0] + held_out[0] == "".join(f"{i:03d}" for i in range(100))
    assert len(held_out[0]) == 15


def test_held_out_text_of_its_own(tmp_path):
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text(jsonl({"text": f"{name} 1"}, {"text": f"{name} 2"}))
    train, held_out = load_corpus(str(tmp_path / "train.jsonl"), held_out=str(tmp_path / "held.jsonl"))
    assert (train["text"][:], held_out) == (["train 1", "train 2"], ["held 1", "held 2"])


def test_made_up_sentences_are_others_for_another_seed():
    train, held_out = load_corpus("babble")
    assert (len(train), len(held_out)) == (400, 40)
    assert not set(train["text"]) & set(held_out)
    assert babble(3) == babble(3) == train["text"][:3]
