"""``generate`` of every family: which tokens, how they are solved, and what is refused."""

import warnings

import pytest
import torch
from hf_models import EVERY, IDS, IMPLICIT, LEFT, close, made, words
from transformers import GenerationConfig

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitCache, to_causal_lm

GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
SOLVES = GREEDY | {"return_dict_in_generate": True}
SHAPES = [(3, 7), (3, 1), (3, 1), (3, 1)]
"""Of the solves of a prompt, then of each token."""


BUDGET = {"stop": {"max_steps": 2}}


class TestTokens:
    @EVERY
    def test_greedy_tokens_are_those_of_the_core(self, kind):
        model = made(kind)
        ids = IDS.masked_fill(~LEFT, 0)
        options = GREEDY | {"attention_mask": LEFT.long()}
        tokens = model.generate(ids, **options)
        assert torch.equal(tokens[:, :7], ids)
        ours = to_causal_lm(model).generate(ids, mask=LEFT, max_new_tokens=4)
        assert torch.equal(tokens[:, 7:], ours.tokens)
        assert len(tokens[:, 7:].unique()) > 1
        embedded = model.get_input_embeddings()(ids)
        cache = ImplicitCache()
        assert torch.equal(model.generate(ids, use_cache=False, **options), tokens)
        assert torch.equal(model.generate(inputs_embeds=embedded, **options), tokens[:, 7:])
        assert torch.equal(model.generate(ids, cache=cache, **options), tokens)
        assert cache.get_seq_length() == 10
        assert cache.batch_size == 3

    @pytest.mark.parametrize("kind", ["llama", "parts"])
    @torch.no_grad()
    def test_beams_that_hold_everything_find_the_best_continuation_of_padded_prompts(self, kind):
        model = made(kind)
        options = GREEDY | {"max_new_tokens": 2, "num_beams": 13}
        best = model.generate(IDS.masked_fill(~LEFT, 0), attention_mask=LEFT.long(), **options)
        pairs = torch.cartesian_prod(torch.arange(13), torch.arange(13))
        for row, real, found in zip(IDS, LEFT, best, strict=True):
            every = torch.cat([row[real].expand(169, -1), pairs], dim=1)
            scores = model(every[:, :-1]).logits[:, -2:].log_softmax(-1)
            best_pair = scores.gather(2, pairs[..., None]).sum(1).argmax()
            assert torch.equal(pairs[best_pair], found[7:])

    def test_rows_that_end(self):
        model = made("llama")
        free = model.generate(IDS, **GREEDY)
        end = free[0, 8].item()
        ended = model.generate(IDS, eos_token_id=end, **GREEDY)
        for row, whole in zip(ended.tolist(), free.tolist(), strict=True):
            length = [*whole[7:], end].index(end) + 8
            assert row[:length] == whole[:length][: len(row)]
            assert not any(row[length:])
        tokenizer = words("abcdef")  # transformers looks for this one
        options = GREEDY | {"stop_strings": [f"w{end}"], "tokenizer": tokenizer}
        by_string = model.generate(IDS[:1], **options)
        length = free[0].tolist().index(end, 7) + 1
        assert torch.equal(by_string[0], free[0, :length])

    @pytest.mark.parametrize("kind", ["mamba2", "decoder"])
    def test_a_prompt_in_parts(self, kind):
        model = made(kind)
        mask = torch.arange(7) >= torch.tensor([0, 2, 1])[:, None]
        options = {"attention_mask": mask.long(), **GREEDY}
        whole = model.generate(IDS, **options)
        assert torch.equal(model.generate(IDS, prefill_chunk_size=3, **options), whole)
        padded = {"attention_mask": LEFT.long(), **GREEDY}  # more padding than one part has tokens
        parts = model.generate(IDS, prefill_chunk_size=3, **padded)
        assert torch.equal(parts, model.generate(IDS, **padded))
        cache = model(IDS[:, :4], attention_mask=mask[:, :4].long()).cache
        assert torch.equal(model.generate(IDS, cache=cache, **options), whole)
        assert cache.get_seq_length() == 10


