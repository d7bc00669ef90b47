"""What every model is: embedded tokens in, states out; and the one without iteration."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deqseq.arguments import PositiveInt, check_integer, check_type, checked
from deqseq.backbones.base import Backbone, Cache, GivenBackbone, check_narrow, check_sequence
from deqseq.config import SolveFields
from deqseq.layers import Attention, with_weights
from deqseq.models.eval_mode import eval_mode
from deqseq.models.output import Evaluation, ModelOutput
from deqseq.models.padding import Padding
from deqseq.start import Start
from deqseq.step import has_values
from deqseq.tokens import TokenArgs, check_backbone, check_commits, own_parts, token_map
from deqseq.types import Counts, Mask, Sequence, Step

SETTINGS = frozenset({"solve", "eval_solve", *SolveFields.__annotations__})
"""Attributes that users expect where there is a solve."""


class Model(nn.Module, ABC):
    """A map from embedded tokens to states: :class:`ImplicitModel`, :class:`ExplicitModel`,
    :class:`RecurrentDepth`.

    A model can be called, and has two methods for decoding loops: :meth:`evaluate` runs a fixed
    number of iterations of some tokens, :meth:`commit` gives the cache after the first of them.

    Example:
        >>> import torch, deqseq as dq
        >>> model, x = dq.ImplicitModel(dq.Affine(4)).eval(), torch.ones(2, 3, 4)
        >>> evaluation = model.evaluate(x, iterations=5)
        >>> exactly = model(x, solver=dq.Naive(), stop=dq.Stop.exactly(5))
        >>> torch.allclose(evaluation.states, exactly.value)
        True
        >>> cache = model.commit(None, evaluation, torch.tensor([1, 3]))  # 1 token of row 0, 3 of 1
    """

    d_model: int
    """Width of the embedded tokens."""
    causal: bool = True
    """Whether a token's state depends only on tokens up to it."""

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_setting(self, name)
        if name == "backbone":
            check_type(f"{type(self).__name__}.backbone", value, Backbone)
            self._checked = [0, 0]
        if name in SETTINGS:  # a property, which nn.Module would not call for a module
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @abstractmethod
    def evaluate(
        self,
        x: Sequence,
        cache: Cache | None = None,
        start: Start | Sequence | None = None,
        iterations: int = 1,
        step: Step | None = None,
    ) -> Evaluation:
        """Run a fixed number of iterations, without a test for convergence; the cache stays as it
        is.

        Args:
            x: embedded tokens, ``(batch, length, d_model)``.
            cache: cache of the tokens before. Default: there are none.
            start: where the iteration begins, as in :class:`SolveConfig`, or states to begin from,
                ``(batch, length, state_width)``, usually ``d_model`` wide. Default: the model's
                own ``start``.
            iterations: evaluations of the model's map, at least 1. An explicit model runs its
                layers once, from ``x``.
            step: gives the point of the next evaluation, from the point and the states of the last
                one. Default: the states, which are plain iterations, whatever the solver.

        Returns:
            States, and what :meth:`commit` needs, without a graph.

        Raises:
            TypeError, ValueError: an argument of the wrong type or shape.
            NotImplementedError: the backbone is not causal or has no ``advance``.
        """

    @abstractmethod
    def commit(
        self, cache: Cache | None, evaluation: Evaluation, counts: Counts | None = None
    ) -> Cache:
        """The cache after some tokens of an evaluation, without a graph; the map is not evaluated.

        Args:
            cache: the cache that the evaluation used.
            evaluation: what :meth:`evaluate` returned.
            counts: how many of its tokens each row commits, int64, ``(batch,)``, not all 0.
                Default: all.

        Raises:
            ValueError: ``counts`` of another shape, dtype or device, or out of range; an evaluation
                of another model, or from another cache.
        """

    @abstractmethod
    def compile(self, **options: Any) -> None:
        """Compile the layers, but not the code around them; ``options`` are those of
        ``torch.compile``.
        """


class Uncommitted(NamedTuple):
    """What commits an evaluation of a backbone, and what it was made from."""

    backbone: Backbone[Any]
    cache: Cache | None
    aux: Any


OTHER_EVALUATION = (
    "evaluation must be what evaluate() of this model returned for this cache, got that of another "
    "model or cache"
)


