"""Tiny released models, and the numbers that their authors' code gives for them."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from deqseq.integrations.recurrent_depth import from_state

DATA = Path(__file__).parent / "data"


@cache
def numbers(name):
    return load_file(DATA / f"{name}.safetensors")


def config(name):
    return json.loads((DATA / f"{name}.json").read_text())


def weights(name, part="weight"):
    return {key.removeprefix(f"{part}/"): x for key, x in numbers(name).items() if key.startswith(f"{part}/")}


@cache
def loaded(name, steps=None):
    return from_state(config(name), weights(name), steps)


def assert_near(found, wanted, atol=1e-9):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= atol


def decoded(lm, ids, states=None, **call):
    """The logits of the last six tokens, one by one after a prompt of eleven; a loop may begin at given ``states``."""
    logits, cache = [], None
    for begin, end in [(0, 11), *((t, t + 1) for t in range(11, 17))]:
        if states is not None:
            lm.model.core.backbone.start = states[:, begin:end]
        with torch.no_grad():
            output = lm(ids[:, begin:end], cache=cache, return_cache=True, **call)
        logits, cache = [*logits, output.logits], output.cache
    return torch.cat(logits[1:], dim=1)
