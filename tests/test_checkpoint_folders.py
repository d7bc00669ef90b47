"""Which checkpoints are kept, what becomes of damaged ones, and what is never touched."""

import json
import os
import shutil
import warnings

import pytest
import torch
from torch import nn

from deqseq.training import DamagedCheckpointWarning, NonFiniteLoss, check_finite, load_latest, save_checkpoint
from deqseq.training import checkpoint as module

FILES = ["model.safetensors", "training.safetensors", "checkpoint.json", "manifest.json"]


def save(folder, step, **options):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, step)
    return save_checkpoint(folder, step, model, torch.optim.AdamW(model.parameters()), {}, **options)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def truncated(path):
    path.write_bytes(path.read_bytes()[:20])


def changed(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def emptied(path):
    path.write_bytes(b"")


def missing(path):
    path.unlink()


def other_json(path):
    path.write_text('{"step": 2}')


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, [8]), (2, [5, 8]), (3, [3, 5, 8]), (9, [1, 3, 5, 8])], ids=lambda value: str(value)
)
def test_as_many_as_asked_are_kept(tmp_path, keep, kept):
    for step in (1, 3, 5, 8):
        save(tmp_path, step, keep=keep)
    assert names(tmp_path) == [f"checkpoint-{step:08d}" for step in kept]
    assert load_latest(tmp_path).step == 8


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    assert load_latest(tmp_path).step == 100_000_000
    assert names(tmp_path) == ["checkpoint-100000000", "checkpoint-99999999"]


@pytest.mark.parametrize("damage", [truncated, changed, emptied, missing, other_json])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, file, damage):
    for step in (1, 2):
        path = save(tmp_path, step)
    damage(path / file)
    message = rf"checkpoint-00000002 is damaged \(({file}|[a-z]+\.(json|safetensors)) .*\): trying the one before"
    with pytest.warns(DamagedCheckpointWarning, match=message):
        assert load_latest(tmp_path).step == 1
    save(tmp_path, 3)
    assert load_latest(tmp_path).step == 3


@pytest.mark.parametrize("file", FILES)
def test_every_bit_of_a_file_counts(tmp_path, file):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file
    data = path.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 50)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saved = load_latest(tmp_path)
        assert saved.step == 1 if caught else file == "manifest.json"  # white space there may change
        assert saved.model["weight"].unique().tolist() == [saved.step]


def test_what_is_said_of_the_damage(tmp_path):
    path = save(tmp_path, 1)
    size = (path / "model.safetensors").stat().st_size
    for damage, message in (
        (changed, "model.safetensors has other bytes than were written"),
        (truncated, f"model.safetensors has 20 bytes instead of {size}"),
        (missing, "model.safetensors is missing"),
    ):
        damage(path / "model.safetensors")
        with (
            pytest.warns(UserWarning, match=message),
            pytest.raises(RuntimeError, match=r"no checkpoint in .* can be read \(checkpoint-00000001\): remove them"),
        ):
            load_latest(tmp_path)


def test_damaged_ones_are_not_counted_among_those_that_are_kept(tmp_path):
    save(tmp_path, 1)
    truncated(save(tmp_path, 4) / "model.safetensors")
    save(tmp_path, 3)
    assert names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000003", "checkpoint-00000004"]
    save(tmp_path, 5)
    assert names(tmp_path) == ["checkpoint-00000003", "checkpoint-00000005"]


def test_what_was_just_saved_exists(tmp_path):
    for step in (100, 200, 5):
        assert save(tmp_path, step, keep=1).exists()


def test_no_checkpoint_is_no_error(tmp_path):
    assert load_latest(tmp_path / "nothing") is None
    assert load_latest(tmp_path) is None


