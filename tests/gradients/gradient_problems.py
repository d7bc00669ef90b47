"""Maps with known fixed points, and a dense oracle of the estimators that shares no code with
deqseq.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
Adjoint = Callable[[Tensor, Tensor], Tensor]

EVENTS = {"rows": (3,), "tokens": (4, 3)}
PROBLEMS = [f"{kind}-{event}" for kind in ("affine", "tanh") for event in EVENTS]


@dataclass
class Case:
    """A map ``z -> phi(z W^T + T z + x U^T + b)`` whose fixed point was chosen first.

    ``T`` mixes each token with those before it. ``x = gain * source`` gives the injection a graph
    of its own.
    """

    leaves: dict[str, Tensor]
    mixing: Tensor | None
    nonlinear: bool
    z_star: Tensor
    weights: Tensor

    def injection(self):
        """The input ``x``, with a graph."""
        return self.leaves["gain"] * self.leaves["source"]

    def f(self, x, leaves=None):
        """The map for the input ``x``, by default with the case's own leaves."""
        p = self.leaves if leaves is None else leaves
        injected = x @ p["U"].T + p["b"]

        def f(z):
            inner = z @ p["W"].T + injected
            inner = inner if self.mixing is None else inner + self.mixing @ z
            return torch.tanh(inner) if self.nonlinear else inner

        return f

    def loss(self, value):
        """A weighted sum of squares."""
        return (self.weights * value.square()).sum()

    @property
    def accumulated(self):
        """The gradients that backward passes have left in the leaves."""
        return {key: leaf.grad for key, leaf in self.leaves.items()}

    @property
    def z0(self):
        """Zeros."""
        return torch.zeros_like(self.z_star)


def make(name, dtype=torch.float64, seed=0):
    """One of PROBLEMS, with leaves that require gradients; the map contracts by less than 0.7."""
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
    return Case(
        leaves, mixing, kind == "tanh", z_star.to(dtype), (0.5 + uniform(3, *shape)).to(dtype)
    )


def dense_fixed_point(f, z0, adjoint):
    """The fixed point by brute force, its backward pass by a hook that applies ``adjoint``."""
    with torch.no_grad():
        z = z0
        for _ in range(120):
            z = f(z)
    value = f(z)
    jacobian = torch.func.jacrev(f)(z).detach().reshape(z.numel(), z.numel())
    value.register_hook(lambda grad: adjoint(jacobian, grad.flatten()).view_as(grad))
    return value


def exact(jacobian, grad):
    """``(I - J)^-T g``: the implicit function theorem."""
    return torch.linalg.solve(torch.eye(len(grad), dtype=grad.dtype) - jacobian.T, grad)


def neumann(steps, damping):
    """``damping * sum_i ((1 - damping) I + damping J)^i`` transposed, times ``g``:
    ``steps`` terms.
    """

    def series(jacobian, grad):
        factor = (1 - damping) * torch.eye(len(grad), dtype=grad.dtype) + damping * jacobian.T
        terms = [torch.linalg.matrix_power(factor, i) @ grad for i in range(steps)]
        return damping * torch.stack(terms).sum(dim=0)

    return series


def gradients(loss, leaves, retain_graph=False):
    """The gradient of every leaf, by its name."""
    found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=retain_graph)
    return dict(zip(leaves, found, strict=True))


def assert_close(ours, expected, rtol=1e-8):
    """Compare norms of differences with ``rtol``; an expected gradient of zero would test nothing,
    and fails.
    """
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert value.abs().max() > 0, f"the oracle's gradient of {key} is zero: nothing is tested"
        found = ours[key]
        assert found is not None, f"no gradient of {key}"
        error = (found - value).norm() / value.norm()
        assert error <= rtol, f"gradient of {key}: relative error {error:.2e} > {rtol:.0e}"
