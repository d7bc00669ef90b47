"""``generate(window=)``: the tokens of decoding one by one, with all that transformers calls for
each token.
"""

import warnings

import pytest
import torch
from hf_models import EXPLICIT, IDS, IMPLICIT, LEFT, made
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    set_seed,
)
from transformers.generation.logits_process import TopPLogitsWarper
from transformers.generation.stopping_criteria import MaxLengthCriteria

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitCache, WindowedOutput

PADDED = IDS.masked_fill(~LEFT, 0)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": LEFT.long()}


class Remembers(LogitsProcessor):
    """Forbids what it has seen chosen most often, by a memory that only calls in order
    keep right.
    """

    def __init__(self):
        self.lengths, self.counts = [], torch.zeros(3, 13, dtype=torch.float32)

    def __call__(self, ids, scores):
        self.lengths.append(ids.shape[1])
        if len(self.lengths) > 1:
            self.counts += torch.nn.functional.one_hot(ids[:, -1], 13)
        return scores.masked_fill(
            self.counts == self.counts.amax(dim=1, keepdim=True).clamp(min=1), -torch.inf
        )


class EndsOf(StoppingCriteria):
    """Rows end with an even sum of their last two tokens, or all with the first that does."""

    def __init__(self, *, together):
        self.together = together

    def __call__(self, ids, scores, **kwargs):
        even = ids[:, -2:].sum(dim=1) % 2 == 0
        return even.any().expand(3) if self.together else even


class Streamer:
    def __init__(self):
        self.told, self.ended = [], 0

    def put(self, tokens):
        self.told.append(tokens)

    def end(self):
        self.ended += 1


@IMPLICIT
@pytest.mark.parametrize("window", [1, 5])
def test_greedy_tokens_are_those_of_one_by_one(kind, window):
    model = made(kind)
    alone = model.generate(PADDED, **GREEDY)
    assert torch.equal(model.generate(PADDED, window=window, **GREEDY), alone)
    end = int(alone[0, 10])
    ended = model.generate(PADDED, window=window, eos_token_id=end, **GREEDY)
    assert torch.equal(ended, model.generate(PADDED, eos_token_id=end, **GREEDY))


@pytest.mark.parametrize("kind", ["llama", "parts"])
def test_prompts_as_embeddings_and_after_a_cache(kind):
    model = made(kind)
    alone, options = model.generate(PADDED, **GREEDY), {**GREEDY, "window": 4}
    embedded = model.get_input_embeddings()(PADDED)
    assert torch.equal(model.generate(inputs_embeds=embedded, **options), alone[:, 7:])
    cache = ImplicitCache()
    model(PADDED[:, :6], attention_mask=LEFT[:, :6].long(), cache=cache)
    for prompt in (PADDED, PADDED[:, 6:]):  # transformers takes the whole sequence, or what is new
        assert torch.equal(model.generate(prompt, cache=cache, **options)[:, -8:], alone[:, 7:])
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 3.0},
        {"min_length": 12, "eos_token_id": [1, 2, 3, 4]},
        {"no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda row, ids: [row + 1, row + 5, (len(ids) + row) % 13]},
        {"forced_eos_token_id": 3, "eos_token_id": [3, 5]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_apply_to_what_is_committed(options):
    model = made("llama")
    alone, plain = model.generate(PADDED, **GREEDY, **options), model.generate(PADDED, **GREEDY)
    assert not torch.equal(alone, plain)
    assert torch.equal(model.generate(PADDED, window=5, **GREEDY, **options), alone)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("end", [None, [2, 9]])
def test_processors_criteria_and_streamers_are_called_as_without_a_window(together, end):
    model, found, streamers, lengths = made("mamba2"), [], [], []
    for window in (None, 8):
        processor, streamer = Remembers(), Streamer()
        output = model.generate(
            IDS,
            window=window,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=[EndsOf(together=together)],
            streamer=streamer,
            eos_token_id=end,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **GREEDY | {"attention_mask": None},
        )
        found.append(output)
        streamers.append((torch.stack(streamer.told[1:]), streamer.ended))
        lengths.append(processor.lengths)
    one, other = found
    assert torch.equal(one.sequences, other.sequences)
    assert lengths[0] == lengths[1] == [*range(7, one.sequences.shape[1])]
    assert torch.equal(streamers[0][0], streamers[1][0])
    assert streamers[0][1] == streamers[1][1] == 1
    going = torch.stack(
        [(row != 0) for row in one.sequences[:, 7:].T]
    )  # padding is 0, and no row chooses it
    for mine, theirs in ((other.scores, one.scores), (other.logits, one.logits)):
        assert len(mine) == len(theirs)
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            torch.testing.assert_close(a[going[place]], b[going[place]], rtol=1e-5, atol=1e-5)


def test_sampling_depends_on_the_seed_and_not_on_the_window():
    model = made("llama")
    usual = {
        "do_sample": True,
        "temperature": 1.5,
        "top_k": 9,
        "top_p": 0.9,
        "num_return_sequences": 2,
    }
    drawn = {}
    for extra in ({}, {"min_p": 0.01}, {"repetition_penalty": 1.3}):
        for window in (1, 3, 8):
            set_seed(4)
            tokens = model.generate(PADDED, window=window, **GREEDY | usual | extra)
            assert tokens.shape == (6, 15)
            assert torch.equal(tokens, drawn.setdefault(str(extra), tokens))
    assert not torch.equal(drawn["{}"], drawn["{'repetition_penalty': 1.3}"])
    assert len(drawn["{}"].unique(dim=0)) > 3


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_p": 0.0, "top_k": 0},
        {"do_sample": True, "top_k": 0, "logits_processor": [TopPLogitsWarper(1e-9)]},
        {"stopping_criteria": [MaxLengthCriteria(12)]},
        {"stopping_criteria": [MaxLengthCriteria(22)]},
    ],
    ids=["a top-p of 0", "a warper of the caller's", "a shorter length", "a longer one"],
)
def test_what_the_caller_gives_counts_as_without_a_window(options):
    model = made("llama")
    alone = model.generate(PADDED, **GREEDY | options)
    assert torch.equal(model.generate(PADDED, window=4, **GREEDY | options), alone)


