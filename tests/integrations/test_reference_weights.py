"""Weights of the paper's reference code under our names, and back."""

from dataclasses import replace

import pytest
import reference_model
import torch

import deqseq as dq
from deqseq.integrations.reference_config import from_reference_config
from deqseq.integrations.reference_weights import from_reference, from_reference_state, to_reference_state


@pytest.fixture(scope="module", params=reference_model.NAMES)
def reference(request) -> tuple[str, dict[str, torch.Tensor]]:
    return request.param, reference_model.load(request.param)


@torch.no_grad()
def test_a_reference_model_from_its_own_file_and_names(reference):
    name, tensors = reference
    lm = from_reference(reference_model.config(name), reference_model.under(tensors, "weight/"))
    assert (lm.model.solve.solver, lm.model.eval_solve.solver) == (dq.Naive(), dq.Relaxed(0.8))
    stop = replace(lm.model.eval_solve.stop, rtol=1e-11)
    output = lm.eval()(tensors["input_ids"], stop=stop)
    assert (output.status == dq.Status.CONVERGED).all()
    assert (output.logits - tensors["eval_logits"]).abs().max() < 1e-8


def test_a_reference_state_there_and_back(reference):
    name, tensors = reference
    spec, theirs = from_reference_config(reference_model.config(name)), reference_model.under(tensors, "weight/")
    ours = from_reference_state(theirs, spec)
    assert ours.keys() == spec.build().state_dict().keys()
    back = to_reference_state(ours, spec)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[key], theirs[key]) for key in theirs)


EXPLICIT_LLAMA = {
    *("word_emb.emb.weight", "criterion.decoder.weight", "backbone.norm_f.weight"),
    *(f"backbone.layers.0.mixer.{part}.weight" for part in ("wq", "wk", "wv", "out_proj")),
    *(f"backbone.layers.0.mlp.{part}.weight" for part in ("w1", "w3", "fc2")),
    *("backbone.layers.0.norm.weight", "backbone.layers.0.norm2.weight"),
}
EXPLICIT_MAMBA2 = {
    *("word_emb.emb.weight", "criterion.decoder.weight", "backbone.norm_f.weight"),
    *(f"backbone.layers.0.mixer.{part}" for part in ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias")),
    *(f"backbone.layers.0.mixer.{part}.weight" for part in ("in_proj", "norm", "out_proj")),
    *(f"backbone.layers.0.mlp.{part}.weight" for part in ("w1", "w3", "fc2")),
    *("backbone.layers.0.norm.weight", "backbone.layers.0.norm2.weight"),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("config", "names"),
    [
        (dq.LlamaConfig(d_model=16, n_heads=2, weight_norm=False), EXPLICIT_LLAMA),
        (dq.Mamba2Config(d_model=16, d_state=4, headdim=8, mlp_width=12, weight_norm=False), EXPLICIT_MAMBA2),
    ],
    ids=["Llama", "Mamba2"],
)
def test_an_explicit_reference_state_there_and_back(config, names, tied):
    spec = dq.LanguageModelSpec(10, config, solve=None, tied=tied)
    ours = spec.build().state_dict()
    theirs = to_reference_state(ours, spec)
    assert theirs.keys() == names
    back = from_reference_state(theirs, spec)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[key], ours[key]) for key in ours)


def test_missing_extra_and_misshapen_tensors_are_listed():
    config = reference_model.config("llama")
    spec, state = from_reference_config(config), reference_model.under(reference_model.load("llama"), "weight/")
    del state["backbone.layers.1.mixer.wk.weight_g"], state["backbone.norm_f.weight"]
    state |= {"backbone.layers.2.norm.weight": torch.ones(32), "backbone.injection.bias": torch.zeros(95)}
    listed = (
        r"2 missing: backbone\.layers\.1\.mixer\.wk\.weight_g, backbone\.norm_f\.weight; 1 unexpected: "
        r"backbone\.layers\.2\.norm\.weight; 1 of another shape: backbone\.injection\.bias \(95,\) instead of \(96,\)"
    )
    with pytest.raises(ValueError, match=listed):
        from_reference_state(state, spec)
    with pytest.raises(ValueError, match=r"38 missing: .*; 39 unexpected"):
        to_reference_state(reference_model.under(reference_model.load("llama"), "weight/"), spec)


def test_a_head_that_is_said_to_be_tied_and_is_not():
    config, state = reference_model.config("llama"), reference_model.under(reference_model.load("llama"), "weight/")
    state["criterion.decoder.weight"] = state["criterion.decoder.weight"] + 1
    with pytest.raises(ValueError, match=r"'criterion\.decoder\.weight' differs from 'word_emb\.emb\.weight': untie"):
        from_reference(config, state)
    lm = from_reference(config | {"tie_embeddings": False}, state)
    assert torch.equal(lm.head.weight, lm.embedding.weight + 1)
