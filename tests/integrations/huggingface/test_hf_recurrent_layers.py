"""Recurrent-depth models of this library's layers, Huginn among them, as models of transformers."""

import copy
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from hf_models import IDS, LEFT, PLAIN, same_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from test_hf_register import run
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import deqseq as dq
from deqseq.integrations.huggingface import RecurrentDepthConfig, from_causal_lm, to_causal_lm
from deqseq.integrations.recurrent_depth import from_state
from deqseq.layers import RotaryScaling

DATA = Path(__file__).parents[1] / "data"
LLAMA = {"d_model": 16, "n_heads": 4, "n_kv_heads": 2, "rope_scaling": RotaryScaling(2.0, original_length=4)}
MAMBA2 = {"d_model": 16, "d_state": 4, "headdim": 8, "chunk_size": 3, "mlp_width": 24, "weight_norm": False}
HOW = {"stop": dq.Stop(rtol=1e-10, max_steps=200), "solver": dq.Relaxed(0.7), "sweep": dq.Simultaneous()}
KINDS = ("llama", "mamba2", "mixed", "huginn")
GREEDY = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def llama(n_layers=1, **changes):
    return dq.Llama(dq.LlamaConfig(**LLAMA | {"n_layers": n_layers, "injection": False, **changes}))


def mamba2(n_layers=1, **changes):
    return dq.Mamba2(dq.Mamba2Config(**MAMBA2 | {"n_layers": n_layers, "injection": False, **changes}))


@cache
def huginn():
    tensors = load_file(DATA / "huginn.safetensors")
    state = {name.removeprefix("weight/"): x for name, x in tensors.items() if name.startswith("weight/")}
    return from_state(json.loads((DATA / "huginn.json").read_text()), state)


def made(kind):
    """In eval mode and float64, with a state that matters."""
    if kind == "huginn":
        return copy.deepcopy(huginn())
    torch.manual_seed(0)
    injection = dq.DecayInjection(16) if kind == "mamba2" else dq.ConcatInjection(16)
    first, core, last, options = {
        "llama": (llama(2), dq.Injected(llama(2), injection), llama(), {"tied": False, "logit_softcap": 2.0}),
        "mamba2": (mamba2(), dq.Injected(mamba2(2), injection), mamba2(), {"embedding_scale": 3.0}),
        "mixed": (llama(), mamba2(injection=True), llama(final_norm=False), {}),  # the core has its own injection
    }[kind]
    model = dq.RecurrentDepth(dq.ExplicitModel(first), dq.ImplicitModel(core, PLAIN), dq.ExplicitModel(last))
    if kind == "llama":
        nn.init.normal_(injection.weight.data[:, :16], std=0.05)
    return dq.CausalLM(13, model, 0.5, **options).double().eval()


def saved(lm, folder):
    """A model in a folder, and that of the folder in memory of its own: a mapped file is aligned otherwise."""
    model = from_causal_lm(lm, pad_token_id=0)
    model.save_pretrained(folder)
    return model, copy.deepcopy(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_saved_model_computes_the_same(kind, tmp_path):
    lm, call = made(kind), {"stop": dq.Stop.exactly(4)}
    expected = lm(IDS, **call).logits
    model, again = saved(lm, tmp_path)
    assert same_weights(again, model)
    assert again.dtype == torch.float64
    assert again.config.to_json_string() == model.config.to_json_string()
    for one in (model, again):
        assert torch.equal(one(IDS, solve=call).logits, expected)
    back = to_causal_lm(again)
    assert torch.equal(back(IDS, **call).logits, expected)
    assert (back.core.solve, back.core.eval_solve) == (lm.core.solve, lm.core.eval_solve)
    for name in ("prelude", "coda"):
        assert getattr(back.model, name).backbone.config == getattr(lm.model, name).backbone.config
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert same_weights(classifier.model, AutoModel.from_pretrained(tmp_path))
    assert classifier(IDS, solve=call).logits.shape == (3, 3)


@pytest.mark.parametrize("tied", [True, False])
def test_the_norm_that_huginn_uses_twice_is_stored_once(tied, tmp_path):
    lm = made("huginn")
    if not tied:
        lm.head = nn.Linear(24, 61, bias=False, dtype=torch.float64)
    model, again = saved(lm, tmp_path)
    norm = "model.core.coda.backbone.norm.weight"
    assert {norm, "model.core.norm.weight"} & load_file(tmp_path / "model.safetensors").keys() == {norm}
    for one in (model, again, AutoModelForSequenceClassification.from_pretrained(tmp_path)):
        core = one.base_model.core
        assert core.norm.weight is core.coda.backbone.norm.weight
        assert one.all_tied_weights_keys["model.core.norm.weight"] == norm  # what other tools ask
    assert again.config.norm == "coda"


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_left_padded_prompts_are_continued_as_by_the_model_itself(kind):
    lm = made(kind)
    prompts = IDS.masked_fill(~LEFT, 0)
    expected = lm.generate(prompts, mask=LEFT, max_new_tokens=3, **HOW).tokens
    found = from_causal_lm(lm).generate(prompts, attention_mask=LEFT.long(), solve=HOW, **GREEDY)
    assert torch.equal(found[:, 7:], expected)


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
@torch.no_grad()
def test_beams_that_hold_everything_find_the_best_continuation_of_padded_prompts(kind):
    lm = made(kind)
    options = GREEDY | {"max_new_tokens": 2, "num_beams": 13, "attention_mask": LEFT.long()}
    best = from_causal_lm(lm).generate(IDS.masked_fill(~LEFT, 0), solve=HOW, **options)
    pairs = torch.cartesian_prod(torch.arange(13), torch.arange(13))
    for row, real, found in zip(IDS, LEFT, best, strict=True):
        every = torch.cat([row[real].expand(169, -1), pairs], dim=1)
        scores = lm(every[:, :-1], **HOW).logits[:, -2:].log_softmax(-1).gather(2, pairs[..., None]).sum(1)[:, 0]
        assert torch.equal(pairs[scores.argmax()], found[7:])


def test_it_is_loaded_without_an_import(tmp_path):
    saved(made("huginn"), tmp_path)
    script = (
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)\n"
        "print(type(model).__module__, model.model.core.norm is model.model.core.coda.backbone.norm)"
    )
    assert run(script) == "deqseq.integrations.huggingface.recurrent_depth True\n"


