"""Windows of tokens that move on as their first tokens converge."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from deqseq.rows import on_device, on_host, per_row, take
from deqseq.solution import Solution, SolveStats, Status
from deqseq.solvers.base import Solver
from deqseq.step import carried, returned_value
from deqseq.stop import Pair, Stop, relative
from deqseq.tokens import TokenArgs
from deqseq.types import Residual, RowIndex, State, float32_at_least

if TYPE_CHECKING:
    from deqseq.solve import Problem

MOVES_EVERY = 2
"""Windows move at every second evaluation, because a move costs half an evaluation.

These move at once: a window of one token; one that passes entirely at its first evaluation, or at
the end of its row; one that diverged or spent its budget; and every one if ``check_every`` > 1.
"""

NextPoint = tuple[Float[Tensor, "rows *event"], RowIndex | None]
"""The next point, and which rows stay in it; None: each."""

GROWTH = 1e4
"""How many times its first size a token may have where a solver combines points."""


class Window:
    """The tokens of each row that are iterated, and what the stopping rule knows of them.

    A row iterates ``width`` tokens, from its first one that is not committed. Arrays are on the
    host: ``(rows,)``, or ``(rows, width)`` with the first token of each window in the first column.

    After a judgement these follow, in this order, each where there is something to do: :meth:`move`
    and :meth:`change` decide which tokens are fresh; :meth:`shift`, which reads that, takes the
    last measurement along; :meth:`keep` removes rows, also of the places that :meth:`shift` has
    noted; :meth:`carry` needs these and the next point of the rows that are left.
    """

    def __init__(self, stop: Stop, solver: Solver[Any], rows: int, width: int) -> None:
        self.stop, self.solver, self.width = stop, solver, width
        self.budget = 1 if solver.owns_loop else stop.max_steps
        self.rows = np.arange(rows)  # places in the batch of the rows that are still evaluated
        self.moved_at = np.zeros(rows, dtype=np.int64)  # evaluations at the row's last move
        # evaluations when a token came into the window, or its input changed
        self.known_since = np.zeros((rows, width), dtype=np.int64)
        self.fresh = np.ones((rows, width), dtype=bool)  # not measured since then
        self.limit = np.zeros((rows, 1), dtype=np.float32)  # see Stop.judge
        self.first_size = np.zeros((rows, width), dtype=np.float32)  # the larger of d and s
        # in the row's last measurement, where a token has to pass in two of them
        self.passed_before = np.zeros((rows, width), dtype=bool)
        self.before: Pair | None = None
        # where each token was and whether it is fresh, if some moved since the last step
        self.origins: Tensor | None = None

    def measure(
        self, z: State, fz: State, block: int, takes_part: np.ndarray | None = None
    ) -> Float[Tensor, "numbers rows width"]:
        """The numbers of :meth:`Stop.measure`.

        Only rows that are True in ``takes_part``, by default all, keep the measurement for the next
        one.
        """
        numbers, pair = self.stop.measure(z, fz, block, self.before)
        if self.before is not None and takes_part is not None and not takes_part.all():
            flags = per_row(on_device(takes_part, z.device), z)
            pairs = zip(pair, self.before, strict=True)
            pair = Pair(*(torch.where(flags, new, old) for new, old in pairs))
        if self.stop.has_tolerance:
            self.before = pair
        return numbers

    def remembered(self, f: Callable[[State], tuple[State, Any]]) -> Callable[[State], Any]:
        """``f`` that notes each evaluation as the one before the next measurement: a solver with a
        loop of its own calls it.
        """

        def evaluated(z: State) -> tuple[State, Any]:
            fz, aux = f(z)
            with torch.no_grad():
                self.before = Pair(z.clone(), fz - z)  # the solver may write into its point
            return fz, aux

        return evaluated

    def judge(
        self, numbers: np.ndarray, precision: float, takes_part: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens pass, and which have not diverged, each ``(rows, width)``.

        Only rows that are True in ``takes_part``, by default all, take anything in, so that no row
        depends on another one. ``precision`` is that of the state.
        """
        passed, sound, limit = self.stop.judge(numbers, self.limit, self.fresh)
        # a solver with a loop of its own has remembered its last evaluation: none is the first
        is_first = self.fresh & (not self.solver.owns_loop)
        has_pair_before = len(numbers) == 4
        if has_pair_before and (passed & ~is_first).any():
            passed = passed & (is_first | self.stop.near(numbers, precision))
        size, confirmed = self.first_size, passed
        if self.solver.combines:
            size = np.where(self.fresh, numbers[:2].max(axis=0), size)
            passed = passed & (numbers[1] <= GROWTH * size)
            # twice in a row, or at the first measurement
            confirmed = passed & (self.passed_before | self.fresh)
        new = limit, np.zeros_like(self.fresh), size, passed
        if takes_part is not None:
            old = self.limit, self.fresh, self.first_size, self.passed_before
            new = (np.where(takes_part[:, None], *pair) for pair in zip(new, old, strict=True))
        self.limit, self.fresh, self.first_size, self.passed_before = new
        return confirmed, sound

    def move(self, counts: np.ndarray, evaluations: int) -> np.ndarray:
        """Drop the first ``counts`` tokens of each window; the place that each token had before.

        A token that enters has that of the last one. :meth:`shift` needs these places.
        """
        places = counts[:, None] + np.arange(self.width)
        source = np.minimum(places, self.width - 1)
        self.fresh = np.take_along_axis(self.fresh, source, axis=1)
        self.first_size = np.take_along_axis(self.first_size, source, axis=1)
        self.passed_before = np.take_along_axis(self.passed_before, source, axis=1)
        self.known_since = np.take_along_axis(self.known_since, source, axis=1)
        self.change(places >= self.width, evaluations)
        self.moved_at = np.where(counts > 0, evaluations, self.moved_at)
        return source

    def change(self, tokens: np.ndarray, evaluations: int) -> None:
        """Forget what is known of ``tokens``, ``(rows, width)``, whose input is new."""
        self.fresh = self.fresh | tokens
        self.known_since = np.where(tokens, evaluations, self.known_since)

    def shift(self, source: np.ndarray, device: torch.device) -> Tensor:
        """Move the last measurement of each token along, and at :meth:`carry` the solver's memory,
        from its place ``source``, which is returned on the device.
        """
        self.origins = on_device(np.stack([source, self.fresh], axis=2), device)
        places = self.origins[..., 0]
        if self.before is not None:
            index = places[..., None].expand_as(self.before.point)
            self.before = Pair(*(states.gather(1, index) for states in self.before))
        return places

    def keep(self, stay: np.ndarray, device: torch.device) -> RowIndex:
        """Remove all rows but those that ``stay``, ``(rows,)``; where these were before."""
        self.rows, self.moved_at = self.rows[stay], self.moved_at[stay]
        self.known_since, self.fresh = self.known_since[stay], self.fresh[stay]
        self.limit, self.first_size = self.limit[stay], self.first_size[stay]
        self.passed_before = self.passed_before[stay]
        staying = on_device(np.flatnonzero(stay), device)
        self.before, self.origins = take((self.before, self.origins), staying)
        return staying

    def carry(self, memory: Any, z: State) -> Any:
        """The solver's memory at ``z``, the next point, after tokens have moved or changed."""
        origins, self.origins = self.origins, None
        return carried(self.solver, memory, z, origins, self.fresh)


