"""Continuous batching: each request gets the tokens that it gets alone, whatever shares its batches and pages."""

from dataclasses import replace

import pytest
import torch
from hf_models import ATTENTION, IDS, LLAMA, made
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

LONG = IDS[0].tolist() * 3
PROMPTS = [IDS[0].tolist(), IDS[1, :2].tolist(), LONG[:18], LONG[:18], LONG[:13], IDS[2, :4].tolist()]
"""Some begin alike; the longest do not fit into one batch."""
GREEDY = {"max_new_tokens": 6, "do_sample": False}


def batching(**fields):
    return ContinuousBatchingConfig(num_blocks=48, page_size=4, max_batch_tokens=16, **fields)


def batched(model, **fields):
    """The new tokens of each request."""
    generation = GenerationConfig(**GREEDY, eos_token_id=-1)
    found = model.generate_batch(PROMPTS, generation, continuous_batching_config=batching(**fields))
    assert [one.error for one in found.values()] == [None] * len(PROMPTS)
    return [one.generated_tokens for one in found.values()]


def alone(model):
    return [model.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in PROMPTS]


@pytest.mark.parametrize("kind", ["llama", "explicit", "decoder"])
def test_requests_get_the_tokens_they_get_alone(kind):
    model = made(kind)
    expected = alone(model)
    assert len({tuple(tokens) for tokens in expected}) > 3 or kind == "decoder"
    assert batched(model) == expected
    config = batching()
    for _ in range(2):  # a configuration can be used again
        found = model.generate_batch(PROMPTS[:1], GenerationConfig(**GREEDY, eos_token_id=-1), config)
        assert [one.generated_tokens for one in found.values()] == expected[:1]


def test_requests_of_eager_attention_and_of_other_sweeps():
    model = made("llama")
    expected = alone(model)
    model.set_attn_implementation("eager")
    assert batched(model) == expected
    assert model.config._attn_implementation == "eager"
    model.config.eval_solve = {"sweep": {"name": "Sliding", "window": 3}, "solver": {"name": "Relaxed", "damping": 0.9}}
    assert batched(model) == expected


def test_parts_of_our_own():
    parts = {"prelude": ATTENTION, "backbone": replace(LLAMA, n_heads=2, injection=False), "coda": ATTENTION}
    model = made("parts", **parts, norm=None)
    assert batched(model) == alone(model)


OTHER = replace(LLAMA, n_heads=4, injection=False)


@pytest.mark.parametrize(
    ("kind", "fields", "generation", "batch", "message"),
    [
        ("mamba2", {}, {}, {}, r"a Mamba2 \(backbone\) has none"),
        ("parts", {}, {}, {}, r"a Mamba2 \(backbone\) has none"),
        ("looped", {}, {}, {}, "a loop has 2"),
        ("parts", {"backbone": OTHER}, {}, {}, r"same heads in all parts, got \[\(2, 2\), \(2, 4\)\]"),
        ("llama", {}, {"window": 4}, {}, r"leave out \['window'\] .*config.eval_solve"),
        ("llama", {}, {"solve": {"sweep": "Sequential"}}, {}, r"leave out \['solve'\]"),
        ("llama", {}, {}, {"use_cuda_graph": True}, "leave out use_cuda_graph"),
        ("llama", {}, {}, {"max_blocks_per_request": 8}, "max_blocks_per_request"),
        ("llama", {}, {}, {"varlen_compile_config": CompileConfig()}, "varlen_compile_config"),
    ],
)
def test_what_pages_cannot_hold_is_refused_before_a_request_is_made(kind, fields, generation, batch, message):
    model = made(kind, **fields)
    with pytest.raises(ValueError, match=message):
        model.generate_batch(PROMPTS, GenerationConfig(**generation), continuous_batching_config=batching(**batch))
