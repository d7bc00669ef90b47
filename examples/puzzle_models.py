"""The models of puzzles.py: a fixed point of one state, or of two, and an ordinary Transformer."""

import math
from typing import Any

import torch
from puzzle_tasks import Maze, Sudoku
from torch import Tensor, nn

import deqseq as dq

SOLVERS = {"naive": dq.Naive(), "relaxed": dq.Relaxed(0.8)}
SOLVERS |= {"adaptive": dq.Adaptive(), "anderson": dq.Anderson()}
GRADIENTS = {"phantom": dq.Phantom(4, damping=0.8), "one_step": dq.OneStep()}
GRADIENTS |= {"implicit": dq.Implicit(), "unrolled": dq.Unrolled()}
SUPERVISIONS, CYCLES, THOUGHTS = 4, 2, 3  # of trm: updates of a batch, and in each of them


class Local(dq.Backbone[Any]):
    """Blocks in which a cell of a square sees its eight neighbours: a convolution, then an MLP."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.d_model, self.causal = width, False
        self.layers = nn.ModuleList()
        for _ in range(layers):
            look = nn.Conv2d(width, width, 3, padding=1, groups=width)
            up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            parts = look, nn.RMSNorm(width), nn.Sequential(up, nn.SiLU(), down), nn.RMSNorm(width)
            self.layers.append(nn.ModuleList(parts))

    def prepare(self, x: Tensor, cache: Any = None, mask: Tensor | None = None) -> Tensor:
        """The input itself, which is added to the state elsewhere."""
        return x

    def forward(
        self, z: Tensor, inputs: Tensor, cache: Any = None, *, need_aux: bool = False
    ) -> tuple[Tensor, None]:
        """One iteration of all cells, ``(batch, cells, width)``."""
        side = math.isqrt(z.shape[1])
        layers: Any = self.layers
        for look, seen, think, thought in layers:
            z = seen(z + look(z.mT.unflatten(2, (side, side))).flatten(2).mT)
            z = thought(z + think(z))
        return z, None


class TwoStates(dq.Backbone[Any]):
    r"""The recurrence of Tiny Recursive Models, whose state is an answer y beside a thought z.

    .. math:: z \leftarrow \mathrm{net}(z + y + x)\ (L\ \text{times}), \qquad
              y \leftarrow \mathrm{net}(y + z)

    References:
        Jolicoeur-Martineau, Less is More: Recursive Reasoning with Tiny Networks, 2025, arXiv
        2510.04871.
    """

    def __init__(self, net: dq.Backbone[Any], thoughts: int) -> None:
        super().__init__()
        self.net, self.thoughts, self.d_model, self.causal = net, thoughts, net.d_model, False

    @property
    def state_width(self) -> int:
        """Width of answer and thought together."""
        return 2 * self.d_model

    def prepare(self, x: Tensor, cache: Any = None, mask: Tensor | None = None) -> Any:
        """The input, and what the layers need."""
        return x, self.net.prepare(x, None, mask)

    def forward(
        self, z: Tensor, inputs: Any, cache: Any = None, *, need_aux: bool = False
    ) -> tuple[Tensor, None]:
        """One cycle: thoughts, then an answer."""
        x, prepared = inputs
        y, z = z.chunk(2, dim=-1)
        for _ in range(self.thoughts):
            z, _ = self.net(z + y + x, prepared)
        y, _ = self.net(y + z, prepared)
        return torch.cat([y, z], dim=-1), None


def make_layers(options: Any) -> dq.LlamaConfig:
    """The layers of all models: they see all cells, and have two-dimensional positions."""
    return dq.LlamaConfig(
        d_model=options.width,
        n_layers=options.layers,
        n_heads=4,
        mlp_width=2 * options.width,
        rope_theta=100.0,
        norms="outer",  # after each residual path: states stay bounded
        final_norm=False,
        weight_norm=False,
        injection=False,  # the input is added to the state, by Injected or TwoStates
        causal=False,
        grid=True,  # the cells of a square, line by line
    )


def make_model(options: Any, task: Sudoku | Maze) -> dq.TokenClassifier:
    """The model of a run, with fresh weights."""
    torch.manual_seed(options.seed)
    layers: dq.Backbone[Any] = dq.Llama(make_layers(options))
    if options.mixer == "convolution":
        layers = Local(options.width, options.layers)
    evaluated = dq.SolveConfig(SOLVERS[options.solver], dq.Stop(rtol=0.01, max_steps=64))
    if options.model == "explicit":
        model = dq.ExplicitModel(layers)
    else:
        stop, backbone = dq.Stop.exactly(CYCLES), TwoStates(layers, THOUGHTS)
        if options.model == "deq":
            stop = dq.Stop(rtol=0.03, max_steps=options.iterations)
            backbone = dq.Injected(layers, dq.AddInjection())
        solve = dq.SolveConfig(SOLVERS[options.solver], stop, GRADIENTS[options.gradient])
        model = dq.ImplicitModel(backbone, solve, evaluated)
    return dq.TokenClassifier(task.vocab_size, task.n_classes, model, positions=task.positions)
