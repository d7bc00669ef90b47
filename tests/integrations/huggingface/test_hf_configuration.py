"""Configurations: typed and checked, equal after a file, convertible both ways."""

import json
from dataclasses import fields, replace

import pytest
from hf_models import LLAMA, MAMBA2
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers import LlamaConfig as TheirLlamaConfig

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitLlamaConfig, ImplicitMamba2Config
from deqseq.layers import RotaryScaling

SOLVE = dq.SolveConfig(dq.Anderson(3), dq.Stop(0.05, max_steps=24), dq.Phantom(6, 0.5), dq.Chunked(8), "input")
EVAL_SOLVE = replace(SOLVE, stop=dq.Stop(1e-3, max_steps=96), solver=dq.Naive())
MAMBA2_SPEC = dq.LanguageModelSpec(
    50, dq.Mamba2Config(32, 3, 16, 8, 4, 2, 3, 24, 5, 1e-6, (0.01, 0.5), 0.1, False), SOLVE, EVAL_SOLVE, False, 0.1
)
LLAMA_SPEC = dq.LanguageModelSpec(
    50,
    dq.LlamaConfig(32, 3, 4, 2, 12, 48, 1e4, RotaryScaling(4.0, 1.0, 2.0, 64), 1e-6, dropout=0.1, weight_norm=False),
    SOLVE,
    EVAL_SOLVE,
    False,
    0.1,
)
BOTH = pytest.mark.parametrize(
    ("kind", "spec"), [(ImplicitMamba2Config, MAMBA2_SPEC), (ImplicitLlamaConfig, LLAMA_SPEC)], ids=["Mamba2", "Llama"]
)
EACH = pytest.mark.parametrize("kind", [ImplicitMamba2Config, ImplicitLlamaConfig])


class TestConversion:
    @BOTH
    @pytest.mark.parametrize("implicit", [True, False])
    def test_a_specification_becomes_a_file_and_comes_back(self, kind, spec, implicit, tmp_path):
        if not implicit:
            spec = replace(spec.explicit(), backbone=replace(spec.backbone, injection=False))
        config = kind.from_specification(spec, eos_token_id=7)
        config.save_pretrained(tmp_path)
        again = AutoConfig.from_pretrained(tmp_path)
        assert type(again) is kind
        assert (again.specification(), again.eos_token_id) == (spec, 7)
        written = json.loads((tmp_path / "config.json").read_text())
        assert (written["model_type"], written["deqseq_version"]) == (kind.model_type, dq.__version__)
        name = kind.__name__.removesuffix("Config")
        assert written["auto_map"] == {
            "AutoConfig": f"deqseq_models.{name}Config",
            "AutoModel": f"deqseq_models.{name}Model",
            "AutoModelForCausalLM": f"deqseq_models.{name}ForCausalLM",
            "AutoModelForSequenceClassification": f"deqseq_models.{name}ForSequenceClassification",
        }

    @pytest.mark.parametrize(
        ("kind", "core"), [(ImplicitMamba2Config, dq.Mamba2Config), (ImplicitLlamaConfig, dq.LlamaConfig)]
    )
    def test_every_size_of_the_backbone_has_a_field(self, kind, core):
        elsewhere = {"injection", "rope_theta", "rope_scaling"}
        assert {field.name for field in fields(core)} - elsewhere == set(kind.sizes)

    def test_defaults_that_llama_fills_in(self):
        config = ImplicitLlamaConfig.from_specification(dq.LanguageModelSpec(50, dq.LlamaConfig(64, n_heads=4)))
        assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (16, 4, 170)
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}

    def test_rope_parameters_are_those_of_transformers(self):
        rope = {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
        given = dict(rope)
        theirs = TheirLlamaConfig(rope_parameters=dict(rope), hidden_size=32, num_attention_heads=4)
        config = ImplicitLlamaConfig(rope_parameters=given, **LLAMA)
        assert config.rope_parameters == theirs.rope_parameters
        assert given == rope
        assert config.backbone().rope_scaling == RotaryScaling(original_length=256)
        older = {name: value for name, value in rope.items() if name != "rope_theta"}
        assert ImplicitLlamaConfig(rope_scaling=older, rope_theta=1e4, **LLAMA).rope_parameters == rope

    def test_a_default_rotary_embedding_may_keep_its_original_length(self):
        rope = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 2048}
        assert ImplicitLlamaConfig(rope_parameters=rope, **LLAMA).backbone().rope_scaling is None

    def test_another_backbone_is_refused(self):
        with pytest.raises(TypeError, match=r"backbone must be a LlamaConfig, got Mamba2Config\("):
            ImplicitLlamaConfig.from_specification(MAMBA2_SPEC)
        with pytest.raises(TypeError, match=r"backbone must be a Mamba2Config, got LlamaConfig\("):
            ImplicitMamba2Config.from_specification(LLAMA_SPEC)


