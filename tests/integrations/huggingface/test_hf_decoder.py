"""Any transformers decoder as a backbone: over a table of families, transformers' numbers."""

import copy

import pytest
import torch
from hf_models import close
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import deqseq as dq
from deqseq.integrations.huggingface import (
    DecoderBackbone,
    DeqseqForCausalLM,
    from_causal_lm,
    from_decoder,
)
from deqseq.integrations.huggingface.decoder import FAMILIES
from deqseq.testing import BackboneContract

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 3}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2}
HEADS = {"head_dim": 8}
GEMMA = HEADS | MIXED | {"query_pre_attn_scalar": 8}
SHORT = {"num_hidden_layers": 2, "layer_types": MIXED["layer_types"][:2]}
OWN = {  # what a family needs besides
    **dict.fromkeys(("gemma", "glm", "glm4", "helium", "nemotron", "qwen3"), HEADS),
    **dict.fromkeys(("mistral", "phi3", "starcoder2"), WINDOW),
    "gemma2": GEMMA | {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5},
    "gemma3_text": GEMMA,
    "gpt_neox": {"num_key_value_heads": None},
    "llama": {"tie_word_embeddings": True},
    "ministral": HEADS | MIXED,
    "olmo3": MIXED,
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    "seed_oss": HEADS | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
IDS = torch.randint(3, 37, (3, 11), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([11, 6, 1])
EVERY = pytest.mark.parametrize("family", sorted(FAMILIES))
SOME = pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "mistral", "gpt_neox"])


def made(family, attention=None, **fields):
    """A small model of transformers with random weights, norms and biases too, in float64."""
    config = AutoConfig.for_model(family, **SIZES | OWN.get(family, {}) | fields)
    floats = [name for name, value in config.to_dict().items() if isinstance(value, float)]
    for name in floats:  # the tests would not see what multiplies nothing: set it in OWN
        assert getattr(config, name) != 1 or "rope" in name, name
    window = getattr(config, "sliding_window", None) or 0
    assert window < 11, "the tests have 11 tokens: set a shorter window in OWN"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.double().eval()


def same(ours, expected, tolerance=1e-10):
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


class TestFamilies:
    @EVERY
    @torch.no_grad()
    def test_logits_are_those_of_transformers_whole_and_in_parts(self, family):
        for attention in ("eager",) if family == "gemma2" else ("eager", "sdpa"):
            theirs = made(family, attention)
            parts = []
            cache = None
            lm = from_decoder(theirs)
            expected = theirs(IDS).logits
            same(lm(IDS).logits, expected)
            for ids in IDS.split([1, 3, 1, 6], dim=1):
                output = lm(ids, cache=cache, return_cache=True)
                parts = [*parts, output.logits]
                cache = output.cache
            same(torch.cat(parts, dim=1), expected, 1e-6)
        theirs.float()
        same(from_decoder(theirs)(IDS).logits, theirs(IDS).logits, 1e-5)

    @EVERY
    @pytest.mark.parametrize("side", ["left", "right"])
    @torch.no_grad()
    def test_a_padded_row_is_the_row_alone_and_so_is_its_continuation(self, family, side):
        lm = from_decoder(made(family))
        mask = torch.arange(11) < LENGTHS[:, None]
        if side == "left":
            mask = mask.flip(1)
        output = lm(IDS, mask=mask, return_cache=True)
        following = lm(IDS[:, :5], cache=output.cache)
        for row, own in enumerate(mask):
            expected = lm(torch.cat([IDS[row, own], IDS[row, :5]])[None]).logits[0]
            same(output.logits[row, own], expected[:-5], 1e-6)
            same(following.logits[row], expected[-5:], 1e-6)

    @EVERY
    def test_gradients_are_those_of_transformers(self, family):
        theirs = made(family).train()
        parameters = list(theirs.parameters())
        models = (from_decoder(theirs), theirs)
        both = [torch.autograd.grad(lm(IDS, labels=IDS).loss, parameters) for lm in models]
        for ours, expected in zip(*both, strict=True):
            assert expected.abs().max() > 0
            same(ours, expected, 1e-6)