class TestSolves:
    @IMPLICIT
    def test_how_prompts_and_tokens_are_solved(self, kind):
        model = made(kind)
        output = model.generate(IDS, **SOLVES)
        solves = output.cache.solves
        assert [solve.stats.iterations.shape for solve in solves] == SHAPES
        assert all(solve.converged.all() for solve in solves)
        for sweep in (dq.Chunked(2), {"name": "Sliding", "window": 3}):
            tokens = model.generate(IDS, solve={"sweep": sweep}, **GREEDY)
            assert torch.equal(tokens, output.sequences)

    def test_an_explicit_model_has_nothing_to_solve(self):
        model = made("explicit")
        assert model.generate(IDS, **SOLVES).cache.solves == ()
        for options in ({"solve": BUDGET}, {"generation_config": GenerationConfig(solve={})}):
            with pytest.raises(ValueError, match=r"^leave out solve.* is explicit \(solve=None\)"):
                model.generate(IDS, **options)

    @pytest.mark.parametrize("window", [None, 4])
    def test_solves_that_do_not_converge_are_told_once(self, window):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made("mamba2").generate(IDS, window=window, solve=BUDGET, **GREEDY)
        (warning,) = (each for each in told if each.category is dq.ConvergenceWarning)
        message = "3 of 3 rows did not converge (3 spent the budget of 2 iterations, 0 diverged)"
        assert message in str(warning.message)

    def test_a_generation_configuration_chooses_sweep_solver_and_budget(self):
        model = made("mamba2")
        kept = made("mamba2")
        solver = {"name": "Relaxed", "damping": 0.5}
        stop = dq.Stop(rtol=1e-9, max_steps=3)
        solve = {"sweep": {"name": "Sequential"}, "solver": solver, "stop": {"max_steps": 3}}
        kept.generation_config.solve = solve
        objects = dq.SolveConfig(dq.Relaxed(0.5), stop, sweep=dq.Sequential())
        outputs = [
            model.generate(IDS, generation_config=GenerationConfig(solve=solve, **SOLVES)),
            model.generate(IDS, solve=solve, **SOLVES),
            kept.generate(IDS, **SOLVES),
            model.generate(IDS, solve=objects, **SOLVES),
        ]
        for output in outputs:
            assert torch.equal(output.sequences, outputs[0].sequences)
            counts = [solve.stats.iterations for solve in output.cache.solves]
            assert [count.shape for count in counts] == SHAPES
            assert all((count == 3).all() for count in counts)
        residual = outputs[0].cache.solves[-1].stats.residual
        assert torch.equal(outputs[3].cache.solves[-1].stats.residual, residual)
        other = model.generate(IDS, solve=solve | {"solver": dq.Relaxed(0.9)}, **SOLVES)
        assert not torch.equal(other.cache.solves[-1].stats.residual, residual)
        # the keyword comes first; the sweep is the configuration's, the tolerance the model's
        longer = kept.generate(IDS, solve={"stop": {"max_steps": 200}}, **SOLVES).cache.solves
        assert max(solve.stats.residual.max() for solve in longer) < 1e-9
        assert longer[0].stats.evaluations > 7 * 3

    @pytest.mark.parametrize("use_cache", [True, False])
    def test_guidance_is_solved_as_the_rest(self, use_cache):
        """Its scores are differences of two solves: of the same prompt there are none."""
        model = made("llama")
        solve = BUDGET | {"solver": "Anderson"}
        options = SOLVES | {"use_cache": use_cache, "output_scores": True, "solve": solve}
        plain = model.generate(IDS, **options).scores
        guided = model.generate(IDS, guidance_scale=3.0, negative_prompt_ids=IDS, **options).scores
        for one, other in zip(plain, guided, strict=True):
            close(one.log_softmax(-1), other, 1e-5)

    def test_prompts_are_solved_by_the_models_own_sweep(self):
        model = made("mamba2", eval_solve={"sweep": dq.Chunked(2)})
        model.generation_config.solve = {"solver": dq.Relaxed(0.9)}
        output = model.generate(IDS, **SOLVES)
        call = made("mamba2")(IDS, solve={"sweep": dq.Chunked(2), "solver": dq.Relaxed(0.9)})
        assert torch.equal(output.cache.solves[0].stats.iterations, call.stats.iterations)


def generation_config(**fields):
    return {"generation_config": GenerationConfig(**fields, **GREEDY)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (generation_config(solve={"sweep": "Slidng"}), "sweep: .*'Slidng' .*mean 'Sliding'"),
        (generation_config(solve={"swep": "Sliding"}), "field 'swep' .*did you mean 'sweep'"),
        (generation_config(solves={}), r"'solves'.*'solve'"),
        ({"solv": {"sweep": "Sliding"}}, r"not used by the model: \['solv'\]"),
        ({"attention_mask": LEFT.flip(1).long()}, "prompts must be padded on the left"),
        (
            {"attention_mask": torch.ones(3, 6)},
            r"attention_mask must have shape \(3, 7\), .*3, 6",
        ),
        ({"cache_implementation": "static"}, "cache_implementation 'static' is not available"),
    ],
)
def test_a_call_that_cannot_be_honoured_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        made("llama").generate(**{"inputs": IDS, **GREEDY, **options})


def test_a_cache_of_other_rows_is_refused():
    model = made("llama")
    cache = model(IDS[:1, :4]).cache
    message = r"1 rows and the input has 3: .*batch_repeat_interleave\(n\)"
    with pytest.raises(ValueError, match=message):
        model.generate(IDS, cache=cache, **GREEDY)
    with pytest.raises(ValueError, match=r"1 rows and the input has 4"):
        model.generate(IDS[:1], cache=cache, num_beams=4, **GREEDY)
    cache.batch_repeat_interleave(4)
    beams = model.generate(IDS[:1], cache=cache, num_beams=4, **GREEDY)
    assert torch.equal(beams, model.generate(IDS[:1], num_beams=4, **GREEDY))


def test_continuous_batching_is_refused():
    message = "continuous batching is not supported: call generate"
    with pytest.raises(NotImplementedError, match=message):
        made("llama").generate_batch(IDS.tolist())
