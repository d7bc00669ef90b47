"""The paper's models by name: sizes, budgets, and how many parameters they have."""

from pathlib import Path

import pytest
import torch

import deqseq as dq

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "presets.md"


def test_state_tracking():
    spec = dq.preset("mamba2-state-tracking")
    config = dq.Mamba2Config(
        d_model=256, n_layers=1, d_state=128, expand=4, headdim=64, dropout=0.05
    )
    assert (spec.vocab_size, spec.backbone) == (240, config)
    stops = (dq.Stop(rtol=0.05, max_steps=budget) for budget in (32, 2048))
    solves = [dq.SolveConfig(dq.Relaxed(0.8), stop, dq.Phantom(4, damping=0.8)) for stop in stops]
    assert [spec.solve, spec.eval_solve] == solves


def test_an_unknown_name_names_its_neighbours():
    with pytest.raises(
        ValueError, match=r"'llama-1\.3b-implict'; did you mean 'llama3-1\.3b-implicit'"
    ):
        dq.preset("llama-1.3b-implict")
    with pytest.raises(ValueError, match=r"'x' \(all names: list\(deqseq\.PRESETS\)\)"):
        dq.preset("x")


def cells(text: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def parameter_count(spec: dq.LanguageModelSpec) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in spec.build().parameters())


def test_the_document_has_the_presets_as_they_are():
    rows = []
    for name, spec in dq.PRESETS.items():
        budgets = ["one pass", "one pass", ""]
        if spec.solve is not None:
            stops = spec.solve.stop, (spec.eval_solve or spec.solve).stop
            budgets = [*(f"≤ {stop.max_steps}" for stop in stops), str(spec.solve.gradient.steps)]
        rows.append([name, f"{parameter_count(spec):,}", *budgets])
    assert cells(DOCUMENT.read_text())[2:] == rows


def test_an_explicit_model_has_nothing_to_solve_in_eval_mode():
    with pytest.raises(ValueError, match="eval_solve must be None if solve is"):
        dq.LanguageModelSpec(
            10, dq.Mamba2Config(d_model=64), solve=None, eval_solve=dq.SolveConfig()
        )
