"""The paper's reference code: its configurations, its weights, and the numbers of both.

``data`` has two small models of it (float64, solved to 1e-14): configurations and weights, logits
at the fixed point, and the gradients of the loss through four phantom steps.
"""

import math
import re
from dataclasses import replace

import pytest
import torch
from integrations.golden import config, numbers, tensors

import deqseq as dq
from deqseq.integrations.foreign import from_reference_config, from_state, to_reference_state
from deqseq.integrations.foreign.reference import BLOCK as BLOCK_FIELDS
from deqseq.integrations.foreign.reference import WHOLE

BOTH = pytest.mark.parametrize("name", ["mamba2", "llama"])
SIZES = {
    "130m": (768, 24, 12, 12),
    "370m": (1024, 48, 24, 16),
    "760m": (1536, 48, 24, 16),
    "1.3b": (2048, 48, 24, 32),
}


class TestNumbers:
    @BOTH
    @pytest.mark.parametrize(
        ("solver", "sweep"),
        [
            (dq.Relaxed(0.8), dq.Simultaneous()),
            (dq.Naive(), dq.Chunked(7)),
            (dq.Anderson(), dq.Sequential()),
        ],
    )
    @torch.no_grad()
    def test_logits_at_the_fixed_point(self, name, solver, sweep):
        lm = from_state(config(name), tensors(name))
        known = numbers(name)
        assert lm.model.solve.solver == dq.Naive()
        assert lm.model.eval_solve.solver == dq.Relaxed(0.8)
        stop = dq.Stop(rtol=1e-13, max_steps=600)
        output = lm(known["input_ids"], solver=solver, stop=stop, sweep=sweep)
        assert (output.status == dq.Status.CONVERGED).all()
        assert (output.logits - known["eval_logits"]).abs().max() < 1e-9

    @pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(8)])
    @BOTH
    def test_phantom_gradient_of_every_parameter(self, name, sweep):
        lm = from_state(config(name), tensors(name)).train()
        known = numbers(name)
        assert lm.model.solve.gradient == dq.Phantom(steps=4, damping=0.8)
        stop = dq.Stop(rtol=1e-12, max_steps=600)
        output = lm(known["input_ids"], labels=known["input_ids"], sweep=sweep, stop=stop)
        assert output.converged.all()
        assert output.loss.item() == pytest.approx(known["train_loss"].item(), rel=1e-6)
        assert (output.logits - known["train_logits"]).abs().max() < 1e-9
        output.loss.backward()
        # gradients move to our names as weights do
        expected = from_state(config(name), tensors(name, "grad")).state_dict()
        for key, parameter in lm.named_parameters():
            error = (parameter.grad - expected[key]).norm() / expected[key].norm()
            assert error < 1e-5, f"{key}: {error:.1e}"


