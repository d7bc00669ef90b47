"""The suite for backbones fails for each that breaks one promise."""

from dataclasses import replace

import pytest
import torch
from test_broken_solvers import fails

import deqseq as dq
from deqseq.backbones.affine import AffineCache
from deqseq.testing import BackboneContract


class Broken(dq.Affine):
    """Affine, of which each subclass breaks one promise."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(4)


class LooksAhead(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + 0.01 * z.mean(dim=1, keepdim=True), aux


class OffByOne(Broken):
    def advance(self, cache, aux, tokens, counts=None):
        return super().advance(cache, aux, tokens - 1, None if counts is None else counts - 1)


class ForgetsPadding(Broken):
    def advance(self, cache, aux, tokens, counts=None):
        return super().advance(cache, aux, tokens)


class ChangesItsCache(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        result = super().forward(z, inputs, cache, need_aux=need_aux)
        if cache is not None:
            cache.previous.mul_(0.9)
        return result


class MixesItsRows(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + 0.01 * z.mean(dim=0, keepdim=True), aux


class KeepsAGraph(Broken):
    def advance(self, cache, aux, tokens, counts=None):
        with torch.enable_grad():
            return AffineCache(aux[:, tokens] * self.A.sum())


class Expands(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return value + 2 * z, aux


class CutsTheGraph(Broken):
    def prepare(self, x, cache=None, mask=None):
        inputs = super().prepare(x, cache, mask)
        return replace(inputs, injection=inputs.injection.detach())


class DrawsItsMasks(Broken):
    def forward(self, z, inputs, cache=None, *, need_aux=False):
        value, aux = super().forward(z, inputs, cache, need_aux=need_aux)
        return torch.dropout(value, 0.2, self.training), aux


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        (LooksAhead, "test_causal"),
        (OffByOne, "test_a_sequence_cut_in_two_is_the_sequence"),
        (OffByOne, "test_every_sweep_comes_to_the_same"),
        (ForgetsPadding, "test_padding_leaves_what_the_row_alone_leaves"),
        (ChangesItsCache, "test_pure"),
        (MixesItsRows, "test_rows_are_independent"),
        (KeepsAGraph, "test_a_sequence_cut_in_two_is_the_sequence"),
        (Expands, "test_every_sweep_comes_to_the_same"),
        (CutsTheGraph, "test_gradients_are_those_of_the_map"),
        (DrawsItsMasks, "test_one_prepare_makes_one_map_in_training_mode_too"),
    ],
)
def test_a_broken_backbone_fails(backbone, expected):
    assert fails(BackboneContract, expected, backbone=backbone())
    assert not fails(BackboneContract, expected, backbone=Broken())
