"""What the call of every model of ours must give: inherited by one class a family."""

import copy

import pytest
import torch
from hf_models import COUNTS, IDS, LEFT
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
        assert torch.equal(output.stats.iterations, wanted.stats.iterations)
        assert output.stats.iterations.shape == (3, 7)
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
            with pytest.raises(ValueError, match=r"^leave out solve: this .* is explicit \(implicit=False\)$"):
                model(IDS, solve=options)
            return
        output, wanted = model(IDS, solve=options), lm(IDS, **options, return_cache=True)
        assert torch.equal(output.logits, wanted.logits)
        assert output.stats.iterations.shape == (3, 7)
        for same in (dq.SolveConfig(**options), {**options, "sweep": {"name": "Chunked", "size": 3}}):
            assert torch.equal(model(IDS, solve=same).logits, wanted.logits)

    @torch.no_grad()
    def test_fields_that_solve_leaves_out_stay_and_failures_are_told(self):
        if not self.implicit:
            return
        model = self.model()
        spent = model(IDS, solve={"stop": {"max_steps": 2}})
        assert spent.status.tolist() == [dq.Status.MAX_STEPS_REACHED] * 3
        assert spent.converged.tolist() == [False] * 3
        assert spent.stats.iterations.tolist() == [[2] * 7] * 3
        with pytest.raises(dq.ConvergenceError):
            spent.raise_if_failed()
        assert spent.explain().causes == ("budget",) * 3
        assert model(IDS, solve={"sweep": "Sequential"}).stats.residual.max() < 1e-9
        with pytest.raises(ValueError, match=r"solve: SolveConfig field 'swep' .*did you mean 'sweep'"):
            model(IDS, solve={"swep": "Sequential"})

    @torch.no_grad()
    def test_eval_solve_is_used_in_eval_mode(self):
        if not self.implicit:
            return
        model = self.model(eval_solve={"stop": dq.Stop.exactly(3), "sweep": {"name": "Chunked", "size": 4}})
        assert model(IDS).stats.iterations.tolist() == [[3] * 7] * 3
        assert model(IDS, solve={"sweep": "Simultaneous"}).stats.iterations.tolist() == [[3] * 7] * 3
        assert model.train()(IDS).stats.residual.max() < 1e-9

    @torch.no_grad()
    def test_other_forms_of_the_same_call(self):
        model = self.model()
        whole = model(IDS)
        embedded = model.get_input_embeddings()(IDS)
        assert torch.equal(model(inputs_embeds=embedded).logits, whole.logits)
        assert torch.equal(model(IDS.to(torch.int32)).logits, whole.logits)
        assert torch.equal(model(IDS, return_dict=False)[0], whole.logits)
        states = model(IDS, output_hidden_states=True).hidden_states
        assert len(states) == (2 if self.implicit else self.layers + 1)
        assert torch.equal(states[0], embedded)
        assert torch.equal(model.lm_head(states[-1]), whole.logits)

    @torch.no_grad()
    def test_hidden_states_of_padded_rows_of_an_explicit_model(self):
        if self.implicit:
            return
        model, first = self.model(), self.model(num_hidden_layers=1)
        first.load_state_dict(model.state_dict(), strict=False)
        between = model(IDS, attention_mask=LEFT.long(), output_hidden_states=True).hidden_states[1]
        norm = list(first.model.core.backbone.children())[1]
        close(norm(between)[LEFT], first.model(IDS, attention_mask=LEFT.long()).last_hidden_state[LEFT])

    @torch.no_grad()
    def test_what_transformers_passes_to_every_model(self):
        model = self.model()
        ignored = {"token_type_ids": torch.zeros_like(IDS), "output_router_logits": False, "is_causal": True}
        nothing = {"cu_seq_lens_q": None, "seq_idx": None, "output_attentions": False}
        assert torch.equal(model(IDS, **ignored, **nothing).logits, model(IDS).logits)

    @torch.no_grad()
    def test_an_explicit_model_is_exported(self):
        if self.implicit:
            return
        model = self.model()
        exported = torch.export.export(model, (IDS,), {"use_cache": False}, strict=False).module()
        assert torch.equal(exported(IDS, use_cache=False).logits, model(IDS).logits)

    @torch.no_grad()
    def test_logits_to_keep(self):
        model = self.model()
        whole = model(IDS).logits
        close(model(IDS, logits_to_keep=2).logits, whole[:, -2:])
        close(model(IDS, logits_to_keep=torch.tensor([5, 0])).logits, whole[:, [5, 0]])
        with pytest.raises(ValueError, match="logits_to_keep must be an integer >= 0"):
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
            output = model(part, cache=cache)
            assert output.cache is cache
            parts.append(output.logits)
        close(torch.cat(parts, dim=1), whole)
        assert (cache.get_seq_length(), cache.batch_size) == (7, 3)
        assert len(cache.solves) == (3 if self.implicit else 0)

    @torch.no_grad()
    def test_a_padded_sequence_in_parts(self):
        model, cache, mask = self.model(), ImplicitCache(), LEFT.long()
        whole = model(IDS, attention_mask=mask).logits
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(IDS[:, :6], attention_mask=mask[:, :6], position_ids=positions[:, :6], cache=cache)
        last = model(IDS[:, 6:], attention_mask=mask, position_ids=positions[:, 6:], cache=cache).logits
        close(last, whole[:, 6:])
        assert cache.mask.tolist() == LEFT.tolist()

    @torch.no_grad()
    def test_a_prompt_that_several_continuations_share(self):
        model = self.model()
        prompt = model(IDS[:, :4]).cache
        for copied, other in ((copy.copy, IDS), (copy.deepcopy, IDS.flip(0)), (copy.copy, IDS.flip(1))):
            got = model(other[:, 4:], cache=copied(prompt)).logits
            close(got, model(torch.cat([IDS[:, :4], other[:, 4:]], dim=1)).logits[:, 4:])
        assert prompt.get_seq_length() == 4

    @torch.no_grad()
    def test_rows_of_a_cache(self):
        model, whole = self.model(), self.model()(IDS, attention_mask=LEFT.long()).logits
        cache = model(IDS[:, :6], attention_mask=LEFT[:, :6].long()).cache
        rows = torch.tensor([2, 0, 2])
        cache.reorder_cache(rows)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 1, 3, 4]))
        rows = rows.repeat_interleave(2)[[0, 1, 3, 4]]
        assert cache.batch_size == 4
        close(model(IDS[rows, 6:], cache=cache).logits, whole[rows, 6:])

    @pytest.mark.parametrize("rows", [[2, 0], torch.tensor([True, False, True]), [-1]], ids=str)
    def test_rows_are_chosen_as_in_a_tensor(self, rows):
        cache = self.model()(IDS, attention_mask=LEFT.long()).cache
        cache.batch_select_indices(rows)
        assert cache.mask.tolist() == LEFT[rows].tolist()
        assert cache.batch_size == len(LEFT[rows])

    def test_when_a_cache_is_made(self):
        model = self.model()
        assert model(IDS).cache.get_seq_length() == 7
        assert model(IDS, use_cache=False).cache is None
        assert model.train()(IDS).cache is None
        cache = model.eval()(IDS[:, :4]).cache
        assert model(IDS[:, 4:], cache=cache, use_cache=False).cache is None
        assert cache.get_seq_length() == 4
        cache.reset()
        assert repr(cache) == "ImplicitCache(batch_size=-1, length=0)"

    def test_tokens_cannot_be_taken_back(self):
        cache = self.model()(IDS).cache
        cache.crop(0)
        assert cache.get_seq_length() == 7
        with pytest.raises(ValueError, match=r"cannot be cropped: .*copy\.copy\(cache\)"):
            cache.crop(-2)

    # what is refused

    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            ({}, ValueError, "either input_ids or inputs_embeds"),
            ({"input_ids": IDS, "inputs_embeds": torch.zeros(3, 7, 8)}, ValueError, "either input_ids or"),
            ({"input_ids": IDS[0]}, ValueError, r"input_ids must have shape \(batch, length\)"),
            ({"inputs_embeds": torch.zeros(8)}, ValueError, r"inputs_embeds must .* \(batch, length, hidden_size\)"),
            ({"input_ids": IDS - 9}, ValueError, r"input_ids must lie in 0\.\.12"),
            ({"input_ids": IDS, "cache": DynamicCache()}, TypeError, "cache .* ImplicitCache"),
            ({"input_ids": IDS, "attention_mask": torch.ones(3, 6)}, ValueError, r"attention_mask .* shape \(3, 7\)"),
            ({"input_ids": IDS, "attention_mask": torch.ones(3, 1, 7, 7)}, ValueError, "masks between pairs"),
            ({"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}, ValueError, "position_ids .* "
             "leave them out"),
            ({"input_ids": IDS, "position_ids": torch.arange(7)}, ValueError, r"position_ids .* shape \(3, 7\)"),
            ({"input_ids": IDS, "position_ids": torch.arange(7).expand(2, 7)}, ValueError, r"shape \(3, 7\)"),
            ({"input_ids": IDS, "output_attentions": True}, ValueError, "output_attentions is not available"),
            ({"input_ids": IDS, "past_key_values": DynamicCache()}, ValueError, "past_key_values .* call it cache"),
            ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 3, 7])}, ValueError, "cu_seq_lens_q is not "
             "available: packed sequences .* pad the rows"),
            ({"input_ids": IDS, "is_causal": False}, ValueError, "is_causal=False is not available"),
            ({"input_ids": IDS, "labels": IDS[:, 1:]}, ValueError, r"labels must have shape \(3, 7\)"),
            ({"input_ids": IDS, "labels": IDS - 9}, ValueError, r"labels must lie in 0\.\.12"),
            ({"input_ids": IDS, "shift_labels": IDS - 9}, ValueError, r"shift_labels must lie in 0\.\.12"),
            ({"input_ids": IDS, "labels": torch.full_like(IDS, -100)}, ValueError, "labels leave nothing to score"),
            ({"input_ids": IDS[:, :1], "labels": IDS[:, :1]}, ValueError, "labels leave nothing to score"),
            ({"input_ids": IDS, "labels": IDS, "logits_to_keep": 1}, ValueError, "leave out logits_to_keep"),
        ],
    )  # fmt: skip
    def test_bad_calls_are_named(self, call, error, message):
        with pytest.raises(error, match=message):
            self.model()(**call)

    @pytest.mark.usefixtures("unchecked")
    @pytest.mark.parametrize(
        "name", ["input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "shift_labels"]
    )
    def test_what_is_no_tensor_is_named(self, name):
        model, call = self.model(), {} if name == "inputs_embeds" else {"input_ids": IDS}
        with pytest.raises(TypeError, match=rf"^{name} must be a Tensor or None, such as torch\.tensor"):
            model(**call | {name: [[1, 2]]})
        if name not in ("labels", "shift_labels"):
            with pytest.raises(TypeError, match=rf"^{name} must be a Tensor"):
                model.model(**call | {name: [[1, 2]]})

    def test_an_unknown_argument_is_not_swallowed(self):
        with pytest.raises(TypeError, match="'atention_mask'; did you mean 'attention_mask'"):
            self.model()(IDS, atention_mask=LEFT)

    def test_a_cache_that_does_not_fit(self):
        model = self.model()
        cache = model(IDS[:, :4], attention_mask=LEFT.flip(1)[:, :4].long()).cache
        with pytest.raises(ValueError, match=r"3 rows and the input has 2: .*batch_select_indices\(rows\)"):
            model(IDS[:2, 4:], cache=cache)
        with pytest.raises(ValueError, match="attention_mask must mark the same padding"):
            model(IDS[:, 4:], attention_mask=torch.ones(3, 7), cache=cache)
        with pytest.raises(ValueError, match="position_ids must count"):
            model(IDS[:, 4:], position_ids=torch.arange(3)[None], cache=cache)
        assert cache.get_seq_length() == 4
