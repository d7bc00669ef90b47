"""A run's folder: entered again with the same options, refused with others."""

import json

import pytest

from deqseq.training.run_folder import claim_folder


def test_the_same_options_enter_again(tmp_path):
    options = {"steps": 5, "lengths": (1, 2), "device": "cpu"}
    folder = claim_folder(tmp_path / "a" / "b", options, free=["device"])
    (folder / "weights").write_text("kept")
    assert json.loads((folder / "config.json").read_text()) == {"steps": 5, "lengths": [1, 2], "device": "cpu"}
    claim_folder(folder, options | {"device": "cuda"}, free=["device"])
    assert json.loads((folder / "config.json").read_text())["device"] == "cuda"
    assert (folder / "weights").read_text() == "kept"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "weights"]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"steps": 6}, r"steps: 5 -> 6"),
        ({"steps": 5, "seed": 1}, r"seed: None -> 1"),
        ({"seed": 0}, r"seed: None -> 0, steps: 5 -> None"),
    ],
)
def test_other_options_are_refused_and_nothing_is_lost(tmp_path, options, changes):
    claim_folder(tmp_path, {"steps": 5})
    with pytest.raises(ValueError, match=rf"holds a run with other options \({changes}\)"):
        claim_folder(tmp_path, options)
    assert json.loads((tmp_path / "config.json").read_text()) == {"steps": 5}
    claim_folder(tmp_path, options, fresh=True)
    assert json.loads((tmp_path / "config.json").read_text()) == options


def test_a_foreign_folder_is_never_removed(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds files that are not a run's \(no config.json\)"):
        claim_folder(tmp_path, {}, fresh=True)
    assert (tmp_path / "thesis.txt").exists()
