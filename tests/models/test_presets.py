"""Models by name: the paper's sizes and budgets; the trained ones are what their docstring says."""

import math
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import deqseq as dq
from deqseq.models.presets import WEIGHTS
from deqseq.tasks import Balls, WordProblem, generators, parse_group

pytestmark = pytest.mark.usefixtures("unchecked")
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


@torch.no_grad()
def share_right(lm, length, **fields):
    """The share of right answers at the last token of 32 sequences, and whether all converged."""
    batch = WordProblem(parse_group("Z2")).fixed(32, length, seed=7)
    output = lm(batch.inputs, **fields)
    right = output.logits[:, -1].argmax(-1) == batch.targets[:, -1]
    return right.float().mean().item(), bool(output.converged.all())


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(), dq.Sequential()])
@pytest.mark.parametrize("length", [16, 128])
def test_parity_is_right_and_converges(sweep, length):
    assert share_right(dq.load_example("parity"), length, sweep=sweep) == (1.0, True)


def test_a_model_trained_unrolled_has_not_learned_a_fixed_point():
    lm = dq.load_example("parity-unrolled")
    share, _ = share_right(lm, 16, solve=dq.SolveConfig(dq.Naive(), dq.Stop.exactly(4)))
    converged_share, _ = share_right(lm, 16)
    assert share > 0.9 > converged_share


@torch.no_grad()
def test_a5_is_right_and_converges_at_four_times_its_training_length():
    lm = dq.load_example("a5")
    group = parse_group("A5")
    batch = WordProblem(group, generators(group, 2)).fixed(16, 64, seed=7)
    for sweep in (dq.Simultaneous(), dq.Sliding(8)):
        output = lm(batch.inputs, sweep=sweep)
        assert torch.equal(output.logits.argmax(-1), batch.targets)
        assert output.converged.all()


@torch.no_grad()
def test_swaps_are_followed_beyond_the_trained_depth_with_more_iterations():
    drawn, stories, answers = random.Random(7), [], []
    for _ in range(64):
        cups, story = dict(zip("12345", "ABCDE", strict=True)), ""
        for _ in range(16):
            (a, b), asked = drawn.sample("12345", 2), drawn.choice("12345")
            cups[a], cups[b] = cups[b], cups[a]
            story += f"{a}{b}{b}{a}{asked}"
        stories.append(list(story.encode()))
        answers.append(ord(cups[asked]))
    lm, ids = dq.load_example("swaps"), torch.tensor(stories)

    def right(**how):
        output = lm(ids, **how)
        said = output.logits[:, -1].argmax(-1)
        return (said == torch.tensor(answers)).double().mean().item(), output.converged

    assert right(stop=dq.Stop.exactly(1))[0] < 0.4
    share, converged = right()
    assert share > 0.9
    assert converged.double().mean() > 0.9


@torch.no_grad()
def test_balls_are_found_after_eight_times_the_trained_swaps():
    lm, task = dq.load_example("balls"), Balls()
    stories = task.fixed(16, 96, seed=7)
    output = lm(stories.inputs, sweep=dq.Sliding(8))
    asked = stories.targets >= 0
    right = (output.logits.argmax(-1) == stories.targets)[asked].double().mean()
    assert right > 0.97
    assert output.converged.double().mean() > 0.9


@torch.no_grad()
def test_sudokus_are_solved_and_converge():
    sudoku = dq.load_example("sudoku")
    puzzles = ("5.36...1.3....2..1...2...4..5...1.3.", "1....263.....2...6...21...36...4...1")
    answers = ("523614614325432561165243346152251436", "154362632145321456465213513624246531")
    inputs, solutions = (
        torch.tensor([[*map(int, text.replace(".", "0"))] for text in texts])
        for texts in (puzzles, answers)
    )
    output = sudoku(inputs)
    assert torch.equal(output.logits.argmax(-1) + 1, solutions)
    assert output.converged.all()


@torch.no_grad()
def test_text_predicts_bytes_it_was_not_trained_on_and_converges():
    lm = dq.load_example("text")
    line = b"The king sees the fool, and the fool mocks the king.\n"
    ids = torch.tensor([list(line)])
    output = lm(ids, labels=ids)
    assert output.loss / math.log(2) < 3.5
    assert output.converged.all()
    generated = lm.generate(ids, max_new_tokens=20)
    assert generated.converged.all()
    assert bytes(generated.tokens[0].tolist()).isascii()


@pytest.mark.parametrize("name", list(dq.EXAMPLES))
def test_each_says_how_it_was_made_and_draws_nothing(name):
    state = torch.random.get_rng_state()
    lm = dq.load_example(name)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not lm.training
    path = WEIGHTS / f"{name}.safetensors"
    assert path.stat().st_size < 1e6
    with safe_open(path, "pt") as file:
        assert file.metadata()["made_by"].startswith(f"docs/_tools/weights.py {name}: ")


def test_an_unknown_example_is_named():
    message = r"name must be one of .* got 'pairty'; did you mean 'parity'"
    with pytest.raises(ValueError, match=message):
        dq.load_example("pairty")
