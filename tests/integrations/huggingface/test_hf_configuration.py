"""Configurations: checked, equal after a file, convertible both ways, read at each call."""

import json
from dataclasses import replace

import pytest
import torch
from hf_models import ATTENTION, BACKBONES, IDS, LAYERS, MAMBA2, STABLELM, configured, made
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig
from transformers import LlamaConfig as TheirLlamaConfig

import deqseq as dq
from deqseq.integrations.huggingface import (
    DeqseqConfig,
    DeqseqForCausalLM,
    from_causal_lm,
    to_causal_lm,
)
from deqseq.integrations.huggingface.configuration import DERIVED
from deqseq.layers import RotaryScaling
from deqseq.models.specification import DecoderLayers

SOLVE = dq.SolveConfig(
    dq.Anderson(3), dq.Stop(0.05, max_steps=24), dq.Phantom(6, 0.5), dq.Chunked(8), "input"
)
EVAL_SOLVE = replace(SOLVE, stop=dq.Stop(1e-3, max_steps=96), solver=dq.Naive())
ROPE = RotaryScaling(4.0, 1.0, 2.0, 64)
SIZES = {
    "mamba2": dq.Mamba2Config(32, 3, 16, 8, 4, 2, 3, 24, 5, 1e-6, (0.01, 0.5), 0.1, False),
    "llama": dq.LlamaConfig(32, 3, 4, 2, 12, 48, 1e4, ROPE, 1e-6, dropout=0.1),
}
DECODER = LAYERS | {"decoder_config": AutoConfig.for_model("stablelm", **STABLELM)}


class TestSpecifications:
    @BACKBONES
    @pytest.mark.parametrize("explicit", [True, False])
    def test_one_becomes_a_file_and_comes_back(self, kind, explicit, tmp_path):
        spec = dq.LanguageModelSpec(50, SIZES[kind], SOLVE, EVAL_SOLVE, False, 0.1)
        spec = spec.explicit() if explicit else spec
        DeqseqConfig.from_specification(spec, eos_token_id=7).save_pretrained(tmp_path)
        again = AutoConfig.from_pretrained(tmp_path)
        assert type(again) is DeqseqConfig
        assert again.specification() == spec
        assert again.eos_token_id == 7

    @pytest.mark.parametrize(
        ("kind", "derived"),
        [
            ("mamba2", (8, 2, None, None, 4)),
            ("llama", (8, 2, 4, 2, 2)),
            ("parts", (8, 4, None, None, 4)),
            ("decoder", (8, 4, 4, 2, None)),
        ],
    )
    def test_what_tools_read_follows_from_the_backbones(self, kind, derived):
        config = configured(kind)
        assert tuple(getattr(config, name) for name in DERIVED) == derived
        assert DeqseqConfig(**config.to_dict()).to_dict() == config.to_dict()
        message = r"DeqseqConfig\.num_hidden_layers must be \d, which follows .*got 7"
        with pytest.raises(ValueError, match=message):
            config.num_hidden_layers = 7
        if kind != "decoder":
            config.backbone = {"n_layers": 5}
            assert config.num_hidden_layers == derived[1] + 3

    def test_fields_that_the_model_decides_are_refused_and_others_taken(self):
        lm = to_causal_lm(made("llama"))
        config = from_causal_lm(lm, initializer_range=0.5, max_position_embeddings=77).config
        assert config.initializer_range == 0.5
        assert config.max_position_embeddings == 77
        assert from_causal_lm(lm).config.max_position_embeddings is None
        for one in (lm, to_causal_lm(made("decoder"))):
            with pytest.raises(ValueError, match="leave out hidden_size, solve, vocab_size"):
                from_causal_lm(one, vocab_size=20, hidden_size=9, solve={"stop": {"max_steps": 8}})


class TestSolves:
    def test_what_a_section_leaves_out_stays(self):
        changes = {"stop": {"max_steps": 7}, "solver": "Naive"}
        config = DeqseqConfig(solve={"stop": {"rtol": 1e-4}}, eval_solve=changes)
        solve = dq.SolveConfig(stop=dq.Stop(1e-4))
        evaluation = replace(solve, solver=dq.Naive(), stop=dq.Stop(1e-4, max_steps=7))
        assert config.specification().solve == solve
        config.solve = {"gradient": {"steps": 2}, "solver": {"name": "Relaxed", "damping": 0.5}}
        solve = replace(solve, gradient=dq.Phantom(2), solver=dq.Relaxed(0.5))
        spec = config.specification()
        assert spec.solve == solve
        assert spec.eval_solve == evaluation
        config.eval_solve = None
        assert config.specification().eval_solve is None

    @torch.no_grad()
    def test_a_change_takes_effect_at_once_from_both_sides(self):
        model = made("mamba2")
        exactly = {"stop": dq.Stop.exactly(3)}

        def iterations(**options):
            return model(IDS, **options).stats.iterations.unique().tolist()

        model.config.solve = exactly
        assert iterations() == [3]
        model.config.eval_solve = {"stop": {"max_steps": 4, "check_every": 4}}
        assert iterations() == [4]
        assert iterations(solve=exactly) == [3]
        to_causal_lm(model).core.eval_solve = dq.SolveConfig(stop=dq.Stop.exactly(2))
        assert model.config.eval_solve["stop"]["max_steps"] == 2
        assert iterations() == [2]
        model.train()
        assert iterations() == [3]


def written(folder, **changes):
    """A configuration's file, with some fields changed."""
    configured("llama").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