class Found(ABC):
    """What a solve has found of the whole batch; :func:`deqseq.solve.iterate` asks it what to do.

    Attributes:
        args: what the map needs of the rows and tokens that are evaluated.
        window: these rows and tokens.
        evaluations: how many there were.
        running: which rows of the batch have not ended, ``(batch,)``.
        numbers: the latest d and s of each token, ``(2, batch, room)``.
    """

    args: Any

    def __init__(self, problem: "Problem", length: int, width: int, room: int) -> None:
        z0, self.problem, self.length = problem.z0, problem, length
        batch, self.device = len(z0), z0.device
        self.window = Window(problem.stop, problem.solver, batch, width)
        self.evaluations = 0
        self.running = np.ones(batch, dtype=bool)
        kind = float32_at_least(z0).itemsize
        self.numbers = np.ones((2, batch, room), f"f{kind}")
        self.numbers[0] = np.inf

    def residual(self) -> Residual:
        """The latest relative residual of each token; infinite where there is none yet."""
        return on_device(relative(self.numbers[:, :, : self.length]), self.device)

    @abstractmethod
    def judge(self, z: State, fz: State) -> bool:
        """Decide which rows or tokens have ended; whether the residual was checked."""

    @property
    @abstractmethod
    def releases(self) -> bool:
        """Whether a row has ended or tokens leave their window, so that :meth:`release` is due."""

    @abstractmethod
    def release(self, z: State, fz: State, aux: Any, proposal: State) -> NextPoint:
        """Freeze or store what has ended; the next point, and which rows stay in it."""

    @abstractmethod
    def solution(self, z: State, fz: State, aux: Any) -> Solution:
        """Store the end of the last rows, and return everything that was found."""


