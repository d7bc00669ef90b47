"""Language models: what the loss scores, what reaches the model, and which calls are refused."""

import copy
from functools import partial

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, language_model
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.testing import assert_close

import deqseq as dq

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.fixture
def lm():
    return language_model(contractive_mamba2(), stop=dq.Stop(rtol=1e-11, max_steps=500))


def test_labels_are_shifted_targets_are_not_and_ignored_ones_do_not_count(lm):
    output = lm(IDS)
    aligned = cross_entropy(output.logits.flatten(0, 1), IDS.flatten())
    next_tokens = IDS[:, 1:].flatten()
    shifted = cross_entropy(output.logits[:, :-1].flatten(0, 1), next_tokens)
    assert output.loss is None
    assert_close(lm(IDS, targets=IDS).loss, aligned)
    assert_close(lm(IDS, labels=IDS).loss, shifted)
    ignored = IDS.clone()
    ignored[:, :3] = -100
    last = cross_entropy(output.logits[:, 3], IDS[:, 3])
    assert_close(lm(IDS, targets=ignored).loss, last)


@pytest.mark.parametrize("real", [[1, 1, 0, 0], [0, 0, 1, 1]])
def test_padding_is_left_out_of_the_loss(lm, real):
    mask = torch.tensor([[1, 1, 1, 1], real]).bool()
    logits = lm(IDS, mask=mask).logits
    aligned = cross_entropy(logits[mask], IDS[mask])
    assert_close(lm(IDS, mask=mask, targets=IDS).loss, aligned)
    both = mask[:, :-1] & mask[:, 1:]
    shifted = cross_entropy(logits[:, :-1][both], IDS[:, 1:][both])
    assert_close(lm(IDS, mask=mask, labels=IDS).loss, shifted)


def test_embedded_tokens_are_dropped_once_and_only_in_training():
    lm = dq.CausalLM(11, dq.ImplicitModel(affine()), embedding_dropout=0.5).double()
    torch.manual_seed(1)
    logits = lm(IDS).logits
    torch.manual_seed(1)
    dropped = dropout(lm.embedding(IDS), 0.5)
    assert (dropped == 0).any()
    assert torch.equal(logits, lm.logits(lm.model(dropped).value))
    lm.eval()
    states = lm.model(lm.embedding(IDS)).value
    assert torch.equal(lm(IDS).logits, lm.logits(states))


def test_embedded_tokens_are_multiplied_by_the_rounded_scale():
    lm = dq.CausalLM(11, dq.ExplicitModel(affine()), embedding_scale=12**0.5).bfloat16()
    x = lm.embedding(IDS)
    assert torch.equal(lm.embed(IDS), x * torch.tensor(12**0.5, dtype=torch.bfloat16))
    assert not torch.equal(lm.embed(IDS), (x.double() * 12**0.5).bfloat16())


def test_fields_of_a_call_reach_the_solve_and_its_statistics_come_back(lm):
    stop = dq.Stop(rtol=1e-11, max_steps=2)
    output = lm.eval()(IDS, sweep=dq.Sequential(), stop=stop)
    assert output.stats.iterations.tolist() == [[2] * 4] * 2
    assert not output.converged.any()
    solve = dq.SolveConfig(stop=dq.Stop.exactly(2))
    assert lm(IDS, solve=solve).stats.evaluations == 2
    residuals = []
    output = lm(IDS, throw=True, callback=lambda now: residuals.append(now.residual))
    assert output.stats.evaluations == len(residuals)
    assert residuals[-1].max() <= 1e-11 < residuals[-2].max()


def test_an_explicit_model_has_no_statistics_and_takes_nothing_for_a_solve():
    lm = dq.CausalLM(11, dq.ExplicitModel(affine())).double()
    output = lm(IDS)
    assert output.stats is None
    assert output.raise_if_failed() is output
    with pytest.raises(ValueError, match="converged needs a solve"):
        _ = output.converged
    options = {"sweep": dq.Sequential(), "throw": True, "solve": dq.SolveConfig(), "misspelt": 1}
    for name, value in options.items():
        with pytest.raises(TypeError, match=name):
            lm(IDS, **{name: value})
        with pytest.raises(TypeError, match=name):
            lm.generate(IDS, max_new_tokens=2, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"labels": IDS, "targets": IDS}, ValueError, "labels .* or targets .*, not both"),
        ({"input_ids": IDS[:, :1], "labels": IDS[:, :1]}, ValueError, "labels leave nothing"),
        ({"targets": torch.full_like(IDS, -100)}, ValueError, "targets leave nothing to score"),
        ({"input_ids": IDS.float()}, TypeError, r"input_ids must be int64.*write input_ids\.long"),
        ({"mask": torch.ones_like(IDS)}, ValueError, r"mask must be bool.*: write mask\.bool\(\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_calls_are_named(lm, arguments, error, message):
    with pytest.raises(error, match=message):
        lm(**{"input_ids": IDS} | arguments)


@pytest.mark.parametrize("name", ["save_pretrained", "push_to_hub", "config"])
def test_what_only_models_of_transformers_have_is_said(lm, name):
    with pytest.raises(AttributeError, match=rf"no {name}.*huggingface\.from_causal_lm\(lm\)"):
        getattr(lm, name)
    assert not hasattr(lm, name)


@torch.no_grad()
@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize("weight_norm", [True, False])
def test_offloaded_weights_are_refused_but_for_a_head(implicit, weight_norm):
    accelerate = pytest.importorskip("accelerate")
    offload = partial(accelerate.cpu_offload, execution_device="cpu")
    backbone = contractive_llama(weight_norm=weight_norm, injection=implicit)
    core = dq.ImplicitModel(backbone) if implicit else dq.ExplicitModel(backbone)
    untied = dq.CausalLM(11, core, tied=False).double().eval()
    tied = dq.CausalLM(11, core).double().eval()
    expected = untied(IDS).logits
    copies = [copy.deepcopy(lm) for lm in (untied, untied, tied)]
    offload(copies[0])
    offload(copies[1].model.backbone.layers[-1])
    offload(copies[2].embedding)
    for lm in copies:
        with pytest.raises(ValueError, match=r"offloaded .*load the whole model onto one device"):
            lm(IDS)
        with pytest.raises(ValueError, match=r"offloaded .*load the whole model onto one device"):
            lm.generate(IDS, max_new_tokens=1)
    offload(untied.head)
    assert untied.head.weight.is_meta
    assert torch.equal(untied(IDS).logits, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@torch.no_grad()
def test_ids_of_other_integers_are_converted(lm, dtype):
    ids = IDS.to(dtype)
    for options in ({"labels": IDS}, {"targets": IDS}):
        converted = {name: answers.to(dtype) for name, answers in options.items()}
        assert torch.equal(lm(ids, **converted).loss, lm(IDS, **options).loss)
    tokens = [lm.generate(prompt, max_new_tokens=3).tokens for prompt in (ids, IDS)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("head", "error", "message"),
    [
        (nn.Linear(8, 9, bias=False), ValueError, "have the shape"),
        (nn.Linear(8, 11, bias=False).half(), TypeError, "have the dtype"),
        (nn.Linear(8, 11), ValueError, "have no bias"),
        (nn.Identity(), TypeError, "be a Tensor"),
    ],
)
def test_a_head_that_does_not_fit_is_named(head, error, message):
    lm = dq.CausalLM(11, dq.ImplicitModel(dq.Affine(8)), tied=False)
    with pytest.raises(error, match=f"head.* must {message}"):
        lm.head = head
        lm(IDS)
    with pytest.raises(TypeError, match=r"CausalLM\.embedding.* must be"):
        lm.embedding = head
