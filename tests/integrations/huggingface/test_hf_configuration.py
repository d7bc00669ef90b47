"""Configurations of models of one backbone: typed and checked, equal after a file, convertible both ways."""

import json
from dataclasses import fields, replace

import pytest
import torch
from hf_models import BACKBONES, LLAMA, configured, made
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlamaForCausalLM
from transformers import LlamaConfig as TheirLlamaConfig

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitLlamaConfig, ImplicitMamba2Config, from_causal_lm, to_causal_lm
from deqseq.layers import RotaryScaling

SOLVE = dq.SolveConfig(dq.Anderson(3), dq.Stop(0.05, max_steps=24), dq.Phantom(6, 0.5), dq.Chunked(8), "input")
EVAL_SOLVE = replace(SOLVE, stop=dq.Stop(1e-3, max_steps=96), solver=dq.Naive())
ROTARY = RotaryScaling(4.0, 1.0, 2.0, 64)
SIZES = {
    "mamba2": dq.Mamba2Config(32, 3, 16, 8, 4, 2, 3, 24, 5, 1e-6, (0.01, 0.5), 0.1, False),
    "llama": dq.LlamaConfig(32, 3, 4, 2, 12, 48, 1e4, ROTARY, 1e-6, dropout=0.1, weight_norm=False),
}
SPECS = {kind: dq.LanguageModelSpec(50, sizes, SOLVE, EVAL_SOLVE, False, 0.1) for kind, sizes in SIZES.items()}
KINDS = {"mamba2": ImplicitMamba2Config, "llama": ImplicitLlamaConfig}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


class TestSpecifications:
    @BACKBONES
    @pytest.mark.parametrize("implicit", [True, False])
    def test_one_becomes_a_file_and_comes_back(self, kind, implicit, tmp_path):
        spec = SPECS[kind]
        if not implicit:
            spec = replace(spec.explicit(), backbone=replace(spec.backbone, injection=False))
        KINDS[kind].from_specification(spec, eos_token_id=7).save_pretrained(tmp_path)
        again = AutoConfig.from_pretrained(tmp_path)
        assert type(again) is KINDS[kind]
        assert (again.specification(), again.eos_token_id) == (spec, 7)

    @BACKBONES
    def test_every_size_of_the_backbone_has_a_field(self, kind):
        elsewhere = {"injection", "rope_theta", "rope_scaling"}
        assert {field.name for field in fields(SIZES[kind])} - elsewhere == set(KINDS[kind].sizes)

    def test_defaults_that_llama_fills_in(self):
        config = ImplicitLlamaConfig.from_specification(dq.LanguageModelSpec(50, dq.LlamaConfig(64, n_heads=4)))
        assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (16, 4, 170)
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}

    def test_rope_parameters_are_those_of_transformers(self):
        given = dict(ROPE)
        theirs = TheirLlamaConfig(rope_parameters=dict(ROPE), hidden_size=32, num_attention_heads=4)
        config = ImplicitLlamaConfig(rope_parameters=given, **LLAMA)
        assert config.rope_parameters == theirs.rope_parameters
        assert given == ROPE
        assert config.backbone().rope_scaling == RotaryScaling(original_length=256)
        older = {name: value for name, value in ROPE.items() if name != "rope_theta"}
        assert ImplicitLlamaConfig(rope_scaling=older, rope_theta=1e4, **LLAMA).rope_parameters == ROPE
        plain = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 2048}
        assert ImplicitLlamaConfig(rope_parameters=plain, **LLAMA).backbone().rope_scaling is None

    @pytest.mark.parametrize("scale", [1.0, 3.0])
    @torch.no_grad()
    def test_scale_and_cap_are_carried(self, scale):
        options = {"embedding_scale": scale, "logit_softcap": 0.7}
        lm = dq.CausalLM(13, dq.ImplicitModel(dq.Llama(dq.LlamaConfig(16, n_heads=2))), 0.5, **options).eval()
        model, ids = from_causal_lm(lm), torch.tensor([[1, 2, 3]])
        for same in (model, to_causal_lm(model)):
            assert torch.equal(same(ids).logits, lm(ids).logits)
        built = model.config.specification().build()
        assert (built.embedding_scale, built.logit_softcap) == (scale, 0.7)

    def test_fields_that_the_model_decides_are_refused_and_others_taken(self):
        lm = to_causal_lm(made("llama"))
        config = from_causal_lm(lm, initializer_range=0.5, max_position_embeddings=77).config
        assert (config.initializer_range, config.max_position_embeddings) == (0.5, 77)
        for one in (lm, to_causal_lm(made("decoder"))):
            with pytest.raises(ValueError, match="leave out solve, vocab_size"):
                from_causal_lm(one, vocab_size=20, solve={"stop": {"max_steps": 8}})

    def test_what_a_section_leaves_out_stays(self):
        changes = {"stop": {"max_steps": 7}, "solver": "Naive"}
        config = ImplicitLlamaConfig(solve={"stop": {"rtol": 1e-4}}, eval_solve=changes)
        solve = dq.SolveConfig(stop=dq.Stop(1e-4))
        evaluation = replace(solve, solver=dq.Naive(), stop=dq.Stop(1e-4, max_steps=7))
        assert (config.specification().solve, config.specification().eval_solve) == (solve, evaluation)
        config.solve = {"gradient": {"steps": 2}, "solver": {"name": "Relaxed", "damping": 0.5}}
        solve = replace(solve, gradient=dq.Phantom(2), solver=dq.Relaxed(0.5))
        assert (config.specification().solve, config.specification().eval_solve) == (solve, evaluation)
        config.eval_solve = None
        assert config.specification().eval_solve is None