class Swept(Found):
    """What a sweep has found of the whole batch, and the tokens that are in the windows now.

    Leading blocks that pass are stored and committed, and the window moves on; tokens that stay
    keep their state. A row that has ended stays in the batch if its cache is needed: its window
    then lies behind its last token.
    """

    def __init__(self, problem: "Problem") -> None:
        z0, sweep, tokens = problem.z0, problem.sweep, problem.args
        assert sweep is not None and sweep.block is not None
        batch, length = z0.shape[:2]
        width = sweep.width(length)
        # windows may reach beyond the end
        super().__init__(problem, length, width, room=length + width)
        self.block, self.all_tokens = sweep.block, tokens
        self.cache, self.returns_cache = tokens.cache, tokens.need_aux
        self.values = F.pad(z0, (0, 0, 0, width))  # final, or the states in the windows
        self.lengths = np.full(batch, length)
        if tokens.mask is not None:
            self.lengths = on_host(tokens.mask.sum(dim=1))
        self.first = np.zeros(batch, dtype=np.int64)  # where each row's window is
        self.work = np.zeros(batch, dtype=np.int64)  # evaluations of one token
        self.status = np.full(batch, int(Status.CONVERGED))
        self.iterations = np.zeros((batch, length), dtype=np.int64)
        self.forced = np.zeros((batch, length), dtype=bool)
        self.place_windows()

    def states(self) -> State:
        """The states in the windows, ``(rows, width, state_width)``."""
        return self.values.flatten(0, 1)[self.value_index]

    def judge(self, z: State, fz: State) -> bool:
        """Decide how many tokens leave each window."""
        window, rows, every = self.window, self.window.rows, self.problem.stop.check_every
        left, age = self.lengths[rows] - self.first[rows], self.evaluations - window.moved_at
        at_budget = age >= window.budget
        has_moved = window.fresh[:, -1]  # tokens enter at the end of a window
        checks = (left > 0) & (at_budget | (age % every == 0))
        self.leaving = np.zeros_like(left)  # how many tokens leave each window
        if not (checks | has_moved).any():
            return False
        numbers = on_host(window.measure(z, fz, self.block, checks | has_moved))
        self.numbers[:, *self.at] = numbers[:2]
        passed, sound = window.judge(numbers, torch.finfo(z.dtype).eps, checks | has_moved)
        if not checks.any():
            return False
        sound = sound.all(axis=1)
        blocks = passed.reshape(len(rows), -1, self.block).all(axis=2)
        passing = np.logical_and.accumulate(blocks, axis=1).sum(axis=1) * self.block
        passing, inside = np.minimum(passing, left), np.minimum(left, window.width)
        moves = checks & sound
        self.diverged, self.spent = checks & ~sound, moves & at_budget & (passing == 0)
        if every == 1 and window.width > 1 and self.evaluations % MOVES_EVERY:
            # at an odd evaluation only what MOVES_EVERY names moves
            whole = (passing == inside) & (has_moved | (inside == left))
            moves = moves & (at_budget | whole)
        self.leaving = np.where(moves, passing, 0)
        self.leaving = np.where(self.spent, np.minimum(left, self.block), self.leaving)
        # The whole window of a row that diverged is committed. Its cache then shows that it is not
        # finite: a solve that goes on from there diverges too, instead of converging as if these
        # tokens did not exist.
        self.leaving = np.where(self.diverged, inside, self.leaving)
        self.running[rows] = ~self.diverged & (self.leaving < left)
        return True

    @property
    def releases(self) -> bool:
        """Whether tokens leave a window."""
        return bool(self.leaving.any())

    def release(self, z: State, fz: State, aux: Any, proposal: State) -> NextPoint:
        """Store and commit what leaves, and move the windows on."""
        window, rows = self.window, self.window.rows
        self.store(z, fz, proposal)
        self.commit(aux)
        after = np.where(self.diverged, self.lengths[rows], self.first[rows] + self.leaving)
        self.first[rows] = after
        self.work[rows] = self.evaluations * window.width
        source = window.move(self.leaving, self.evaluations)
        if ((self.leaving > 0) & (self.leaving < window.width)).any():  # some tokens stay
            window.shift(source, self.device)
        stay, staying = self.running[rows], None
        if not self.returns_cache and 4 * (~stay).sum() >= len(rows):
            staying = window.keep(stay, self.device)
            self.cache = take(self.cache, staying)
        self.place_windows()
        return self.states(), staying

    def solution(self, z: State, fz: State, aux: Any) -> Solution:
        """Store the end of the last rows."""
        self.store(z, fz, fz)
        if self.returns_cache:
            self.commit(aux)
        self.work[self.window.rows] = self.evaluations * self.window.width
        updates = self.iterations.copy()
        # work beyond the end of a row is counted at its last token
        updates[np.arange(len(updates)), self.lengths - 1] += self.work - updates.sum(axis=1)
        self.numbers[0, np.arange(self.numbers.shape[2]) >= self.lengths[:, None]] = 0  # padding
        arrays = self.status, self.iterations, updates, self.forced
        status, steps, updates, forced = (on_device(x, self.device) for x in arrays)
        stats = SolveStats(steps, self.residual(), self.evaluations, updates, forced)
        cache = self.cache if self.returns_cache else None
        value = self.values[:, : self.length].contiguous()
        # on a CPU the tensor shares its memory with the array
        return Solution(value, status, stats, self.status.copy(), cache)

    def store(self, z: State, fz: State, proposal: State) -> None:
        """Write the windows back: final values of tokens that leave, next states of the others."""
        at_point, start = self.diverged, z
        if self.problem.returns_tested:
            at_point = self.diverged | ~self.spent
        if self.diverged.any():
            start = self.states()
        value = returned_value(z, fz, at_point, self.diverged, start)
        leaves = np.arange(self.window.width) < self.leaving[:, None]
        value = torch.where(on_device(leaves, self.device)[..., None], value, proposal)
        self.values.flatten(0, 1)[self.value_index.flatten()] = value.flatten(0, 1)
        row, column = leaves.nonzero()
        rows, tokens = self.window.rows[row], self.at[1][row, column]
        self.iterations[rows, tokens] = self.evaluations - self.window.known_since[row, column]
        self.forced[rows, tokens] = self.spent[row]
        self.status[self.window.rows[self.spent]] = Status.MAX_STEPS_REACHED
        for row in self.window.rows[self.diverged]:  # it does not reach the tokens that are left
            self.status[row] = Status.DIVERGED
            self.forced[row, self.first[row] : self.lengths[row]] = True

    def commit(self, aux: Any) -> None:
        """The cache after the tokens that leave."""
        low, high = int(self.leaving.min()), int(self.leaving.max())
        counts = None if low == high else on_device(self.leaving, self.device)
        self.cache = self.args.advance(aux, len(self.window.rows), high, counts)

    def place_windows(self) -> None:
        """Where the windows are now, and what the map needs of their tokens."""
        row = self.window.rows[:, None]
        token = self.first[row] + np.arange(self.window.width)
        self.at = row, token
        inside = np.minimum(token, self.length - 1)  # inputs end with the row, values do not
        # (rows, width): in the flattened values; in inputs of all rows; in inputs of each row
        places = row * self.values.shape[1] + token, inside, row * self.length + inside
        self.value_index, shared, separate = on_device(np.stack(places), self.device)
        real = token < self.lengths[row]
        mask = None if real.all() else on_device(real, self.device)
        cache = None if self.cache is None else self.cache.reserve(self.window.width)
        self.args: TokenArgs = self.all_tokens.at(shared, separate, cache, mask)
