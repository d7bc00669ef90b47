"""Streamed data sets: read from a local folder, which the hub's library treats like one of its own."""

import json
import sys

import pytest

from deqseq.tasks.text import ByteEncoder, HubDocuments, PackedStream


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for shard in range(2):
        lines = [{"text": f"document {shard} {i}" if i != 2 else "", "n": i} for i in range(6)]
        (tmp_path / f"part-{shard}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


EXPECTED = [f"document {shard} {i}" for shard in range(2) for i in range(6) if i != 2]


def test_reads_again_and_again(folder):
    documents = HubDocuments(str(folder))
    assert list(documents) == EXPECTED
    iterator = iter(documents)
    next(iterator)
    assert list(documents) == EXPECTED


@pytest.mark.parametrize("done", [0, 1, 2, 5, 9, 10])
def test_resumes_where_the_state_stands(folder, done):
    documents = HubDocuments(str(folder))
    iterator = iter(documents)
    assert [next(iterator) for _ in range(done)] == EXPECTED[:done]
    state = json.loads(json.dumps(documents.state_dict()))
    resumed = HubDocuments(str(folder))
    list(resumed)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert list(resumed) == EXPECTED[done:]
    assert list(resumed) == EXPECTED  # a state is used once


def test_state_before_the_first_record(folder):
    documents = HubDocuments(str(folder))
    fresh = documents.state_dict()
    list(documents)
    iter(documents)
    assert documents.state_dict() == fresh


def test_a_repeated_stream_resumes_in_its_second_round(folder):
    def stream():
        return PackedStream(HubDocuments(str(folder)), ByteEncoder(), length=8, batch_size=3, repeat=True)

    whole = stream()
    for _ in range(6):
        next(whole)
    resumed = stream()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(8):
        assert next(resumed).targets.tolist() == next(whole).targets.tolist()


def test_bad_columns(folder):
    with pytest.raises(ValueError, match=r"split train has no field 'body', only 'text', 'n'"):
        list(HubDocuments(str(folder), field="body"))
    with pytest.raises(ValueError, match=r"'n' must be a string, got int"):
        list(HubDocuments(str(folder), field="n"))


def test_datasets_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "deqseq\[data\]"'):
        HubDocuments("somebody/something")