class TestFiles:
    def test_keywords_override_fields_or_are_refused(self, tmp_path):
        DeqseqConfig(solve={"stop": {"rtol": 1e-4}}).save_pretrained(tmp_path)
        load = DeqseqConfig.from_pretrained
        five = {"stop": {"max_steps": 5}}
        config = load(tmp_path, eval_solve=five, backbone={"n_layers": 2})
        assert config.eval_solve["stop"]["max_steps"] == 5
        assert config.num_hidden_layers == 2
        spec = load(tmp_path, solve=five).specification()
        assert spec.solve.stop == dq.Stop(1e-4, max_steps=5)
        for changes, message in (
            ({"vocab_sise": 2}, r"field 'vocab_sise' .*did you mean 'vocab_size'"),
            ({"hidden_size": 8}, "hidden_size must be 768, which follows from .*, got 8"),
        ):
            with pytest.raises(ValueError, match=message):
                load(tmp_path, **changes)
        assert load(tmp_path, another=None).hidden_size == 768  # asks for nothing
        _, unused = AutoConfig.from_pretrained(tmp_path, return_unused_kwargs=True, another=1)
        assert unused == {"another": 1}

    def test_what_transformers_adds_is_read_and_a_field_of_nobody_is_an_error(self, tmp_path):
        added = {"tokenizer_class": "Words", "auto_map": {}, "architectures": ["X"]}
        folder = written(tmp_path, dtype="float16", **added)
        config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
        assert config.tokenizer_class == "Words"
        assert config.dtype == torch.float16
        with pytest.raises(ValueError, match="field 'unheard_of' is unknown"):
            AutoConfig.from_pretrained(written(tmp_path, unheard_of=1))

    def test_a_newer_release_is_refused_and_a_newer_patch_is_read(self, tmp_path):
        message = r"written by deqseq 99\.1\.0, .*pip install --upgrade deqseq"
        with pytest.raises(ValueError, match=message):
            AutoConfig.from_pretrained(written(tmp_path, deqseq_version="99.1.0", unheard_of=1))
        patch = written(tmp_path, deqseq_version=dq.__version__ + ".post7")
        config = AutoConfig.from_pretrained(patch)
        assert config.deqseq_version == dq.__version__

    def test_saving_refuses_what_loading_would_refuse(self, tmp_path):
        config = DeqseqConfig()
        config.vocab_sise = 8
        with pytest.raises(ValueError, match=r"field 'vocab_sise' .*did you mean 'vocab_size'"):
            config.save_pretrained(tmp_path / "new")
        assert not (tmp_path / "new").exists()


NARROW = dq.LlamaConfig(16, n_heads=2)
CODA = {"prelude": ATTENTION, "coda": replace(ATTENTION, final_norm=False)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"backbone": {"n_layer": 2}},
            r"Config\.backbone: .*'n_layer' .*did you mean .*'n_layers'",
        ),
        ({"solve": 3}, r"Config\.solve must be a solve of deqseq or its JSON"),
        ({"eval_solve": {"stop": {"rtoll": 1}}}, r"Config\.eval_solve: .*did you mean 'rtol'"),
        ({"solve": None, "eval_solve": {}}, "eval_solve must be None if solve is"),
        ({"solve": None, "injection": "add"}, "injection must be None"),
        ({"prelude": ATTENTION}, "coda must be given, too"),
        ({"steps": 2}, "steps must be None in an implicit model, got 2"),
        (CODA | {"backbone": NARROW}, r"the same d_model, got \[8, 16, 8\]"),
        (CODA | {"backbone": MAMBA2, "norm": "coda"}, "norm must be None where"),
        ({"norm": "core"}, r"norm must be one of \('coda',\), got 'core'"),
        (DECODER | {"hidden_size": 16}, r"Config\.hidden_size must be 8, .*got 16"),
        (DECODER | {"decoder_config": None}, "decoder_config must be given with DecoderLayers"),
        (DECODER | {"coda": DecoderLayers(8, 3, 5)}, "decoder's 4 layers of"),
        ({"model_type": "llama"}, r"model_type must be 'deqseq', got 'llama': .*AutoConfig"),
        ({"vocab_size": "64"}, "Field 'vocab_size' expected int, got str"),
        ({"embedding_dropout": -0.1}, r"embedding_dropout must .*\[0, 1\), got -0.1"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises((ValueError, TypeError, StrictDataclassError), match=message):
        DeqseqConfig(**fields)


@pytest.mark.parametrize(
    ("call", "argument", "message"),
    [
        (DeqseqConfig.from_specification, MAMBA2, "spec must be a LanguageModelSpec"),
        (DeqseqForCausalLM, TheirLlamaConfig(), "config must be a DeqseqConfig, got LlamaConfig"),
        (from_causal_lm, nn.Linear(2, 2), "lm must be a CausalLM, .*got Linear"),
        (to_causal_lm, nn.Linear(2, 2), "model must be a DeqseqForCausalLM, got Linear"),
    ],
)
def test_what_is_no_model_of_this_type_is_refused(call, argument, message):
    with pytest.raises(TypeError, match=message):
        call(argument)


def test_weights_that_no_configuration_describes_are_refused():
    unused_injection = dq.Llama(dq.LlamaConfig(d_model=16, n_heads=2))
    with pytest.raises(ValueError, match=r"other weights .*: backbone\.injection\."):
        from_causal_lm(dq.CausalLM(10, dq.ExplicitModel(unused_injection)))


def test_layers_that_are_not_causal_are_refused():
    layers = {"name": "LlamaConfig", "d_model": 8, "n_heads": 2, "causal": False}
    for solve in (None, {"stop": {"max_steps": 4}}):
        with pytest.raises(
            ValueError, match=r"DeqseqConfig\.backbone must be causal, got causal=F"
        ):
            DeqseqConfig(backbone=layers, solve=solve)
