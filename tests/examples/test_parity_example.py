"""The example to copy is short, needs nothing but deqseq and torch, and does what it says."""

import re
import sys
from pathlib import Path

import parity
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "parity.py"


def test_it_is_short_and_stands_alone():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 80
    modules = {*re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE)}
    assert modules - sys.stdlib_module_names == {"deqseq", "torch"}


@pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")
def test_a_tiny_run_prints_a_table_and_writes_nothing(tmp_path, monkeypatch, capsys):
    fixed = parity.WordProblem.fixed

    def four(task, count, length, seed):
        return fixed(task, 4, length, seed=seed)

    monkeypatch.setattr(parity.WordProblem, "fixed", four)  # of 256, which take a minute
    monkeypatch.chdir(tmp_path)
    parity.main(["--steps", "3"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["length", "accuracy", "iterations", "converged"]
    assert [row.split()[0] for row in rows] == ["16", "32", "64", "128"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_parity_is_learned(capsys):
    parity.main([])
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["128", "1.000"]
    assert row.endswith("100.0%")


def test_steps_out_of_range_are_named(capsys):
    with pytest.raises(SystemExit):
        parity.main(["--steps", "0"])
    assert "--steps must be 1 or more, got 0" in capsys.readouterr().err
