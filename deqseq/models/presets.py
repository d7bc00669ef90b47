"""Models by name: the paper's, and the trained ones that come with the library."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, overload

import torch
from safetensors.torch import load_file

from deqseq.arguments import Choice, checked, suggestion
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.gradients import Phantom
from deqseq.models.causal_lm import CausalLM
from deqseq.models.specification import LanguageModelSpec
from deqseq.models.token_classifier import TokenClassifier
from deqseq.solvers import Naive, Relaxed
from deqseq.stop import Stop

SIZES = {
    "130m": (768, 24, 12, 12, 32),
    "370m": (1024, 48, 24, 16, 24),
    "760m": (1536, 48, 24, 16, 32),
    "1.3b": (2048, 48, 24, 32, 32),
}
"""Width; layers of the Mamba2; layers, heads, and iterations in the free phase of the Llama."""


@checked
def preset(name: str) -> LanguageModelSpec:
    """One of the paper's models: ``FAMILY-SIZE-KIND``, or the state-tracking model.

    Families are ``llama3`` and ``mamba2``, sizes ``130m``, ``370m``, ``760m`` and ``1.3b``. Kinds
    are ``explicit``; ``pretrain``, with at most 4 iterations, then 1 phantom step; and
    ``implicit``, with at most 24 iterations (32 for Llamas except ``370m``), then 4 phantom steps.
    Solves use ``Relaxed(0.8)`` and end at a relative residual of 0.05 of each token. The budget in
    evaluation is 4 times as large. ``mamba2-state-tracking`` has 32 iterations, and 2,048 in
    evaluation. The paper's code trains undamped and measures a sequence by one norm;
    :func:`deqseq.integrations.foreign.from_reference_config` gives that.

    Args:
        name: a key of :data:`PRESETS`.

    Returns:
        The specification; ``build()`` makes the model, with fresh weights.

    Raises:
        ValueError: an unknown name; the nearest ones are in the message.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, and the
        configuration files of its public code.

    Example:
        >>> from deqseq import preset
        >>> spec = preset("mamba2-1.3b-implicit")
        >>> spec.backbone.n_layers, spec.solve.stop.max_steps, spec.eval_solve.stop.max_steps
        (48, 24, 96)
    """
    if name not in PRESETS:
        raise ValueError(
            f"unknown preset name {name!r}{suggestion(name, PRESETS)} "
            "(all names: list(deqseq.PRESETS))"
        )
    return PRESETS[name]


def _language_model(family: str, size: str, kind: str) -> LanguageModelSpec:
    width, mamba2_layers, llama_layers, heads, budget = SIZES[size]
    vocabulary = 50277  # tokens of the GPT-NeoX tokenizer
    if family == "llama3":
        backbone = LlamaConfig(width, llama_layers, heads, mlp_width=8 * width // 3)
    else:
        backbone, budget = Mamba2Config(width, mamba2_layers), 24
        if (size, kind) != ("130m", "explicit"):  # the reference pads all of them but this one
            vocabulary = 50288
    if kind == "explicit":
        backbone = replace(backbone, weight_norm=False, injection=False)
        return LanguageModelSpec(vocabulary, backbone, solve=None)
    solves = _solves(4, 1, 16) if kind == "pretrain" else _solves(budget, 4, 4 * budget)
    return LanguageModelSpec(vocabulary, backbone, *solves)


def _solves(budget: int, phantom_steps: int, eval_budget: int) -> tuple[SolveConfig, SolveConfig]:
    """How the paper solves in training, and in evaluation."""
    stop = Stop(rtol=0.05, max_steps=budget)
    solve = SolveConfig(Relaxed(0.8), stop, Phantom(phantom_steps, damping=0.8))
    return solve, replace(solve, stop=replace(stop, max_steps=eval_budget))


_STATE_TRACKING = LanguageModelSpec(
    240,  # A5 times a monoid of four elements
    Mamba2Config(d_model=256, n_layers=1, d_state=128, expand=4, headdim=64, dropout=0.05),
    *_solves(32, 4, 2048),
)
PRESETS: Mapping[str, LanguageModelSpec] = MappingProxyType(
    {
        f"{family}-{size}-{kind}": _language_model(family, size, kind)
        for family in ("llama3", "mamba2")
        for size in SIZES
        for kind in ("explicit", "pretrain", "implicit")
    }
    | {"mamba2-state-tracking": _STATE_TRACKING}
)
"""The :class:`LanguageModelSpec` of each preset, by name."""


WEIGHTS = Path(__file__).parent / "weights"
_LAYERS = LlamaConfig(
    d_model=64,
    n_heads=4,
    n_layers=2,
    mlp_width=128,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    injection=False,
    weight_norm=False,
    final_norm=False,
)
_SWAPS = LanguageModelSpec(
    128,
    _LAYERS,
    SolveConfig(Naive(), Stop(rtol=1e-2, max_steps=64), start="input"),
    prelude=_LAYERS,
    coda=replace(_LAYERS, final_norm=True),
    injection="concat",
)
EXAMPLES: Mapping[str, LanguageModelSpec] = MappingProxyType(
    {
        name: LanguageModelSpec(
            tokens,
            Mamba2Config(d_model=width, d_state=d_state, headdim=32, skip_scale=skip_scale),
            SolveConfig(stop=Stop(rtol=1e-2, max_steps=max_steps)),
        )
        for name, tokens, width, d_state, skip_scale, max_steps in (
            ("parity", 2, 32, 16, 1.0, 1000),
            ("parity-unrolled", 2, 32, 16, 1.0, 1000),
            ("a5", 60, 64, 16, 1.0, 2000),
            ("balls", 11, 64, 32, 1.0, 2000),
            ("text", 128, 96, 16, 0.25, 256),
        )
    }
    | {"swaps": _SWAPS}
)
"""The :class:`LanguageModelSpec` of each trained language model, by name, without ``"sudoku"``. The
metadata of a weights file says how the model was trained."""


@overload
def load_example(name: Literal["sudoku"]) -> TokenClassifier: ...
@overload
def load_example(
    name: Literal["parity", "parity-unrolled", "a5", "balls", "swaps", "text"],
) -> CausalLM: ...
@overload
def load_example(name: str) -> Any: ...
def load_example(name: str) -> Any:
    """A small trained model, for first steps, tests and tutorials.

    The guide "The trained models that come with deqseq" has data, licence, training and limits of
    each.

    - ``"parity"``: one Mamba2 block, trained on sequences of 16 bits; says at each bit whether the
      number of ones so far is odd. Right at every length up to 512, and converges there.
    - ``"parity-unrolled"``: the same, trained only through 4 unrolled iterations: what it learned
      is not a fixed point.
    - ``"a5"``: one Mamba2 block, trained on products of up to 16 factors, each one of two elements
      of A5, the smallest group that is not solvable; says after each factor which of the 60
      elements the product is. Right at every position of 64 tokens, and at 98 % of those of 256.
      Its inputs are those of ``WordProblem(group, generators(group, 2))`` in :mod:`deqseq.tasks`.
    - ``"balls"``: one Mamba2 block, trained on stories of up to 12 swaps of balls; says in which
      cup a ball is. Its words are those of :class:`deqseq.tasks.Balls`. In stories of 96 swaps it
      answers 98 % of the last questions.
    - ``"swaps"``: a Transformer of six layers, pretrained on stories of up to four swaps, whose two
      middle layers were then looped; answers 98 % of the last questions after 16 swaps. Its ids are
      bytes: a sentence such as ``13315`` (1 for 3, 3 for 1, where is 5?) swaps the balls 1 and 3
      and asks for ball 5; answers are the cups ``A`` to ``E``.
    - ``"text"``: one Mamba2 block that predicts the next character of Shakespeare's plays; 2.36
      bits per character on three plays that it was not trained on. Its ids are the bytes of ASCII
      text.
    - ``"sudoku"``: one Transformer block that sees all cells, a :class:`TokenClassifier`; solves
      99 % of 6 x 6 Sudokus with 14 givens or more, whose boxes have two lines and three
      columns. Its ids are the digits, 0 for a blank, line by line; a digit's class is one less.

    Args:
        name: name of the model.

    Returns:
        The model in eval mode, on the CPU, in float32, solved to a relative tolerance of 0.01. All
        but ``"sudoku"`` are a :class:`CausalLM`.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> from deqseq import load_example
        >>> import torch
        >>> lm = load_example("parity")
        >>> output = lm(torch.tensor([[1, 0, 1, 1, 1]]))
        >>> output.logits.argmax(-1), output.converged
        (tensor([[1, 1, 0, 1, 0]]), tensor([True]))
        >>> prompt = torch.tensor([list(b"ROMEO:")])
        >>> made = load_example("text").generate(prompt, max_new_tokens=40, temperature=0.7, seed=0)
        >>> text = bytes(made.tokens[0].tolist()).decode()  # what follows the prompt
        >>> sudoku = load_example("sudoku")
        >>> puzzle = "5.36...1.3....2..1...2...4..5...1.3.".replace(".", "0")
        >>> output = sudoku(torch.tensor([[*map(int, puzzle)]]))
        >>> output.logits.argmax(-1).add(1).view(6, 6)[0], output.converged
        (tensor([5, 2, 3, 6, 1, 4]), tensor([True]))
    """
    Choice((*EXAMPLES, "sudoku"))("name", name)
    with torch.random.fork_rng(devices=()):  # the weights that are drawn here are replaced
        lm = sudoku() if name == "sudoku" else EXAMPLES[name].build()
    lm.load_state_dict(load_file(WEIGHTS / f"{name}.safetensors"))
    return lm.eval()


def sudoku() -> TokenClassifier:
    """A model of the sizes of the example ``"sudoku"``, with fresh weights."""
    layers = LlamaConfig(
        d_model=96,
        n_heads=4,
        mlp_width=192,
        rope_theta=100.0,
        norms="outer",
        final_norm=False,
        weight_norm=False,
        causal=False,
        grid=True,
    )
    solve = SolveConfig(stop=Stop(rtol=1e-2, max_steps=256))
    spec = LanguageModelSpec(7, layers, solve, injection="add")
    lines, columns = torch.cartesian_prod(torch.arange(6), torch.arange(6)).T
    boxes = lines // 2 * 2 + columns // 3
    positions = torch.stack([lines, columns, boxes], dim=1)
    return TokenClassifier(spec.vocab_size, 6, spec.build_model(), positions=positions)