def test_a_device_that_does_not_exist_is_no_damage(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(RuntimeError, match="bogus"):
        load_latest(tmp_path, "bogus")


def test_a_failed_write_leaves_the_one_before_and_nothing_else(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(module, "write_tensors", full)
        with pytest.raises(OSError, match="No space left on device"):
            save(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_everything_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.replace

    def synced(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(old, new):
        events.append(f"{old.name} -> {new.name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    save(tmp_path, 7)
    unfinished = "unfinished-00000007"
    assert events == [*FILES, unfinished, f"{unfinished} -> checkpoint-00000007", tmp_path.name]


def test_leftovers_of_an_interrupted_write_are_removed_and_nothing_else(tmp_path):
    shutil.copytree(save(tmp_path, 1), tmp_path / "unfinished-00000002")
    (tmp_path / "unfinished-00000003").mkdir()
    (tmp_path / "unfinished-00000003" / "model.safetensors").write_bytes(b"half")
    kept = ["unfinished", "unfinished-7", "unfinished-00000004", "checkpoint-final", "mine.txt", "checkpoint-12"]
    for name in kept[:2]:
        (tmp_path / name).mkdir()
    for name in (kept[2], *kept[3:]):
        (tmp_path / name).write_text("mine") if name.endswith("txt") else (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / kept[2] / "notes.txt").write_text("mine")
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == sorted([*kept, "checkpoint-00000005"])


def test_folders_with_something_else_are_never_removed(tmp_path):
    (save(tmp_path, 1) / "notes.txt").write_text("mine")
    elsewhere = save(tmp_path / "elsewhere", 2)
    (tmp_path / "checkpoint-00000002").symlink_to(elsewhere)
    save(tmp_path, 3, keep=1)
    assert (tmp_path / "checkpoint-00000001" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(FILES)
    for step in (1, 2):
        with pytest.raises(
            FileExistsError, match=rf"checkpoint-0000000{step} is in the way of a checkpoint, and holds"
        ):
            save(tmp_path, step)


def test_a_checkpoint_that_was_set_aside_is_found(tmp_path):
    """As a kill between the two renames leaves it."""
    save(tmp_path, 4).rename(tmp_path / "replaced-00000004")
    assert load_latest(tmp_path).step == 4
    save(tmp_path, 4)
    assert names(tmp_path) == ["checkpoint-00000004"]


def test_the_folder_may_be_a_string(tmp_path):
    save(str(tmp_path), 1)
    assert load_latest(str(tmp_path)).step == 1
    assert json.loads((tmp_path / "checkpoint-00000001" / "checkpoint.json").read_text())["step"] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tensor", [True, False])
def test_a_loss_that_is_not_finite_stops_the_run_and_says_where(tmp_path, value, tensor):
    save(tmp_path, 1)
    truncated(save(tmp_path, 2) / "model.safetensors")
    loss = torch.tensor(value, requires_grad=True) if tensor else value
    with pytest.raises(NonFiniteLoss) as caught:
        check_finite(loss, step=3, phase="free", directory=tmp_path)
    error = caught.value
    last = tmp_path / "checkpoint-00000001"
    assert (error.quantity, error.step, error.phase, error.checkpoint) == ("loss", 3, "free", last)
    assert str(error) == (
        f"the loss is {value} after step 3 in phase 'free': stopped before the weights are updated; the last good "
        f"checkpoint is {last}"
    )
    assert isinstance(error, FloatingPointError)
    assert str(error.__reduce__()[0](*error.__reduce__()[1])) == str(error)
    assert names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_a_finite_loss_is_returned(tmp_path):
    assert check_finite(torch.tensor([2.5], requires_grad=True), step=0, directory=tmp_path / "nothing") == 2.5
    with pytest.raises(
        NonFiniteLoss, match=r"the gradient norm is nan after step 0: .*; no checkpoint has been written"
    ):
        check_finite(torch.tensor(float("nan")), step=0, quantity="gradient norm", directory=tmp_path)
    with pytest.raises(ValueError, match=r"the loss must be one number, got a tensor of shape \(2,\)"):
        check_finite(torch.zeros(2), step=0)
