"""What every backbone must do: be causal or say that it is not, keep rows independent, and change
nothing in place.
"""

import copy
from itertools import repeat
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor
from torch.testing import assert_close

from deqseq.arguments import check_type
from deqseq.backbones import Backbone, Cache
from deqseq.config import SolveConfig
from deqseq.models import ImplicitModel, ModelOutput
from deqseq.rows import map_tensors, take, tensors_of
from deqseq.stop import Stop
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep
from deqseq.testing.problems import random
from deqseq.tokens import keeps_cache

SWEEPS: tuple[Sweep, ...] = (Simultaneous(), Chunked(3), Sequential(), Sliding(3))


class BackboneContract:
    """The suite for a backbone: subclass it as ``TestName``, and set ``backbone``.

    It checks single evaluations at random states and their gradients, and whole solves. For these
    the backbone must contract, or ``config`` name a solver that finds its fixed point. It checks
    that tokens do not depend on later ones (unless ``causal`` is False), that rows are independent
    and padding has no effect, that nothing is changed in place, and that a solve is the same with a
    cache as without. Tests use a copy in float64 and eval mode; one also takes other dtypes, one
    training mode. Those of the cache are skipped for a backbone that is not causal or has no
    ``advance``.

    Attributes:
        backbone: the backbone, of any width.
        config: how its fixed point is found; the tolerance must be tight.

    Example:
        >>> from deqseq.testing import BackboneContract
        >>> import deqseq as dq
        >>> class TestAffine(BackboneContract):
        ...     backbone = dq.Affine(8)
    """

    backbone: ClassVar[Backbone[Any]]
    config: ClassVar[SolveConfig] = SolveConfig(stop=Stop(rtol=1e-9, max_steps=1000))

    @property
    def given(self) -> Backbone[Any]:
        """The backbone, checked."""
        check_type(f"{type(self).__name__}.backbone", getattr(self, "backbone", None), Backbone)
        return self.backbone

    def made(self) -> Backbone[Any]:
        """A copy to test."""
        return copy.deepcopy(self.given).double().eval()

    def randn(self, batch: int, length: int, seed: int = 0) -> Tensor:
        """Random inputs, ``(batch, length, d_model)``."""
        return random(batch, length, self.given.d_model, seed=seed)

    def states(self, batch: int, length: int, seed: int = 1) -> Tensor:
        """Random states, ``(batch, length, state_width)``."""
        return random(batch, length, self.given.state_width, seed=seed)

    def example(self, batch: int, length: int) -> tuple[Backbone[Any], Tensor, Tensor]:
        """A copy to test, its input x and a state z."""
        return self.made(), self.randn(batch, length), self.states(batch, length)

    def advance(
        self,
        backbone: Backbone[Any],
        cache: Cache | None,
        aux: Any,
        tokens: int,
        counts: Tensor | None = None,
    ) -> Cache:
        """The cache after ``tokens``; skips the test if the backbone has no ``advance``."""
        self.require_advance()
        with torch.no_grad():
            return backbone.advance(cache, aux, tokens, counts)

    def require_advance(self) -> None:
        """Skip the test if the backbone is not causal or has no ``advance``."""
        if not keeps_cache(self.given):
            raise SkipTest("the backbone keeps no cache")

    def solved(self, x: Tensor, sweep: Sweep = Simultaneous(), **options: Any) -> ModelOutput:
        """The fixed point, which must be found."""
        model = ImplicitModel(self.made(), self.config)
        with torch.no_grad():
            output = model(x, sweep=sweep, **options)
        assert bool(output.converged.all()), (
            "the solve must converge: set `backbone` to one that contracts, or `config` to a "
            "solver and a budget that find its fixed point"
        )
        return output

    # One evaluation

    def test_keeps_the_dtype(self) -> None:
        backbone, x, z = self.example(2, 4)
        expected, _ = evaluated(backbone, x, z)
        for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-3), (torch.bfloat16, 0.2)):
            value, _ = evaluated(self.made().to(dtype), x.to(dtype), z.to(dtype))
            assert value.dtype == dtype
            assert value.shape == z.shape
            assert (value.double() - expected).norm() <= rtol * expected.norm()

    def test_tensors_are_made_on_the_device_of_the_state(self) -> None:
        """A tensor made without a device is on "meta" here, and cannot be used with the others."""
        backbone, x, z = self.example(2, 4)
        expected, _ = evaluated(backbone, x, z, need_aux=True)
        with torch.device("meta"):
            inputs = backbone.prepare(x)
            value, aux = backbone(z, inputs, need_aux=True)
            tensors = [value, *tensors_of((inputs, aux))]
            if keeps_cache(backbone):
                tensors += self.advance(backbone, None, aux, 4).tensors()
        assert {tensor.device for tensor in tensors} == {x.device}
        assert torch.equal(value, expected)

    def test_one_prepare_makes_one_map_in_training_mode_too(self) -> None:
        """``prepare`` draws random masks, once per solve: a map that draws has no fixed point."""
        backbone, x, z = self.example(3, 4)
        backbone.train()
        inputs, rows = backbone.prepare(x), torch.tensor([2, 0])
        value, _ = backbone(z, inputs)
        assert torch.equal(backbone(z, inputs)[0], value)
        taken, _ = backbone(z[rows], take(inputs, rows))
        assert_same(taken, value[rows])

    def test_gradients_are_those_of_the_map(self) -> None:
        backbone, x, z = self.example(2, 4)
        leaves = [leaf.requires_grad_() for leaf in (x, z, *backbone.parameters())]

        def value(*_: Tensor) -> Tensor:  # gradcheck perturbs the leaves in place
            return evaluated(backbone, x, z)[0]

        assert torch.autograd.gradcheck(value, leaves, fast_mode=True, atol=1e-6, rtol=1e-4)

    def test_causal(self) -> None:
        if not self.given.causal:
            raise SkipTest("the backbone is not causal")
        backbone, x, z = self.example(2, 7)
        value, _ = evaluated(backbone, x, z)
        # random, because a norm would remove a constant
        other_x, other_z = self.randn(2, 7, seed=2), self.states(2, 7, seed=3)
        for cut in range(1, 7):
            later_x = torch.cat([x[:, :cut], other_x[:, cut:]], dim=1)
            later_z = torch.cat([z[:, :cut], other_z[:, cut:]], dim=1)
            for name, changed_x, changed_z in (("input", later_x, z), ("state", x, later_z)):
                changed, _ = evaluated(backbone, changed_x, changed_z)
                assert torch.allclose(changed[:, :cut], value[:, :cut], 1e-9, 1e-9), (
                    f"a token must not depend on the {name} of later ones"
                )
                assert not torch.allclose(changed[:, cut:], value[:, cut:]), (
                    f"a token must depend on its {name}"
                )

    def test_padding_is_not_seen(self) -> None:
        backbone, x, z = self.example(2, 9)
        counts = torch.tensor([4, 9])
        mask = torch.arange(9) < counts[:, None]
        value, _ = evaluated(backbone, x * mask[..., None], z, mask=mask)
        for row, count in enumerate(counts.tolist()):
            some = slice(row, row + 1), slice(count)
            assert_same(value[some], evaluated(backbone, x[some], z[some])[0])

    def test_rows_are_independent(self) -> None:
        backbone, x, z = self.example(3, 9)
        rows, counts = torch.tensor([1, 1, 2, 0]), torch.tensor([9, 4, 1])
        mask = torch.arange(9) < counts[:, None]
        inputs = backbone.prepare(x, None, mask)
        value, aux = backbone(z, inputs, need_aux=True)
        taken, taken_aux = backbone(z[rows], take(inputs, rows), need_aux=True)
        assert_same(taken, value[rows])
        cache = self.advance(backbone, None, aux, 9, counts)
        for rows_aux in (take(aux, rows), taken_aux):
            taken_cache = self.advance(backbone, None, rows_aux, 9, counts[rows])
            assert_same_cache(taken_cache, take(cache, rows))
        for prepared in (cache, cache.reserve(9)):
            inputs = backbone.prepare(x, prepared, mask)
            value, _ = backbone(z, inputs, prepared)
            taken, _ = backbone(z[rows], take(inputs, rows), take(prepared, rows))
            assert_same(taken, value[rows])

    def test_pure(self) -> None:
        """Nothing that it is given changes, nor a cache if another one continues the same."""
        backbone, x, z = self.example(2, 4)
        other_z = self.states(2, 4, seed=2)
        cache: Cache | None = None
        inputs = backbone.prepare(x)

        def watched() -> list[Tensor]:
            tensors = [z, *tensors_of(inputs), *backbone.state_dict().values()]
            return tensors if cache is None else [*tensors, *cache.tensors()]

        for _ in range(2):  # without tokens before, and after some
            copies = [tensor.clone() for tensor in watched()]
            with torch.no_grad():
                first, _ = backbone(z, inputs, cache, need_aux=True)
                second, aux = backbone(z, inputs, cache, need_aux=True)
            assert torch.equal(first, second)
            with_a_graph, _ = backbone(z, inputs, cache)
            assert_same(with_a_graph, first)
            assert_close(watched(), copies, rtol=0, atol=0)
            next_cache = self.advance(backbone, cache, aux, 4)
            copies += [tensor.clone() for tensor in next_cache.tensors()]
            with torch.no_grad():
                _, other_aux = backbone(other_z, inputs, cache, need_aux=True)
            other_cache = self.advance(backbone, cache, other_aux, 4)
            assert_close([*watched(), *next_cache.tensors()], copies, rtol=0, atol=0)
            assert not all(map(torch.allclose, next_cache.tensors(), other_cache.tensors()))
            cache, inputs = next_cache.reserve(4), backbone.prepare(x, next_cache)

    # The cache

    def test_a_sequence_cut_anywhere_is_the_sequence(self) -> None:
        self.require_advance()
        backbone, x, z = self.example(2, 40)
        inputs = backbone.prepare(x)
        whole, whole_aux = backbone(z, inputs, need_aux=True)
        for sizes in ((1, 39), (3, 37), (39, 1), repeat(1, 40)):
            cache, values, start = None, [], 0
            for size in sizes:
                end = start + size
                some_x, some_z = x[:, start:end], z[:, start:end]
                value, aux = backbone(some_z, part(inputs, start, end), cache, need_aux=True)
                assert_same(evaluated(backbone, some_x, some_z, cache)[0], value)
                values.append(value)
                cache, start = self.advance(backbone, cache, aux, size), end
                assert not any(tensor.requires_grad for tensor in cache.tensors())
            assert_same(torch.cat(values, dim=1), whole)
            assert_same_cache(cache, self.advance(backbone, None, whole_aux, 40))

    def test_padding_does_not_change_a_row(self) -> None:
        """Nor does what the other rows commit: row 2 commits nothing, and keeps its cache."""
        self.require_advance()
        backbone, x, z = self.example(3, 5)
        later_x, later_z = self.randn(3, 4, seed=2), self.states(3, 4, seed=3)
        mask = torch.arange(5) < torch.tensor([[2], [5], [1]])
        cache: Cache | None = None
        for committed in (3, 5):  # without tokens before, and after some
            counts = torch.tensor([2, committed, 0])
            value, aux = evaluated(backbone, x, z, cache, mask, need_aux=True)
            next_cache = self.advance(backbone, cache, aux, committed, counts)
            later, _ = evaluated(backbone, later_x, later_z, next_cache)
            for row in torch.arange(3).split(1):
                row_cache, count = take(cache, row), int(counts[row])
                if count > 0:
                    row_x, row_z = x[row, :count], z[row, :count]
                    alone, aux = evaluated(backbone, row_x, row_z, row_cache, need_aux=True)
                    assert_same(alone, value[row, :count])
                    row_cache = self.advance(backbone, row_cache, aux, count)
                alone_later, _ = evaluated(backbone, later_x[row], later_z[row], row_cache)
                assert_same(alone_later, later[row], where="the value after advance with counts")
            cache = next_cache

    # Whole solves

    def test_a_row_with_padding_is_solved_as_alone(self) -> None:
        x, counts = self.randn(3, 9), torch.tensor([9, 1, 4])
        padded = self.solved(x, mask=torch.arange(9) < counts[:, None])
        for row, count in enumerate(counts.tolist()):
            some = slice(row, row + 1), slice(count)
            assert_same(padded.value[some], self.solved(x[some]).value, 1e-7)

    def test_every_sweep_finds_the_same_fixed_point(self) -> None:
        """With padding after its tokens, a row is the beginning of the row without."""
        self.require_advance()
        x = self.randn(3, 7)
        real = torch.arange(7) < torch.tensor([[7], [1], [4]])
        whole = self.solved(x, return_cache=True)
        beginnings = whole.value.masked_fill(~real[..., None], 0)
        for sweep in SWEEPS:
            padded = self.solved(x, sweep, mask=real)
            assert_same(padded.value, beginnings, 1e-7, f"{sweep}, with padding")
            output = self.solved(x, sweep, return_cache=True)
            assert_same(output.value, whole.value, 1e-7, str(sweep))
            assert_same_cache(output.cache, whole.cache, 1e-7)
            first = self.solved(x[:, :4], sweep, return_cache=True)
            rest = self.solved(x[:, 4:], sweep, cache=first.cache)
            value = torch.cat([first.value, rest.value], dim=1)
            assert_same(value, whole.value, 1e-7, f"{sweep}, in two calls")


def evaluated(
    backbone: Backbone[Any],
    x: Tensor,
    z: Tensor,
    cache: Cache | None = None,
    mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """The value of the map at ``z``, and its auxiliary record."""
    return backbone(z, backbone.prepare(x, cache, mask), cache, **options)


def part(inputs: Any, start: int, stop: int) -> Any:
    """The inputs of some tokens."""
    return map_tensors(lambda x: x[:, start:stop], inputs)


def assert_same(
    actual: Tensor, expected: Tensor, tolerance: float = 1e-9, where: str = "the value"
) -> None:
    """Equal up to rounding of the element or of the largest one; ``where`` begins the error."""
    largest = 1 + expected.abs().max().item()
    assert_close(
        actual,
        expected,
        rtol=tolerance,
        atol=tolerance * largest,
        msg=lambda text: f"{where}: {text}",
    )


def assert_same_cache(
    actual: Cache | None, expected: Cache | None, tolerance: float = 1e-9
) -> None:
    """The same tensors in two caches, at least one."""
    assert actual is not None and expected is not None
    assert actual.tensors()
    for actual_part, expected_part in zip(actual.tensors(), expected.tensors(), strict=True):
        assert_same(actual_part, expected_part, tolerance, "the cache")
