"""Pretrained Llama and Mamba2: explicit models compute the same, and it is the first iteration of
implicit ones.
"""

import json
import os
import re

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, embedded

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers

import deqseq as dq
from deqseq.integrations.foreign import FROM_INPUT, from_pretrained_model, from_state
from deqseq.integrations.foreign.engine import described
from deqseq.integrations.foreign.pretrained import PRETRAINED
from deqseq.layers import RotaryScaling, fold_weight_norm, with_weights

IDS = torch.randint(0, 50, (3, 21), generator=torch.Generator().manual_seed(0))
REAL = torch.arange(21) < torch.tensor([21, 15, 18])[:, None]
ONCE = dq.Stop.exactly(1)
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPE["original_max_position_embeddings"] = 16
SHARED = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}


def llama(**changes) -> transformers.PreTrainedModel:
    """In eval mode, with grouped heads and a head of its own unless told."""
    sizes = {
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SHARED, **sizes, **changes})
    ).eval()
    model.model.layers[0].mlp.gate_proj.weight.data[3] = (
        0  # to which weight normalisation gives a direction
    )
    return model


def mamba2(**changes) -> transformers.PreTrainedModel:
    """In eval mode, with two groups and a head of its own unless told."""
    sizes = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8}
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(**{**SHARED, **sizes, **changes})
    ).eval()
    with torch.no_grad():
        for (
            block
        ) in model.backbone.layers:  # at their initial values these would hide where they belong
            for part in (
                block.norm.weight,
                block.mixer.norm.weight,
                block.mixer.D,
                block.mixer.conv1d.bias,
            ):
                part.uniform_(0.5, 1.5)
    return model


