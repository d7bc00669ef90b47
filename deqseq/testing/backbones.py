"""What every backbone must do: be causal and pure, and come to the same however its
tokens are cut.
"""

import copy
from typing import Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor

from deqseq.backbones import Backbone, Cache
from deqseq.config import SolveConfig
from deqseq.models import ImplicitModel, ModelOutput
from deqseq.rows import map_tensors, take, tensors_of
from deqseq.stop import Stop
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep
from deqseq.testing.problems import seeded

SWEEPS: tuple[Sweep, ...] = (Simultaneous(), Chunked(3), Sequential(), Sliding(3))


class BackboneContract:
    """The suite for a backbone: subclass it as ``TestName``, and set ``backbone``.

    It checks single evaluations first, at any state, with their gradients, and then whole solves,
    for which the backbone must contract, or ``config`` name a solver that finds its fixed point.
    All tests use a copy in float64, and all but one eval mode. What needs ``advance`` is skipped
    for a backbone without.

    Attributes:
        backbone: the backbone, of any width.
        config: how its fixed point is found, tightly.

    Example:
        >>> import deqseq as dq
        >>> class TestAffine(BackboneContract):
        ...     backbone = dq.Affine(8)
    """

    backbone: ClassVar[Backbone[Any]]
    config: ClassVar[SolveConfig] = SolveConfig(stop=Stop(rtol=1e-9, max_steps=1000))

    def made(self) -> Backbone[Any]:
        """A copy to test."""
        return copy.deepcopy(self.backbone).double().eval()

    def randn(self, batch: int, length: int, seed: int = 0) -> Tensor:
        """Random inputs or states."""
        return torch.randn(
            batch, length, self.backbone.d_model, generator=seeded(seed), dtype=torch.float64
        )

    def advance(
        self,
        backbone: Backbone[Any],
        cache: Cache | None,
        aux: Any,
        tokens: int,
        counts: Tensor | None = None,
    ) -> Cache:
        """The cache after ``tokens``; skips the test of a backbone that keeps none."""
        if type(backbone).advance is Backbone.advance:
            raise SkipTest("the backbone has no advance()")
        with torch.no_grad():
            return backbone.advance(cache, aux, tokens, counts)

    def solved(
        self, x: Tensor, sweep: Sweep = Simultaneous(), backbone: Any = None, **options: Any
    ) -> ModelOutput:
        """The fixed point, which must be found."""
        model = ImplicitModel(self.made() if backbone is None else backbone, self.config)
        if type(model.backbone).advance is Backbone.advance and (
            options or sweep != Simultaneous()
        ):
            raise SkipTest("the backbone has no advance()")
        with torch.no_grad():
            output = model(x, sweep=sweep, **options)
        assert bool(output.converged.all()), (
            "set `backbone` to one that contracts, or `config` to what solves it"
        )
        return output

    # one evaluation

    def test_keeps_the_dtype(self) -> None:
        x, z = self.randn(2, 5), self.randn(2, 5, seed=1)
        expected = self.made()(z, self.made().prepare(x))[0]
        for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-3), (torch.bfloat16, 0.2)):
            backbone = self.made().to(dtype)
            value = backbone(z.to(dtype), backbone.prepare(x.to(dtype)))[0]
            assert (value.dtype, value.shape) == (dtype, z.shape)
            assert (value.double() - expected).norm() <= rtol * expected.norm()

    def test_tensors_are_made_on_the_device_of_the_state(self) -> None:
        """Whatever is made without a device is made on "meta" here, and cannot be used with the
        others.
        """
        backbone, x, z = self.made(), self.randn(2, 5), self.randn(2, 5, seed=1)
        expected, aux = backbone(z, backbone.prepare(x), need_aux=True)
        with torch.device("meta"):
            inputs = backbone.prepare(x)
            value, aux = backbone(z, inputs, need_aux=True)
            everything = [value, *tensors_of((inputs, aux))]
            if type(backbone).advance is not Backbone.advance:
                everything += self.advance(backbone, None, aux, 5).tensors()
        assert {tensor.device for tensor in everything} == {x.device}
        assert torch.equal(value, expected)

    def test_one_prepare_makes_one_map_in_training_mode_too(self) -> None:
        """Random masks are drawn by ``prepare``, once per solve: a map that draws its own has no
        fixed point.
        """
        backbone, z, rows = self.made().train(), self.randn(3, 5, seed=1), torch.tensor([2, 0])
        inputs = backbone.prepare(self.randn(3, 5))
        value = backbone(z, inputs)[0]
        assert torch.equal(backbone(z, inputs)[0], value)
        assert_same(backbone(z[rows], take(inputs, rows))[0], value[rows])

    def test_gradients_are_those_of_the_map(self) -> None:
        backbone, x, z = self.made(), self.randn(2, 4), self.randn(2, 4, seed=1)
        leaves = [
            leaf.requires_grad_() for leaf in (x, z, *backbone.parameters())
        ]  # perturbed in place
        map_of = lambda *_: backbone(z, backbone.prepare(x))[0]  # noqa: E731
        assert torch.autograd.gradcheck(map_of, leaves, fast_mode=True, atol=1e-6, rtol=1e-4)

    def test_causal(self) -> None:
        backbone, x, z = self.made(), self.randn(2, 7), self.randn(2, 7, seed=1)
        before, changed = backbone(z, backbone.prepare(x))[0], [x.clone(), z.clone()]
        for sequence, changed_x, changed_z in (
            (changed[0], changed[0], z),
            (changed[1], x, changed[1]),
        ):
            sequence[:, 4:] = self.randn(2, 3, seed=2)  # a constant is what a norm would remove
            after = backbone(changed_z, backbone.prepare(changed_x))[0]
            assert torch.allclose(after[:, :4], before[:, :4], 1e-9, 1e-9), (
                "a token must not depend on later ones"
            )
            assert not torch.allclose(after[:, 4:], before[:, 4:]), (
                "a token must depend on its input and its state"
            )

    def test_rows_are_independent(self) -> None:
        backbone, x, z, rows = (
            self.made(),
            self.randn(3, 4),
            self.randn(3, 4, seed=1),
            torch.tensor([1, 1, 2, 0]),
        )
        mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
        inputs = backbone.prepare(x, None, mask)
        whole, aux = backbone(z, inputs, need_aux=True)
        taken, taken_aux = backbone(z[rows], take(inputs, rows), need_aux=True)
        assert_same(taken, whole[rows])
        cache = self.advance(backbone, None, aux, 4, mask.sum(dim=1))
        taken_cache = self.advance(backbone, None, take(aux, rows), 4, mask[rows].sum(dim=1))
        assert_same_cache(taken_cache, take(cache, rows))
        assert_same_cache(
            self.advance(backbone, None, taken_aux, 4, mask[rows].sum(dim=1)), taken_cache
        )
        for prepared in (cache, cache.reserve(4)):
            later = backbone.prepare(x, prepared, mask)
            expected = backbone(z, later, prepared)[0][rows]
            assert_same(backbone(z[rows], take(later, rows), take(prepared, rows))[0], expected)

    def test_pure(self) -> None:
        backbone, x, z = self.made(), self.randn(2, 3), self.randn(2, 3, seed=1)

        def watched(cache: Cache | None, inputs: Any) -> list[Tensor]:
            kept = () if cache is None else cache.tensors()
            return [z, *tensors_of(inputs), *backbone.state_dict().values(), *kept]

        cache, inputs = None, backbone.prepare(x)
        for _ in range(2):
            copies = [tensor.clone() for tensor in watched(cache, inputs)]
            with torch.no_grad():
                first, second = (backbone(z, inputs, cache, need_aux=True) for _ in range(2))
            assert torch.equal(first[0], second[0])
            assert_same(
                backbone(z, inputs, cache)[0], first[0]
            )  # with a graph, and nothing to be committed
            following = self.advance(backbone, cache, second[1], 3)
            assert all(
                torch.equal(*pair) for pair in zip(copies, watched(cache, inputs), strict=True)
            )
            cache, inputs = following, backbone.prepare(x, following)

    # the cache

    def test_a_sequence_cut_anywhere_is_the_sequence(self) -> None:
        backbone, x, z = self.made(), self.randn(2, 40), self.randn(2, 40, seed=1)
        inputs = backbone.prepare(x)
        whole, last = backbone(z, inputs, need_aux=True)
        for sizes in ((1, 39), (3, 37), (39, 1), [1] * 40):
            cache, values, start = None, [], 0
            for size in sizes:
                end = start + size
                value, aux = backbone(
                    z[:, start:end], part(inputs, start, end), cache, need_aux=True
                )
                prepared = backbone.prepare(x[:, start:end], cache)
                assert_same(backbone(z[:, start:end], prepared, cache)[0], value)
                cache, start = self.advance(backbone, cache, aux, size), end
                assert not any(tensor.requires_grad for tensor in cache.tensors())
                values.append(value)
            assert_same(torch.cat(values, dim=1), whole)
            assert cache is not None
            assert_same_cache(cache, self.advance(backbone, None, last, 40))

    def test_padding_leaves_what_the_row_alone_leaves(self) -> None:
        backbone, x, z = self.made(), self.randn(3, 5), self.randn(3, 5, seed=1)
        later_x, later_z, real = (
            self.randn(3, 4, seed=2),
            self.randn(3, 4, seed=3),
            torch.tensor([2, 5, 1]),
        )
        value, whole = backbone(
            z, backbone.prepare(x, None, torch.arange(5) < real[:, None]), need_aux=True
        )
        for committed in (3, 5):
            counts = real.clamp(max=committed)
            cache = self.advance(backbone, None, whole, committed, counts)
            later = backbone(later_z, backbone.prepare(later_x, cache), cache)[0]
            for row, count in enumerate(counts.tolist()):
                one = slice(row, row + 1)
                alone, aux = backbone(
                    z[one, :count], backbone.prepare(x[one, :count]), need_aux=True
                )
                assert_same(alone, value[one, :count])
                own = self.advance(backbone, None, aux, count)
                assert_same(
                    backbone(later_z[one], backbone.prepare(later_x[one], own), own)[0], later[one]
                )

    def test_a_row_that_commits_nothing_keeps_its_cache(self) -> None:
        """Windows of a batch move apart: one row commits its first tokens, the other none."""
        backbone, counts, cache = self.made(), torch.tensor([3, 0]), None
        x, z = self.randn(2, 9), self.randn(2, 9, seed=1)
        for start in (0, 3):  # without tokens before, and after some
            now = slice(start, start + 3)
            _, aux = backbone(z[:, now], backbone.prepare(x[:, now], cache), cache, need_aux=True)
            after = self.advance(backbone, cache, aux, 3, counts)
            later, alone = (
                backbone(z[:, 6:], backbone.prepare(x[:, 6:], one), one)[0]
                for one in (after, cache)
            )
            assert_same(later[1], alone[1])
            cache = self.advance(backbone, cache, aux, 3)

    def test_two_continuations_of_one_cache_do_not_disturb_each_other(self) -> None:
        backbone, x, z = self.made(), self.randn(2, 9), self.randn(2, 9, seed=1)
        inputs = backbone.prepare(x)
        with torch.no_grad():
            _, aux = backbone(z[:, :3], part(inputs, 0, 3), need_aux=True)
            root = self.advance(backbone, None, aux, 3)
            prepared = root.reserve(2)
            _, aux = backbone(z[:, 3:5], part(inputs, 3, 5), prepared, need_aux=True)
            one = self.advance(backbone, prepared, aux, 2)
            kept = [tensor.clone() for tensor in (*root.tensors(), *one.tensors())]
            _, aux = backbone(z[:, 5:7], part(inputs, 3, 5), prepared, need_aux=True)
            other = self.advance(backbone, prepared, aux, 2)
            backbone(z[:, 7:9], part(inputs, 3, 5), root)
        assert all(
            torch.equal(*pair) for pair in zip(kept, (*root.tensors(), *one.tensors()), strict=True)
        )
        assert not all(
            torch.allclose(*pair) for pair in zip(one.tensors(), other.tensors(), strict=True)
        )

    # whole solves

    def test_every_sweep_comes_to_the_same(self) -> None:
        x = self.randn(2, 7)
        whole = self.solved(x, return_cache=True)
        for sweep in SWEEPS:
            output = self.solved(x, sweep, return_cache=True)
            assert_same(output.value, whole.value, 1e-7, str(sweep))
            assert output.cache is not None and whole.cache is not None
            assert_same_cache(output.cache, whole.cache, 1e-7)
            first = self.solved(x[:, :4], sweep, return_cache=True)
            rest = self.solved(x[:, 4:], sweep, cache=first.cache)
            assert_same(
                torch.cat([first.value, rest.value], dim=1),
                whole.value,
                1e-7,
                f"{sweep}, in two parts",
            )

    def test_a_padded_row_is_the_row_alone(self) -> None:
        x, mask = self.randn(3, 6), torch.arange(6) < torch.tensor([6, 1, 4])[:, None]
        alone = [self.solved(x[row : row + 1, real]).value[0] for row, real in enumerate(mask)]
        for sweep in SWEEPS:
            together = self.solved(x, sweep, mask=mask).value
            assert together[~mask].abs().max() == 0
            for row, real in enumerate(mask):
                assert_same(together[row, real], alone[row], 1e-7, f"{sweep}, row {row}")


def part(inputs: Any, start: int, stop: int) -> Any:
    """The inputs of some tokens."""
    return map_tensors(lambda x: x[:, start:stop], inputs)


def assert_same(ours: Tensor, expected: Tensor, tolerance: float = 1e-9, where: str = "") -> None:
    """Equal but for rounding, of its own element or of the largest; ``where`` begins the error."""
    largest = 1 + expected.abs().max().item()
    torch.testing.assert_close(
        ours,
        expected,
        rtol=tolerance,
        atol=tolerance * largest,
        msg=lambda text: f"{where}: {text}" if where else text,
    )


def assert_same_cache(ours: Cache, expected: Cache, tolerance: float = 1e-9) -> None:
    """All tensors of two caches, of which there must be some."""
    assert len(ours.tensors()) == len(expected.tensors()) > 0
    for one, other in zip(ours.tensors(), expected.tensors(), strict=True):
        assert_same(one, other, tolerance)