def test_a_warper_that_keeps_more_tokens_is_called():
    model, drawn = made("llama"), []
    for least in (1, 13):
        set_seed(0)
        warper = TopPLogitsWarper(1e-9, min_tokens_to_keep=least)
        options = {
            "do_sample": True,
            "top_k": 0,
            "logits_processor": [warper],
            "num_return_sequences": 20,
        }
        drawn.append(model.generate(IDS[:1], window=4, max_new_tokens=2, **options).unique(dim=0))
    assert len(drawn[0]) == 1
    assert len(drawn[1]) > 10


def test_guesses_that_a_processor_overrules_were_wrong():
    def other(ids, scores):
        return scores.roll(1, 1)

    model, options = made("llama"), GREEDY | {"return_dict_in_generate": True}
    found = model.generate(PADDED, window=4, logits_processor=[other], **options).generation
    usual = model.generate(PADDED, window=4, **options).generation
    assert (found.guessed < usual.guessed).all()


def test_what_a_processor_leaves_is_drawn_with_its_probability():
    model = made("llama")
    shares = []
    for window in (None, 4):
        set_seed(0)
        first = model.generate(
            IDS[:1],
            window=window,
            do_sample=True,
            max_new_tokens=1,
            min_p=0.05,
            num_return_sequences=4000,
        )[:, -1]
        shares.append(first.bincount(minlength=13) / 4000)
    assert (shares[0] - shares[1]).abs().max() < 0.04


def test_the_numbers_of_a_generation():
    model = made("mamba2")
    model.generation_config.window = 4
    output = model.generate(PADDED, return_dict_in_generate=True, **GREEDY)
    assert isinstance(output, WindowedOutput)
    assert output.scores is output.logits is output.cache is None
    assert output.generation.converged.all()
    assert output.generation.evaluations < sum(
        solve.stats.evaluations
        for solve in made("mamba2")
        .generate(PADDED, **GREEDY | {"return_dict_in_generate": True})
        .cache.solves[1:]
    )
    assert (output.generation.guessed > 0).all()
    assert torch.equal(output.sequences[:, 7:], output.generation.tokens)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beams"),
        ({"guidance_scale": 2.0, "negative_prompt_ids": IDS}, "guidance calls the model"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"synced_gpus": True}, "equally often"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_decodes_one_by_one_says_so(options, reason, monkeypatch):
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)  # of one process
    model = made("llama")
    with pytest.warns(
        UserWarning, match=f"window is not used, tokens are decoded one by one: .*{reason}"
    ):
        windowed = model.generate(PADDED, window=4, **GREEDY | options)
    alone = model.generate(PADDED, **GREEDY | options)
    windowed, alone = (getattr(each, "sequences", each) for each in (windowed, alone))
    assert torch.equal(windowed, alone)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {"window": 0}, "window must be an integer >= 1, got 0"),
        ("llama", {"window": "8"}, "window must be an integer >= 1, got '8'"),
        (
            "llama",
            {"generation_config": GenerationConfig(windw=8)},
            "'windw' .*did you mean 'window'",
        ),
        (
            "llama",
            {"window": 4, "solve": {"stop": {"rtol": 0.0, "atol": 0.0}}},
            "window must be 1, got 4: without a tol",
        ),
        *[(kind, {"window": 4}, "window must be 1, got 4: an explicit model") for kind in EXPLICIT],
    ],
)
def test_windows_that_cannot_be(kind, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        made(kind).generate(PADDED, **GREEDY, **options)


def test_processors_that_leave_no_token_are_refused():
    def none(ids, scores):
        return torch.where(torch.tensor([False, True, False])[:, None], -torch.inf, scores)

    with pytest.raises(
        ValueError, match=r"the logits processors leave no token to choose in rows \[1\]"
    ):
        made("llama").generate(
            PADDED, window=4, logits_processor=LogitsProcessorList([none]), **GREEDY
        )


def test_tokens_that_do_not_converge_are_told():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made("mamba2").generate(
            IDS[:, :1], window=4, max_new_tokens=6, solve={"stop": {"max_steps": 2}}
        )
    messages = [str(each.message) for each in told if each.category is dq.ConvergenceWarning]
    assert len(messages) == 1
    assert "rows did not converge" in messages[0]
