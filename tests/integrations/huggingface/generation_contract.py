"""What ``generate`` of every model of ours must do: inherited by one class a family."""

import warnings

import pytest
import torch
from hf_models import COUNTS, IDS, LEFT
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast, set_seed

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitCache, to_causal_lm

GREEDY = {"max_new_tokens": 4, "do_sample": False}


class GenerationContract:
    # which tokens

    def test_greedy(self):
        model = self.model()
        tokens = model.generate(IDS, **GREEDY)
        assert torch.equal(tokens[:, :7], IDS)
        assert torch.equal(tokens[:, 7:], to_causal_lm(model).generate(IDS, max_new_tokens=4).tokens)
        assert torch.equal(tokens, model.generate(IDS, use_cache=False, **GREEDY))
        assert len(tokens[:, 7:].unique()) > 2

    def test_sampling(self):
        model, draws = self.model(), []
        options = {"max_new_tokens": 4, "do_sample": True, "top_k": 9, "temperature": 2.0, "num_return_sequences": 2}
        for seed, use_cache in ((1, True), (1, False), (2, True)):
            set_seed(seed)
            draws.append(model.generate(IDS, use_cache=use_cache, **options))
        assert draws[0].shape == (6, 11)
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        assert len(draws[0].unique(dim=0)) > 3
        sharp = model.generate(IDS, max_new_tokens=4, do_sample=True, top_k=1)
        assert torch.equal(sharp, model.generate(IDS, **GREEDY))

    @torch.no_grad()
    def test_beams_that_hold_everything_find_the_best_continuation(self):
        model = self.model()
        best = model.generate(IDS, max_new_tokens=2, num_beams=13, do_sample=False)
        for row, found in zip(IDS, best, strict=True):
            pairs = torch.cartesian_prod(torch.arange(13), torch.arange(13))
            every = torch.cat([row.expand(169, -1), pairs], dim=1)
            scores = model(every[:, :-1]).logits[:, -2:].log_softmax(-1).gather(2, pairs[..., None]).sum(1)[:, 0]
            assert torch.equal(every[scores.argmax()], found)

    def test_beams_with_a_cache_are_beams_without(self):
        model = self.model()
        options = {"num_beams": 4, "num_return_sequences": 3, **GREEDY}
        beams = model.generate(IDS, **options)
        assert beams.shape == (9, 11)
        assert torch.equal(beams, model.generate(IDS, use_cache=False, **options))
        assert len(beams.unique(dim=0)) == 9

    @pytest.mark.parametrize("beams", [1, 2])
    def test_left_padded_rows_are_the_rows_alone(self, beams):
        model = self.model()
        options = {"num_beams": beams, **GREEDY}
        together = model.generate(IDS.masked_fill(~LEFT, 0), attention_mask=LEFT.long(), pad_token_id=0, **options)
        for row, count in enumerate(COUNTS[:2]):
            alone = model.generate(IDS[row : row + 1, 7 - count :], **options)
            assert torch.equal(together[row, 7 - count :], alone[0])

    def test_rows_that_end(self):
        model = self.model()
        free = model.generate(IDS, **GREEDY)
        end = free[0, 8].item()
        ended = model.generate(IDS, eos_token_id=end, pad_token_id=0, **GREEDY)
        for row, whole in zip(ended.tolist(), free.tolist(), strict=True):
            place = whole.index(end, 7) + 1 if end in whole[7:] else len(whole)
            assert row[:place] == whole[: min(place, len(row))]
            assert not any(row[place:])

    def test_embedded_prompts(self):
        model = self.model()
        embedded = model.get_input_embeddings()(IDS)
        assert torch.equal(model.generate(inputs_embeds=embedded, **GREEDY), model.generate(IDS, **GREEDY)[:, 7:])

    def test_a_prompt_in_parts(self):
        model = self.model(num_hidden_layers=2)
        mask = torch.arange(7) >= torch.tensor([0, 2, 1])[:, None]
        options = {"attention_mask": mask.long(), **GREEDY}
        whole = model.generate(IDS, **options)
        assert torch.equal(model.generate(IDS, prefill_chunk_size=3, **options), whole)
        padded = {"attention_mask": LEFT.long(), **GREEDY}  # more padding than one part has tokens
        assert torch.equal(model.generate(IDS, prefill_chunk_size=3, **padded), model.generate(IDS, **padded))
        cache = model(IDS[:, :4], attention_mask=mask[:, :4].long()).cache
        assert torch.equal(model.generate(IDS, cache=cache, **options), whole)
        assert cache.get_seq_length() == 10

    def test_strings_that_end_a_row(self):
        words = Tokenizer(WordLevel({"abcdef": 0} | {f"w{i}": i for i in range(1, 13)}, unk_token="abcdef"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        model = self.model()
        free = model.generate(IDS[:1], **GREEDY)
        end = free[0, 8].item()
        ended = model.generate(IDS[:1], stop_strings=[f"w{end}"], tokenizer=tokenizer, **GREEDY)
        assert ended[0].tolist() == free[0, : free[0].tolist().index(end, 7) + 1].tolist()

    # how it is solved

    def test_solves_that_do_not_converge_are_told_once(self):
        if not self.implicit:
            return
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.model().generate(IDS, solve={"stop": {"max_steps": 2}}, **GREEDY)
        assert [each.category for each in told] == [dq.ConvergenceWarning]
        assert "3 of 3 rows spent the budget of 2 iterations" in str(told[0].message)

    def test_a_misspelt_solve_of_a_generation_configuration_is_refused(self):
        config = GenerationConfig(solves={"stop": {"max_steps": 2}}, **GREEDY)
        with pytest.raises(ValueError, match=r"'solves'.*'solve'"):
            self.model().generate(IDS, generation_config=config)

    def test_how_prompts_and_tokens_are_solved(self):
        output = self.model().generate(IDS, return_dict_in_generate=True, **GREEDY)
        solves = output.cache.solves
        if not self.implicit:
            assert solves == ()
            return
        assert [solve.stats.iterations.shape for solve in solves] == [(3, 7)] + [(3, 1)] * 3
        assert not any(solve.stats.forced.any() for solve in solves)
        assert all(solve.status.tolist() == [dq.Status.CONVERGED] * 3 for solve in solves)

    def test_a_generation_configuration_chooses_sweep_solver_and_budget(self):
        if not self.implicit:
            return
        model = self.model()
        solve = {
            "sweep": {"name": "Sequential"},
            "solver": {"name": "Relaxed", "damping": 0.5},
            "stop": {"max_steps": 3},
        }
        written = GenerationConfig(return_dict_in_generate=True, solve=solve, **GREEDY)
        kept = self.model()
        kept.generation_config.solve = solve
        objects = dq.SolveConfig(dq.Relaxed(0.5), dq.Stop(rtol=1e-9, max_steps=3), sweep=dq.Sequential())
        options = {"return_dict_in_generate": True, **GREEDY}
        outputs = [
            model.generate(IDS, generation_config=written),
            model.generate(IDS, solve=solve, **options),
            kept.generate(IDS, **options),
            model.generate(IDS, solve=objects, **options),
        ]
        for output in outputs:
            assert torch.equal(output.sequences, outputs[0].sequences)
            counts = [solve.stats.iterations for solve in output.cache.solves]
            assert [(each.shape, each.unique().tolist()) for each in counts] == [((3, 7), [3])] + [((3, 1), [3])] * 3
        residual = outputs[0].cache.solves[-1].stats.residual
        assert torch.equal(outputs[3].cache.solves[-1].stats.residual, residual)
        longer = model.generate(IDS, solve={**solve, "stop": {"max_steps": 200}}, **options)
        assert max(solve.stats.residual.max() for solve in longer.cache.solves) < 1e-9  # the model's own rtol
        other = model.generate(IDS, solve={**solve, "solver": {"name": "Relaxed", "damping": 0.9}}, **options)
        assert not torch.equal(other.cache.solves[-1].stats.residual, residual)

    def test_the_keyword_comes_before_the_generation_configuration(self):
        if not self.implicit:
            return
        model = self.model()
        model.generation_config.solve = {"sweep": "Sequential", "stop": {"max_steps": 3}}
        solve = {"stop": {"max_steps": 4}}
        solves = model.generate(IDS, solve=solve, return_dict_in_generate=True, **GREEDY).cache.solves
        assert [(solve.stats.iterations.shape, solve.stats.evaluations) for solve in solves] == [
            ((3, 7), 7 * 4),
            *[((3, 1), 4)] * 3,
        ]

    @pytest.mark.parametrize(
        "sweep", [{"name": "Chunked", "size": 2}, {"name": "Sliding", "window": 3}], ids=lambda sweep: sweep["name"]
    )
    def test_sweeps_agree(self, sweep):
        if self.implicit:
            model = self.model()
            swept = model.generate(IDS, solve={"sweep": sweep}, **GREEDY)
            assert torch.equal(swept, model.generate(IDS, **GREEDY))

    def test_prompts_are_solved_by_the_models_own_sweep(self):
        if self.implicit:
            model = self.model(eval_solve={"sweep": {"name": "Chunked", "size": 2}})
            model.generation_config.solve = {"solver": dq.Relaxed(0.9)}
            output = model.generate(IDS, return_dict_in_generate=True, **GREEDY)
            own = self.model()(IDS, solve={"sweep": dq.Chunked(2), "solver": dq.Relaxed(0.9)})
            assert torch.equal(output.cache.solves[0].stats.iterations, own.stats.iterations)

    # what is refused

    @pytest.mark.parametrize(
        ("solve", "error", "message"),
        [
            ({"sweep": {"name": "Slidng"}}, ValueError, "sweep: name 'Slidng' .*did you mean 'Sliding'"),
            ({"stop": {"max_step": 3}}, ValueError, "Stop field 'max_step' .*did you mean 'max_steps'"),
            ({"stop": {"max_steps": 0}}, ValueError, r"Stop\.max_steps must be an integer >= 1"),
            ({"solver": 3}, TypeError, r"solver must be a solver of deqseq or its JSON"),
            ({"swep": "Sliding"}, ValueError, "field 'swep' .*did you mean 'sweep'"),
        ],
    )
    def test_a_bad_field_of_a_generation_configuration_is_named(self, solve, error, message):
        if not self.implicit:
            return
        with pytest.raises(error, match=message):
            self.model().generate(IDS, generation_config=GenerationConfig(solve=solve, **GREEDY))

    def test_a_misspelt_keyword_is_named(self):
        with pytest.raises(ValueError, match=r"not used by the model: \['solv'\]"):
            self.model().generate(IDS, solv={"sweep": "Sliding"}, **GREEDY)

    def test_an_explicit_model_has_nothing_to_choose(self):
        if not self.implicit:
            for options in ({"solve": {"stop": {"max_steps": 3}}}, {"generation_config": GenerationConfig(solve={})}):
                with pytest.raises(ValueError, match=r"^leave out solve.* is explicit \(implicit=False\)"):
                    self.model().generate(IDS, **options)

    def test_caches_and_prompts_that_do_not_fit(self):
        model = self.model()
        cache = model(IDS[:1, :4]).cache
        with pytest.raises(ValueError, match=r"1 rows and the input has 3: .*batch_repeat_interleave\(n\)"):
            model.generate(IDS, cache=cache, **GREEDY)
        with pytest.raises(ValueError, match=r"1 rows and the input has 4"):
            model.generate(IDS[:1], cache=cache, num_beams=4, **GREEDY)
        cache.batch_repeat_interleave(4)
        beams = model.generate(IDS[:1], cache=cache, num_beams=4, **GREEDY)
        assert torch.equal(beams, model.generate(IDS[:1], num_beams=4, **GREEDY))
        with pytest.raises(ValueError, match="prompts must be padded on the left"):
            model.generate(IDS, attention_mask=LEFT.flip(1).long(), pad_token_id=0, **GREEDY)
        with pytest.raises(ValueError, match="cache_implementation 'static' is not available"):
            model.generate(IDS, cache_implementation="static", **GREEDY)
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            model.generate(IDS[:1], prompt_lookup_num_tokens=2, **GREEDY)

    def test_an_empty_cache_of_ours_is_filled(self):
        cache = ImplicitCache()
        self.model().generate(IDS, cache=cache, **GREEDY)
        assert (cache.get_seq_length(), cache.batch_size) == (10, 3)
