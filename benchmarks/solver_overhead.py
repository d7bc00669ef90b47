"""What an iteration costs beyond the map: deqseq.solve beside a loop by hand and TorchDEQ's solvers.

All run the same number of evaluations with tolerances of zero, in turns: on ``tanh(z W + u)`` of each token,
and on a Mamba2 block.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from harness import Row, arguments, memory_row, report, time_row, value_row
from torch import Tensor
from torchdeq.solver import get_solver

import deqseq as dq
from deqseq.layers import with_weights

EVALUATIONS = 20
NEVER = dq.Stop(rtol=0.0, atol=0.0, max_steps=EVALUATIONS)
SHAPES = ((32, 64, 256), (8, 256, 512))
Map = Callable[[Tensor], Tensor]
Goals = tuple[str | None, str | None]


def token_map(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> Map:
    """``tanh(z W + u)`` with W 0.9 times an orthogonal matrix: still contracting after the last evaluation."""
    generator = torch.Generator().manual_seed(0)
    W = 0.9 * torch.linalg.qr(torch.randn(shape[-1], shape[-1], generator=generator, dtype=dtype)).Q
    u = 0.1 * torch.randn(shape, generator=generator, dtype=dtype)
    return lambda z: torch.tanh(z @ W + u)


def bare_loop(f: Map, z: Tensor, damping: float = 1.0) -> Tensor:
    """What a careful user writes by hand: the residual is measured and tested at every step."""
    fz = z
    for _ in range(EVALUATIONS):
        fz = f(z)
        if (fz - z).norm() / fz.norm() < 0.0:
            break
        z = fz if damping == 1 else torch.lerp(z, fz, damping)
    return fz


def ours(f: Map, z0: Tensor, solver: dq.Solver, stop: dq.Stop = NEVER) -> Tensor:
    """``deqseq.solve``, checked to have done all its evaluations."""
    solution = dq.solve(f, z0, solver=solver, stop=stop)
    assert solution.stats.evaluations == stop.max_steps, solution.stats.evaluations
    return solution.value


def torchdeq(f: Map, z0: Tensor, name: str, evaluations: int = EVALUATIONS, **options: int | float) -> Tensor:
    """TorchDEQ's solver on flattened rows; its Broyden is given a step less, for the same evaluations."""
    steps = evaluations - 1 if name == "broyden" else evaluations
    flat = z0.flatten(start_dim=1)
    value, _, _ = get_solver(name)(
        lambda z: f(z.view_as(z0)).view_as(z), flat, max_iter=steps, tol=0.0, stop_mode="rel", **options
    )
    return value.view_as(z0)


def per_step(
    case: str,
    mine: Callable[[], Tensor],
    peer: str,
    theirs: Callable[[], Tensor],
    runs: int,
    goals: Goals = (None, None),
) -> Iterator[Row]:
    """Time per iteration and peak memory, with a goal for each."""
    yield time_row(case, mine, peer, theirs, runs=runs, per=EVALUATIONS, goal=goals[0])
    yield memory_row(case, mine, peer, theirs, goal=goals[1])


def against_bare_loop(name: str, f: Map, z0: Tensor, runs: int, limit: float) -> Iterator[Row]:
    """Naive and Relaxed beside the hand-written loop."""
    goal = f"ratio <= {limit}"
    naive, relaxed = partial(ours, f, z0, dq.Naive()), partial(ours, f, z0, dq.Relaxed(0.8))
    yield from per_step(f"Naive, {name}", naive, "loop by hand", partial(bare_loop, f, z0), runs, (goal, None))
    damped = partial(bare_loop, f, z0, 0.8)
    yield from per_step(f"Relaxed, {name}", relaxed, "damped loop by hand", damped, runs, (goal, None))


