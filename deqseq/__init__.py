"""Implicit (deep equilibrium) sequence models: solve and differentiate fixed points of sequence blocks."""

from deqseq.backbones import Affine, Backbone, Cache, Inputs, Llama, LlamaConfig, Mamba2, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.fixed_point import fixed_point
from deqseq.gradients import AttachedGradient, Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.models import (
    EXAMPLES,
    PRESETS,
    CausalLM,
    CausalLMOutput,
    ExplicitModel,
    Generation,
    ImplicitModel,
    LanguageModelSpec,
    ModelOutput,
    NewTokens,
    ParameterCount,
    load_example,
    parameter_count,
    preset,
    preset_names,
)
from deqseq.rows import take
from deqseq.solution import ConvergenceError, ConvergenceWarning, Solution, SolveStats, Status
from deqseq.solve import Progress, solve
from deqseq.solvers import Anderson, Broyden, ExternalSolver, Naive, Relaxed, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep
from deqseq.types import FixedPointMap, Residual, State

__version__ = "0.1.0"

__all__ = [
    "EXAMPLES",
    "PRESETS",
    "Affine",
    "Anderson",
    "AttachedGradient",
    "Backbone",
    "Broyden",
    "Cache",
    "CausalLM",
    "CausalLMOutput",
    "Chunked",
    "ConvergenceError",
    "ConvergenceWarning",
    "ExplicitModel",
    "ExternalSolver",
    "FixedPointMap",
    "Generation",
    "Gradient",
    "Implicit",
    "ImplicitModel",
    "Inputs",
    "LanguageModelSpec",
    "Llama",
    "LlamaConfig",
    "Mamba2",
    "Mamba2Config",
    "ModelOutput",
    "Naive",
    "NewTokens",
    "OneStep",
    "ParameterCount",
    "Phantom",
    "Progress",
    "Relaxed",
    "Residual",
    "Sequential",
    "Simultaneous",
    "Sliding",
    "Solution",
    "SolveConfig",
    "SolveStats",
    "Solver",
    "State",
    "Status",
    "Stop",
    "Sweep",
    "Unrolled",
    "fixed_point",
    "load_example",
    "parameter_count",
    "preset",
    "preset_names",
    "solve",
    "take",
]
