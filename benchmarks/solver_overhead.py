"""What a solve costs beside its evaluations: deqseq, loops by hand, TorchDEQ's solvers.

Both sides make the same number of evaluations with tolerances of zero, in turns: on ``tanh(z W +
u)`` of each token, on a map that costs nothing (the bookkeeping), and on a Mamba2 block.

``fixed_point`` on a layer ``tanh(z W + x)`` of 400 states of width 32 is run forward and backward:
with Naive and OneStep, and with its defaults, beside the iteration to the same residual and one
differentiated evaluation by hand. With the exact gradient, whose equation is solved to 1e-5, it is
run beside the same by hand and in TorchDEQ.

Decoding: both backbones with d_model 256 and 2 blocks continue a prompt of 256 tokens by 128, one
by one, with 8 iterations a token. The peer calls the blocks on one token with the cache that the
same prompt left, as often as ``generate`` did for the new tokens. Ours is all that ``generate``
does after the first new token: solving, committing, head, choice. The residual is measured in every
iteration, or, in rows that say so, once per token. The solver is the default, ``Adaptive()``; rows
of a constant damping show what it adds.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from harness import Row, Work, benchmark, memory_row, paired_row, seconds, time_row
from models import KINDS, block_of, language_model, one_by_one, random_ids
from torch import Tensor
from torchdeq import get_deq
from torchdeq.solver import get_solver

import deqseq as dq

EVALUATIONS = 20
NEVER = dq.Stop(rtol=0.0, atol=0.0, max_steps=EVALUATIONS)
SHAPES = ((32, 64, 256), (8, 256, 512))
DECODED = 8  # iterations of a token
Map = Callable[[Tensor], Tensor]
Goals = tuple[str | None, str | None]


def randn(*shape: int) -> Tensor:
    """Random numbers, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def token_map(shape: tuple[int, int, int]) -> Map:
    """``tanh(z W + u)`` with W 0.9 times an orthogonal matrix, which contracts slowly."""
    W, u = 0.9 * torch.linalg.qr(randn(shape[-1], shape[-1])).Q, 0.1 * randn(*shape)
    return lambda z: torch.tanh(z @ W + u)


def bare_loop(
    f: Map, z: Tensor, damping: float = 1.0, rtol: float = 0.0, steps: int = EVALUATIONS
) -> Tensor:
    """What a careful user writes by hand: the residual is measured and tested at every step."""
    fz = z
    for _ in range(steps):
        fz = f(z)
        if (fz - z).norm() / fz.norm() < rtol:
            break
        z = fz if damping == 1 else torch.lerp(z, fz, damping)
    return fz


def ours(f: Map, z0: Tensor, solver: dq.Solver) -> Tensor:
    """``deqseq.solve``, checked to have made all its evaluations."""
    solution = dq.solve(f, z0, solver=solver, stop=NEVER)
    assert solution.stats.evaluations == EVALUATIONS, solution.stats.evaluations
    return solution.value


def torchdeq(f: Map, z0: Tensor, name: str) -> Tensor:
    """TorchDEQ's solver on flattened rows; Broyden gets a step less for equal evaluations."""
    steps = EVALUATIONS - 1 if name == "broyden" else EVALUATIONS
    flat, options = z0.flatten(start_dim=1), {"max_iter": steps, "tol": 0.0, "stop_mode": "rel"}
    value, _, _ = get_solver(name)(lambda z: f(z.view_as(z0)).view_as(z), flat, **options)
    return value.view_as(z0)


def per_step(
    case: str, mine: Work, peer: str, theirs: Work, runs: int, goals: Goals = (None, None)
) -> Iterator[Row]:
    """Time per iteration and peak memory, with a goal for each."""
    yield time_row(case, mine, peer, theirs, runs=runs, per=EVALUATIONS, goal=goals[0])
    yield memory_row(case, mine, peer, theirs, goal=goals[1])