def against_torchdeq(name: str, f: Map, z0: Tensor, runs: int) -> Iterator[Row]:
    """Each solver beside TorchDEQ's, at both libraries' defaults and at equal memory."""
    anderson, broyden = ("ratio <= 1.0", "ratio <= 0.45"), ("ratio <= 0.3", None)
    comparisons: tuple[tuple[str, dq.Solver, str, Goals], ...] = (
        ("Naive", dq.Naive(), "fixed_point_iter", (None, None)),
        ("Anderson (defaults: 4, 6)", dq.Anderson(), "anderson", anderson),
        ("Anderson (memory 6, 6)", dq.Anderson(memory=6), "anderson", anderson),
        ("Broyden (defaults: 16, all)", dq.Broyden(), "broyden", broyden),
        ("Broyden (memory 20, 20)", dq.Broyden(memory=20), "broyden", broyden),
    )
    for case, solver, peer, goals in comparisons:
        mine, theirs = partial(ours, f, z0, solver), partial(torchdeq, f, z0, peer)
        yield from per_step(f"{case}, {name}", mine, f"torchdeq {peer}", theirs, runs, goals)


def bookkeeping(shape: tuple[int, int, int], runs: int) -> Iterator[Row]:
    """A map that costs nothing: it hands out tensors made beforehand, which contract or alternate."""
    ones = torch.ones(shape)
    contracting = [ones * (1 + 0.5**step) for step in range(EVALUATIONS)]
    goals = ("ratio <= 0.25", "ratio <= 0.25")
    for kind, values in (("contracting", contracting), ("two in turns", contracting[:2])):
        source = cycle(values)

        def f(z: Tensor, source: Iterator[Tensor] = source) -> Tensor:
            return next(source)

        z0, label = torch.zeros(shape), f"bookkeeping, {kind}, {describe(shape)}"
        mine, theirs = partial(ours, f, z0, dq.Naive()), partial(torchdeq, f, z0, "fixed_point_iter")
        yield from per_step(label, mine, "torchdeq fixed_point_iter", theirs, runs, goals)
        bare = partial(bare_loop, f, z0)
        yield from per_step(label, mine, "loop by hand", bare, runs)


def accuracy() -> Iterator[Row]:
    """Error after 20 evaluations on ``z = A z + b`` in float64, A symmetric of the given spectral radius."""
    generator = torch.Generator().manual_seed(0)
    for radius in (0.3, 0.5, 0.9):
        Q, _ = torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))
        A = Q @ torch.diag(torch.linspace(-radius, radius, 64, dtype=torch.float64)) @ Q.T
        b = torch.randn(8, 1, 64, generator=generator, dtype=torch.float64)
        exact = torch.linalg.solve(torch.eye(64, dtype=torch.float64) - A, b[:, 0].T).T[:, None]
        f, z0 = (lambda z, A=A, b=b: z @ A + b), torch.zeros_like(b)
        theirs = error(torchdeq(f, z0, "anderson"), exact)
        for memory in (4, 6):
            mine = error(ours(f, z0, dq.Anderson(memory=memory)), exact)
            goal = "ours <= 1e-11" if radius == 0.3 else None
            case = f"Anderson ({memory}, 6), affine, radius {radius}"
            yield value_row(case, "relative error", mine, "torchdeq anderson", theirs, goal=goal)


def agreement() -> Iterator[Row]:
    """The same fixed points as TorchDEQ's, converged to 1e-10 in float64."""
    shape = (4, 16, 32)
    f, z0 = token_map(shape, torch.float64), torch.zeros(shape, dtype=torch.float64)
    stop = dq.Stop(rtol=1e-10, max_steps=400)
    peers = {"fixed_point_iter": dq.Naive(), "anderson": dq.Anderson(), "broyden": dq.Broyden()}
    for peer, solver in peers.items():
        mine = dq.solve(f, z0, solver=solver, stop=stop).raise_if_failed().value
        theirs = torchdeq(f, z0, peer, evaluations=400)
        case, difference = f"the same fixed point, {type(solver).__name__}", error(mine, theirs)
        yield value_row(case, "relative difference", difference, f"torchdeq {peer}", None, goal="ours <= 1e-6")


def counts() -> Iterator[Row]:
    """Evaluations for small budgets; TorchDEQ is given the same ``max_iter``."""
    peers = {"fixed_point_iter": dq.Naive(), "anderson": dq.Anderson(), "broyden": dq.Broyden()}
    for peer, solver in peers.items():
        for budget in (1, 2, 3):
            mine, theirs = Counted(), Counted()
            dq.solve(mine, torch.zeros(2, 4), solver=solver, stop=dq.Stop(rtol=0.0, max_steps=budget))
            get_solver(peer)(theirs, torch.zeros(2, 4), max_iter=budget, tol=0.0)
            case = f"{type(solver).__name__}, budget {budget}"
            goal = f"ours == {budget}"
            yield value_row(case, "evaluations", mine.count, f"torchdeq {peer}", theirs.count, goal=goal)


