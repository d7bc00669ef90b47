"""Checkpoints of the examples: which are kept, what becomes of damaged ones, and what is never touched."""

import json
import os
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from common import checkpoints
from common.checkpoints import DamagedCheckpointWarning, newest, resume, save
from torch import nn

FILES = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "progress.json", "manifest.json"]


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def model(accelerator) -> nn.Module:
    model = nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return model


@pytest.fixture
def write(accelerator, model, tmp_path):
    def written(step: int):
        nn.init.constant_(model.weight, step)
        save(accelerator, tmp_path, step, {"more": {"a": [1, None]}})
        return tmp_path / f"checkpoint-{step:08d}"

    return written


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def truncated(path):
    path.write_bytes(path.read_bytes()[:20])


def changed(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_json(path):
    path.write_text('{"step": 2}')


def test_everything_comes_back(accelerator, model, write, tmp_path):
    assert resume(accelerator, tmp_path / "nothing") is None
    assert sorted(FILES) == names(write(3))
    nn.init.zeros_(model.weight)
    state = torch.get_rng_state()
    torch.rand(5)
    assert resume(accelerator, tmp_path) == {"step": 3, "more": {"a": [1, None]}}
    assert model.weight.unique().tolist() == [3]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_last_two_are_kept(write, tmp_path):
    for step in (1, 3, 5, 8):
        write(step)
    assert names(tmp_path) == ["checkpoint-00000005", "checkpoint-00000008"]


def test_steps_are_ordered_as_numbers(write, tmp_path):
    for step in (99_999_999, 100_000_000):
        write(step)
    assert newest(tmp_path).name == "checkpoint-100000000"


@pytest.mark.parametrize("damage", [truncated, changed, os.remove, other_json])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(accelerator, model, write, tmp_path, file, damage):
    write(1)
    damage(write(2) / file)
    with pytest.warns(DamagedCheckpointWarning, match=r"checkpoint-00000002 is damaged \(.*trying the one before"):
        assert resume(accelerator, tmp_path)["step"] == 1
    assert model.weight.unique().tolist() == [1]
    write(2)
    assert newest(tmp_path).name == "checkpoint-00000002"


def test_if_all_are_damaged_it_is_an_error(write, tmp_path):
    truncated(write(1) / "model.safetensors")
    with pytest.warns(DamagedCheckpointWarning, match=r"model.safetensors has 20 bytes instead of \d+"):  # noqa: SIM117
        with pytest.raises(RuntimeError, match=r"checkpoint-00000001\): remove"):
            newest(tmp_path)


def test_damaged_ones_are_not_counted_among_those_that_are_kept(write, tmp_path):
    write(1)
    truncated(write(4) / "model.safetensors")
    write(5)
    assert names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000005"]


@pytest.mark.parametrize("file", ["optimizer.bin", "random_states_0.pkl"])
def test_no_code_is_run_by_loading(accelerator, write, tmp_path, file):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harmed"),)

    path = write(1)
    torch.save({"state": Harmful()}, path / file)
    (path / "random_states_1.pkl").write_bytes(pickle.dumps(Harmful()))
    (path / "manifest.json").unlink()
    checkpoints._seal(path)
    try:
        resume(accelerator, tmp_path)
    except pickle.UnpicklingError:
        assert file == "optimizer.bin"
    assert not (tmp_path / "harmed").exists()


def test_a_failed_write_leaves_the_one_before_and_nothing_else(accelerator, write, tmp_path, monkeypatch):
    write(1)

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_seal", full)
    with pytest.raises(OSError, match="No space left on device"):
        write(2)
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_everything_is_on_the_disk_before_the_name_is(write, tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.replace

    def synced(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(old, new):
        events.append(f"{old.name} -> {new.name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write(7)
    assert sorted(events[:5]) == sorted(FILES)
    assert events[5:] == ["unfinished-00000007", "unfinished-00000007 -> checkpoint-00000007", tmp_path.name]


def test_leftovers_of_an_interrupted_write_are_removed_and_nothing_else(write, tmp_path):
    (tmp_path / "unfinished-00000003").mkdir()
    for name in ("model.safetensors", ".tmpBCV4mW"):  # safetensors writes into a file of such a name and renames it
        (tmp_path / "unfinished-00000003" / name).write_bytes(b"half")
    kept = ["unfinished-00000004/notes.txt", "unfinished-7/a", "checkpoint-final/a", "checkpoint-00000001/notes.txt"]
    for name in kept:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("mine")
    write(5)
    assert all((tmp_path / name).read_text() == "mine" for name in kept)
    assert names(tmp_path) == sorted([*(name.partition("/")[0] for name in kept), "checkpoint-00000005"])


def test_folders_with_something_else_and_links_are_never_removed(write, tmp_path):
    (write(1) / "notes.txt").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    write(2).rename(elsewhere)
    (tmp_path / "checkpoint-00000002").symlink_to(elsewhere)
    write(3)
    assert (tmp_path / "checkpoint-00000001" / "notes.txt").exists()
    assert names(elsewhere) == sorted(FILES)
    for step in (1, 2):
        with pytest.raises(FileExistsError, match=f"checkpoint-0000000{step} is in the way"):
            write(step)
    assert json.loads((elsewhere / "progress.json").read_text())["step"] == 2
