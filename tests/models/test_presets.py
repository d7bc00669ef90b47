"""The paper's models by name: sizes, budgets, and how many parameters they have."""

from pathlib import Path

import pytest
import torch

import deqseq as dq

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "presets.md"


def test_state_tracking():
    spec = dq.preset("mamba2-state-tracking")
    sizes = dq.Mamba2Config(256, n_layers=1, d_state=128, expand=4, headdim=64, dropout=0.05)
    assert spec.vocab_size == 240
    assert spec.backbone == sizes
    for solve, budget in ((spec.solve, 32), (spec.eval_solve, 2048)):
        stop = dq.Stop(rtol=0.05, max_steps=budget)
        assert solve == dq.SolveConfig(dq.Relaxed(0.8), stop, dq.Phantom(4, damping=0.8))


def test_an_unknown_name_names_similar_ones():
    message = r"'llama-1\.3b-implict'; did you mean 'llama3-1\.3b-implicit'"
    with pytest.raises(ValueError, match=message):
        dq.preset("llama-1.3b-implict")
    with pytest.raises(ValueError, match=r"'x' \(all names: list\(deqseq\.PRESETS\)\)"):
        dq.preset("x")


def parameter_count(spec):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in spec.build().parameters())


def test_the_document_has_the_presets_as_they_are():
    rows = []
    for name, spec in dq.PRESETS.items():
        cells = [name, f"{parameter_count(spec):,}", "one pass", "one pass", ""]
        if spec.solve is not None:
            budgets = spec.solve.stop.max_steps, spec.eval_solve.stop.max_steps
            cells[2:] = [*(f"≤ {budget}" for budget in budgets), str(spec.solve.gradient.steps)]
        rows.append(cells)
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]] == rows


def test_an_explicit_model_has_nothing_to_solve_in_eval_mode():
    with pytest.raises(ValueError, match="eval_solve must be None if solve is"):
        dq.LanguageModelSpec(10, dq.Mamba2Config(64), solve=None, eval_solve=dq.SolveConfig())
