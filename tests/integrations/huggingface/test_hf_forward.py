"""The call of every family: the core's numbers, padding, caches, and what is refused."""

from copy import copy

import pytest
import torch
from hf_models import EVERY, EXPLICIT, IDS, LEFT, close, made
from hf_runs import iterations
from transformers import DynamicCache

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitCache, from_causal_lm, to_causal_lm

CHOSEN = torch.tensor([5, 0])


class TestNumbers:
    @EVERY
    @torch.no_grad()
    def test_calls_are_those_of_the_core(self, kind):
        model = made(kind, tie_word_embeddings=False)
        lm = to_causal_lm(model)
        right = LEFT.flip(1)
        again = from_causal_lm(lm, eos_token_id=5)
        assert type(again) is type(model)
        assert again.config.eos_token_id == 5
        assert not again.training
        assert again.model.core == lm.model
        assert again.lm_head == lm.head
        how = {"sweep": dq.Chunked(3), "solver": dq.Relaxed(0.8), "stop": dq.Stop(rtol=0.1)}
        as_json = {**how, "sweep": {"name": "Chunked", "size": 3}}
        calls = [
            ({}, {}),
            ({"attention_mask": LEFT.long()}, {"mask": LEFT}),
            ({"attention_mask": right}, {"mask": right}),
        ]
        if kind not in EXPLICIT:
            calls += [({"solve": solve}, how) for solve in (how, dq.SolveConfig(**how), as_json)]
        for call, ours in calls:
            for one in (model, again):
                output = one(IDS, **call)
                expected = lm(IDS, **ours, return_cache=True)
                assert torch.equal(output.logits, expected.logits)
                assert iterations(output) == iterations(expected)
        assert (model(IDS).status is None) == (kind in EXPLICIT)

    @torch.no_grad()
    def test_failures_are_told(self):
        spent = made("mamba2")(IDS, solve={"stop": {"max_steps": 2}})
        assert spent.status.tolist() == [dq.Status.MAX_STEPS_REACHED] * 3
        assert spent.converged.tolist() == [False] * 3
        with pytest.raises(dq.ConvergenceError):
            spent.raise_if_failed()
        assert spent.explain().causes == ("budget",) * 3

    @pytest.mark.parametrize("kind", ["mamba2", "explicit"])
    @torch.no_grad()
    def test_other_forms_of_the_same_call(self, kind):
        model = made(kind)
        whole = model(IDS)
        embedded = model.get_input_embeddings()(IDS)
        ignored = {"token_type_ids": torch.zeros_like(IDS), "is_causal": True}
        nothing = {"cu_seq_lens_q": None, "seq_idx": None, "output_attentions": False}
        for same in (
            model(inputs_embeds=embedded).logits,
            model(IDS.to(torch.int32)).logits,
            model(IDS, return_dict=False)[0],
            model(IDS, **ignored, **nothing).logits,
        ):
            assert torch.equal(same, whole.logits)
        for positions, expected in ((2, whole.logits[:, -2:]), (CHOSEN, whole.logits[:, CHOSEN])):
            close(model(IDS, logits_to_keep=positions).logits, expected)
        states = model(IDS, output_hidden_states=True).hidden_states
        assert len(states) == 2
        assert torch.equal(states[0], embedded)
        assert torch.equal(model.lm_head(states[-1]), whole.logits)

    @EVERY
    @torch.no_grad()
    def test_rows_are_taken_of_outputs_caches_and_solves(self, kind):
        model, order = made(kind), torch.tensor([2, 0])
        output = model(IDS, use_cache=True, labels=IDS)
        taken = dq.take(output, order)
        assert type(taken) is type(output)
        assert taken.loss is None
        assert torch.equal(taken.logits, output.logits[order])
        assert (taken.cache.batch_size, output.cache.batch_size) == (2, 3)
        next_ids = IDS[:, :1]
        expected = model(next_ids, cache=copy(output.cache)).logits[order]
        close(model(next_ids[order], cache=taken.cache).logits, expected)
        states = dq.take(model.model(IDS, use_cache=True), order)
        assert states.last_hidden_state.shape == (2, 7, 8)
        for one in (output, *output.cache.solves):
            steps, part = (x.stats and x.stats.iterations for x in (one, dq.take(one, order)))
            assert steps is part is None or torch.equal(part, steps[order])

    @torch.no_grad()
    def test_an_explicit_model_is_exported(self):
        model = made("explicit")
        exported = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False).module()
        assert torch.equal(exported(IDS, use_cache=False).logits, model(IDS).logits)