def written(folder, **changes):
    """A configuration's file, with some fields changed."""
    configured("llama").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


class TestFiles:
    def test_keywords_override_fields_or_are_refused(self, tmp_path):
        ImplicitLlamaConfig(solve={"stop": {"rtol": 1e-4}}).save_pretrained(tmp_path)
        load = ImplicitLlamaConfig.from_pretrained
        config = load(tmp_path, eval_solve={"stop": {"max_steps": 5}}, num_hidden_layers=2)
        assert (config.eval_solve["stop"]["max_steps"], config.num_hidden_layers) == (5, 2)
        assert load(tmp_path, solve={"stop": {"max_steps": 5}}).specification().solve.stop == dq.Stop(1e-4, max_steps=5)
        for changes, error, message in (
            ({"num_hiden_layers": 2}, ValueError, r"field 'num_hiden_layers' .*did you mean 'num_hidden_layers'"),
            ({"another": 1}, ValueError, "field 'another' is unknown"),
            ({"hidden_size": 0, "head_dim": 1}, StrictDataclassError, "d_model must be an integer >= 1, got 0"),
        ):
            with pytest.raises(error, match=message):
                load(tmp_path, **changes)
        assert load(tmp_path, another=None).hidden_size == 768  # asks for nothing
        _, unused = AutoConfig.from_pretrained(tmp_path, return_unused_kwargs=True, another=1)
        assert unused == {"another": 1}

    def test_what_transformers_adds_is_read_and_a_field_of_nobody_is_an_error(self, tmp_path):
        added = {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {}, "architectures": ["X"]}
        config = AutoConfig.from_pretrained(written(tmp_path, dtype="float16", **added), attn_implementation="sdpa")
        assert (config.tokenizer_class, str(config.dtype)) == ("PreTrainedTokenizerFast", "torch.float16")
        with pytest.raises(ValueError, match="field 'unheard_of' is unknown"):
            AutoConfig.from_pretrained(written(tmp_path, unheard_of=1))

    def test_a_newer_release_is_refused_and_a_newer_patch_is_read(self, tmp_path):
        with pytest.raises(ValueError, match=r"written by deqseq 99\.1\.0, .*pip install --upgrade deqseq"):
            AutoConfig.from_pretrained(written(tmp_path, deqseq_version="99.1.0", unheard_of=1))
        config = AutoConfig.from_pretrained(written(tmp_path, deqseq_version=dq.__version__ + ".post7"))
        assert config.deqseq_version == dq.__version__

    def test_saving_refuses_what_loading_would_refuse(self, tmp_path):
        config = ImplicitMamba2Config()
        config.hiden_size = 8
        with pytest.raises(ValueError, match=r"field 'hiden_size' .*did you mean 'hidden_size'"):
            config.save_pretrained(tmp_path / "new")
        assert not (tmp_path / "new").exists()


