"""Puzzles have one solution; the example learns, goes on and draws; its recurrence is TRM's."""

import itertools
import json
from dataclasses import replace

import puzzles
import pytest
import torch
from puzzle_models import Local, TwoStates
from puzzle_tasks import Maze, Sudoku, renamed
from puzzles import read_options

import deqseq as dq

TINY = "--puzzle sudoku4 --givens 6 --width 16 --train-puzzles 12 --test-puzzles 4 --batch 4"
TINY += " --minutes 0.02 --test-iterations 2 6"


def solved(puzzles, side):
    """The grids of the solutions."""
    return torch.where(puzzles.inputs > 0, puzzles.inputs, puzzles.targets + 1).unflatten(
        1, (side, side)
    )


@pytest.mark.parametrize(
    ("side", "givens", "box"), [(4, 6, (2, 2)), (6, 14, (2, 3)), (9, 36, (3, 3))]
)
def test_solutions_have_every_digit_once_and_are_the_only_ones(side, givens, box):
    task = Sudoku(side, givens)
    made = task.make(6, seed=1)
    assert torch.equal(made.inputs, task.make(6, seed=1).inputs)
    assert not torch.equal(made.inputs, task.make(6, seed=2).inputs)
    for grids in (made, task.varied(made, torch.Generator().manual_seed(0))):
        assert ((grids.inputs > 0).sum(1) >= givens).all()
        given = grids.inputs > 0
        assert torch.equal(grids.inputs[given], grids.targets[given] + 1)
        whole = solved(grids, side)
        boxes = whole.unfold(1, box[0], box[0]).unfold(2, box[1], box[1]).flatten(3)
        for unit in (whole, whole.mT, boxes.flatten(1, 2)):
            assert torch.equal(unit.sort(dim=2).values, torch.arange(1, side + 1).expand_as(unit))
        for puzzle, solution in zip(grids.inputs.tolist(), whole.flatten(1).tolist(), strict=True):
            assert list(task.solutions(puzzle, None)) == [solution]


def test_no_solution_is_another_one_with_other_digits():
    task = Sudoku(6, 14)
    grids = solved(task.make(200, seed=0), 6).flatten(1).tolist()
    assert len({renamed(grid) for grid in grids}) == 200
    assert renamed(grids[0]) == renamed([7 - digit for digit in grids[0]])


def test_hints_are_right_digits():
    plain, task = Sudoku(6, 14), Sudoku(6, 14, hints=0.5)
    made = task.make(200, seed=0)
    told = task.varied(made, torch.Generator().manual_seed(0))
    given = told.inputs > 0
    assert torch.equal(given & (made.inputs > 0), made.inputs > 0)
    assert torch.equal(told.inputs[given], told.targets[given] + 1)
    more = (given.sum(1) > (made.inputs > 0).sum(1)).double().mean()
    assert more == pytest.approx(0.5, abs=0.12)
    renamed = plain.varied(made, torch.Generator().manual_seed(0))
    assert torch.equal(renamed.targets, told.targets)
    assert torch.equal(renamed.inputs > 0, made.inputs > 0)


def same(puzzles, others):
    """The same pairs in any order."""
    pairs = (torch.cat([*each], dim=1).tolist() for each in (puzzles, others))
    return sorted(next(pairs)) == sorted(next(pairs))


def test_a_file_of_puzzles_is_read_whatever_its_columns_are(tmp_path):
    task, path = Sudoku(4, 6), tmp_path / "puzzles.csv"
    made = task.make(3, seed=0)
    texts = [
        ["".join(map(str, row)) for row in grids]
        for grids in (made.inputs.tolist(), solved(made, 4).flatten(1).tolist())
    ]
    lines = [f"x,{a.replace('0', '.')},{b},7\n" for a, b in zip(*texts, strict=True)]
    path.write_text("source,question,answer,rating\n" + "".join(lines))
    read = Sudoku(4, 6, str(path))
    assert same(read.make(3, seed=5), made)
    path.write_text("".join(f"{a},{b},\n" for a, b in zip(*texts, strict=True)))  # qqwing's
    assert same(read.make(3, seed=5), made)
    path.write_text("source,question\n")
    with pytest.raises(ValueError, match="2 puzzles of different solutions are wanted, got 0"):
        read.make(2, seed=5)


