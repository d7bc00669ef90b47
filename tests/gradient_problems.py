"""Maps with known fixed points, and a dense oracle of the estimators that shares no code with deqseq."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import deqseq as dq

Map = Callable[[Tensor], Tensor]
Adjoint = Callable[[Tensor, Tensor], Tensor]

TIGHT = dq.Stop(rtol=1e-12, max_steps=200)
COARSE = dq.Stop(rtol=1e-2, norm="frobenius")
SOLVERS = [dq.Naive(), dq.Relaxed(), dq.Anderson(), dq.Broyden()]
EVENTS = {"rows": (3,), "tokens": (4, 3)}
PROBLEMS = [f"{kind}-{event}" for kind in ("affine", "tanh") for event in EVENTS]


@dataclass
class Case:
    """A map ``z -> phi(z W^T + T z + x U^T + b)`` whose fixed point was chosen first.

    ``T`` mixes each token with those before it. ``x = gain * source`` gives the injection a graph of its own.
    """

    leaves: dict[str, Tensor]
    mixing: Tensor | None
    nonlinear: bool
    z_star: Tensor
    weights: Tensor

    def injection(self) -> Tensor:
        return self.leaves["gain"] * self.leaves["source"]

    def f(self, x: Tensor, leaves: Mapping[str, Tensor] | None = None) -> Map:
        p = self.leaves if leaves is None else leaves
        injected = x @ p["U"].T + p["b"]

        def f(z: Tensor) -> Tensor:
            inner = z @ p["W"].T + injected
            inner = inner if self.mixing is None else inner + self.mixing @ z
            return torch.tanh(inner) if self.nonlinear else inner

        return f

    def loss(self, value: Tensor) -> Tensor:
        return (self.weights * value.square()).sum()

    @property
    def z0(self) -> Tensor:
        return torch.zeros_like(self.z_star)


def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """One of PROBLEMS, with leaves that want gradients; the map contracts by less than 0.7."""
    kind, event = name.split("-")
    generator = torch.Generator().manual_seed(seed)
    uniform = partial(torch.rand, generator=generator, dtype=torch.float64)
    shape = EVENTS[event]
    W = uniform(3, 3) - 0.5
    W = 0.4 * W / torch.linalg.matrix_norm(W, 2)
    U = torch.eye(3, dtype=torch.float64) + 0.2 * uniform(3, 3)
    b = uniform(3) - 0.5
    mixing = 0.1 * torch.tril(1 + uniform(4, 4), -1) if event == "tokens" else None
    z_star = 1.6 * uniform(3, *shape) - 0.8
    inner = z_star @ W.T if mixing is None else z_star @ W.T + mixing @ z_star
    target = torch.atanh(z_star) if kind == "tanh" else z_star
    gain = torch.tensor(1.5, dtype=torch.float64)
    source = torch.linalg.solve(U, (target - inner - b).mT).mT
    named = {"W": W, "U": U, "b": b, "gain": gain, "source": source / gain}
    leaves = {key: value.to(dtype).requires_grad_() for key, value in named.items()}
    mixing = None if mixing is None else mixing.to(dtype)
    return Case(leaves, mixing, kind == "tanh", z_star.to(dtype), (0.5 + uniform(3, *shape)).to(dtype))


class Block(nn.Module):
    """The same map with its weights as parameters."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        for key in ("W", "U", "b"):
            self.register_parameter(key, nn.Parameter(case.leaves[key].detach().clone()))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.case.f(x, dict(self.named_parameters()))(z)


class Counted:
    """A map that counts its calls."""

    def __init__(self, f: Map) -> None:
        self.f, self.calls = f, 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return self.f(z)


def solve_of(case: Case, gradient: dq.Gradient | None, **changes: object) -> dq.Solution:
    options = {"solver": dq.Naive(), "stop": TIGHT, "gradient": gradient, "throw": True}
    return dq.fixed_point(case.f(case.injection()), case.z0, **(options | changes))


def dense_jacobian(f: Map, z: Tensor) -> Tensor:
    return torch.func.jacrev(f)(z).detach().reshape(z.numel(), z.numel())


def dense_fixed_point(f: Map, z0: Tensor, adjoint: Adjoint) -> Tensor:
    """The fixed point by brute force, its backward pass by a hook that applies ``adjoint``."""
    with torch.no_grad():
        z = z0
        for _ in range(120):
            z = f(z)
    value, jacobian = f(z), dense_jacobian(f, z)
    value.register_hook(lambda grad: adjoint(jacobian, grad.flatten()).view_as(grad))
    return value


def inverse(jacobian: Tensor, grad: Tensor) -> Tensor:
    """``(I - J)^-T g``: the implicit function theorem."""
    return torch.linalg.solve(torch.eye(len(grad), dtype=grad.dtype) - jacobian.T, grad)


def neumann(steps: int, damping: float) -> Adjoint:
    """``damping * sum_i ((1 - damping) I + damping J)^i`` transposed, times ``g``: ``steps`` terms."""

    def series(jacobian: Tensor, grad: Tensor) -> Tensor:
        factor = (1 - damping) * torch.eye(len(grad), dtype=grad.dtype) + damping * jacobian.T
        return damping * sum(torch.linalg.matrix_power(factor, i) @ grad for i in range(steps))

    return series


@contextmanager
def packed_tensors() -> Iterator[list[int]]:
    """Collects the number of elements of everything that autograd saves."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def gradients(loss: Tensor, leaves: Mapping[str, Tensor], retain_graph: bool = False) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=retain_graph)
    return dict(zip(leaves, found, strict=True))


def assert_close(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-8) -> None:
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert value.abs().max() > 0, f"the oracle's gradient of {key} is zero: nothing is tested"
        error = (ours[key] - value).norm() / value.norm()
        assert error <= rtol, f"gradient of {key}: relative error {error:.2e} > {rtol:.0e}"
