"""What the call of every model of ours must give: inherited by one class a family."""

import copy

import pytest
import torch
from hf_models import COUNTS, IDS, LEFT, exactly
from transformers import DynamicCache

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitCache, from_causal_lm, to_causal_lm


def close(got, wanted, tolerance=1e-6):
    assert wanted.abs().max() > 0.1
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() < tolerance


class ForwardContract:
    # the core's numbers

    @torch.no_grad()
    def test_logits_are_those_of_the_core(self):
        model = self.model()
        output, wanted = model(IDS), to_causal_lm(model)(IDS)
        assert torch.equal(output.logits, wanted.logits)
        if not self.implicit:
            assert (output.stats, output.status) == (None, None)
            return
        assert torch.equal(output.stats.steps, wanted.stats.steps)
        assert output.stats.steps.shape == (3,)
        assert output.stats.residual.max() < 1e-9
        assert output.status.tolist() == [dq.Status.CONVERGED] * 3

    @torch.no_grad()
    def test_from_the_core_and_back(self):
        model = self.model(tie_word_embeddings=False)
        lm = to_causal_lm(model)
        assert lm.head is model.lm_head
        again = from_causal_lm(lm, eos_token_id=5)
        assert (type(again), again.config.eos_token_id, again.training) == (type(model), 5, False)
        assert again.model.core is lm.model
        assert torch.equal(again(IDS).logits, model(IDS).logits)

    @torch.no_grad()
    def test_solve_options(self):
        model, lm = self.model(), to_causal_lm(self.model())
        options = {"sweep": dq.Chunked(3), "solver": dq.Relaxed(0.8), "stop": dq.Stop(rtol=0.1)}
        if not self.implicit:
            message = f"this {type(model.model).__name__} is explicit (implicit=False) and solves nothing: leave out "
            with pytest.raises(ValueError, match=exactly(message + "sweep, solver, stop")):
                model(IDS, **options)
            return
        output = model(IDS, **options)
        assert torch.equal(output.logits, lm(IDS, **options).logits)
        assert output.stats.steps.shape == (3, 7)
        spent = model(IDS, stop=dq.Stop.exactly(2))
        assert spent.status.tolist() == [dq.Status.BUDGET_SPENT] * 3
        assert spent.stats.steps.tolist() == [2, 2, 2]

    @torch.no_grad()
    def test_other_forms_of_the_same_call(self):
        model = self.model()
        whole = model(IDS)
        embedded = model.get_input_embeddings()(IDS)
        assert torch.equal(model(inputs_embeds=embedded).logits, whole.logits)
        assert torch.equal(model(IDS.to(torch.int32)).logits, whole.logits)
        assert torch.equal(model(IDS, return_dict=False)[0], whole.logits)
        states = model(IDS, output_hidden_states=True).hidden_states
        assert torch.equal(states[0], embedded)
        assert torch.equal(model.lm_head(states[1]), whole.logits)

    @torch.no_grad()
    def test_logits_to_keep(self):
        model = self.model()
        whole = model(IDS).logits
        close(model(IDS, logits_to_keep=2).logits, whole[:, -2:])
        close(model(IDS, logits_to_keep=torch.tensor([5, 0])).logits, whole[:, [5, 0]])
        with pytest.raises(ValueError, match=exactly("logits_to_keep must be an integer >= 0 or positions, got -1")):
            model(IDS, logits_to_keep=-1)

    # padding

    @pytest.mark.parametrize("side", ["left", "right"])
    @torch.no_grad()
    def test_a_padded_row_is_the_row_alone(self, side):
        model = self.model()
        ids, real = (IDS, LEFT) if side == "left" else (IDS.flip(1), LEFT.flip(1))
        logits = model(ids.masked_fill(~real, 0), attention_mask=real.long()).logits
        assert logits[~real].abs().max() == 0
        for row, count in enumerate(COUNTS):
            alone = model(ids[row][real[row]][None]).logits[0]
            assert len(alone) == count
            close(logits[row][real[row]], alone)

    # caches

    @torch.no_grad()
    def test_a_sequence_in_parts_is_the_sequence(self):
        model, cache = self.model(), ImplicitCache()
        whole, parts = model(IDS).logits, []
        for part in IDS.split([3, 1, 3], dim=1):
            output = model(part, past_key_values=cache)
            assert output.past_key_values is cache
            parts.append(output.logits)
        close(torch.cat(parts, dim=1), whole)
        assert (cache.get_seq_length(), cache.batch_size) == (7, 3)
        assert len(cache.solves) == (3 if self.implicit else 0)

    @torch.no_grad()
    def test_a_padded_sequence_in_parts(self):
        model, cache, mask = self.model(), ImplicitCache(), LEFT.long()
        whole = model(IDS, attention_mask=mask).logits
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(IDS[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6], past_key_values=cache)
        last = model(IDS[:, 6:], attention_mask=mask, position_ids=positions[:, 6:], past_key_values=cache).logits
        close(last, whole[:, 6:])
        assert cache.real.tolist() == LEFT.tolist()

    @torch.no_grad()
    def test_a_prompt_that_several_continuations_share(self):
        model = self.model()
        prompt = model(IDS[:, :4]).past_key_values
        for copied, other in ((copy.copy, IDS), (copy.deepcopy, IDS.flip(0)), (copy.copy, IDS.flip(1))):
            got = model(other[:, 4:], past_key_values=copied(prompt)).logits
            close(got, model(torch.cat([IDS[:, :4], other[:, 4:]], dim=1)).logits[:, 4:])
        assert prompt.get_seq_length() == 4

    @torch.no_grad()
    def test_rows_of_a_cache(self):
        model, whole = self.model(), self.model()(IDS, attention_mask=LEFT.long()).logits
        cache = model(IDS[:, :6], attention_mask=LEFT[:, :6].long()).past_key_values
        rows = torch.tensor([2, 0, 2])
        cache.reorder_cache(rows)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1, 3, 4]))
        rows = rows.repeat_interleave(2)[[0, 1, 3, 4]]
        assert cache.batch_size == 4
        close(model(IDS[rows, 6:], past_key_values=cache).logits, whole[rows, 6:])

    def test_when_a_cache_is_made(self):
        model = self.model()
        assert model(IDS).past_key_values.get_seq_length() == 7
        assert model(IDS, use_cache=False).past_key_values is None
        assert model.train()(IDS).past_key_values is None
        cache = model.eval()(IDS[:, :4]).past_key_values
        assert model(IDS[:, 4:], past_key_values=cache, use_cache=False).past_key_values is None
        assert cache.get_seq_length() == 4
        cache.reset()
        assert repr(cache) == "ImplicitCache(batch_size=-1, length=0)"

    def test_tokens_cannot_be_taken_back(self):
        cache = self.model()(IDS).past_key_values
        cache.crop(0)
        assert cache.get_seq_length() == 7
        with pytest.raises(ValueError, match=r"^an ImplicitCache cannot be cropped, because"):
            cache.crop(-2)

    # what is refused

    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            ({}, ValueError, "give exactly one of input_ids and inputs_embeds"),
            ({"input_ids": IDS, "inputs_embeds": torch.zeros(3, 7, 8)}, ValueError, "give exactly one of input_ids and "
             "inputs_embeds"),
            ({"input_ids": IDS - 9}, ValueError, f"input_ids must lie in 0..12, got {IDS.min() - 9}..{IDS.max() - 9}"),
            ({"input_ids": IDS, "past_key_values": DynamicCache()}, TypeError, "past_key_values must be an "
             "ImplicitCache, got DynamicCache: leave it out, or give deqseq.integrations.huggingface.ImplicitCache()"),
            ({"input_ids": IDS, "attention_mask": torch.ones(3, 6)}, ValueError, "attention_mask must have shape "
             "(3, 7), for 0 tokens in the cache and 7 new ones, got (3, 6); masks between pairs of tokens are not "
             "supported"),
            ({"input_ids": IDS, "attention_mask": torch.ones(3, 1, 7, 7)}, ValueError, "attention_mask must have shape "
             "(3, 7), for 0 tokens in the cache and 7 new ones, got (3, 1, 7, 7); masks between pairs of tokens are "
             "not supported"),
            ({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}, ValueError, "position_ids must "
             "count the real tokens of a row from 0, those of the cache included, as the model does itself: leave them "
             "out (packed sequences and shifted positions are not supported)"),
            ({"input_ids": IDS, "position_ids": torch.arange(7)}, ValueError, "position_ids must have shape (batch, "
             "7), got (7,)"),
            ({"input_ids": IDS, "output_attentions": True}, ValueError, "output_attentions is not available: no "
             "attention weights are computed"),
            ({"input_ids": IDS, "labels": IDS[:, 1:]}, ValueError, "labels must have shape (3, 7), got (3, 6)"),
            ({"input_ids": IDS, "labels": IDS - 9}, ValueError, f"labels must lie in 0..12, got "
             f"{IDS[:, 1:].min() - 9}..{IDS[:, 1:].max() - 9}"),
            ({"input_ids": IDS, "labels": IDS, "logits_to_keep": 1}, ValueError, "labels need the logits of all "
             "positions: leave out logits_to_keep"),
        ],
    )  # fmt: skip
    def test_bad_calls_are_named(self, call, error, message):
        with pytest.raises(error, match=exactly(message)):
            self.model()(**call)

    def test_an_unknown_argument_is_not_swallowed(self):
        with pytest.raises(TypeError, match="atention_mask"):
            self.model()(IDS, atention_mask=LEFT)

    def test_a_cache_that_does_not_fit(self):
        model = self.model()
        cache = model(IDS[:, :4], attention_mask=LEFT.flip(1)[:, :4].long()).past_key_values
        message = (
            "the cache holds 3 rows and the input has 2: repeat the cache's rows with "
            "cache.batch_repeat_interleave(n), or choose some with cache.batch_select_indices(rows)"
        )
        with pytest.raises(ValueError, match=exactly(message)):
            model(IDS[:2, 4:], past_key_values=cache)
        message = "attention_mask has padding at other tokens of the cache than when they were computed"
        with pytest.raises(ValueError, match=exactly(message)):
            model(IDS[:, 4:], attention_mask=torch.ones(3, 7), past_key_values=cache)
        with pytest.raises(ValueError, match="position_ids must count"):
            model(IDS[:, 4:], position_ids=torch.arange(3)[None], past_key_values=cache)
        assert cache.get_seq_length() == 4