def test_more_puzzles_than_there_are_end_with_an_error(tmp_path):
    with pytest.raises(ValueError, match="500 puzzles of different solutions are wanted, got "):
        Maze(5).make(500, seed=0)
    sizes = "--train-puzzles 500 --test-puzzles 4"
    with pytest.raises(SystemExit, match="--train-puzzles, --test-puzzles, --csv: 504 puzzles of"):
        puzzles.main(f"--puzzle maze --side 5 {sizes} --output {tmp_path}".split())


def test_the_marked_path_is_the_only_shortest_one():
    task = Maze(11)
    made = task.make(20, seed=0)
    for mazes in (made, task.varied(made, torch.Generator().manual_seed(3))):
        assert not mazes.targets[mazes.inputs == 0].any()
        assert ((mazes.inputs == 2).sum(1) == 2).all()
        for cells, marked in zip(mazes.inputs, mazes.targets, strict=True):
            free = cells > 0
            steps = torch.zeros(121, 121)
            for a in range(121):
                for b in (a + 1, a + 11):
                    if b < 121 and free[a] and free[b]:
                        steps[a, b] = steps[b, a] = 1
            start, goal = (cells == 2).nonzero()[:, 0].tolist()
            ways, length = torch.eye(121)[start], 0  # walks of this length from the start
            while ways[goal] == 0:
                ways, length = ways @ steps, length + 1
            assert ways[goal] == 1
            path = marked == 1
            assert path.sum() == length + 1
            assert path[[start, goal]].all()
            assert (steps[path][:, path].sum(1) >= 1).all()


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--model trm",
        "--model explicit",
        "--puzzle maze --side 7 --test-others 9",
        "--puzzle sudoku9 --givens 36 --test-others 40 --hints 0.5",
    ],
)
def test_it_writes_numbers_and_goes_on(tmp_path, capsys, options):
    command = f"{TINY} {options} --output {tmp_path}".split()
    puzzles.main(command)
    rows = json.loads((tmp_path / "results.json").read_text())
    budgets = [1] if "explicit" in options else [2, 6]
    tested = [7, 9] if "maze" in options else [36, 40] if "sudoku9" in options else [6]
    kinds = [*itertools.product(tested, budgets)]
    assert [(row["tested"], row["budget"]) for row in rows] == kinds
    assert all(0 <= row["exact"] <= row["cells"] <= 1 for row in rows)
    assert all(row["updates"] > 0 and row["cpu_minutes"] >= 0.02 for row in rows)
    assert (tmp_path / "puzzles.png").exists() == ("explicit" not in options)
    capsys.readouterr()
    puzzles.main(command)
    assert f"going on from step {rows[0]['updates']}" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text()) == rows


def test_updates_learn_and_those_of_two_states_go_on_from_one_another(monkeypatch, tmp_path):
    starts = []
    forward = dq.TokenClassifier.forward

    def watched(lm, inputs, **options):
        starts.append(options.get("start"))
        output = forward(lm, inputs, **options)
        states.append(output.states.detach())
        return output

    monkeypatch.setattr(dq.TokenClassifier, "forward", watched)
    for model, updates in (("deq", 1), ("trm", 4)):
        options = read_options(f"{TINY} --model {model} --lr 0.01".split())
        task = puzzles.make_task(options)
        run, batch = puzzles.Run(options, task, tmp_path / model), task.make(12, seed=0)
        losses, states = [], []
        for _ in range(30):
            states.clear()
            starts.clear()
            losses.append(run.update(*batch))
            assert len(starts) == updates
            assert starts[0] is None
            assert all(map(torch.equal, starts[1:], states[:-1]))
        assert losses[-1] < 0.95 * losses[0]


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path, monkeypatch):
    """With a clock by which an update takes a second."""
    clock = itertools.count()
    monkeypatch.setattr(puzzles.time, "process_time", lambda: next(clock))
    runs = []
    for parts in ((6,), (3, 6)):
        path = tmp_path / f"{len(parts)}.pt"
        for seconds in parts:
            options = replace(read_options(TINY.split()), minutes=seconds / 60)
            task = puzzles.make_task(options)
            run = puzzles.Run(options, task, path)
            run.train(task.make(12, 0))
        runs.append(run)
    assert runs[0].step == runs[1].step == 6
    for model in ("lm", "mean"):
        pairs = zip(*(getattr(run, model).parameters() for run in runs), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--width 30", "--width, --layers: LlamaConfig.n_heads must divide d_model = 30"),
        ("--givens 0", "--givens must"),
        ("--hints 2", "--hints must be a number in [0, 1], got 2.0"),
        ("--test-others 0 --puzzle sudoku9", "--test-others must"),
        ("--test-others 12", "--test-others must be empty: too few solutions of sudoku6"),
        ("--minutes -1", "--minutes must"),
        ("--csv nowhere.csv", "--csv must be a file of Sudokus, got 'nowhere.csv'"),
        ("--side 8 --puzzle maze", "sides of mazes must be odd, 5 or more, got 8"),
    ],
)
def test_bad_options_are_named_before_anything_is_made(arguments, text, tmp_path, capsys):
    with pytest.raises(SystemExit):
        puzzles.main(f"{arguments} --output {tmp_path / 'none'}".split())
    assert text in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert not (tmp_path / "none").exists()


