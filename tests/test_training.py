"""Curriculum phases and checkpoints."""

import json
import warnings

import pytest
import torch
from torch import nn

import deqseq as dq
from deqseq.training import Curriculum, Phase, load_latest, save_checkpoint

BOUNDED = Phase("bounded", 0.8, dq.Stop.exactly(4), dq.Phantom(1))
FREE = Phase("free", 1.0, dq.Stop(rtol=0.05, max_steps=24), dq.Phantom(4))


@pytest.mark.parametrize(("progress", "name"), [(0.0, "bounded"), (0.79, "bounded"), (0.8, "free"), (1.0, "free")])
def test_the_phase_in_force(progress, name):
    assert Curriculum((BOUNDED, FREE)).at(progress).name == name


def test_a_phase_changes_how_a_model_trains():
    model = dq.ImplicitModel(dq.Affine(4))
    FREE.apply(model)
    assert (model.stop, model.gradient) == (FREE.stop, FREE.gradient)


@pytest.mark.parametrize("phases", [(), (BOUNDED,), (FREE, BOUNDED), (FREE, FREE)])
def test_bad_curricula_are_named(phases):
    with pytest.raises(ValueError, match=r"Curriculum.phases must have ends that rise to 1, got \["):
        Curriculum(phases)


def test_a_phase_must_end_within_the_run():
    with pytest.raises(ValueError, match=r"Phase.until must lie in \(0, 1\], got 1.2"):
        Phase("late", 1.2, dq.Stop(), dq.OneStep())


def trained(steps, model=None, optimizer=None):
    if model is None:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def resumed(saved):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model.load_state_dict(saved.model)
    optimizer.load_state_dict(saved.optimizer)
    return model, optimizer


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path):
    whole, _ = trained(9)
    model, optimizer = trained(4)
    save_checkpoint(tmp_path, 4, model, optimizer, {"seconds": 1.5})
    saved = load_latest(tmp_path)
    assert (saved.step, saved.meta) == (4, {"seconds": 1.5})
    model, _ = trained(5, *resumed(saved))
    assert torch.equal(model.weight, whole.weight)
    assert torch.equal(model.bias, whole.bias)


def test_two_checkpoints_are_kept_and_the_newest_is_taken(tmp_path):
    model, optimizer = trained(1)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, model, optimizer, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000002", "checkpoint-00000003"]
    assert load_latest(tmp_path).step == 3


def test_an_interrupted_write_leaves_the_one_before(tmp_path, monkeypatch):
    model, optimizer = trained(1)
    save_checkpoint(tmp_path, 1, model, optimizer, {})
    monkeypatch.setattr(json, "dumps", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, model, optimizer, {})
    monkeypatch.undo()
    assert load_latest(tmp_path).step == 1
    save_checkpoint(tmp_path, 2, model, optimizer, {})
    assert load_latest(tmp_path).step == 2


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, file):
    model, optimizer = trained(1)
    for step in (1, 2):
        path = save_checkpoint(tmp_path, step, model, optimizer, {})
    (path / file).write_bytes((path / file).read_bytes()[:20])
    with pytest.warns(UserWarning, match=r"checkpoint-00000002 is damaged \(.*\): trying the one before"):
        assert load_latest(tmp_path).step == 1


def test_no_checkpoint_is_no_error(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_latest(tmp_path / "nothing") is None


def made():
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


def test_a_device_that_does_not_exist_is_no_damage(tmp_path):
    save_checkpoint(tmp_path, 1, *made(), {})
    with pytest.raises(RuntimeError, match="bogus"):
        load_latest(tmp_path, "bogus")


def test_nothing_readable_is_an_error_and_no_fresh_start(tmp_path):
    path = save_checkpoint(tmp_path, 1, *made(), {})
    (path / "checkpoint.json").write_text("{")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(RuntimeError, match=r"no checkpoint in .* can be read"),
    ):
        load_latest(tmp_path)


def test_what_was_just_saved_exists(tmp_path):
    for step in (100, 200, 5):
        assert save_checkpoint(tmp_path, step, *made(), {}).exists()