class TestCaches:
    @EVERY
    @torch.no_grad()
    def test_a_sequence_in_parts_is_the_sequence(self, kind):
        model = made(kind)
        cache = ImplicitCache()
        mask = LEFT.long()
        whole = model(IDS, attention_mask=mask).logits
        positions = (mask.cumsum(1) - 1).clamp(0)
        for new in (slice(6), slice(6, 7)):
            options = {"attention_mask": mask[:, : new.stop], "position_ids": positions[:, new]}
            output = model(IDS[:, new], cache=cache, **options)
            assert output.cache is cache
            close(output.logits, whole[:, new], 1e-6)
        assert cache.mask.tolist() == LEFT.tolist()
        assert cache.get_seq_length() == 7
        assert cache.batch_size == 3
        assert len(cache.solves) == (0 if kind in EXPLICIT else 2)

    @EVERY
    @torch.no_grad()
    def test_rows_of_a_cache_are_chosen_as_in_a_tensor(self, kind):
        model = made(kind)
        whole = model(IDS, attention_mask=LEFT.long()).logits
        cache = ImplicitCache()
        model(IDS[:, :6], attention_mask=LEFT[:, :6].long(), cache=cache)
        rows = torch.arange(3)
        for chosen in (torch.tensor([2, 0, 2]), [0, -1], torch.tensor([True, False])):
            cache.reorder_cache(chosen)
            rows = rows[chosen]
            cache.batch_repeat_interleave(2)
            rows = rows.repeat_interleave(2)[: 2 * len(rows)]
            cache.batch_select_indices(torch.arange(len(rows)) % 2 == 0)
            rows = rows[::2]
        assert cache.batch_size == 1
        assert cache.mask.tolist() == LEFT[rows][:, :6].tolist()
        close(model(IDS[rows, 6:], cache=cache).logits, whole[rows, 6:], 1e-6)

    def test_when_a_cache_is_made(self):
        model = made("llama")
        assert model(IDS).cache.get_seq_length() == 7
        assert model(IDS, use_cache=False).cache is None
        assert model.train()(IDS).cache is None
        cache = model.eval()(IDS[:, :4]).cache
        assert model(IDS[:, 4:], cache=cache, use_cache=False).cache is None
        cache.reset()
        assert repr(cache) == "ImplicitCache(batch_size=-1, length=0)"

    def test_a_cache_that_does_not_fit(self):
        model = made("mamba2")
        cache = model(IDS[:, :4], attention_mask=LEFT.flip(1)[:, :4].long()).cache
        for rows, call, message in (
            (2, {}, r"3 rows and the input has 2: .*batch_select_indices\(rows\)"),
            (3, {"attention_mask": torch.ones(3, 7)}, "attention_mask must mark the same padding"),
            (3, {"position_ids": torch.arange(3)[None]}, "position_ids must count"),
        ):
            with pytest.raises(ValueError, match=message):
                model(IDS[:rows, 4:], cache=cache, **call)
        assert cache.get_seq_length() == 4


FLAT = {"input_ids": None, "inputs_embeds": torch.zeros(8)}
SHIFTED = torch.tensor([[0, 1, 2, 5, 6, 7, 8]])