class Counted:
    """A map that counts its evaluations."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, z: Tensor) -> Tensor:
        """``cos(z + 1)``."""
        self.count += 1
        return torch.cos(z + 1)


def training_memory(name: str, f: Map, z0: Tensor) -> Iterator[Row]:
    """Peak memory of a solve, four phantom steps and the backward pass, for 32 and for 4 iterations."""

    def train(steps: int) -> None:
        stop = dq.Stop(rtol=0.0, max_steps=steps)
        solution = dq.fixed_point(f, z0, solver=dq.Relaxed(0.8), stop=stop, gradient=dq.Phantom(steps=4))
        solution.value.square().mean().backward()

    peer = "4 iterations"
    case = f"Phantom(4) after 32 iterations, {name}"
    yield memory_row(case, partial(train, 32), peer, partial(train, 4), goal="ratio <= 1.05")


def trainable_map(shape: tuple[int, int, int]) -> Map:
    """The token map with a weight that wants a gradient."""
    weight = torch.nn.Linear(shape[-1], shape[-1])
    torch.nn.init.normal_(weight.weight, std=0.45 / shape[-1] ** 0.5)
    return lambda z: torch.tanh(weight(z))


def error(value: Tensor, exact: Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((value - exact).norm() / exact.norm())


def describe(shape: tuple[int, int, int]) -> str:
    """``32x64x256``."""
    return "x".join(map(str, shape))


def block_rows(runs: int) -> Iterator[Row]:
    """A real implicit Mamba2 block: batch 64, length 16, d_model 64, d_state 16, headdim 32.

    With random weights the map does not contract; a solve that works looks like the contracting block, whose injection
    outweighs the state.
    """
    torch.manual_seed(0)
    model = backbone = dq.Mamba2(dq.Mamba2Config(d_model=64, d_state=16, headdim=32))
    x = torch.randn(64, 16, 64)
    z0 = torch.zeros_like(x)

    def f(z: Tensor) -> Tensor:
        return backbone(z, inputs)[0]

    with torch.no_grad():
        inputs = backbone.prepare(x)
        backbone = with_weights(model)
        yield from against_bare_loop("Mamba2 block, random", f, z0, runs, limit=1.03)
        for layer, scale in (("in_proj", 0.3), ("out_proj", 4.0)):
            model.get_parameter(f"layers.0.mixer.{layer}.parametrizations.weight.original0").mul_(scale)
        backbone = with_weights(model)
        yield from against_bare_loop("Mamba2 block", f, z0, runs, limit=1.03)
        seldom = partial(ours, f, z0, dq.Naive(), replace(NEVER, check_every=4))
        bare = partial(bare_loop, f, z0)
        yield from per_step("Naive, check_every=4, Mamba2 block", seldom, "loop by hand", bare, runs)
        yield from against_torchdeq("Mamba2 block", f, z0, runs)
    yield from training_memory("Mamba2 block", lambda z: model(z, model.prepare(x))[0], z0)


def main() -> None:
    """Measure, print and write."""
    chosen = arguments("overhead of an iteration")
    runs = 5 if chosen.quick else 25
    rows: list[Row] = []
    with torch.no_grad():
        for shape in SHAPES:
            f, z0, name = token_map(shape), torch.zeros(shape), f"map {describe(shape)}"
            rows += against_bare_loop(name, f, z0, runs, limit=1.10)
            rows += against_torchdeq(name, f, z0, runs)
            rows += bookkeeping(shape, runs)
        rows += [*accuracy(), *agreement(), *counts()]
    shape = SHAPES[0]
    rows += training_memory(f"map {describe(shape)}", trainable_map(shape), torch.zeros(shape))
    rows += block_rows(runs)
    report(rows, chosen)


if __name__ == "__main__":
    main()
