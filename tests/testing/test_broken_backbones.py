"""The suite for backbones fails for each that breaks one promise."""

from dataclasses import replace

import pytest
import torch
from test_broken_solvers import fails

import deqseq as dq
from deqseq.backbones.affine import AffineCache
from deqseq.testing import BackboneContract


def commits_one_token_fewer(backbone, cache, aux, tokens, counts=None):
    fewer = None if counts is None else counts - 1
    return dq.Affine.advance(backbone, cache, aux, tokens - 1, fewer)


def ignores_counts(backbone, cache, aux, tokens, counts=None):
    return dq.Affine.advance(backbone, cache, aux, tokens)


def commits_at_least_one(backbone, cache, aux, tokens, counts=None):
    more = None if counts is None else counts.clamp_min(1)
    return dq.Affine.advance(backbone, cache, aux, tokens, more)


def spoils_its_cache(backbone, cache, *parts):
    after = dq.Affine.advance(backbone, cache, *parts)
    if cache is not None:
        cache.previous.mul_(0.9)
    return after


def adding(more):
    """A map with ``more`` added to its value."""

    def forward(backbone, z, *arguments, **options):
        value, aux = dq.Affine.forward(backbone, z, *arguments, **options)
        return value + more(backbone, z), aux

    return forward


def cuts_the_graph(backbone, *arguments):
    inputs = dq.Affine.prepare(backbone, *arguments)
    return replace(inputs, injection=inputs.injection.detach())


@torch.enable_grad()
def keeps_a_graph(backbone, cache, aux, tokens, counts=None):
    return AffineCache(aux[:, tokens] + 0 * backbone.A.sum())


LOOKS_AHEAD = adding(lambda backbone, z: 0.01 * z.mean(dim=1, keepdim=True))
IN_PAIRS = adding(lambda backbone, z: 0.01 * z[:, [i ^ 1 if i < 6 else i for i in range(7)]])
MIXES_ROWS = adding(lambda backbone, z: 0.01 * z.mean(dim=0, keepdim=True))
EXPANDS = adding(lambda backbone, z: 2 * z)
DRAWS = adding(lambda backbone, z: torch.dropout(torch.ones_like(z), 0.2, backbone.training))


@pytest.mark.parametrize(
    ("expected", "method", "broken"),
    [
        ("test_causal", "forward", LOOKS_AHEAD),
        ("test_causal", "forward", IN_PAIRS),
        ("test_a_sequence_cut_anywhere_is_the_sequence", "advance", commits_one_token_fewer),
        ("test_every_sweep_finds_the_same_fixed_point", "advance", commits_one_token_fewer),
        ("test_padding_does_not_change_a_row", "advance", ignores_counts),
        ("test_padding_does_not_change_a_row", "advance", commits_at_least_one),
        ("test_pure", "advance", spoils_its_cache),
        ("test_rows_are_independent", "forward", MIXES_ROWS),
        ("test_a_sequence_cut_anywhere_is_the_sequence", "advance", keeps_a_graph),
        ("test_every_sweep_finds_the_same_fixed_point", "forward", EXPANDS),
        ("test_gradients_are_those_of_the_map", "prepare", cuts_the_graph),
        ("test_one_prepare_makes_one_map_in_training_mode_too", "forward", DRAWS),
    ],
)
def test_a_broken_backbone_fails(expected, method, broken):
    kind = type("Broken", (dq.Affine,), {method: broken})
    assert fails(BackboneContract, expected, backbone=kind(4))
    assert not fails(BackboneContract, expected, backbone=dq.Affine(4))


@pytest.mark.parametrize("missing", [{}, {"backbone": dq.Affine}, {"backbone": torch.zeros(2)}])
def test_a_suite_without_a_backbone_says_so(missing):
    suite = type("TestMine", (BackboneContract,), missing)()
    with pytest.raises(TypeError, match=r"TestMine\.backbone must be a Backbone, got"):
        suite.test_causal()


@pytest.mark.parametrize(
    ("of", "method", "broken"),
    [
        ("input", "prepare", lambda self, x, *rest: dq.Affine.prepare(self, 0 * x, *rest)),
        (
            "state",
            "forward",
            lambda self, z, *rest, **options: dq.Affine.forward(self, 0 * z, *rest, **options),
        ),
    ],
)
def test_what_does_not_matter_is_named(of, method, broken):
    kind = type("Broken", (dq.Affine,), {method: broken})
    suite = type("TestMine", (BackboneContract,), {"backbone": kind(4)})()
    with pytest.raises(AssertionError, match=f"a token must depend on its {of}"):
        suite.test_causal()