def numbers(rows, columns, k):
    """What the record below was made with: sines of equal steps."""
    steps = torch.arange(rows * columns, dtype=torch.float64) * (0.7 + 0.1 * k)
    return steps.sin().reshape(rows, columns) / columns**0.5


ANSWER = """1.01553869556 -1.03647037297 0.926456743155 -0.631004805181 -1.25333033997 1.59652287832
-1.60225436436 1.23963782987 1.35291784208 -0.796166374658 0.787691990804 -0.926441155773
-1.32153386156 1.55088277667 -1.51592992414 1.19874602541 1.44790105871 -1.09511860207
0.998585506229 -0.808231011947 2.61719793914 -0.841454545994 0.141028832727 0.424413872693"""
THOUGHT = """0.863945045725 -0.887556767002 0.813574241205 -0.59821925538 -1.36521295047
1.61846800686 -1.59124975893 1.26567891964 1.11732191414 -0.516521459958 0.453328803356
-0.563557080312 -1.41912750268 1.57813907177 -1.52356454866 1.24557011022 1.28165616182
-0.860244557356 0.714222685392 -0.517031666729 2.64357533897 -1.17905646592 0.553254608718
-0.0246408191948"""


def test_two_cycles_are_those_of_the_public_code_of_trm():
    """Every third token and fifth channel of y and z, which the public code (commit e7b6871, MIT)
    computed in float64, its norm too.
    """
    config = dq.LlamaConfig(
        d_model=16,
        n_layers=2,
        n_heads=2,
        mlp_width=256,
        rope_theta=10000.0,
        norms="outer",
        final_norm=False,
        weight_norm=False,
        injection=False,
        causal=False,
    )
    net = dq.Llama(config).double()
    k = 0
    for block in net.layers:
        attention, mlp = block.self_attn, block.mlp
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            layer.weight.data, k = numbers(16, 16, k), k + 1
        for layer in (mlp.gate_proj, mlp.up_proj):
            layer.weight.data, k = numbers(256, 16, k), k + 1
        mlp.down_proj.weight.data, k = numbers(16, 256, k), k + 1
    x, y, z = (4 * numbers(14, 16, k).reshape(2, 7, 16) for k in (100, 101, 102))
    solve = dq.SolveConfig(dq.Naive(), dq.Stop.exactly(2))
    model = dq.ImplicitModel(TwoStates(net, thoughts=3), solve)
    with torch.no_grad():
        value = model(x, start=torch.cat([y, z], dim=2)).value
    for state, expected in zip(value.chunk(2, dim=2), (ANSWER, THOUGHT), strict=True):
        recorded = torch.tensor([float(text) for text in expected.split()], dtype=torch.float64)
        torch.testing.assert_close(state[:, ::3, ::5].flatten(), recorded, rtol=0, atol=1e-9)


def test_a_convolution_shows_a_cell_its_eight_neighbours():
    torch.manual_seed(0)
    net, states = Local(8, layers=1).double(), torch.randn(1, 25, 8, dtype=torch.float64)
    changed = states.clone()
    changed[0, 6] += 1  # line 1, column 1
    values = [net(z, net.prepare(z))[0] for z in (states, changed)]
    moved = (values[0] - values[1]).norm(dim=2) > 1e-9
    assert moved[0].nonzero()[:, 0].tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 12]


def test_mazes_are_looked_at_by_a_convolution(tmp_path):
    arguments = "--puzzle maze --side 7 --mixer convolution --model trm --solver naive"
    puzzles.main([*arguments.split(), *TINY.split()[4:], "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())
    assert {row["mixer"] for row in rows} == {"convolution"}
    assert rows[0]["parameters"] < 4000
