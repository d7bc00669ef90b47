"""Implicit (deep equilibrium) sequence models: solve and differentiate fixed points of sequence blocks."""

from deqseq.backbones import (
    AddInjection,
    Affine,
    Backbone,
    Cache,
    ConcatInjection,
    DecayInjection,
    Injected,
    Injection,
    Inputs,
    Llama,
    LlamaConfig,
    Looped,
    Mamba2,
    Mamba2Config,
)
from deqseq.config import SolveConfig
from deqseq.fixed_point import fixed_point
from deqseq.gradients import AttachedGradient, Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.loop import Progress
from deqseq.models import (
    EXAMPLES,
    PRESETS,
    CausalLM,
    CausalLMOutput,
    Evaluation,
    ExplicitModel,
    Generation,
    ImplicitModel,
    LanguageModelSpec,
    Model,
    ModelOutput,
    NewTokens,
    RecurrentDepth,
    load_example,
    parameter_count,
    preset,
)
from deqseq.rows import take
from deqseq.solution import ConvergenceError, ConvergenceWarning, Solution, SolveStats, Status
from deqseq.solve import solve
from deqseq.solvers import Adaptive, Anderson, Broyden, ExternalSolver, Naive, Relaxed, Solver
from deqseq.start import RandomStart, Start
from deqseq.stop import Rule, Stop
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep
from deqseq.types import FixedPointMap, Residual, State

__version__ = "0.1.0"

__all__ = [
    "EXAMPLES",
    "PRESETS",
    "Adaptive",
    "AddInjection",
    "Affine",
    "Anderson",
    "AttachedGradient",
    "Backbone",
    "Broyden",
    "Cache",
    "CausalLM",
    "CausalLMOutput",
    "Chunked",
    "ConcatInjection",
    "ConvergenceError",
    "ConvergenceWarning",
    "DecayInjection",
    "Evaluation",
    "ExplicitModel",
    "ExternalSolver",
    "FixedPointMap",
    "Generation",
    "Gradient",
    "Implicit",
    "ImplicitModel",
    "Injected",
    "Injection",
    "Inputs",
    "LanguageModelSpec",
    "Llama",
    "LlamaConfig",
    "Looped",
    "Mamba2",
    "Mamba2Config",
    "Model",
    "ModelOutput",
    "Naive",
    "NewTokens",
    "OneStep",
    "Phantom",
    "Progress",
    "RandomStart",
    "RecurrentDepth",
    "Relaxed",
    "Residual",
    "Rule",
    "Sequential",
    "Simultaneous",
    "Sliding",
    "Solution",
    "SolveConfig",
    "SolveStats",
    "Solver",
    "Start",
    "State",
    "Status",
    "Stop",
    "Sweep",
    "Unrolled",
    "fixed_point",
    "load_example",
    "parameter_count",
    "preset",
    "solve",
    "take",
]
