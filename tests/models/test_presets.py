"""The paper's models by name: sizes, budgets, and how many parameters they have."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

import deqseq as dq
from deqseq.models.presets import parameters, widened

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "presets.md"
SIZES = {"130m": (768, 24, 12, 12), "370m": (1024, 48, 24, 16), "760m": (1536, 48, 24, 16), "1.3b": (2048, 48, 24, 32)}
PADDED = 50288


def test_there_are_three_of_each_size_and_the_state_tracking_model():
    names = [
        f"{family}-{size}-{kind}"
        for family in ("llama3", "mamba2")
        for size in SIZES
        for kind in ("explicit", "pretrain", "implicit")
    ]
    assert list(dq.PRESETS) == [*names, "mamba2-state-tracking"]
    assert dq.preset("llama3-130m-implicit") is dq.PRESETS["llama3-130m-implicit"]


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_the_papers(size):
    width, mamba2_layers, llama_layers, heads = SIZES[size]
    llama, mamba2 = (dq.preset(f"{family}-{size}-implicit") for family in ("llama3", "mamba2"))
    assert llama.backbone == dq.LlamaConfig(
        d_model=width, n_layers=llama_layers, n_heads=heads, mlp_width=int(2 / 3 * 4 * width), rope_theta=500000.0
    )
    assert mamba2.backbone == dq.Mamba2Config(d_model=width, n_layers=mamba2_layers, d_state=128, headdim=64, expand=2)
    for spec, rows in ((llama, 50277), (mamba2, PADDED)):
        assert (spec.vocab_size, spec.tied) == (rows, True)
        assert spec.backbone.weight_norm
        assert spec.backbone.injection


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["llama3", "mamba2"])
def test_kinds_differ_in_how_they_are_solved(family, size):
    explicit, pretrain, implicit = (
        dq.preset(f"{family}-{size}-{kind}") for kind in ("explicit", "pretrain", "implicit")
    )
    assert (explicit.solve, explicit.eval_solve) == (None, None)
    assert explicit.backbone == replace(implicit.backbone, weight_norm=False, injection=False)
    assert explicit.vocab_size == (50277 if (family, size) == ("mamba2", "130m") else implicit.vocab_size)
    assert pretrain.backbone == implicit.backbone
    budget = 32 if family == "llama3" and size != "370m" else 24
    for spec, steps, phantom in ((pretrain, 4, 1), (implicit, budget, 4)):
        stops = (dq.Stop(rtol=0.05, max_steps=budget) for budget in (steps, 4 * steps))
        solves = [dq.SolveConfig(dq.Relaxed(0.8), stop, dq.Phantom(phantom, damping=0.8)) for stop in stops]
        assert [spec.solve, spec.eval_solve] == solves


def test_state_tracking():
    spec = dq.preset("mamba2-state-tracking")
    config = dq.Mamba2Config(d_model=256, n_layers=1, d_state=128, expand=4, headdim=64, dropout=0.05)
    assert (spec.vocab_size, spec.backbone) == (240, config)
    stops = (dq.Stop(rtol=0.05, max_steps=budget) for budget in (32, 2048))
    solves = [dq.SolveConfig(dq.Relaxed(0.8), stop, dq.Phantom(4, damping=0.8)) for stop in stops]
    assert [spec.solve, spec.eval_solve] == solves


def test_an_unknown_name_names_its_neighbours():
    with pytest.raises(ValueError, match=r"'llama-1\.3b-implict'; did you mean 'llama3-1\.3b-implicit'"):
        dq.preset("llama-1.3b-implict")
    with pytest.raises(ValueError, match=r"'x' \(all names: list\(deqseq\.PRESETS\)\)"):
        dq.preset("x")


def by_hand(spec: dq.LanguageModelSpec) -> int:
    """The number of parameters in closed form."""
    config, d = spec.backbone, spec.backbone.d_model
    if isinstance(config, dq.LlamaConfig):
        width, injected = config.mlp_width, 3 * d
        layer = 4 * d * d + 3 * d * width + 2 * d
        rows = 4 * d + 2 * width + d
    else:
        inner = config.expand * d
        heads, convolved = inner // config.headdim, inner + 2 * config.d_state
        injected = inner + convolved + heads
        layer = d * injected + 5 * convolved + 3 * heads + inner + inner * d + d
        rows = injected + convolved + d
    total = spec.vocab_size * d + config.n_layers * layer + d
    if spec.solve is None:
        return total
    injection = d * injected + injected + d
    return total + injection + config.n_layers * rows + injected


@pytest.fixture(scope="module")
def table() -> list[list[str]]:
    """The cells of the table, built on the meta device once."""
    return cells(parameters.preset_table())


def cells(text: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def test_every_count_is_that_of_the_closed_form(table):
    counted = {row[0]: int(row[1].replace(",", "")) for row in table[2:]}
    assert counted == {name: by_hand(spec) for name, spec in dq.PRESETS.items()}
    assert counted["mamba2-1.3b-explicit"] == 1_343_757_312


def test_the_document_has_the_table_that_is_computed(table):
    assert cells(DOCUMENT.read_text()) == table
    assert len(table) == 27


def test_the_documents_code_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    exec(compile(code, DOCUMENT.name, "exec"), {})
    assert capsys.readouterr().out.endswith("131713328\n")


def test_the_parts_of_a_count():
    small = dq.LanguageModelSpec(10, dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
    count = dq.parameter_count(small)
    assert count.total == by_hand(small) == sum(p.numel() for p in small.build().parameters())
    # in_proj gives gate 32, x 32, B 4, C 4, dt 4: 76 rows; the convolution has 40, out_proj 16
    assert count.magnitudes == 76 + 40 + 16 + 76
    assert (count.embedding, count.head, count.final_norm, count.injection) == (160, 0, 16, 16 + 76 * 16 + 76 + 76)
    untied = dq.parameter_count(replace(small, tied=False))
    assert (untied.head, untied.total) == (160, count.total + 160)
    explicit = dq.parameter_count(replace(small.explicit(), backbone=replace(small.backbone, weight_norm=False)))
    assert (explicit.injection, explicit.magnitudes) == (0, 0)


def test_the_module_prints_the_table(capsys, monkeypatch):
    name = "mamba2-state-tracking"
    monkeypatch.setattr(parameters, "PRESETS", {name: dq.preset(name)})
    runpy.run_module("deqseq.models.presets", run_name="__main__")
    row = "| mamba2-state-tracking | 1,528,160 | 61,440 | 867,648 | 598,816 | 256 | 6,176 | ≤ 32 | ≤ 2048 | 4 |"
    assert capsys.readouterr().out.splitlines()[-1] == row


@pytest.mark.parametrize(
    "backbone",
    [
        dq.LlamaConfig(d_model=60, n_layers=2, n_heads=5, mlp_width=100),
        dq.Mamba2Config(d_model=48, n_layers=2, d_state=8, headdim=16),
        dq.Mamba2Config(d_model=48, n_layers=3, d_state=8, headdim=24, expand=1),
    ],
    ids=["llama", "mamba2", "expand 1"],
)
def test_a_widened_model_is_the_nearest_in_size(backbone):
    implicit = dq.LanguageModelSpec(100, backbone)
    plain = replace(implicit.explicit(), backbone=replace(backbone, weight_norm=False))
    wanted = dq.parameter_count(implicit).total
    found = widened(plain, wanted)
    assert replace(found, backbone=replace(found.backbone, d_model=backbone.d_model)) == plain
    sizes = {}
    for width in range(backbone.d_model, 3 * backbone.d_model):
        try:
            spec = replace(plain, backbone=replace(plain.backbone, d_model=width))
            sizes[width] = abs(dq.parameter_count(spec).total - wanted)
        except ValueError:
            continue  # heads would not be whole
    assert sizes[found.backbone.d_model] == min(sizes.values())
    assert widened(implicit, wanted) is implicit


def test_an_explicit_model_has_nothing_to_solve_in_eval_mode():
    with pytest.raises(ValueError, match="eval_solve must be None if solve is"):
        dq.LanguageModelSpec(10, dq.Mamba2Config(d_model=64), solve=None, eval_solve=dq.SolveConfig())