OUTSIDE = {"word_emb.emb.weight", "criterion.decoder.weight", "backbone.norm_f.weight"}
BLOCK = {*(f"mlp.{part}.weight" for part in ("w1", "w3", "fc2")), "norm.weight", "norm2.weight"}
ATTENTION = {f"mixer.{part}.weight" for part in ("wq", "wk", "wv", "out_proj")}
MIXER = {f"mixer.{part}" for part in ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias")}
MIXER |= {f"mixer.{part}.weight" for part in ("in_proj", "norm", "out_proj")}


class TestWeights:
    @BOTH
    def test_a_state_there_and_back(self, name):
        spec = from_reference_config(config(name))
        theirs = tensors(name)
        back = to_reference_state(from_state(config(name), theirs).state_dict(), spec)
        assert back.keys() == theirs.keys()
        assert all(torch.equal(back[key], theirs[key]) for key in theirs)

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize(
        ("sizes", "mixer"),
        [
            (dq.LlamaConfig(d_model=16, n_heads=2, weight_norm=False), ATTENTION),
            (
                dq.Mamba2Config(d_model=16, d_state=4, headdim=8, mlp_width=12, weight_norm=False),
                MIXER,
            ),
        ],
    )
    def test_the_names_of_an_explicit_state(self, sizes, mixer, tied):
        spec = dq.LanguageModelSpec(10, sizes, solve=None, tied=tied)
        theirs = to_reference_state(spec.build().state_dict(), spec)
        assert theirs.keys() == OUTSIDE | {f"backbone.layers.0.{part}" for part in mixer | BLOCK}

    def test_missing_extra_and_misshapen_tensors_are_listed(self):
        state = tensors("llama")
        del state["backbone.layers.1.mixer.wk.weight_g"], state["backbone.norm_f.weight"]
        state |= {
            "backbone.layers.2.norm.weight": torch.ones(32),
            "backbone.injection.bias": torch.zeros(95),
        }
        message = (
            r"does not fit the configuration(.|\n)*"
            r"Missing key.*layers\.1\.self_attn\.k_proj\S+original0.*backbone\.norm\.weight(.|\n)*"
            r"Unexpected key.*backbone\.layers\.2\.norm\.weight(.|\n)*"
            r"size mismatch for model\.backbone\.injection\.bias: .*\[95\].*\[96\]"
        )
        with pytest.raises(ValueError, match=message):
            from_state(config("llama"), state)
        with pytest.raises(ValueError, match=r"Missing key.*\n.*Unexpected key"):
            to_reference_state(tensors("llama"), from_reference_config(config("llama")))

    def test_a_head_that_is_said_to_be_tied_and_is_not(self):
        state = tensors("llama")
        state["criterion.decoder.weight"] = state["criterion.decoder.weight"] + 1
        message = r"'criterion\.decoder\.weight' differs from 'word_emb\.emb\.weight': untie"
        with pytest.raises(ValueError, match=message):
            from_state(config("llama"), state)
        lm = from_state(config("llama") | {"tie_embeddings": False}, state)
        assert torch.equal(lm.head.weight, lm.embedding.weight + 1)


def published(family, size, kind):
    """The reference's file for one of the paper's models, from its sizes."""
    llama = family == "llama3"
    width, mamba2_layers, llama_layers, heads = SIZES[size]
    whole = config("llama" if llama else "mamba2")
    block = {
        "d_model": width,
        "n_layer": llama_layers if llama else mamba2_layers,
        "d_inner": 4 * width if llama else 0,
        "block_cfg": {"n_head": heads} if llama else {"d_state": 128, "expand": 2, "headdim": 64},
    }
    whole["backbone_config"] |= block
    tokens = {"vocab_size": 50277} if llama else {"vocab_size": 50277, "n_tokens": 50277}
    whole |= {"d_embed": width, **tokens}
    if not llama and (size, kind) == ("130m", "explicit"):
        whole |= {"pad_vocab": False, "pad_vocab_size_multiple": 8}
    if kind == "explicit":
        whole |= {"backbone_type": "explicit", "deq_params": {}}
        for name in ("init_gain", "pretrain_iter", "pretrain_steps"):
            del whole["backbone_config"][name]
        return whole
    budget = 4 if kind == "pretrain" else 32 if llama and size != "370m" else 24
    solver = {"f_max_iter": budget, "f_tol": 0.05, "eval_factor": 4.0, "eval_f_max_iter": 0}
    whole["deq_params"]["solver"] |= solver
    whole["deq_params"]["training"]["grad"] = 1 if kind == "pretrain" else 4
    return whole


class TestPublished:
    def test_the_two_reference_models(self):
        mamba2, llama = (from_reference_config(config(name)) for name in ("mamba2", "llama"))
        gradient = dq.Phantom(steps=4, damping=0.8)
        solves = (
            dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-14, max_steps=600, norm="row"), gradient),
            dq.SolveConfig(dq.Relaxed(0.8), dq.Stop(rtol=1e-14, max_steps=1200), gradient),
        )
        sizes = dq.Mamba2Config(
            d_model=32, n_layers=2, d_state=16, headdim=16, expand=2, chunk_size=64
        )
        assert mamba2 == dq.LanguageModelSpec(48, sizes, *solves)
        sizes = dq.LlamaConfig(d_model=32, n_layers=2, n_heads=4, mlp_width=64)
        assert llama == dq.LanguageModelSpec(48, sizes, *solves)

    @pytest.mark.parametrize("kind", ["explicit", "pretrain", "implicit"])
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("family", ["llama3", "mamba2"])
    def test_the_papers_files_are_the_presets(self, family, size, kind):
        spec = from_reference_config(published(family, size, kind))
        preset = dq.preset(f"{family}-{size}-{kind}")
        if spec.solve is not None:  # the reference's own: undamped training under one norm
            stop = replace(spec.solve.stop, norm="token")
            solve = replace(spec.solve, solver=spec.eval_solve.solver, stop=stop)
            spec = replace(spec, solve=solve)
        fields = ("vocab_size", "backbone", "tied", "solve", "eval_solve")
        for field in fields:
            assert getattr(spec, field) == getattr(preset, field)


