"""The output folder of a run: entered with its own options, refused to others, and emptied of a run's files alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from common import run
from common.checkpoints import FILES
from common.run import FolderError, Log, Progress, claim_folder, curve_rows, release_folder, save_whole, write_text

EXAMPLES = Path(__file__).parents[2] / "examples"
WRITES = ("results.json", "log.txt", *(f"implicit/{files}" for files in FILES))


@pytest.fixture
def claim():
    claimed = []

    def enter(folder, options, **more):
        path = claim_folder(folder, "mine", options, **more)
        claimed.append(path)
        return path

    yield enter
    for path in set(claimed):
        release_folder(path)


def options_in(folder: Path) -> dict:
    return json.loads((folder / "options.json").read_text())["options"]


def test_a_run_that_another_process_begins_meanwhile_is_not_taken(claim, tmp_path, monkeypatch):
    take_lock = run._take_lock

    def late(folder: Path) -> None:
        take_lock(folder)
        (folder / "options.json").write_text(json.dumps({"script": "theirs", "options": {}}))

    monkeypatch.setattr(run, "_take_lock", late)
    with pytest.raises(FolderError, match="holds a run of theirs"):
        claim(tmp_path / "new", {})
    release_folder(tmp_path / "new")


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def test_the_same_options_enter_again(claim, tmp_path):
    options = {"steps": 5, "lengths": (1, 2), "device": "cpu"}
    folder = claim(tmp_path / "a" / "b", options, free=["device"])
    (folder / "results.json").write_text("kept")
    assert options_in(folder) == {"steps": 5, "lengths": [1, 2], "device": "cpu"}
    claim(folder, options | {"device": "cuda"}, free=["device"])
    assert options_in(folder)["device"] == "cuda"
    assert names(folder) == [".lock", "options.json", "results.json"]


@pytest.mark.parametrize(
    ("options", "changes"),
    [({"steps": 6}, "steps: 5 -> 6"), ({"steps": 5, "seed": 1}, "seed: None -> 1"), ({}, "steps: 5 -> None")],
)
def test_other_options_are_refused_and_nothing_is_lost(claim, tmp_path, options, changes):
    claim(tmp_path, {"steps": 5})
    with pytest.raises(FolderError, match=rf"\({changes}\).*--fresh"):
        claim(tmp_path, options)
    assert options_in(tmp_path) == {"steps": 5}
    claim(tmp_path, options, fresh=True)
    assert options_in(tmp_path) == options


def test_fresh_removes_what_a_run_wrote_and_nothing_else(claim, tmp_path):
    folder, elsewhere = claim(tmp_path / "run", {"steps": 5}), tmp_path / "elsewhere"
    written = ["results.json", "log.txt", "log.txt.unfinished", "implicit/checkpoint-00000001/model.safetensors"]
    foreign = ["thesis.txt", "implicit/notes.txt", "plots/results.json", "config.json"]
    foreign += ["implicit/checkpoint-00000003/thesis.txt", "implicit/checkpoint-best/model.safetensors"]
    for name in [*written, *foreign, "../elsewhere/results.json"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "implicit" / "checkpoint-00000002").symlink_to(elsewhere)
    claim(folder, {"steps": 6}, fresh=True, writes=WRITES)
    assert names(folder) == sorted([".lock", "options.json", *foreign, "implicit/checkpoint-00000002"])
    assert not (folder / "implicit" / "checkpoint-00000001").exists()
    assert names(elsewhere) == ["results.json"]


@pytest.mark.parametrize("config", [None, "config.json", "options.json"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_other_files_is_refused_and_left_alone(claim, tmp_path, config, fresh):
    (tmp_path / "thesis.txt").write_text("years of work")
    if config is not None:
        (tmp_path / config).write_text('{"steps": 5}')
    before = names(tmp_path)
    with pytest.raises(FolderError, match="holds files but no run"):
        claim(tmp_path, {}, fresh=fresh, writes=("thesis.txt",))
    assert names(tmp_path) == before


def test_another_scripts_run_is_refused_and_left_alone(claim, tmp_path):
    claim(tmp_path, {"steps": 5})
    (tmp_path / "results.json").write_text("kept")
    for fresh in (False, True):
        with pytest.raises(FolderError, match="holds a run of mine, not of yours"):
            claim_folder(tmp_path, "yours", {"steps": 5}, fresh=fresh, writes=WRITES)
    assert names(tmp_path) == [".lock", "options.json", "results.json"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"--output .*file/run cannot be a folder, .*file is a file"):
        claim_folder(tmp_path / "file" / "run", "mine", {})
    with pytest.raises(FolderError, match=r"--output .*too long"):
        claim_folder(tmp_path / ("long" * 100), "mine", {})
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(FolderError, match=r"--output .*run cannot be written"):
        claim_folder(tmp_path / "run", "mine", {})
    monkeypatch.undo()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FolderError, match=r"--output .*run cannot be used .*No space left"):
        claim_folder(tmp_path / "run", "mine", {})
    assert names(tmp_path) == ["file"]


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write_text(tmp_path / "results.json", "old")

    def full(path: Path, text: str) -> int:
        path.write_bytes(text.encode()[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "results.json", "much newer")
    assert names(tmp_path) == ["results.json"]
    assert (tmp_path / "results.json").read_text() == "old"


def test_progress_is_a_line_every_few_seconds_without_a_terminal(capsys, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    progress = Progress("mine", 12)
    assert list(progress.over("abcdefghijkl")) == list("abcdefghijkl")
    assert capsys.readouterr().out == "mine: 42% after 5 s\nmine: 83% after 10 s\nmine: 100% after 12 s\n"
    unknown = Progress("yours", None)
    for done in range(1, 7):
        unknown.to(done)
    assert capsys.readouterr().out == "yours: 5 done after 5 s\n"


def test_empty_paths_links_and_files_are_refused(claim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = claim(tmp_path / "run", {"steps": 5})
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "file").write_text("")
    before = names(tmp_path)
    for path, message in (("", "empty"), ("link", "symbolic link"), ("file", "is a file")):
        with pytest.raises(FolderError, match=message):
            claim(path, {"steps": 5}, fresh=True, writes=("**/*",))
    assert names(tmp_path) == before


def test_a_second_running_process_is_refused(claim, tmp_path):
    claim(tmp_path, {"steps": 5})
    code = f"from common.run import claim_folder; claim_folder({str(tmp_path)!r}, 'mine', {{'steps': 5}})"
    command = [sys.executable, "-c", code]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=EXAMPLES)
    assert refused.returncode == 1
    assert "another process is running" in refused.stderr
    release_folder(tmp_path)
    entered = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=EXAMPLES)
    assert entered.returncode == 0, entered.stderr
    claim(tmp_path, {"steps": 5})


def test_a_curve_is_cut_back_to_the_step_that_a_run_goes_on_from(tmp_path, capsys):
    path = tmp_path / "curve.jsonl"
    for steps in ((1, 2, 3, 4), (3, 4, 5)):
        curve = Log(path, "mine", 5)
        for step in steps:
            curve.add({"step": step, "loss": 1 / steps[0], "none": None})
        curve.close()
    assert curve_rows(curve.path) == [{"step": step, "loss": 1.0 if step < 3 else 1 / 3} for step in range(1, 6)]
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert len(curve_rows(curve.path)) == 5
    assert "mine: 100%" in capsys.readouterr().out
    other = Log(tmp_path / "none.jsonl", "other", 5, main=False)
    other.add({"step": 5})
    assert not (tmp_path / "none.jsonl").exists()
    assert capsys.readouterr().out == ""


class Part:
    """Saves two files, or fails after the first one."""

    def __init__(self, name, text, fails=False):
        self.name, self.text, self.fails = name, text, fails

    def save_pretrained(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / f"{self.name}.json").write_text(self.text)
        if self.fails:
            raise OSError("no space left")
        (folder / f"{self.name}.safetensors").write_text(self.text)


def test_a_model_that_cannot_be_saved_leaves_the_one_before(tmp_path):
    def texts():
        return {path.name: path.read_text() for path in (tmp_path / "model").iterdir()}

    save_whole(tmp_path / "model", Part("model", "old"), Part("tokenizer", "old"))
    before = texts()
    assert set(before) == {f"{name}.{kind}" for name in ("model", "tokenizer") for kind in ("json", "safetensors")}
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="no space left"):
        save_whole(tmp_path / "model", Part("model", "new"), Part("tokenizer", "new", fails=True))
    assert texts() == before | {"notes.txt": "mine"}
    save_whole(tmp_path / "model", Part("model", "new"))
    assert texts() == before | {"notes.txt": "mine", "model.json": "new", "model.safetensors": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
