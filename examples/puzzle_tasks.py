"""Puzzles on a square grid, with one solution each: Sudoku, and mazes with a path to be marked."""

import csv
import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

OPENINGS = 0.1  # share of the inner walls of a maze that are taken away, so that there are detours
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # lines and columns of a Sudoku's boxes, by its side


class Puzzles(NamedTuple):
    """Cells and their solution, each ``(puzzles, cells)``."""

    inputs: Tensor
    targets: Tensor


class Sudoku:
    """Each line, column and box has every digit once. 0 is a blank; a digit's class is one less.

    Puzzles have so many ``givens``, or a few more, or are those of a file ``csv``. When varied, a
    share ``hints`` has more.
    """

    def __init__(self, side: int, givens: int, csv: str = "", hints: float = 0.0) -> None:
        self.side, self.givens, self.csv, self.hints = side, givens, csv, hints
        self.vocab_size, self.n_classes = side + 1, side
        (height, width), cells = BOXES[side], (divmod(cell, side) for cell in range(side**2))
        self.units = [(r, c, r // height * height + c // width) for r, c in cells]
        self.positions = torch.tensor(self.units)  # line, column and box

    def make(self, count: int, seed: int) -> Puzzles:
        """So many puzzles of different solutions: none becomes another by renaming its digits."""
        # only twelve solutions of 4 x 4 differ so: there the puzzles do
        drawn, made, tries = random.Random(f"sudoku {seed}"), {}, 0
        while not self.csv and len(made) < count and (tries := tries + 1) < 100 * count:
            solution = next(self.solutions([0] * self.side**2, drawn))
            if self.side == 4 or renamed(solution) not in made:
                puzzle = self._thinned(solution, drawn)
                made[tuple(puzzle) if self.side == 4 else renamed(solution)] = puzzle, solution
        pairs = self._read(Path(self.csv), count) if self.csv else enough(made, count)
        inputs, solutions = (torch.tensor(grids) for grids in zip(*pairs, strict=True))
        return Puzzles(inputs, solutions - 1)

    def _read(self, path: Path, count: int) -> list[list[list[int]]]:
        """Puzzles that are drawn from a CSV file, such as Sudoku-Extreme's or one of qqwing."""
        pairs: dict[tuple[int, ...], list[list[int]]] = {}
        with path.open(newline="") as file:
            for row in csv.reader(file):
                texts = [text.replace(".", "0") for text in row if len(text) == self.side**2]
                grids = [[*map(int, text)] for text in texts if text.isdigit()]
                if len(grids) == 2 and set(grids[1]) == set(range(1, self.side + 1)):
                    pairs.setdefault(renamed(grids[1]), grids)
        return random.Random(0).sample(enough(pairs, count), count)

    def solutions(self, cells: Sequence[int], drawn: random.Random | None) -> Iterator[list[int]]:
        """All solutions, the digits of a cell in the order that is ``drawn``."""
        grid, left = list(cells), [set(range(1, self.side + 1)) for _ in range(3 * self.side)]
        places = [(r, self.side + c, 2 * self.side + b) for r, c, b in self.units]
        for cell, digit in enumerate(grid):
            for unit in places[cell] if digit else ():
                left[unit].remove(digit)

        def go() -> Iterator[list[int]]:
            fewest, choices = None, set[int]()
            for cell, (r, c, b) in enumerate(places):
                if not grid[cell]:
                    fitting = left[r] & left[c] & left[b]
                    if fewest is None or len(fitting) < len(choices):
                        fewest, choices = cell, fitting
                    if len(choices) < 2:
                        break
            if fewest is None:
                yield list(grid)
                return
            order = sorted(choices)
            if drawn:
                drawn.shuffle(order)
            for digit in order:
                grid[fewest] = digit
                for unit in places[fewest]:
                    left[unit].remove(digit)
                yield from go()
                for unit in places[fewest]:
                    left[unit].add(digit)
                grid[fewest] = 0

        return go()

    def _thinned(self, solution: list[int], drawn: random.Random) -> list[int]:
        """The solution without some digits, in a random order, as long as there is no other."""
        puzzle, given = solution, len(solution)
        for cell in drawn.sample(range(len(solution)), len(solution)):
            less = [*puzzle[:cell], 0, *puzzle[cell + 1 :]]
            if given > self.givens and len([*islice(self.solutions(less, None), 2)]) == 1:
                puzzle, given = less, given - 1
        return puzzle

    def varied(self, puzzles: Puzzles, generator: torch.Generator) -> Puzzles:
        """The same puzzles with other names for their digits, and hints."""
        inputs, targets = puzzles
        names = torch.rand(len(inputs), self.side, generator=generator).argsort(dim=1)
        if self.hints:
            left = torch.rand(len(inputs), 1, generator=generator) - (1 - self.hints)
            told = torch.rand(inputs.shape, generator=generator) < left.clamp(min=0) / self.hints
            inputs = torch.where(told, targets + 1, inputs)
        digits = torch.cat([torch.zeros_like(names[:, :1]), names + 1], dim=1)
        return Puzzles(digits.gather(1, inputs), names.gather(1, targets))


def enough(made: dict[Any, Any], count: int) -> list[Any]:
    """Puzzles and solutions, if they are as many as wanted."""
    if len(made) < count:
        raise ValueError(f"{count} puzzles of different solutions are wanted, got {len(made)}")
    return list(made.values())


def renamed(solution: Sequence[int]) -> tuple[int, ...]:
    """The solution with the digits of its first line in order."""
    names = {digit: place for place, digit in enumerate(solution[: max(solution)])}
    return tuple(names[digit] for digit in solution)


class Maze:
    """Walls (0), free cells (1) and two ends (2): which free cells does the shortest path take?"""

    vocab_size, n_classes, positions = 3, 2, None

    def __init__(self, side: int) -> None:
        self.side = side  # odd, with the outer wall

    def make(self, count: int, seed: int) -> Puzzles:
        """So many different mazes, in which one path is shorter than all others."""
        drawn, made, tries = random.Random(f"maze {self.side} {seed}"), {}, 0
        while len(made) < count and (tries := tries + 1) < 100 * count:
            cells = self._dug(drawn)
            start, goal = drawn.sample([i for i, cell in enumerate(cells) if cell], 2)
            path = self._path(cells, start, goal)
            if path is not None and len(path) >= self.side:
                cells[start] = cells[goal] = 2
                made[tuple(cells)] = [int(cell in path) for cell in range(len(cells))]
        return Puzzles(torch.tensor(list(made)), torch.tensor(enough(made, count)))

    def _dug(self, drawn: random.Random) -> list[int]:
        """A tree of corridors, dug in depth, and some openings."""
        side, cells, stack = self.side, [0] * self.side**2, [self.side + 1]
        cells[side + 1] = 1
        while stack:
            here = stack[-1]
            ways = [step for step in (-1, 1, -side, side) if self._solid(cells, here + 2 * step)]
            if not ways:
                stack.pop()
                continue
            step = drawn.choice(ways)
            cells[here + step] = cells[here + 2 * step] = 1
            stack.append(here + 2 * step)
        for r in range(1, side - 1):
            for c in range(1 + r % 2, side - 1, 2):  # between two rooms
                if drawn.random() < OPENINGS:
                    cells[r * side + c] = 1
        return cells

    def _solid(self, cells: Sequence[int], cell: int) -> bool:
        row, column = divmod(cell, self.side)
        return 0 < row < self.side - 1 and 0 < column < self.side - 1 and not cells[cell]

    def _path(self, cells: Sequence[int], start: int, goal: int) -> set[int] | None:
        """The cells of the shortest path; None if there are several."""
        ways, far, queue = {start: 1}, {start: 0}, deque([start])
        while queue:
            here = queue.popleft()
            for step in (-1, 1, -self.side, self.side):
                there = here + step
                if cells[there] and there not in far:
                    far[there], ways[there] = far[here] + 1, 0
                    queue.append(there)
                if cells[there] and far[there] == far[here] + 1:
                    ways[there] += ways[here]
        if ways[goal] > 1:
            return None
        path = {goal}
        while goal != start:
            steps = (goal + step for step in (-1, 1, -self.side, self.side))
            goal = next(cell for cell in steps if far.get(cell) == far[goal] - 1)
            path.add(goal)
        return path

    def varied(self, puzzles: Puzzles, generator: torch.Generator) -> Puzzles:
        """The same mazes, all turned and mirrored in one way."""
        turns, mirror = divmod(int(torch.randint(8, (), generator=generator)), 2)
        grids = (part.unflatten(1, (self.side, self.side)) for part in puzzles)
        turned = (torch.rot90(grid.flip(1) if mirror else grid, turns, (1, 2)) for grid in grids)
        return Puzzles(*(grid.flatten(1) for grid in turned))