LLAMA_FIELDS = [
    ({"num_attention_heads": 7}, r"n_heads must divide d_model"),
    ({"logit_softcap": -1.0}, "logit_softcap must be a number"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, r"'rope_type' must be one of .*'llama3'"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'low_freq_factor' is missing"),
    ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "'factor' is unknown"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("mamba2", {"hiden_size": 8}, r"field 'hiden_size' .*did you mean 'hidden_size'"),
        ("llama", {"temperature": 0.5}, r"field 'temperature' is unknown"),
        ("mamba2", {"solve": {"solver": "Andersen"}}, r"Config\.solve: .*'Andersen' .*did you mean 'Anderson'"),
        ("mamba2", {"solve": {"solver": 3}}, r"Config\.solve: SolveConfig\.solver must be a solver"),
        ("llama", {"eval_solve": {"stop": {"rtoll": 1}}}, r"Config\.eval_solve: .*'rtoll' .*did you mean 'rtol'"),
        (
            "llama",
            {"model_type": "llama"},
            r"a 'llama', but ImplicitLlamaConfig is for 'implicit_llama3': .*AutoConfig",
        ),
        ("llama", {"hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
        ("mamba2", {"implicit": 1}, "Field 'implicit' expected bool, got int"),
        ("mamba2", {"solve": 3}, "Field 'solve'"),
        ("mamba2", {"solve": None}, "Field 'solve'"),
        ("llama", {"eval_solve": []}, "Field 'eval_solve'"),
        ("llama", {"dropout": 1.0}, r"dropout must .*\[0, 1\), got 1.0"),
        ("mamba2", {"embedding_dropout": -0.1}, r"embedding_dropout must .*\[0, 1\), got -0.1"),
        ("llama", {"hidden_size": 0}, r"d_model must be an integer >= 1, got 0 \(here d_model is hidden_size\)"),
        ("mamba2", {"head_dim": 7}, r"headdim must divide .* \(here d_model is hidden_size, headdim is head_dim\)"),
        ("mamba2", {"time_step_limit": (0.0, 1.0, 2.0)}, r"dt_limit"),
        ("mamba2", {"backend": "cuda"}, r"backend"),
        *(("llama", *case) for case in LLAMA_FIELDS),
    ],
)
def test_bad_fields_are_named(kind, fields, message):
    with pytest.raises((ValueError, TypeError, StrictDataclassError), match=message):
        KINDS[kind](**fields)


def theirs():
    return LlamaForCausalLM(TheirLlamaConfig(vocab_size=13, hidden_size=8, num_hidden_layers=1, **LLAMA))


def injected(make, injection):
    return dq.CausalLM(10, make(dq.Llama(dq.LlamaConfig(d_model=16, n_heads=2, injection=injection))))


def from_input(backbone):  # Ouro is implicit without an injection
    return dq.ImplicitModel(backbone, dq.SolveConfig(start="input"))


INJECTION = r"must have a backbone with injection=True.* got {} with injection={}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ImplicitLlamaConfig.from_specification(SPECS["mamba2"]),
            r"backbone must be a LlamaConfig, .*got Mamba2",
        ),
        (
            lambda: ImplicitMamba2Config.from_specification(SPECS["llama"]),
            r"backbone must be a Mamba2Config, .*got Llama",
        ),
        (lambda: type(made("mamba2"))(configured("llama")), "must be an ImplicitMamba2Config, got ImplicitLlamaConfig"),
        (lambda: from_causal_lm(theirs()), r"lm must be a CausalLM, .*from_pretrained_model\(.*got LlamaForCausalLM"),
        (lambda: from_causal_lm(made("mamba2")), r"lm must be a CausalLM, .*got ImplicitMamba2ForCausalLM"),
        (lambda: to_causal_lm(theirs()), r"model must be an ImplicitCausalLM, got LlamaForCausalLM"),
        (lambda: from_causal_lm(injected(from_input, False)), INJECTION.format("ImplicitModel", False)),
        (lambda: from_causal_lm(injected(dq.ExplicitModel, True)), INJECTION.format("ExplicitModel", True)),
    ],
)
def test_what_is_no_model_of_this_type_is_refused_with_a_remedy(call, message):
    with pytest.raises(TypeError, match=message):
        call()
