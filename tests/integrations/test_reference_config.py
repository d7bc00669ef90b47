"""Configurations of the paper's reference code: every field is honoured, has no effect, or is refused."""

import copy
import math
import re
from dataclasses import replace

import pytest
from reference_model import config

import deqseq as dq
from deqseq.integrations.reference_config import BACKBONE_NO_EFFECT, NO_EFFECT, from_reference_config

SIZES = {"130m": (768, 24, 12, 12), "370m": (1024, 48, 24, 16), "760m": (1536, 48, 24, 16), "1.3b": (2048, 48, 24, 32)}


def changed(name: str, *path: str, value: object) -> dict:
    """A configuration with one field set."""
    whole = config(name)
    inner = whole
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return whole


def published(family: str, size: str, kind: str) -> dict:
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


def test_the_two_reference_models():
    mamba2, llama = (from_reference_config(config(name)) for name in ("mamba2", "llama"))
    gradient = dq.Phantom(steps=4, damping=0.8)
    solves = (
        dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-14, max_steps=600, norm="row"), gradient),
        dq.SolveConfig(dq.Relaxed(0.8), dq.Stop(rtol=1e-14, max_steps=1200), gradient),
    )
    sizes = dq.Mamba2Config(d_model=32, n_layers=2, d_state=16, headdim=16, expand=2, chunk_size=64)
    assert mamba2 == dq.LanguageModelSpec(48, sizes, *solves)
    assert llama == dq.LanguageModelSpec(48, dq.LlamaConfig(d_model=32, n_layers=2, n_heads=4, mlp_width=64), *solves)


