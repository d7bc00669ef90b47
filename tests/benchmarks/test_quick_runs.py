"""Every benchmark's quick run ends well, and its rows have what pages read."""

import json
import os
from pathlib import Path

import pytest
from processes import output_of

FOLDER = Path(__file__).parents[2] / "benchmarks"
KEYS = "case metric ours peer theirs ratio runs spread goal holds machine"
FAST = ("ssd", "training_sweeps", "sweeps")  # seconds; the others take up to a minute
SCRIPTS = [
    path.stem if path.stem in FAST else pytest.param(path.stem, marks=pytest.mark.slow)
    for path in sorted(FOLDER.glob("*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_writes_its_rows(name, tmp_path):
    target = tmp_path / "rows.json"
    paths = f"{FOLDER.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": paths}
    output_of(FOLDER / f"{name}.py", "--quick", "--json", target, cwd=tmp_path, env=env)
    rows = json.loads(target.read_text())
    if name == "groups":
        assert [(row["group"], row["seed"], row["part"]) for row in rows] == [("Z2", 0, "tuning")]
        assert set(rows[0]["accuracy"]) == {"simultaneous", "sequential", "sliding"}
    elif name == "text":
        models = dict.fromkeys((row["text"], row["change"]) for row in rows)
        changes = ["", "no damping", "no damping", ""]
        assert [*models] == [*zip(["bible", "bible", "plays", "plays"], changes, strict=True)]
        fixed = [row["self_iterations"] for row in rows if row["sweep"] == "5 iterations"]
        assert fixed == [5] * 4
    else:
        assert all(list(row) == KEYS.split() for row in rows)
        assert len({(row["case"], row["metric"], row["peer"]) for row in rows}) == len(rows) > 0
        assert all(row["holds"] in (True, False) for row in rows if row["goal"])