BOTH = pytest.mark.parametrize("make", [llama, mamba2])
MODELS = pytest.mark.parametrize(
    "make",
    [
        llama,
        lambda: llama(rope_parameters=ROPE, tie_word_embeddings=True),
        lambda: llama(num_key_value_heads=4, head_dim=8),
        mamba2,
        lambda: mamba2(
            tie_word_embeddings=True, n_groups=1, conv_kernel=3, time_step_limit=(0.01, 0.5)
        ),
    ],
    ids=["Llama", "Llama 3.x, tied", "Llama, ungrouped", "Mamba2", "Mamba2, tied"],
)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal up to a fraction of the largest value, which is not small."""
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


class TestExplicit:
    @MODELS
    @pytest.mark.parametrize("side", ["left", "right"])
    @torch.no_grad()
    def test_logits_whole_and_padded(self, make, side):
        theirs = make()
        ours = from_pretrained_model(theirs, implicit=False).eval()
        assert isinstance(ours.model, dq.ExplicitModel)
        assert (ours.head is None) == theirs.config.tie_word_embeddings
        close(ours(IDS).logits, theirs(IDS).logits)
        mask = REAL.flip(1) if side == "left" else REAL
        got, expected = (
            ours(IDS, mask=mask).logits,
            theirs(IDS, **given(theirs, mask, 0, 21)).logits,
        )
        close(got[mask], expected[mask])
        assert got[~mask].abs().max() == 0

    @BOTH
    @torch.no_grad()
    def test_cached_decoding_of_a_padded_batch(self, make):
        theirs, mask = make(), REAL.flip(1)
        ours = from_pretrained_model(theirs, implicit=False).eval()
        mine = ours(IDS[:, :15], mask=mask[:, :15], return_cache=True)
        other = theirs(IDS[:, :15], use_cache=True, **given(theirs, mask, 0, 15))
        for t in range(15, 21):
            ids = IDS[:, t : t + 1]
            mine = ours(ids, cache=mine.cache, return_cache=True)
            other = theirs(ids, use_cache=True, cache=other.cache, **given(theirs, mask, t, t + 1))
            close(mine.logits[:, -1], other.logits[:, -1])

    @MODELS
    def test_gradients_and_those_of_one_unrolled_self_iteration(self, make):
        theirs = make()
        explicit = from_pretrained_model(theirs, implicit=False)
        solve = dq.SolveConfig(stop=ONCE, gradient=dq.Unrolled(), start="input")
        implicit = from_pretrained_model(theirs, implicit=True, solve=solve)
        fold_weight_norm(implicit)
        for model in (theirs, explicit, implicit):
            model(IDS, labels=IDS).loss.backward()
        expected = {
            name.partition(".")[2]: parameter.grad for name, parameter in theirs.named_parameters()
        }
        mine, checked = {name: parameter.grad for name, parameter in implicit.named_parameters()}, 0
        for name, parameter in explicit.named_parameters():
            assert (mine.pop(name) - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name
            other = expected.get(name.removeprefix("model.backbone."))
            if other is not None:
                assert (parameter.grad - other).norm() < 1e-4 * other.norm(), name
                checked += 1
        assert checked >= 19
        assert mine["model.backbone.injection.weight"].norm() > 1e-3
        assert mine["model.backbone.injection.bias"].norm() > 1e-3


def given(model, mask: torch.Tensor, start: int, stop: int) -> dict:
    """The mask as each of them takes it, and the positions that generate() would pass to a
    transformer.
    """
    if model.config.model_type == "mamba2":
        return {"attention_mask": mask[:, start:stop].long()}
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, start:stop]
    return {"attention_mask": mask[:, :stop].long(), "position_ids": positions}


class TestImplicit:
    @MODELS
    @torch.no_grad()
    def test_the_first_self_iteration_is_the_pretrained_model(self, make):
        theirs, mask = make(), REAL.flip(1)
        explicit = from_pretrained_model(theirs, implicit=False).eval()
        ours = from_pretrained_model(theirs, implicit=True).eval()
        assert ours.model.backbone.config.weight_norm
        assert with_weights(ours).model.backbone.injection.weight.abs().max() == 0
        for sweep in (
            dq.Simultaneous(),
            dq.Chunked(4),
            dq.Sequential(),
        ):  # not Sliding, whose later tokens are iterated while the first one is committed
            output = ours(IDS, sweep=sweep, stop=ONCE)
            assert (output.stats.iterations == 1).all()
            close(output.logits, theirs(IDS).logits)
            padded = ours(IDS, mask=mask, sweep=sweep, stop=ONCE).logits
            close(padded[mask], explicit(IDS, mask=mask).logits[mask])
        options = {"max_new_tokens": 6, "mask": mask}
        tokens = ours.generate(IDS, sweep=dq.Sequential(), stop=ONCE, **options).tokens
        assert torch.equal(tokens, explicit.generate(IDS, **options).tokens)

    @BOTH
    def test_the_injection_learns_in_the_default_setting(self, make):
        lm, losses = from_pretrained_model(make(), implicit=True), []
        assert (lm.model.solve.stop, lm.model.solve.gradient) == (
            dq.Stop(rtol=0.05, max_steps=4),
            dq.Phantom(steps=1),
        )
        optimizer = torch.optim.AdamW(lm.model.backbone.injection.parameters(), lr=0.01)
        for _ in range(20):
            losses.append(lm(IDS, labels=IDS).loss)
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0] - 0.1

    @pytest.mark.parametrize("make", [contractive_llama, contractive_mamba2])
    @pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Chunked(4), dq.Sliding(5)], ids=str)
    @pytest.mark.parametrize("gradient", [dq.Phantom(2), dq.OneStep(), dq.Implicit()], ids=str)
    def test_where_a_solve_converges_neither_value_nor_gradient_depends_on_its_start(
        self, make, sweep, gradient
    ):
        stop, mask, found = (
            dq.Stop(rtol=1e-11, max_steps=500),
            torch.arange(7) < torch.tensor([[7], [4]]),
            [],
        )
        for start in ("zero", "input"):
            model = dq.ImplicitModel(
                make(), dq.SolveConfig(stop=stop, gradient=gradient, start=start)
            )
            x, weights = embedded().requires_grad_(), torch.linspace(-1, 1, 8, dtype=torch.float64)
            output = model(x, mask=mask, sweep=sweep)
            assert (output.status == dq.Status.CONVERGED).all()
            found.append((output.value, torch.autograd.grad((output.value * weights).sum(), x)[0]))
        (value, grad), (same_value, same_grad) = found
        assert (same_value - value).abs().max() < 1e-8
        assert grad.norm() > 0.1
        assert (same_grad - grad).norm() < 1e-6 * grad.norm()


class TestWeights:
    def test_they_are_copies_and_keep_their_dtype(self):
        theirs = mamba2().to(torch.bfloat16)
        lm = from_pretrained_model(theirs, implicit=True)
        assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}
        assert all(parameter.requires_grad for parameter in lm.parameters())
        explicit = from_pretrained_model(theirs, implicit=False)
        places = [
            {x.data_ptr() for x in model.state_dict().values()} for model in (theirs, explicit)
        ]
        assert not places[0] & places[1]
        lm = from_pretrained_model(explicit, implicit=True)
        assert not places[1] & {parameter.data_ptr() for parameter in lm.parameters()}

    @pytest.mark.parametrize("tied", [True, False])
    @torch.no_grad()
    def test_the_original_mamba2(self, tied):
        """Weights by mamba_ssm's names, and a padded vocabulary of 64."""
        theirs = mamba2(vocab_size=64, tie_word_embeddings=tied)
        weights = {
            name.replace("embeddings.", "embedding."): tensor
            for name, tensor in theirs.state_dict().items()
        }
        ssm = {"layer": "Mamba2", "d_state": 8, "headdim": 16, "ngroups": 2, "chunk_size": 8}
        config = {
            "d_model": 32,
            "d_intermediate": 0,
            "n_layer": 2,
            "vocab_size": 50,
            "ssm_cfg": ssm,
        }
        config |= {"attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True}
        config |= {"fused_add_norm": True, "pad_vocab_size_multiple": 16, "tie_embeddings": tied}
        expected = theirs(IDS).logits
        assert expected.shape == (3, 21, 64)
        explicit = from_state(config, weights)
        close(explicit(IDS).logits, expected)
        close(
            from_pretrained_model(explicit, implicit=True).eval()(IDS, stop=ONCE).logits, expected
        )


def pretrained_spec(config):
    return described(config, {}, PRETRAINED)[0]


class TestConfigurations:
    @MODELS
    def test_they_may_leave_default_values_out(self, make, tmp_path):
        config = make().config
        config.save_pretrained(tmp_path)
        content = json.loads((tmp_path / "config.json").read_text())
        assert pretrained_spec(content) == pretrained_spec(config.to_dict())

    def test_a_llama_file_of_older_transformers(self):
        new = llama(rope_parameters=ROPE).config.to_dict()
        rope = new.pop("rope_parameters")
        old = {**new, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        assert pretrained_spec(old) == pretrained_spec(new | {"rope_parameters": ROPE})
        assert pretrained_spec(old).backbone.rope_scaling == RotaryScaling(8.0, 1.0, 4.0, 16)
        oldest = pretrained_spec({**old, "rope_scaling": None}).backbone
        assert (oldest.rope_theta, oldest.rope_scaling) == (5000.0, None)
        theirs = llama()
        frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
        from_state(old | {"rope_scaling": None}, theirs.state_dict() | frequencies)

    def test_the_original_mamba2s_defaults(self):
        spec = pretrained_spec(
            {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}}
        )
        sizes = {
            "d_model": 768,
            "n_layers": 24,
            "d_state": 128,
            "headdim": 64,
            "expand": 2,
            "n_groups": 1,
            "d_conv": 4,
        }
        explicit = dq.Mamba2Config(**sizes, norm_eps=1e-5, weight_norm=False, injection=False)
        assert spec == dq.LanguageModelSpec(50280, explicit, solve=None, tied=True)


MODEL = llama()
STATE, CONFIG = MODEL.state_dict(), MODEL.config
BIASED = {name: tensor for name, tensor in STATE.items() if name != "lm_head.weight"}
BIASED["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
SPOILED = STATE | {"lm_head.weight": STATE["lm_head.weight"] * torch.nan}
UNLIKE = (
    r"Missing key.*\"head\.weight\"(.|\n)*Unexpected "
    r"key.*\"model\.layers\.0\.self_attn\.q_proj\.bias\""
)
BAD_CALLS = [
    (MODEL, {"implicit": False, "solve": FROM_INPUT}, "^leave out solve, or give implicit"),
    (MODEL, {"solve": dq.SolveConfig()}, r"^solve\.start must be 'input'"),
    (torch.nn.Linear(1, 1), {}, "model must be a transformers model, got Linear"),
    (CONFIG, {}, "model must be a Module"),
]


@pytest.mark.parametrize(("model", "arguments", "message"), BAD_CALLS)
def test_arguments_that_cannot_be_honoured_are_named(model, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        from_pretrained_model(model, **{"implicit": True, **arguments})


UNTYPED = STATE | {"lm_head.weight": 1.0}
BAD_STATES = [
    (BIASED, UNLIKE),
    (SPOILED, r"NaN or infinity in head\.weight$"),
    (
        STATE | {"lm_head.weight": STATE["lm_head.weight"].to("meta")},
        r"^state\['lm_head\.weight'\] .*meta device",
    ),
    ({1: torch.ones(2)}, "^a name in state must be a str"),
    (UNTYPED, r"^state\['lm_head\.weight'\] must be a Tensor, got 1"),
]


@pytest.mark.parametrize(("state", "message"), BAD_STATES)
def test_a_state_that_does_not_fit_is_refused(state, message):
    with pytest.raises((TypeError, ValueError), match=message):
        from_state(CONFIG.to_dict(), state)


def test_a_backbone_of_transformers_is_refused():
    for model in (dq.ImplicitModel, dq.ExplicitModel):
        with pytest.raises(TypeError, match=r"backbone must be a Backbone, got LlamaForCausalLM"):
            model(MODEL)


LLAMA, MAMBA2, SSM = {"model_type": "llama"}, {"model_type": "mamba2"}, {"layer": "Mamba2"}
REFUSED = [
    (
        LLAMA | {"attention_bias": True},
        "'attention_bias' must be False, got True: deqseq computes nothing else",
    ),
    (LLAMA | {"hidden_act": "gelu"}, "'hidden_act' must be 'silu' or 'swish', got 'gelu'"),
    (LLAMA | {"attention_dropout": 0.1}, "'attention_dropout' must be 0 or None, got 0.1"),
    (
        LLAMA | {"quantization_config": {"bits": 4}},
        "'quantization_config' must be None, got {'bits': 4}",
    ),
    (
        LLAMA | {"hidden_size": "wide"},
        "llama configuration: 'hidden_size' must be an integer >= 1, got 'wide'",
    ),
    (
        LLAMA | {"rope_scaling": {"type": "linear"}},
        "'type' must be 'default' or 'llama3', got 'linear'",
    ),
    (
        LLAMA | {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "'low_freq_factor' is missing",
    ),
    (
        LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "parameters: 'partial_rotary_factor' must be 1 or",
    ),
    (MAMBA2 | {"use_bias": True}, "'use_bias' must be False, got True"),
    (MAMBA2 | {"use_conv_bias": False}, "'use_conv_bias' must be True, got False"),
    (MAMBA2 | {"num_heads": 64}, "'num_heads' must be 128, got 64"),
    ({"ssm_cfg": {}}, "'layer' must be 'Mamba2', got 'Mamba1' (the default)"),
    ({"ssm_cfg": SSM | {"d_ssm": 64}}, "'d_ssm' must be None or 5120, got 64"),
    ({"ssm_cfg": SSM | {"ngroup": 2}}, "ssm_cfg: 'ngroup' is unknown; did you mean 'ngroups'"),
    ({"ssm_cfg": SSM, "attn_layer_idx": [3]}, "'attn_layer_idx' must be [] or (), got [3]"),
    ({"ssm_cfg": SSM, "d_intermediate": 8}, "'d_intermediate' must be 0, got 8"),
    ({"ssm_cfg": SSM, "n_layers": 4}, "'n_layers' is unknown; did you mean 'n_layer'"),
    ({"model_type": "mistral"}, "'model_type' must be 'llama' or 'mamba2' or"),
    ("config.json", "config must be a Mapping"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda part: str(part)[:50])
def test_what_the_layers_do_not_compute_is_refused(config, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        from_state(config, {})
