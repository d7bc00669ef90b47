"""A pretrained decoder whose middle layers are iterated is, before training, the pretrained decoder."""

import pytest
import torch
from test_hf_decoder import IDS, LENGTHS, made, same
from torch import nn
from transformers import AutoModel

import deqseq as dq
from deqseq.integrations.huggingface import retrofit
from deqseq.integrations.huggingface.retrofit import EVAL, TRAIN

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_neox", "gemma2", "smollm3"])
PARTS = {"prelude": 1, "core": 2, "coda": 1}
SWEEPS = (dq.Simultaneous(), dq.Chunked(4), dq.Sliding(3), dq.Sequential())
ONCE = {"stop": dq.Stop.exactly(1)}


@FAMILIES
@pytest.mark.parametrize(("injection", "tolerance"), [("concat", 1e-10), ("add", 1e-10), ("decay", 1e-6)])
@torch.no_grad()
def test_one_iteration_is_the_model(family, injection, tolerance):
    theirs = made(family)
    expected = theirs(IDS).logits
    same(retrofit(theirs, **PARTS, injection=injection)(IDS, **ONCE).logits, expected, tolerance)
    theirs.float()
    same(retrofit(theirs, **PARTS, injection=injection)(IDS, **ONCE).logits, expected.float(), 1e-5)


@FAMILIES
@torch.no_grad()
def test_a_concatenated_state_is_ignored_until_it_is_trained(family):
    theirs = made(family)
    lm, expected = retrofit(theirs, **PARTS), theirs(IDS).logits
    for sweep in SWEEPS:
        output = lm(IDS, sweep=sweep)
        same(output.logits, expected, 1e-6)
        assert output.converged.all()
        assert output.stats.iterations.max() <= (2 if not isinstance(sweep, dq.Sliding) else 4)
    weight = lm.core.backbone.injection.weight
    nn.init.normal_(weight[:, :32], std=0.05)
    assert (lm(IDS, **ONCE).logits - expected).abs().max() < 1e-10  # the state is zero
    assert (lm(IDS, stop=dq.Stop.exactly(2)).logits - expected).abs().max() > 1e-3


@FAMILIES
@torch.no_grad()
def test_generation_is_that_of_the_model(family):
    theirs = made(family).float()
    mask = (torch.arange(11) < LENGTHS[:, None]).flip(1)
    prompt = IDS.masked_fill(~mask, 0)
    options = {"attention_mask": mask.long(), "do_sample": False, "eos_token_id": None}
    expected = theirs.generate(prompt, max_new_tokens=5, **options)[:, 11:]
    lm = retrofit(theirs, **PARTS)
    assert torch.equal(lm.generate(prompt, mask=mask, max_new_tokens=5).tokens, expected)


@FAMILIES
def test_it_learns(family):
    """The gradient of the state's weights, which are zero, by a difference of the loss."""
    lm = retrofit(made(family).train(), **PARTS)
    assert (lm.core.solve, lm.core.eval_solve) == (TRAIN, EVAL)
    lm(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in lm.parameters())
    weight = lm.core.backbone.injection.weight
    direction, losses = torch.zeros_like(weight), []
    direction[:, :32].diagonal().fill_(1)
    with torch.no_grad():
        for step in (1e-4, -2e-4):
            weight += step * direction
            losses.append(lm(IDS, labels=IDS, stop=dq.Stop.exactly(8)).loss)
    slope = (losses[0] - losses[1]) / 2e-4
    same((weight.grad * direction).sum(), slope, 1e-3)


@torch.no_grad()
def test_layers_can_be_dropped():
    theirs = made("llama")
    lm = retrofit(theirs, prelude=1, core=1, coda=1, dropped=1)
    parts = [lm.model.prelude.backbone, lm.core.backbone.backbone, lm.model.coda.backbone]
    assert [list(part.part) for part in parts] == [[0], [2], [3]]
    del theirs.model.layers[1]
    theirs.config.num_hidden_layers = 3
    same(lm(IDS).logits, theirs(IDS, use_cache=False).logits)


def test_a_name_is_loaded_and_weights_are_shared(tmp_path):
    theirs = made("qwen3", tie_word_embeddings=False).bfloat16()
    theirs.save_pretrained(tmp_path)
    lm = retrofit(tmp_path, **PARTS)
    assert torch.equal(lm(IDS).logits, retrofit(str(tmp_path), **PARTS)(IDS).logits)
    assert {parameter.dtype for parameter in lm.parameters()} == {torch.bfloat16}
    assert not lm.training
    lm = retrofit(theirs.train(), **PARTS)
    assert lm.training
    new = {id(p) for p in lm.parameters()} - {id(p) for p in theirs.parameters()}
    assert new == {id(lm.core.backbone.injection.weight)}
    assert len(list(lm.parameters())) == len(list(theirs.parameters())) + 1


def test_an_injection_of_ones_own():
    class Half(dq.Injection):
        def prepare(self, x):
            return x / 2

        def enter(self, z, prepared):
            return prepared + z / 2

    theirs, injection = made("llama"), Half()
    lm = retrofit(theirs, **PARTS, injection=injection, eval_solve=None)
    assert lm.core.backbone.injection is injection
    assert lm.core.eval_solve is None


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"coda": 2}, ValueError, r"add up to the model's 4 layers, got 1 \+ 2 \+ 2 \+ 0 = 5"),
        ({"core": 1}, ValueError, r"prelude, core, coda and dropped must add up .* got 1 \+ 1 \+ 1 \+ 0 = 3"),
        ({"prelude": 0}, ValueError, "prelude must be an integer >= 1, got 0"),
        ({"core": 2.0}, TypeError, "core must be an integer >= 1, got 2.0"),
        ({"dropped": -1}, ValueError, "dropped must be an integer >= 0, got -1"),
        ({"injection": "concatenated"}, ValueError, r"injection must be one of \('concat', .*did you mean 'concat'"),
        ({"model": nn.Linear(2, 2)}, TypeError, "model must be a PreTrainedModel or a str or a PathLike, such as Auto"),
        ({"model": AutoModel.from_config(made("llama").config)}, ValueError, "ForCausalLM, got LlamaModel"),
        ({"model": made("gpt_neox", attention_dropout=0.1)}, ValueError, "no dropout"),
        ({"solve": dq.Stop()}, TypeError, "solve must be a SolveConfig"),
    ],
)
def test_bad_arguments_are_named(changed, error, message):
    with pytest.raises(error, match=message):
        retrofit(**{"model": made("llama"), **PARTS, **changed})