@torch.no_grad()
def test_folded_weights_are_the_same_to_the_last_bit(tmp_path):
    lm = made("llama")
    model = from_causal_lm(lm)
    before = model(IDS).logits
    model.fold_weight_norm()
    assert torch.equal(model(IDS).logits, before)
    model.save_pretrained(tmp_path)
    again = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert not any(".parametrizations." in name for name in again.state_dict())
    assert torch.equal(again(IDS).logits, before)
    assert from_causal_lm(to_causal_lm(model)).config.layers == again.config.layers


def test_activations_of_all_parts_are_recomputed():
    model, calls = from_causal_lm(made("mamba2")).train(), dict.fromkeys(("prelude", "core", "coda"), 0)
    model(IDS, labels=IDS).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for name in calls:
        count = lambda *_, name=name: calls.update({name: calls[name] + torch.is_grad_enabled()})  # noqa: E731
        backbone = getattr(model.model.core, name).backbone
        (backbone.backbone if name == "core" else backbone).layers[0].mixer.register_forward_hook(count)
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": False})
    model(IDS, labels=IDS).loss.backward()
    # of the core: the first evaluation, four phantom steps, and those again
    assert calls == {"prelude": 2, "core": 9, "coda": 2}
    for name, parameter in model.named_parameters():
        assert (parameter.grad - plain[name]).abs().max() < 1e-10, name


def test_a_new_model_is_initialised_as_its_parts_are():
    backbones = {"prelude": llama(2), "core": llama(3), "coda": mamba2()}
    layers = {part: backbone.config for part, backbone in backbones.items()}
    config = RecurrentDepthConfig(layers=layers, vocab_size=4000, injection="decay", tie_word_embeddings=False)
    assert (config.hidden_size, config.num_hidden_layers, config.prelude, config.core, config.coda) == (16, 6, 2, 3, 1)
    torch.manual_seed(3)
    expected = [type(backbone)(backbone.config) for backbone in backbones.values()]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    core = model.model.core
    for one, other in zip(
        expected, (core.prelude.backbone, core.core.backbone.backbone, core.coda.backbone), strict=True
    ):
        assert same_weights(one, other)
    for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
        assert abs(weight.std().item() / 0.02 - 1) < 0.02


ONE = {"name": "LlamaConfig", "d_model": 16, "n_heads": 2}
THREE = dict.fromkeys(("prelude", "core", "coda"), ONE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_config": {"model_type": "llama"}}, "give either decoder_config or layers, not both"),
        (
            {"layers": {"prelude": ONE, "core": ONE}},
            r"layers must have the keys prelude, core, coda, got prelude, core",
        ),
        ({"layers": THREE | {"core": ONE | {"d_model": 8}}}, r"the same d_model, got \[16, 8, 16\]"),
        ({"layers": THREE | {"core": ONE | {"name": "LamaConfig"}}}, r"layers\['core'\]: .*did you mean 'LlamaConfig'"),
        ({"layers": THREE | {"coda": ONE | {"n_layer": 2}}}, r"layers\['coda'\]: .*did you mean 'n_layers'"),
        ({"core": 2}, "core must be 1, as its parts have, got 2"),
        ({"hidden_size": 8}, "hidden_size must be 16, as its parts have, got 8"),
        ({"dropped": 1}, "dropped must be 0, as its parts have, got 1"),
        ({"norm": "core"}, r"norm must be one of \(None, 'coda'\), got 'core'"),
        ({"norm": "coda", "layers": THREE | {"coda": ONE | {"final_norm": False}}}, "norm must be None where the coda"),
    ],
)
def test_bad_configurations_are_named(fields, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        RecurrentDepthConfig(**{"layers": THREE} | fields)


def test_layers_are_those_of_a_decoder_unless_they_are_given():
    config = RecurrentDepthConfig()
    assert (config.decoder_config.model_type, config.prelude, config.core, config.coda) == ("llama", 4, 24, 4)
    with pytest.raises(StrictDataclassError, match="norm must be None, as its parts have, got coda"):
        RecurrentDepthConfig(norm="coda")
    with pytest.raises(StrictDataclassError, match="injection must be one of"):
        RecurrentDepthConfig(injection=None)


def test_what_a_configuration_cannot_name_is_refused():
    lm = made("llama")
    lm.model.prelude = lm.model.coda
    with pytest.raises(ValueError, match="weights of their own"):
        from_causal_lm(lm)
    lm = made("llama")
    lm.model.norm = nn.LayerNorm(16)
    with pytest.raises(ValueError, match=r"the last norm of its coda, .*got LayerNorm"):
        from_causal_lm(lm)
    lm = made("llama")
    lm.model.prelude = dq.ExplicitModel(dq.Affine(16))
    with pytest.raises(TypeError, match=r"must be Llama or Mamba2 backbones, .*got Affine, Llama, Llama"):
        from_causal_lm(lm)