def against_bare_loop(name: str, f: Map, z0: Tensor, runs: int) -> Iterator[Row]:
    """Naive and Relaxed beside the hand-written loop."""
    goals: Goals = ("ratio <= 1.08", None)
    for solver, damping, peer in (
        (dq.Naive(), 1.0, "loop by hand"),
        (dq.Relaxed(0.8), 0.8, "damped loop by hand"),
    ):
        mine, theirs = partial(ours, f, z0, solver), partial(bare_loop, f, z0, damping)
        yield from per_step(f"{type(solver).__name__}, {name}", mine, peer, theirs, runs, goals)


def against_torchdeq(name: str, f: Map, z0: Tensor, runs: int) -> Iterator[Row]:
    """Each solver beside TorchDEQ's, at both libraries' defaults and at equal memory."""
    anderson, broyden = ("ratio <= 1.0", None), (None, None)
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
    """A map that costs nothing: it returns tensors made beforehand, which contract or alternate."""
    contracting = [torch.ones(shape) * (1 + 0.5**step) for step in range(EVALUATIONS)]
    for kind, values in (("contracting", contracting), ("two in turns", contracting[:2])):
        source = cycle(values)

        def f(z: Tensor, source: Iterator[Tensor] = source) -> Tensor:
            return next(source)

        z0, label = torch.zeros(shape), f"bookkeeping, {kind}, {'x'.join(map(str, shape))}"
        mine, theirs = (
            partial(ours, f, z0, dq.Naive()),
            partial(torchdeq, f, z0, "fixed_point_iter"),
        )
        goals = ("ratio <= 0.3", "ratio <= 0.25")
        yield from per_step(label, mine, "torchdeq fixed_point_iter", theirs, runs, goals)
        yield from per_step(label, mine, "loop by hand", partial(bare_loop, f, z0), runs)


def layer(runs: int) -> Iterator[Row]:
    """``fixed_point`` as a layer of a model, forward and backward."""
    weight, x = torch.nn.Parameter(0.5 * torch.linalg.qr(randn(32, 32)).Q), 0.5 * randn(400, 32)
    z0, stop = torch.zeros_like(x), dq.Stop()

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ weight + x)

    def by_hand() -> None:
        with torch.no_grad():
            z = bare_loop(f, z0, rtol=stop.rtol, steps=stop.max_steps)
        torch.autograd.grad(f(z).sum(), weight)

    def library(**options: Any) -> None:
        torch.autograd.grad(dq.fixed_point(f, z0, **options).value.sum(), weight)

    def exact_by_hand() -> None:
        with torch.no_grad():
            z = bare_loop(f, z0, rtol=stop.rtol, steps=stop.max_steps)
        fz = f(z.requires_grad_())
        y = pulled = torch.ones_like(z)
        for _ in range(100):
            pulled = torch.autograd.grad(fz, z, y, retain_graph=True)[0] + 1
            if (pulled - y).norm() / pulled.norm() < 1e-5:
                break
            y = pulled
        torch.autograd.grad(fz, weight, pulled)

    def deq(solver: str) -> None:
        forward = {
            "f_solver": solver,
            "f_max_iter": stop.max_steps,
            "f_tol": stop.rtol,
            "f_stop_mode": "rel",
        }
        backward = {"b_solver": solver, "b_max_iter": 100, "b_tol": 1e-5, "b_stop_mode": "rel"}
        (z,), _ = get_deq(ift=True, **forward, **backward)(f, z0)
        torch.autograd.grad(z.sum(), weight)

    peer, name = "loop by hand", "tanh layer 400x32, forward and backward"
    naive = partial(library, solver=dq.Naive(), gradient=dq.OneStep())
    yield time_row(
        f"fixed_point, Naive and OneStep, {name}",
        naive,
        peer,
        by_hand,
        runs=4 * runs,
        goal="ratio <= 1.6",
    )
    yield time_row(
        f"fixed_point, defaults, {name}", library, peer, by_hand, runs=4 * runs, goal="ratio <= 6"
    )
    exact = partial(
        library, solver=dq.Naive(), gradient=dq.Implicit(dq.Naive(), dq.Stop(rtol=1e-5, norm="row"))
    )
    iterated = partial(deq, "fixed_point_iter")
    yield time_row(
        f"exact gradient, Naive, {name}",
        exact,
        "loop by hand, exact gradient",
        exact_by_hand,
        runs=4 * runs,
    )
    yield time_row(
        f"exact gradient, Naive, {name}", exact, "torchdeq, exact gradient", iterated, runs=4 * runs
    )
    yield time_row(
        f"exact gradient, defaults, {name}",
        library,
        "torchdeq anderson",
        partial(deq, "anderson"),
        runs=4 * runs,
    )