class TestLayers:
    @torch.no_grad()
    def test_a_window_counts_real_tokens(self):
        """A continuation of unequal rows: the cache has gaps, which take no room in the window."""
        lm = from_decoder(made("mistral", sliding_window=4))
        mask = torch.arange(6) < torch.tensor([6, 2])[:, None]
        cache = None
        rows = [[], []]
        for part in range(3):
            ids = IDS[:2].roll(part, dims=1)[:, :6]
            output = lm(ids, mask=mask, cache=cache, return_cache=True)
            cache = output.cache
            for row in (0, 1):
                rows[row].append(ids[row, mask[row]])
        for row in (0, 1):
            expected = lm(torch.cat(rows[row])[None]).logits[0]
            same(output.logits[row, mask[row]], expected[-len(rows[row][-1]) :], 1e-6)

    @torch.no_grad()
    def test_bfloat16(self):
        theirs = made("gemma3_text").bfloat16()
        lm = from_decoder(theirs)
        assert torch.equal(lm(IDS).logits, theirs(IDS).logits)
        first = lm(IDS[:, :6], return_cache=True)
        assert first.cache.tensors()[0].dtype == torch.bfloat16
        close(lm(IDS[:, 6:], cache=first.cache).logits, theirs(IDS).logits[:, 6:], 0.1)

    @pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
    )
    @pytest.mark.parametrize(("family", "reentrant"), [("gemma3_text", False), ("gpt_neox", True)])
    def test_gradient_checkpointing_keeps_the_cache(self, family, reentrant):
        theirs = made(family).train()
        model = dq.ExplicitModel(DecoderBackbone(theirs))
        x = theirs.get_input_embeddings()(IDS).detach()

        def outcome():
            x.requires_grad_().grad = None
            first = model(x[:, :4], return_cache=True)
            second = model(x[:, 4:], cache=first.cache, return_cache=True)
            (first.value.square().sum() + second.value.square().sum()).backward()
            return x.grad, *second.cache.tensors()

        plain = outcome()
        theirs.gradient_checkpointing_enable({"use_reentrant": reentrant})
        same(outcome(), plain)

    @pytest.mark.slow
    @torch.no_grad()
    def test_compiled(self):
        model = dq.ExplicitModel(DecoderBackbone(made("gemma3_text", **SHORT)))
        x = torch.randn(2, 7, 32).double()
        expected = model(x).value
        model.compile(backend="eager")
        same(model(x).value, expected)
        first = model(x[:, :4], return_cache=True)
        same(model(x[:, 4:], cache=first.cache).value, expected[:, 4:], 1e-6)

    @SOME
    @torch.no_grad()
    def test_the_parts_of_a_model_are_the_model_and_so_is_one_iteration(self, family):
        theirs = made(family)
        caches = [None] * 3
        x = theirs.get_input_embeddings()(IDS)
        expected = theirs.base_model(IDS).last_hidden_state
        parts = [DecoderBackbone(theirs, slice(*ends), False) for ends in ((0, 1), (1, -1))]
        parts.append(DecoderBackbone(theirs, slice(3, None)))
        for z, value in zip(x.split(4, dim=1), expected.split(4, dim=1), strict=True):
            for i, part in enumerate(parts):
                output = dq.ExplicitModel(part)(z, cache=caches[i], return_cache=True)
                z, caches[i] = output.value, output.cache
            same(z, value, 1e-6)
        assert parts[1].layers[0] is theirs.base_model.layers[1]
        solve = dq.SolveConfig(stop=dq.Stop.exactly(1), start="input")
        once = dq.ImplicitModel(DecoderBackbone(theirs), solve)
        for sweep in (dq.Simultaneous(), dq.Chunked(4)):
            same(once(x, sweep=sweep).value, expected, 1e-6)

    def test_weights_are_shared_and_a_copy_has_its_own(self):
        theirs = made("llama")
        lm = from_decoder(theirs)
        assert {id(p) for p in lm.parameters()} == {id(p) for p in theirs.parameters()}
        assert lm.head is None
        assert not lm.training
        assert from_decoder(made("qwen3", tie_word_embeddings=False).train()).head is not None
        twin = copy.deepcopy(lm)
        expected = lm(IDS).logits
        nn.init.zeros_(theirs.model.norm.weight)
        assert torch.equal(twin(IDS).logits, expected)


@SOME
def test_a_converted_decoder_stops_and_samples_as_its_own_configuration_says(family, tmp_path):
    theirs = made(family)
    theirs.generation_config.eos_token_id = [2, 24]
    theirs.generation_config.repetition_penalty = 1.3
    ours = from_causal_lm(from_decoder(theirs))
    assert ours.config.max_position_embeddings == 64
    ours.save_pretrained(tmp_path)
    for model in (ours, DeqseqForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)):
        expected = theirs.generate(IDS, max_new_tokens=20, do_sample=False)
        assert torch.equal(model.generate(IDS, max_new_tokens=20, do_sample=False), expected)
        assert model.generation_config.eos_token_id == [2, 24]
        assert model.generation_config.cache_implementation is None
    chosen = from_causal_lm(from_decoder(theirs), eos_token_id=5)
    assert chosen.generation_config.eos_token_id == chosen.config.eos_token_id == 5
    assert chosen.generation_config.repetition_penalty == 1.3
    assert theirs.generation_config.eos_token_id == [2, 24]