def changed(name, *path, value=...):
    """A configuration with one field set to ``value``, or without it."""
    whole = inner = config(name)
    for step in path[:-1]:
        inner = inner[step]
    inner.pop(path[-1], None)
    if value is not ...:
        inner[path[-1]] = value
    return whole


BACKBONE = ("backbone_config",)
LAYER = ("backbone_config", "block_cfg")
SOLVER = ("deq_params", "solver")
NORM = ("deq_params", "norm")
REGULAR = ("deq_params", "regularization")
REFUSED = [  # what the error says that the field must be
    ("mamba2", ("dropout",), "much", "a number in (-inf, inf)"),
    ("llama", ("d_embed",), 16, "32"),
    ("mamba2", ("vocab_size",), 50, "48"),
    ("mamba2", ("n_tokens",), 4.5, "an integer >= 1"),
    ("llama", ("tie_embeddings",), "yes", "True or False"),
    ("llama", ("model_type",), "llama", "'implicit_llama3' or 'implicit_mamba2'"),
    ("llama", (*BACKBONE, "mlp_type"), "gated_mlp", "'llama_mlp'"),
    ("llama", (*BACKBONE, "d_inner"), 0, "an integer >= 1"),
    ("llama", (*BACKBONE, "dropout"), 0.1, "0"),
    ("mamba2", (*LAYER, "d_ssm"), 32, "None or 64"),
    ("mamba2", (*LAYER, "A_init_range"), [1, 8], "(1, 16) or [1, 16]"),
    ("mamba2", (*LAYER, "dt_limit"), "wide", "two ordered bounds, such as (0.0, 0.1)"),
]
UNKNOWN = [  # and what is missing, or has a default that is refused
    ("mamba2", ("tie_embedding",), 1, "'tie_embedding' is unknown; did you mean 'tie_embeddings'"),
    ("mamba2", (*LAYER, "headim"), 1, "backbone_config: block_cfg: 'headim' is unknown; did you"),
    ("mamba2", (*SOLVER, "f_toll"), 1, "deq_params: 'f_toll' is unknown; did you mean 'f_tol'"),
    ("mamba2", (*REGULAR, "jac_loss_weight"), 0.5, "'jac_loss_weight' must be 0, got 0.5"),
    ("llama", ("model_type",), ..., "'model_type' is missing"),
    ("llama", NORM, ..., "reference configuration: deq_params: 'norm' is missing"),
    ("llama", (*BACKBONE, "mlp_type"), ..., "must be 'llama_mlp', got 'gated_mlp' (the default)"),
]