class BackboneModel(Model):
    """A model of one backbone."""

    _checked: list[int]
    """Rows, up to 2, and tokens, up to 8, that the backbone has been checked with."""

    def __init__(self, backbone: Backbone[Any]) -> None:
        super().__init__()
        check_integer("backbone.d_model", getattr(backbone, "d_model", None), 1)
        check_type("backbone.causal", backbone.causal, bool)
        check_integer("backbone.state_width", backbone.state_width, backbone.d_model)
        for name, part in backbone.named_modules():
            if backbone.causal and isinstance(part, (Backbone, Attention)) and not part.causal:
                raise ValueError(
                    f"backbone must say causal = False, as its part {name!r} does, a "
                    f"{type(part).__name__}; got causal = True"
                )
        self.backbone, self.d_model = backbone, backbone.d_model

    def _check_backbone(self, x: Sequence) -> None:
        """Check a backbone with parts of the user's own, at the first rows and tokens."""
        new = [min(len(x), 2), min(x.shape[1], 8)]
        if all(map(int.__ge__, self._checked, new)) or not has_values(x):
            return
        if own_parts(self.backbone):
            with eval_mode(self):
                check_backbone(self.backbone, x)
        self._checked[:] = map(max, self._checked, new)

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the backbone is causal."""
        return self.backbone.causal

    @checked
    def commit(
        self, cache: Cache | None, evaluation: Evaluation, counts: Counts | None = None
    ) -> Cache:
        made, device = evaluation.aux, evaluation.states.device
        if not isinstance(made, Uncommitted):
            raise ValueError(OTHER_EVALUATION)
        if made.backbone is not self.backbone or made.cache is not cache:
            raise ValueError(OTHER_EVALUATION)
        rows, length = evaluation.states.shape[:2]
        low = high = length
        if counts is not None:
            if counts.dtype != torch.int64 or counts.shape != (rows,) or counts.device != device:
                got = f"{counts.dtype} {tuple(counts.shape)} on {counts.device}"
                raise ValueError(f"counts must be int64 of shape ({rows},) on {device}, got {got}")
            low, high = torch.stack(torch.aminmax(counts)).tolist()  # one transfer
            if low < 0 or high < 1 or high > length:
                wanted = f"0 to {length} tokens of each row, and not all 0"
                raise ValueError(f"counts must be {wanted}, got {counts.tolist()}")
        tokens = TokenArgs(self.backbone, None, cache)
        return tokens.advance(made.aux, rows, high, None if low == high else counts)

    def compile(self, **options: Any) -> None:
        self.backbone.compile(**options)


def refuse_setting(module: nn.Module, name: str) -> None:
    """Refuse an attribute that looks like a setting of the solve and that nothing would read."""
    if name in SETTINGS and not hasattr(type(module), name):
        raise AttributeError(
            f"{type(module).__name__}.{name} would be read by nothing: set the solve of the part "
            "that is iterated, as in implicit_model.solve = SolveConfig(...), or name it in the "
            "call"
        )


def check_loaded(module: nn.Module, x: Tensor) -> None:
    """Refuse weights that accelerate loads in the forward pass of their layer only."""
    if not x.is_meta and any(weight.is_meta for weight in module.parameters()):
        raise ValueError(
            "weights of this model are offloaded (cpu_offload, disk_offload or device_map) or on "
            f"meta, but all of them must be on {x.device}, where their input is: load the whole "
            "model onto one device, as device_map={'': 0} does"
        )


def check_input(x: Sequence, backbone: Backbone[Any]) -> None:
    """Refuse embedded tokens of another width, dtype or device than a backbone can compute with."""
    check_sequence(x, backbone.d_model)
    first = next(backbone.parameters(), x)
    if first.dtype == x.dtype and first.device == x.device:
        return  # the others are not looked at in every iteration
    parameters = list(backbone.parameters())
    dtypes = {parameter.dtype for parameter in parameters}
    devices = {parameter.device for parameter in parameters}
    if x.dtype not in dtypes and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"x must have the dtype of the model, {first.dtype}, got {x.dtype}")
    check_loaded(backbone, x)
    if x.device not in devices:
        raise ValueError(f"x must be on the device of the model, {first.device}, got {x.device}")


UNSET = {"callback": None, "throw": False, "solve": None}
"""Options of a solve that ask for nothing."""


class ExplicitModel(BackboneModel):
    r"""One pass of a backbone over the embedded tokens, :math:`z = f_\theta(x)`: an ordinary
    sequence model.

    Args:
        backbone: the layers. Build it with ``injection=False``: an injection is used only by a
            backbone inside a :class:`~deqseq.Looped`.

    Example:
        >>> import torch, deqseq as dq
        >>> config = dq.Mamba2Config(d_model=16, n_layers=2, d_state=4, headdim=8, injection=False)
        >>> dq.ExplicitModel(dq.Mamba2(config))(torch.zeros(1, 5, 16)).value.shape
        torch.Size([1, 5, 16])
    """

    @checked
    def __init__(self, backbone: GivenBackbone) -> None:
        super().__init__(backbone)
        check_narrow("backbone", backbone)

    @checked
    def forward(
        self,
        x: Sequence,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
        **options: Any,
    ) -> ModelOutput:
        """Run the layers once; ``stats`` and ``status`` of the output are None.

        ``x``, ``(batch, length, d_model)``, ``mask``, ``(batch, length)``, ``cache`` and
        ``return_cache`` are those of :meth:`deqseq.ImplicitModel.forward`. Its other ``options``
        are errors unless they are None or False.

        Raises:
            TypeError: an argument of the wrong type, or an option of a solve.
            ValueError: a bad shape, or offloaded weights.
        """
        for name, value in options.items():
            if name not in UNSET or value is not UNSET[name]:
                raise TypeError(f"an explicit model has nothing to solve: it takes no {name}")
        check_loaded(self.backbone, x)
        check_input(x, self.backbone)
        if return_cache or cache is not None:
            check_commits(self.backbone)
        self._check_backbone(x)
        padding = Padding.of(x, mask)
        tokens = padding.compact(x)
        args = self._args(tokens, cache, padding.mask, return_cache)
        value, aux = token_map(tokens, args)
        counts = None if padding.mask is None else padding.mask.sum(dim=1)
        after = args.advance(aux, len(x), x.shape[1], counts) if return_cache else None
        return ModelOutput(padding.back(value), after)

    @checked
    @torch.no_grad()
    def evaluate(
        self,
        x: Sequence,
        cache: Cache | None = None,
        start: Start | Sequence | None = None,
        iterations: PositiveInt = 1,
        step: Step | None = None,
    ) -> Evaluation:
        check_input(x, self.backbone)
        check_commits(self.backbone)
        value, aux = token_map(x, self._args(x, cache, None, True))
        return Evaluation(value, value, value, Uncommitted(self.backbone, cache, aux))

    def _args(
        self, x: Sequence, cache: Cache | None, mask: Mask | None, need_aux: bool
    ) -> TokenArgs:
        args = TokenArgs.prepared(with_weights(self.backbone), x, cache, mask, need_aux)
        return args._replace(inputs=self.backbone.without_injection(args.inputs))