def block_rows(runs: int) -> Iterator[Row]:
    """A Mamba2 block that contracts because its injection outweighs the state: 64 x 16 tokens."""
    torch.manual_seed(0)
    backbone = dq.Mamba2(dq.Mamba2Config(d_model=64, d_state=16, headdim=32, weight_norm=False))
    x, name = randn(64, 16, 64), "Mamba2 block"
    z0 = torch.zeros_like(x)
    with torch.no_grad():
        for part, scale in (("in_proj", 0.3), ("out_proj", 4.0)):
            backbone.get_parameter(f"layers.0.mixer.{part}.weight").mul_(scale)
        inputs = backbone.prepare(x)

        def f(z: Tensor) -> Tensor:
            return backbone(z, inputs)[0]

        yield from against_bare_loop(name, f, z0, runs)
        yield from against_torchdeq(name, f, z0, runs)


def decoding(kind: str, batch: int, width: int, prompt: int, new: int, runs: int) -> Iterator[Row]:
    """Time per iteration of ``generate``, with a residual in every iteration, and one per token."""
    lm, ids, peer = (
        language_model(kind, width),
        random_ids(batch, prompt, seed=1),
        "bare blocks, one token",
    )
    once = dq.Stop.exactly(DECODED)
    settings: dict[str, tuple[dq.Solver, dq.Stop]] = {
        "the residual every iteration": (dq.Adaptive(), dq.Stop(rtol=0.0, max_steps=DECODED)),
        "the residual once per token": (dq.Adaptive(), once),
        "Relaxed(0.8), the residual once per token": (dq.Relaxed(0.8), once),
    }
    with torch.no_grad():
        cache, token = lm(ids, return_cache=True, stop=once).cache, lm.embedding(ids[:, :1])
    for label, (solver, stop) in settings.items():

        def generated(solver: dq.Solver = solver, stop: dq.Stop = stop) -> float:
            stamps: list[float] = []
            how: dict[str, Any] = {"solver": solver, "stop": stop, "sweep": dq.Simultaneous()}
            lm.generate(
                ids,
                max_new_tokens=new,
                callback=lambda _: stamps.append(time.perf_counter()),
                **how,
            )
            return stamps[-1] - stamps[0]  # without the prompt

        bare = partial(one_by_one, block_of(lm), token, cache, new - 1, DECODED)
        times = [(generated(), seconds(bare)) for _ in range(runs + 1)]
        del times[0]  # a warm-up
        (mine, theirs), scale = zip(*times, strict=True), 1e3 / (DECODED * (new - 1))
        goal = "ratio <= 1.35" if isinstance(solver, dq.Adaptive) else None
        case = f"{kind}, batch {batch}, {label}"
        yield paired_row(
            case, mine, peer, theirs, metric="ms per iteration", scale=scale, goal=goal
        )


def rows(quick: bool) -> Iterator[Row]:
    """Maps, the layer, the block, decoding."""
    runs = 2 if quick else 25
    with torch.no_grad():
        for shape in ((2, 4, 8),) if quick else SHAPES:
            f, z0, name = token_map(shape), torch.zeros(shape), f"map {'x'.join(map(str, shape))}"
            yield from against_bare_loop(name, f, z0, runs)
            yield from against_torchdeq(name, f, z0, runs)
            yield from bookkeeping(shape, runs)
    yield from layer(runs)
    yield from block_rows(runs)
    for kind in KINDS:
        for batch in (1, 8):
            sizes = {"width": 256, "prompt": 256, "new": 128}
            if quick:
                sizes = {"width": 64, "prompt": 8, "new": 4}
            yield from decoding(kind, batch, **sizes, runs=2 if quick else 7)


main = benchmark(__doc__, rows)

if __name__ == "__main__":
    main()
