"""Configurations: checked, equal after a file, convertible both ways, read at each call."""

import json
from dataclasses import replace

import pytest
import torch
from hf_models import ATTENTION, BACKBONES, IDS, LAYERS, MAMBA2, STABLELM, configured, made
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlamaForCausalLM
from transformers import LlamaConfig as TheirLlamaConfig

import deqseq as dq
from deqseq.integrations.huggingface import DeqseqConfig, from_causal_lm, to_causal_lm
from deqseq.layers import RotaryScaling

SOLVE = dq.SolveConfig(
    dq.Anderson(3), dq.Stop(0.05, max_steps=24), dq.Phantom(6, 0.5), dq.Chunked(8), "input"
)
EVAL_SOLVE = replace(SOLVE, stop=dq.Stop(1e-3, max_steps=96), solver=dq.Naive())
SIZES = {
    "mamba2": dq.Mamba2Config(32, 3, 16, 8, 4, 2, 3, 24, 5, 1e-6, (0.01, 0.5), 0.1, False),
    "llama": dq.LlamaConfig(
        32, 3, 4, 2, 12, 48, 1e4, RotaryScaling(4.0, 1.0, 2.0, 64), 1e-6, dropout=0.1
    ),
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
        assert (type(again), again.specification(), again.eos_token_id) == (DeqseqConfig, spec, 7)

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
        names = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
        assert tuple(getattr(config, name) for name in names) == derived
        assert DeqseqConfig(**config.to_dict()).to_dict() == config.to_dict()
        with pytest.raises(
            ValueError, match=r"DeqseqConfig\.num_hidden_layers must be \d, which follows .*got 7"
        ):
            config.num_hidden_layers = 7
        if kind != "decoder":
            config.backbone = {"n_layers": 5}
            assert config.num_hidden_layers == derived[1] + 3

    def test_fields_that_the_model_decides_are_refused_and_others_taken(self):
        lm = to_causal_lm(made("llama"))
        config = from_causal_lm(lm, initializer_range=0.5, max_position_embeddings=77).config
        assert (config.initializer_range, config.max_position_embeddings) == (0.5, 77)
        for one in (lm, to_causal_lm(made("decoder"))):
            with pytest.raises(ValueError, match="leave out hidden_size, solve, vocab_size"):
                from_causal_lm(one, vocab_size=20, hidden_size=9, solve={"stop": {"max_steps": 8}})

    def test_one_builds_the_model_that_it_counts(self):
        spec = dq.preset("llama3-1.3b-implicit")
        with torch.device("meta"):
            model = type(made("llama"))(DeqseqConfig.from_specification(spec, bos_token_id=0))
            own = spec.build()
        assert model.num_parameters() == sum(parameter.numel() for parameter in own.parameters())


class TestSolves:
    def test_what_a_section_leaves_out_stays(self):
        changes = {"stop": {"max_steps": 7}, "solver": "Naive"}
        config = DeqseqConfig(solve={"stop": {"rtol": 1e-4}}, eval_solve=changes)
        solve = dq.SolveConfig(stop=dq.Stop(1e-4))
        evaluation = replace(solve, solver=dq.Naive(), stop=dq.Stop(1e-4, max_steps=7))
        assert (config.specification().solve, config.specification().eval_solve) == (
            solve,
            evaluation,
        )
        config.solve = {"gradient": {"steps": 2}, "solver": {"name": "Relaxed", "damping": 0.5}}
        solve = replace(solve, gradient=dq.Phantom(2), solver=dq.Relaxed(0.5))
        assert (config.specification().solve, config.specification().eval_solve) == (
            solve,
            evaluation,
        )
        config.eval_solve = None
        assert config.specification().eval_solve is None

    @torch.no_grad()
    def test_a_change_takes_effect_at_once_from_both_sides(self):
        model, exactly = made("mamba2"), {"stop": dq.Stop.exactly(3)}
        model.config.solve = exactly
        assert model(IDS).stats.iterations.unique().tolist() == [3]
        model.config.eval_solve = {"stop": {"max_steps": 4, "check_every": 4}}
        assert model(IDS).stats.iterations.unique().tolist() == [4]
        assert model(IDS, solve=exactly).stats.iterations.unique().tolist() == [3]
        to_causal_lm(model).core.eval_solve = dq.SolveConfig(stop=dq.Stop.exactly(2))
        assert model.config.eval_solve["stop"]["max_steps"] == 2
        assert model(IDS).stats.iterations.unique().tolist() == [2]
        assert model.train()(IDS).stats.iterations.unique().tolist() == [3]


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
        config = load(tmp_path, eval_solve={"stop": {"max_steps": 5}}, backbone={"n_layers": 2})
        assert (config.eval_solve["stop"]["max_steps"], config.num_hidden_layers) == (5, 2)
        assert load(
            tmp_path, solve={"stop": {"max_steps": 5}}
        ).specification().solve.stop == dq.Stop(1e-4, max_steps=5)
        for changes, message in (
            ({"vocab_sise": 2}, r"field 'vocab_sise' .*did you mean 'vocab_size'"),
            ({"another": 1}, "field 'another' is unknown"),
            (
                {"hidden_size": 8},
                r"hidden_size must be 768, which follows from the backbones, got 8",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                load(tmp_path, **changes)
        assert load(tmp_path, another=None).hidden_size == 768  # asks for nothing
        _, unused = AutoConfig.from_pretrained(tmp_path, return_unused_kwargs=True, another=1)
        assert unused == {"another": 1}

    def test_what_transformers_adds_is_read_and_a_field_of_nobody_is_an_error(self, tmp_path):
        added = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "auto_map": {},
            "architectures": ["X"],
        }
        config = AutoConfig.from_pretrained(
            written(tmp_path, dtype="float16", **added), attn_implementation="sdpa"
        )
        assert (config.tokenizer_class, str(config.dtype)) == (
            "PreTrainedTokenizerFast",
            "torch.float16",
        )
        with pytest.raises(ValueError, match="field 'unheard_of' is unknown"):
            AutoConfig.from_pretrained(written(tmp_path, unheard_of=1))

    def test_a_newer_release_is_refused_and_a_newer_patch_is_read(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"written by deqseq 99\.1\.0, .*pip install --upgrade deqseq"
        ):
            AutoConfig.from_pretrained(written(tmp_path, deqseq_version="99.1.0", unheard_of=1))
        config = AutoConfig.from_pretrained(
            written(tmp_path, deqseq_version=dq.__version__ + ".post7")
        )
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
        (
            {"eval_solve": {"stop": {"rtoll": 1}}},
            r"Config\.eval_solve: .*'rtoll' .*did you mean 'rtol'",
        ),
        ({"solve": None, "eval_solve": {}}, "eval_solve must be None if solve is"),
        ({"steps": 2}, "steps must be None in an implicit model, got 2"),
        ({"solve": None, "injection": "add"}, "injection must be None"),
        ({"prelude": ATTENTION}, "coda must be given, too"),
        (CODA | {"backbone": NARROW}, r"the same d_model, got \[8, 16, 8\]"),
        (CODA | {"backbone": MAMBA2, "norm": "coda"}, "norm must be None where"),
        ({"norm": "core"}, r"norm must be one of \('coda',\), got 'core'"),
        (
            DECODER | {"injection": "add", "hidden_size": 16},
            r"Config\.hidden_size must be 8, .*got 16",
        ),
        (DECODER | {"decoder_config": None}, "decoder_config must be given with DecoderLayers"),
        (
            DECODER | {"coda": {"name": "DecoderLayers", "d_model": 8, "first": 3, "end": 5}},
            "decoder's 4 layers of",
        ),
        ({"model_type": "llama"}, r"model_type must be 'deqseq', got 'llama': .*AutoConfig"),
        ({"vocab_size": "64"}, "Field 'vocab_size' expected int, got str"),
        ({"embedding_dropout": -0.1}, r"embedding_dropout must .*\[0, 1\), got -0.1"),
    ],
    ids=lambda part: "+".join(part) if isinstance(part, dict) else "",
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises((ValueError, TypeError, StrictDataclassError), match=message):
        DeqseqConfig(**fields)


def theirs():
    return LlamaForCausalLM(
        TheirLlamaConfig(vocab_size=13, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    )


def unused_injection():
    return dq.CausalLM(10, dq.ExplicitModel(dq.Llama(dq.LlamaConfig(d_model=16, n_heads=2))))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: DeqseqConfig.from_specification(MAMBA2),
            TypeError,
            "spec must be a LanguageModelSpec",
        ),
        (
            lambda: type(made("mamba2"))(theirs().config),
            TypeError,
            "config must be a DeqseqConfig, got LlamaConfig",
        ),
        (lambda: from_causal_lm(theirs()), TypeError, r"lm must be a CausalLM, .*got Llama"),
        (
            lambda: from_causal_lm(made("mamba2")),
            TypeError,
            r"lm must be a CausalLM, .*got DeqseqForCausalLM",
        ),
        (
            lambda: to_causal_lm(theirs()),
            TypeError,
            r"model must be a DeqseqForCausalLM, got LlamaForCausalLM",
        ),
        (
            lambda: from_causal_lm(unused_injection()),
            ValueError,
            r"other weights .*: backbone\.injection\.",
        ),
    ],
)
def test_what_is_no_model_of_this_type_is_refused_with_a_remedy(call, error, message):
    with pytest.raises(error, match=message):
        call()