@pytest.mark.parametrize("kind", ["explicit", "pretrain", "implicit"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["llama3", "mamba2"])
def test_the_papers_files_are_the_presets(family, size, kind):
    spec, preset = from_reference_config(published(family, size, kind)), dq.preset(f"{family}-{size}-{kind}")
    assert (spec.vocab_size, spec.backbone, spec.tied) == (preset.vocab_size, preset.backbone, preset.tied)
    if kind == "explicit":
        assert spec == preset
        return
    # what differs is the reference's own: undamped training under one norm
    assert preset.eval_solve == spec.eval_solve
    stop = replace(spec.solve.stop, norm="token")
    assert preset.solve == replace(spec.solve, solver=spec.eval_solve.solver, stop=stop)


def test_state_tracking():
    whole = config("mamba2")
    whole["backbone_config"] |= {"d_model": 256, "n_layer": 1, "dropout": 0.05, "pretrain_iter": 0}
    whole["backbone_config"]["block_cfg"] = {"d_state": 128, "expand": 4, "headdim": 64}
    whole["deq_params"]["solver"] |= {"f_max_iter": 32, "eval_f_max_iter": 2048, "eval_factor": 0.0, "f_tol": 0.05}
    whole |= {"vocab_size": 240, "n_tokens": 240, "d_embed": 256}
    spec, preset = from_reference_config(whole), dq.preset("mamba2-state-tracking")
    assert (spec.vocab_size, spec.backbone) == (preset.vocab_size, preset.backbone)
    assert (spec.solve.stop.max_steps, spec.eval_solve) == (32, preset.eval_solve)


HONOURED = [
    ("llama", ("backbone_config", "block_cfg", "rope_theta"), 1e4, lambda s: s.backbone.rope_theta == 1e4),
    ("llama", ("backbone_config", "d_inner"), 100, lambda s: s.backbone.mlp_width == 66),
    ("llama", ("tie_embeddings",), False, lambda s: not s.tied),
    ("llama", ("pad_vocab",), True, lambda s: s.vocab_size == 48),
    ("mamba2", ("pad_vocab_size_multiple",), 20, lambda s: s.vocab_size == 60),
    ("mamba2", ("backbone_config", "dropout"), 0.1, lambda s: s.backbone.dropout == 0.1),
    ("llama", ("dropout",), 0.2, lambda s: s.embedding_dropout == 0.2),
    ("mamba2", ("backbone_config", "do_weight_norm"), False, lambda s: not s.backbone.weight_norm),
    ("mamba2", ("backbone_config", "init_z_mode"), "input", lambda s: s.solve.start == "input"),
    ("mamba2", ("backbone_config", "block_cfg", "chunk_size"), 8, lambda s: s.backbone.chunk_size == 8),
    ("mamba2", ("backbone_config", "block_cfg", "ngroups"), 2, lambda s: s.backbone.n_groups == 2),
    ("mamba2", ("backbone_config", "block_cfg", "d_conv"), 3, lambda s: s.backbone.d_conv == 3),
    ("mamba2", ("backbone_config", "block_cfg", "dt_limit"), [0, 1], lambda s: s.backbone.dt_limit == (0.0, 1.0)),
    (
        "mamba2",
        ("backbone_config", "block_cfg", "dt_limit"),
        [0.0, {"__float__": "Infinity"}],
        lambda s: s.backbone.dt_limit == (0.0, math.inf),
    ),
    ("mamba2", ("deq_params", "norm", "norm_type"), "none", lambda s: not s.backbone.weight_norm),
    ("mamba2", ("deq_params", "training", "grad"), 2, lambda s: s.solve.gradient == dq.Phantom(2, damping=0.8)),
    ("mamba2", ("deq_params", "training", "tau"), 1.0, lambda s: s.eval_solve.solver == dq.Naive()),
    ("mamba2", ("deq_params", "training", "ift"), True, lambda s: type(s.solve.gradient) is dq.Implicit),
    ("mamba2", ("deq_params", "solver", "f_solver"), "anderson", lambda s: s.solve.solver == dq.Anderson(memory=6)),
    ("mamba2", ("deq_params", "solver", "eval_f_max_iter"), 0, lambda s: s.eval_solve.stop.max_steps == 600),
]


@pytest.mark.parametrize(("name", "path", "value", "holds"), HONOURED)
def test_a_field_is_honoured(name, path, value, holds):
    assert holds(from_reference_config(changed(name, *path, value=value)))


def test_feed_forward_layers_beside_a_mamba2_mixer():
    whole = config("mamba2")
    whole["backbone_config"] |= {"d_inner": 96, "mlp_type": "llama_mlp"}
    assert from_reference_config(whole).backbone.mlp_width == 64


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_fields_without_effect_have_none(name):
    whole, spec = config(name), from_reference_config(config(name))
    whole |= dict.fromkeys(NO_EFFECT, "anything")
    whole["backbone_config"] |= dict.fromkeys(BACKBONE_NO_EFFECT, "anything")
    assert from_reference_config(whole) == spec


def test_missing_fields_have_the_references_defaults():
    whole = config("llama")
    for field in (
        "backbone_type",
        "tie_embeddings",
        "pad_vocab",
        "pad_vocab_size_multiple",
        "head_bias",
        "weight_decay",
    ):
        del whole[field]
    for field in ("rms_norm", "dropout", "residual_in_fp32", "pretrain_steps", "pretrain_iter", "init_gain"):
        del whole["backbone_config"][field]
    assert from_reference_config(whole) == from_reference_config(config("llama"))


def backbone(field: str) -> tuple[str, str]:
    return ("backbone_config", field)


def layer(field: str) -> tuple[str, str, str]:
    return ("backbone_config", "block_cfg", field)


REFUSED = [
    ("mamba2", ("dropout",), "much", "finite number"),
    ("llama", ("head_bias",), True, "no bias"),
    ("llama", ("d_embed",), 16, "must be the backbone's d_model"),
    ("mamba2", ("vocab_size",), 50, "n_tokens, which is 48"),
    ("mamba2", ("n_tokens",), 4.5, "an integer >= 1"),
    ("llama", ("tie_embeddings",), "yes", "True or False"),
    ("llama", ("model_type",), "llama", "'implicit_llama3', 'implicit_mamba2'"),
    ("llama", ("backbone_type",), "explicitly", "did you mean 'explicit'"),
    ("llama", ("backbone_config",), None, "a mapping"),
    ("llama", backbone("block_type"), "mamba", "did you mean 'mamba2'"),
    ("llama", backbone("pre_norm"), False, "normalise their input"),
    ("llama", backbone("rms_norm"), False, "RMSNorm"),
    ("llama", backbone("mlp_type"), "gated_mlp", "'llama_mlp'"),
    ("llama", backbone("d_inner"), 0, "feed-forward layer"),
    ("llama", backbone("dropout"), 0.1, "attention weights"),
    ("llama", backbone("norm_epsilon"), 1e-6, "keeps 1e-5"),
    ("mamba2", backbone("norm_epsilon"), 1e-6, "keeps 1e-5"),
    ("mamba2", backbone("pretrain_steps"), 100, "Curriculum"),
    ("mamba2", backbone("ema_alpha"), 0.1, "noise"),
    ("mamba2", backbone("init_z_mode"), "random", "'input'"),
    ("mamba2", backbone("initializer_cfg"), {"rescale_prenorm_residual": False}, "initial weights"),
    ("llama", layer("bias"), True, "no bias"),
    ("llama", layer("apply_rotary"), False, "rotary positions"),
    ("mamba2", layer("bias"), True, "no bias"),
    ("mamba2", layer("conv_bias"), False, "has a bias"),
    ("mamba2", layer("d_ssm"), 32, "all of the inner channels"),
    ("mamba2", layer("D_has_hdim"), True, "one number per head"),
    ("mamba2", layer("allow_negative_A_EV"), True, "positive"),
    ("mamba2", layer("rmsnorm"), False, "normalises its output"),
    ("mamba2", layer("norm_before_gate"), True, "gates before"),
    ("mamba2", layer("process_group"), "all", "processes"),
    ("mamba2", layer("A_init_range"), [1, 8], "initial weights"),
    ("mamba2", layer("dt_max"), 1.0, "initial weights"),
    ("mamba2", layer("dt_limit"), "wide", "two numbers"),
]


@pytest.mark.parametrize(("name", "path", "value", "reason"), REFUSED, ids=lambda part: str(part)[:40])
def test_what_has_no_equivalent_is_refused_with_a_reason(name, path, value, reason):
    where = "".join(f"{step}: " for step in path[:-1])
    message = f"{where}{path[-1]!r} cannot be {value!r} here: "
    with pytest.raises(ValueError, match=re.escape(message) + ".*" + re.escape(reason)):
        from_reference_config(changed(name, *path, value=value))


def test_torchdeq_refuses_what_it_cannot_honour():
    with pytest.raises(ValueError, match=r"'jac_loss_weight' cannot be 0\.1 here: .*jacobian_regularisation"):
        from_reference_config(changed("llama", "deq_params", "regularization", "jac_loss_weight", value=0.1))


UNKNOWN = [
    (("tie_embedding",), "'tie_embedding' is unknown; did you mean 'tie_embeddings'"),
    (backbone("n_layers"), "backbone_config: 'n_layers' is unknown; did you mean 'n_layer'"),
    (layer("headim"), "backbone_config: block_cfg: 'headim' is unknown; did you mean 'headdim'"),
    (layer("state_noise_db"), "backbone_config: block_cfg: 'state_noise_db' is unknown"),
    (("deq_params", "solvers"), "deq_params: 'solvers' is unknown; did you mean 'solver'"),
    (("deq_params", "solver", "f_toll"), "torchdeq key 'f_toll' is unknown; did you mean 'f_tol'"),
]


@pytest.mark.parametrize(("path", "message"), UNKNOWN)
def test_unknown_fields_are_refused(path, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_reference_config(changed("mamba2", *path, value=1))


@pytest.mark.parametrize("path", [("d_embed",), ("model_type",), backbone("n_layer"), backbone("pre_norm")])
def test_what_has_no_default_must_be_there(path):
    whole = copy.deepcopy(config("mamba2"))
    inner = whole if len(path) == 1 else whole[path[0]]
    del inner[path[-1]]
    message = "'d_embed' cannot be None here" if path == ("d_embed",) else f"{path[-1]!r} is missing"
    with pytest.raises(ValueError, match=message):
        from_reference_config(whole)


def test_the_references_default_drops_embedded_tokens():
    whole = config("mamba2")
    del whole["dropout"]
    assert from_reference_config(whole).embedding_dropout == 0.05


def test_an_implicit_model_needs_all_groups_of_its_solver():
    whole = config("mamba2")
    del whole["deq_params"]["norm"]
    with pytest.raises(ValueError, match=r"^reference configuration: deq_params: 'norm' is missing$"):
        from_reference_config(whole)