class TestFields:
    @EACH
    def test_objects_and_json_are_the_same(self, kind):
        parts = {"solver": dq.Relaxed(0.5), "stop": dq.Stop(1e-4), "gradient": dq.OneStep()}
        config = kind(solve=dq.SolveConfig(**parts))
        assert config.solve["solver"] == {"name": "Relaxed", "damping": 0.5}
        assert (config.solve["stop"]["rtol"], config.solve["gradient"]) == (1e-4, {"name": "OneStep"})
        json_parts = {"solver": {"name": "Relaxed", "damping": 0.5}, "stop": {"rtol": 1e-4}, "gradient": "OneStep"}
        for same in (parts, json_parts):
            assert kind(solve=same).solve == config.solve
        assert config.specification().eval_solve is None

    @EACH
    def test_what_a_section_leaves_out_stays(self, kind):
        config = kind(solve={"stop": {"rtol": 1e-4}}, eval_solve={"stop": {"max_steps": 7}, "solver": "Naive"})
        solve = dq.SolveConfig(stop=dq.Stop(1e-4))
        evaluation = replace(solve, solver=dq.Naive(), stop=dq.Stop(1e-4, max_steps=7))
        assert (config.specification().solve, config.specification().eval_solve) == (solve, evaluation)
        config.solve = {"gradient": {"steps": 2}, "solver": {"name": "Relaxed", "damping": 0.5}}
        solve = replace(solve, gradient=dq.Phantom(2), solver=dq.Relaxed(0.5))
        assert (config.specification().solve, config.specification().eval_solve) == (solve, evaluation)
        config.eval_solve = None
        assert config.specification().eval_solve is None

    @EACH
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"hiden_size": 8}, r"field 'hiden_size' .*did you mean 'hidden_size'"),
            ({"temperature": 0.5}, r"field 'temperature' is unknown"),
            ({"solve": {"solver": "Andersen"}}, r"Config\.solve: .*'Andersen' .*did you mean 'Anderson'"),
            ({"eval_solve": {"stop": {"rtoll": 1}}}, r"Config\.eval_solve: .*'rtoll' .*did you mean 'rtol'"),
            ({"model_type": "llama"}, r"a 'llama', but Implicit\w+Config is for 'implicit_\w+': .*AutoConfig"),
        ],
    )  # fmt: skip
    def test_what_is_misspelt_is_named(self, kind, fields, message):
        with pytest.raises(ValueError, match=message):
            kind(**fields)

    @EACH
    def test_a_part_of_the_wrong_kind_is_refused(self, kind):
        with pytest.raises(TypeError, match=r"Config\.solve: SolveConfig\.solver must be a solver"):
            kind(solve={"solver": 3})

    @EACH
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
            ({"implicit": 1}, "Field 'implicit' expected bool, got int"),
            ({"solve": 3}, "Field 'solve'"),
            ({"solve": None}, "Field 'solve'"),
            ({"eval_solve": []}, "Field 'eval_solve'"),
            ({"dropout": 1.0}, r"dropout must .*\[0, 1\), got 1.0"),
            ({"embedding_dropout": -0.1}, r"embedding_dropout must .*\[0, 1\), got -0.1"),
            ({"hidden_size": 0}, r"d_model must be an integer >= 1, got 0 \(here d_model is hidden_size\)"),
        ],
    )
    def test_wrong_values_are_named(self, kind, fields, message):
        with pytest.raises(StrictDataclassError, match=message):
            kind(**fields)

    @pytest.mark.parametrize(
        ("kind", "fields", "message"),
        [
            (ImplicitMamba2Config, {"head_dim": 7}, r"headdim must divide .* \(here d_model is hidden_size, headdim is "
             r"head_dim\)"),
            (ImplicitMamba2Config, {"time_step_limit": (0.0, 1.0, 2.0)}, r"dt_limit"),
            (ImplicitMamba2Config, {"backend": "cuda"}, r"backend"),
            (ImplicitLlamaConfig, {"num_attention_heads": 7}, r"n_heads must divide d_model"),
            (ImplicitLlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, r"'rope_type' cannot be "
             r"'linear' here: .*'default'.*'llama3'"),
            (ImplicitLlamaConfig, {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, r"'low_freq_factor' is "
             r"missing"),
            (ImplicitLlamaConfig, {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, r"'factor' is unknown"),
        ],
    )  # fmt: skip
    def test_numbers_that_do_not_fit_together(self, kind, fields, message):
        with pytest.raises(StrictDataclassError, match=message):
            kind(**fields)


class TestFiles:
    @EACH
    def test_an_unknown_keyword_that_is_none_asks_for_nothing(self, kind, tmp_path):
        kind().save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path, another=None).hidden_size == kind().hidden_size
        with pytest.raises(ValueError, match="field 'another' is unknown"):
            AutoConfig.from_pretrained(tmp_path, another=1)

    @EACH
    def test_saving_refuses_what_loading_would_refuse(self, kind, tmp_path):
        config = kind()
        config.hiden_size = 8
        with pytest.raises(ValueError, match=r"field 'hiden_size' .*did you mean 'hidden_size'"):
            config.save_pretrained(tmp_path / "new")
        assert not (tmp_path / "new").exists()

    @EACH
    def test_a_keyword_overrides_and_a_misspelt_one_is_an_error(self, kind, tmp_path):
        kind().save_pretrained(tmp_path)
        config = kind.from_pretrained(tmp_path, eval_solve={"stop": {"max_steps": 5}}, num_hidden_layers=2)
        assert (config.eval_solve["stop"]["max_steps"], config.num_hidden_layers) == (5, 2)
        kind(solve={"stop": {"rtol": 1e-4}}).save_pretrained(tmp_path)
        config = kind.from_pretrained(tmp_path, solve={"stop": {"max_steps": 5}})
        assert config.specification().solve.stop == dq.Stop(1e-4, max_steps=5)
        with pytest.raises(ValueError, match=r"field 'num_hiden_layers' .*did you mean 'num_hidden_layers'"):
            kind.from_pretrained(tmp_path, num_hiden_layers=2)
        with pytest.raises(StrictDataclassError, match="d_model must be an integer >= 1, got 0"):
            kind.from_pretrained(tmp_path, hidden_size=0, head_dim=1)
        _, unused = AutoConfig.from_pretrained(tmp_path, return_unused_kwargs=True, another=1)
        assert unused == {"another": 1}

    @EACH
    def test_a_newer_release_is_refused_and_a_newer_patch_is_read(self, kind, tmp_path):
        self.write(kind, tmp_path, deqseq_version="99.1.0", unheard_of=1)
        with pytest.raises(ValueError, match=r"written by deqseq 99\.1\.0, .*pip install --upgrade deqseq"):
            AutoConfig.from_pretrained(tmp_path)
        self.write(kind, tmp_path, deqseq_version=dq.__version__ + ".post7")
        assert AutoConfig.from_pretrained(tmp_path).deqseq_version == dq.__version__

    @EACH
    def test_a_field_of_nobody_is_an_error(self, kind, tmp_path):
        self.write(kind, tmp_path, unheard_of=1)
        with pytest.raises(ValueError, match="field 'unheard_of' is unknown"):
            AutoConfig.from_pretrained(tmp_path)

    @EACH
    def test_what_transformers_adds_is_read(self, kind, tmp_path):
        added = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "auto_map": {},
            "architectures": ["X"],
            "dtype": "float16",
        }
        self.write(kind, tmp_path, **added)
        config = AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa")
        assert (config.tokenizer_class, str(config.dtype)) == ("PreTrainedTokenizerFast", "torch.float16")

    def write(self, kind, folder, **changes):
        sizes = MAMBA2 if kind is ImplicitMamba2Config else LLAMA
        kind(**sizes).save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