class Driven(dq.Backbone):
    """Layers that their input drives, scaled so that they contract."""

    def __init__(self, layers):
        super().__init__()
        self.d_model = layers.d_model
        self.layers = layers
        # norms take a shift of all away
        self.register_buffer("scale", torch.linspace(0.5, 1.5, self.d_model))

    def prepare(self, x, cache=None, mask=None):
        return x, self.layers.prepare(x, cache, mask)

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        x, rotary = inputs
        value, aux = self.layers(self.scale * (x + z / 8), rotary, cache, need_aux=need_aux)
        return value / 8, aux

    def advance(self, cache, aux, tokens, counts=None):
        return self.layers.advance(cache, aux, tokens, counts)


def driven(family):
    """Of a family whose norms keep the dtype: others round to float32, which hides errors."""
    return Driven(DecoderBackbone(made(family, num_hidden_layers=1)))


class TestFullAttention(BackboneContract):
    backbone = driven("stablelm")


class TestSlidingWindow(BackboneContract):
    backbone = driven("starcoder2")


class TestRefusals:
    @pytest.mark.parametrize(
        ("family", "fields", "message"),
        [
            ("gpt2", {}, r"families arcee, .*got a GPT2LMHeadModel: .*see CONTRIBUTING\.md"),
            ("mixtral", {}, "got a MixtralForCausalLM: .*mixtures of experts are not run"),
            ("gpt_neox", {"attention_dropout": 0.1}, "no dropout.*'attention_dropout': 0.1.*from_"),
            ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ],
    )
    def test_a_model_that_does_not_fit_is_named_with_the_reason(self, family, fields, message):
        with pytest.raises(ValueError, match=message):
            DecoderBackbone(made(family, **fields))

    def test_what_was_changed_after_loading(self):
        model = made("llama")
        attention = model.model.layers[2].self_attn
        attention.q_proj = nn.Sequential(attention.q_proj, nn.Dropout(0.2))
        with pytest.raises(ValueError, match=r"'2\.self_attn\.q_proj\.1': 0\.2"):
            DecoderBackbone(model)
        assert len(DecoderBackbone(model, slice(2)).layers) == 2

    @pytest.mark.parametrize(
        "part", [slice(2, 2), slice(0, 5), slice(0, 4, 2), slice(3, 1), slice(-5, None)]
    )
    def test_a_slice_that_is_no_part_of_the_layers(self, part):
        with pytest.raises(ValueError, match="layers must be a contiguous part of the model's 4"):
            DecoderBackbone(made("llama"), part)

    def test_a_model_without_a_head(self):
        model = AutoModelForSequenceClassification.from_config(made("llama").config)
        for one in (model, model.model):
            with pytest.raises(ValueError, match="ForCausalLM"):
                from_decoder(one)

    @pytest.mark.parametrize(
        ("family", "longest", "rope"),
        [
            ("llama", 11, {"rope_type": "dynamic"}),
            ("phi3", 22, LONGROPE),
        ],
    )
    def test_frequencies_that_change_with_the_length(self, family, longest, rope):
        sizes = {"max_position_embeddings": longest, "original_max_position_embeddings": 11}
        theirs = made(family, rope_parameters={"rope_theta": 1e4, "factor": 2.0, **rope}, **sizes)
        lm = from_decoder(theirs)
        first = lm(IDS, return_cache=True)
        same(first.logits, theirs(IDS).logits)
        with pytest.raises(ValueError, match="at most 11 tokens, got 12"):
            lm(IDS[:, :1], cache=first.cache)

    def test_a_cache_of_another_model_and_a_map_without_an_input(self):
        lm, other = (from_decoder(made("llama", num_hidden_layers=n)) for n in (2, 3))
        with pytest.raises(ValueError, match="cache must be of this model"):
            lm(IDS, cache=other(IDS, return_cache=True).cache)
        with pytest.raises(ValueError, match="injection"):
            dq.ImplicitModel(DecoderBackbone(made("llama")))(torch.zeros(1, 3, 32).double())