class TestFields:
    def test_fields_of_a_llama_are_honoured(self):
        whole = config("llama")
        before = from_reference_config(config("llama"))
        whole |= {"tie_embeddings": False, "dropout": 0.2, "vocab_size": 50, "pad_vocab": True}
        whole["backbone_config"] |= {"d_inner": 100, "do_weight_norm": False}
        whole["backbone_config"]["block_cfg"]["rope_theta"] = 1e4
        backbone = replace(before.backbone, mlp_width=66, rope_theta=1e4, weight_norm=False)
        expected = replace(before, backbone=backbone, tied=False, embedding_dropout=0.2)
        assert from_reference_config(whole) == replace(expected, vocab_size=56)

    def test_fields_of_a_mamba2_are_honoured(self):
        whole = config("mamba2")
        before = from_reference_config(config("mamba2"))
        whole["pad_vocab_size_multiple"] = 20
        whole["backbone_config"] |= {"dropout": 0.1, "init_z_mode": "input"}
        layer = {"chunk_size": 8, "ngroups": 2, "d_conv": 3, "dt_limit": [0, 1]}
        whole["backbone_config"]["block_cfg"] |= layer
        deq = whole["deq_params"]
        deq["norm"]["norm_type"] = "none"
        deq["training"] |= {"grad": 2, "tau": 1.0}
        deq["solver"] |= {"f_solver": "anderson", "eval_f_max_iter": 0}
        sizes = {"chunk_size": 8, "n_groups": 2, "d_conv": 3, "dt_limit": (0.0, 1.0)}
        backbone = replace(before.backbone, dropout=0.1, weight_norm=False, **sizes)
        solver = dq.Anderson(memory=6)
        gradient = dq.Phantom(2, damping=1.0)
        solve = replace(before.solve, solver=solver, gradient=gradient, start="input")
        stop = replace(before.eval_solve.stop, max_steps=600)
        eval_solve = dq.SolveConfig(dq.Naive(), stop, gradient, start="input")
        spec = replace(before, backbone=backbone, solve=solve, eval_solve=eval_solve)
        assert from_reference_config(whole) == replace(spec, vocab_size=60)
        layer["dt_limit"] = [0.0, {"__float__": "Infinity"}]
        whole["backbone_config"]["block_cfg"] |= layer
        assert from_reference_config(whole).backbone.dt_limit == (0.0, math.inf)

    @BOTH
    def test_fields_without_effect_have_none(self, name):
        whole = config(name)
        spec = from_reference_config(config(name))
        for fields, table in ((whole, WHOLE), (whole["backbone_config"], BLOCK_FIELDS)):
            fields |= {field: "anything" for field, entry in table.items() if entry is None}
        assert from_reference_config(whole) == spec

    def test_missing_fields_have_the_references_defaults(self):
        whole = config("llama")
        for field in ("backbone_type", "tie_embeddings", "pad_vocab", "head_bias"):
            del whole[field]
        for field in ("rms_norm", "dropout", "pretrain_steps"):
            del whole["backbone_config"][field]
        assert from_reference_config(whole) == from_reference_config(config("llama"))
        assert from_reference_config(changed("mamba2", "dropout")).embedding_dropout == 0.05
        whole = config("mamba2")
        whole["backbone_config"] |= {"d_inner": 96, "mlp_type": "llama_mlp"}  # beside a mixer
        assert from_reference_config(whole).backbone.mlp_width == 64

    @pytest.mark.parametrize(("name", "path", "value", "wanted"), REFUSED)
    def test_what_is_not_computed_here_is_refused(self, name, path, value, wanted):
        where = "".join(f"{step}: " for step in path[:-1])
        message = f"reference configuration: {where}{path[-1]!r} must be {wanted}, got {value!r}"
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            from_reference_config(changed(name, *path, value=value))

    @pytest.mark.parametrize(("name", "path", "value", "message"), UNKNOWN)
    def test_unknown_and_missing_fields_are_refused(self, name, path, value, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            from_reference_config(changed(name, *path, value=value))