class TestRefusals:
    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            ({"input_ids": None}, ValueError, "either input_ids or inputs_embeds"),
            ({"inputs_embeds": torch.zeros(3, 7, 8)}, ValueError, "either input_ids or"),
            ({"input_ids": IDS[0]}, ValueError, r"input_ids must have shape \(batch, length\)"),
            (FLAT, ValueError, r"inputs_embeds must .*hidden_size\)"),
            ({"input_ids": IDS - 9}, ValueError, r"input_ids must lie in 0\.\.12"),
            ({"cache": DynamicCache()}, TypeError, "cache .* ImplicitCache"),
            ({"attention_mask": torch.ones(3, 6)}, ValueError, r"attention_mask .* shape \(3, 7\)"),
            ({"attention_mask": torch.ones(3, 1, 7, 7)}, ValueError, "masks between pairs"),
            ({"position_ids": SHIFTED}, ValueError, "position_ids .* leave them out"),
            ({"position_ids": torch.arange(7)}, ValueError, r"position_ids .* shape \(3, 7\)"),
            ({"output_attentions": True}, ValueError, "output_attentions is not available"),
            ({"past_key_values": DynamicCache()}, ValueError, "past_key_values .* call it cache"),
            ({"is_causal": False}, ValueError, "is_causal=False is not available"),
            ({"labels": IDS[:, 1:]}, ValueError, r"labels must have shape \(3, 7\)"),
            ({"labels": IDS - 9}, ValueError, r"labels .*must lie in 0\.\.12"),
            ({"shift_labels": IDS - 9}, ValueError, r"shift_labels .*must lie in 0\.\.12"),
            ({"labels": torch.full_like(IDS, -100)}, ValueError, "labels leave nothing to score"),
            ({"input_ids": IDS[:, :1], "labels": IDS[:, :1]}, ValueError, "nothing to score"),
            ({"labels": IDS, "logits_to_keep": 1}, ValueError, "leave out logits_to_keep"),
            ({"logits_to_keep": -1}, ValueError, "logits_to_keep must be an integer >= 0"),
            ({"atention_mask": LEFT}, TypeError, "'atention_mask'; did you mean 'attention_mask'"),
            ({"stop": dq.Stop()}, TypeError, r"'stop': write solve=\{\"stop\": ...\}"),
            ({"solve": {"swep": "Sequential"}}, ValueError, "field 'swep' .*did you mean 'sweep'"),
        ],
    )
    def test_bad_calls_are_named(self, call, error, message):
        with pytest.raises(error, match=message):
            made("mamba2")(**{"input_ids": IDS, **call})

    @pytest.mark.parametrize(
        "name",
        ["input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "shift_labels"],
    )
    def test_what_is_no_tensor_is_named(self, name):
        call = {"input_ids": None if name == "inputs_embeds" else IDS, name: [[1, 2]]}
        with pytest.raises(TypeError, match=rf"^{name} must be a Tensor or None, such as torch\."):
            made("llama")(**call)

    def test_an_explicit_model_has_nothing_to_solve(self):
        with pytest.raises(ValueError, match=r"^leave out solve: .* is explicit \(solve=None\)$"):
            made("explicit")(IDS, solve={"sweep": dq.Chunked(3)})


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("use_cache", lambda model: model(IDS, use_cache=3)),
        ("output_hidden_states", lambda model: model(IDS, output_hidden_states=[1])),
        ("logits_to_keep", lambda model: model(IDS, logits_to_keep=[1])),
        ("position_ids", lambda model: model(IDS, position_ids=torch.arange(7.0)[None])),
        ("inputs_embeds", lambda model: model(inputs_embeds=torch.ones(1, 2, 3))),
        ("input_ids", lambda model: model.generate(input_ids=IDS[0])),
        ("inputs", lambda model: model.generate("text")),
        ("max_new_tokens", lambda model: model.generate(IDS, max_new_tokens="3")),
        ("attention_mask", lambda model: model.generate(IDS, attention_mask=3)),
        ("beam_idx", lambda model: model(IDS, use_cache=True).cache.reorder_cache(None)),
        ("indices", lambda model: model(IDS, use_cache=True).cache.batch_select_indices([99])),
        ("repeats", lambda model: model(IDS, use_cache=True).cache.batch_repeat_interleave(0)),
        ("tokens_to_remove", lambda model: model(IDS, use_cache=True).cache.crop(None)),
        ("section", lambda model: model.config.section("solv")),
        ("decoder_config", lambda model: type(model.config)(decoder_config=3)),
        ("max_position_embeddings", lambda model: type(model.config)(max_position_embeddings=0)),
    ],
)
def test_what_transformers_or_torch_would_refuse_later(name, call):
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        call(made("llama"))
