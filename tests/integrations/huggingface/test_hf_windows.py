"""``generate(window=)``: the tokens of decoding one by one, and what is called for each."""

import pytest
import torch
from hf_models import IDS, IMPLICIT, LEFT, close, made
from torch.nn.functional import one_hot
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    set_seed,
)
from transformers.generation.logits_process import TopPLogitsWarper
from transformers.generation.stopping_criteria import MaxLengthCriteria

from deqseq.integrations.huggingface import ImplicitCache, WindowedOutput

PADDED = IDS.masked_fill(~LEFT, 0)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": LEFT.long()}


def same_in_windows(model, window, prompt=PADDED, **options):
    """The tokens of decoding one by one, which a window gives, too."""
    options = GREEDY | options
    tokens = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, window=window, **options), tokens)
    return tokens


class Remembers(LogitsProcessor):
    """Forbids what was chosen most often, by a memory that only calls in order keep right."""

    def __init__(self):
        self.lengths = []
        self.counts = torch.zeros(3, 13, dtype=torch.float32)

    def __call__(self, ids, scores):
        self.lengths.append(ids.shape[1])
        if len(self.lengths) > 1:
            self.counts += one_hot(ids[:, -1], 13)
        most = self.counts.amax(dim=1, keepdim=True).clamp(min=1)
        return scores.masked_fill(self.counts == most, -torch.inf)


class EndsOf(StoppingCriteria):
    """Rows end with an even sum of their last two tokens, or all with the first that does."""

    def __init__(self, *, together):
        self.together = together

    def __call__(self, ids, scores, **kwargs):
        even = ids[:, -2:].sum(dim=1) % 2 == 0
        return even.any().expand(3) if self.together else even


class Streamer:
    def __init__(self):
        self.told = []
        self.ended = 0

    def put(self, tokens):
        self.told.append(tokens)

    def end(self):
        self.ended += 1


@IMPLICIT
def test_greedy_tokens_are_those_of_one_by_one(kind):
    model = made(kind)
    alone = same_in_windows(model, 5)
    same_in_windows(model, 5, eos_token_id=int(alone[0, 10]))


@pytest.mark.parametrize("kind", ["llama", "parts"])
def test_prompts_as_embeddings_and_after_a_cache(kind):
    model = made(kind)
    alone = model.generate(PADDED, **GREEDY)
    options = {**GREEDY, "window": 4}
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
)
def test_processors_apply_to_what_is_committed(options):
    model = made("llama")
    alone = same_in_windows(model, 5, **options)
    assert not torch.equal(alone, model.generate(PADDED, **GREEDY))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("end", [None, [2, 9]])
def test_processors_criteria_and_streamers_are_called_as_without_a_window(together, end):
    model = made("mamba2")
    outputs = []
    options = GREEDY | {"attention_mask": None, "return_dict_in_generate": True}
    options |= {"eos_token_id": end, "output_scores": True, "output_logits": True}
    for window in (None, 8):
        processor = Remembers()
        streamer = Streamer()
        options["logits_processor"] = LogitsProcessorList([processor])
        options["stopping_criteria"] = [EndsOf(together=together)]
        output = model.generate(IDS, window=window, streamer=streamer, **options)
        outputs.append(output)
        assert processor.lengths == [*range(7, output.sequences.shape[1])]
        assert torch.equal(torch.stack(streamer.told[1:], dim=1), output.sequences[:, 7:])
        assert streamer.ended == 1
    alone, windowed = outputs
    assert torch.equal(alone.sequences, windowed.sequences)
    goes_on = alone.sequences[:, 7:].T != 0  # padding is 0, and no row chooses it
    for name in ("scores", "logits"):
        found, expected = (torch.stack(output[name]) for output in (windowed, alone))
        torch.testing.assert_close(found[goes_on], expected[goes_on], rtol=1e-5, atol=1e-5)


def test_sampling_depends_on_the_seed_and_not_on_the_window():
    model = made("llama")
    drawn = []
    usual = GREEDY | {"do_sample": True, "num_return_sequences": 2}
    usual |= {"temperature": 1.5, "top_k": 9, "top_p": 0.9}
    for extra in ({}, {"repetition_penalty": 1.3}):
        tokens = []
        for window in (1, 8):
            set_seed(4)
            tokens.append(model.generate(PADDED, window=window, **usual | extra))
            assert torch.equal(tokens[-1], tokens[0])
        drawn.append(tokens[0])
    assert not torch.equal(*drawn)
    assert len(drawn[0].unique(dim=0)) > 3


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_p": 0.0, "top_k": 0},
        {"do_sample": True, "top_k": 0, "logits_processor": [TopPLogitsWarper(1e-9)]},
        {"stopping_criteria": [MaxLengthCriteria(12)]},
        {"stopping_criteria": [MaxLengthCriteria(22)]},
    ],
)
def test_what_the_caller_gives_counts_as_without_a_window(options):
    same_in_windows(made("llama"), 4, **options)


def test_a_warper_that_keeps_more_tokens_is_called():
    model = made("llama")
    drawn = []
    for least in (1, 13):
        set_seed(0)
        warper = TopPLogitsWarper(1e-9, min_tokens_to_keep=least)
        options = {"do_sample": True, "top_k": 0, "logits_processor": [warper]}
        prompt = IDS[:1].expand(20, -1)
        drawn.append(model.generate(prompt, window=4, max_new_tokens=2, **options).unique(dim=0))
    assert len(drawn[0]) == 1
    assert len(drawn[1]) > 10


def test_guesses_that_a_processor_overrules_were_wrong():
    def other(ids, scores):
        return scores.roll(1, 1)

    model = made("llama")
    options = GREEDY | {"return_dict_in_generate": True}
    found = model.generate(PADDED, window=4, logits_processor=[other], **options).generation
    usual = model.generate(PADDED, window=4, **options).generation
    assert (found.guessed < usual.guessed).all()


def test_what_a_processor_leaves_is_drawn_with_its_probability():
    model = made("llama")
    shares = []
    for window in (None, 4):
        set_seed(0)
        options = {"do_sample": True, "min_p": 0.05, "num_return_sequences": 2000}
        tokens = model.generate(IDS[:1], window=window, max_new_tokens=1, **options)[:, -1]
        shares.append(tokens.bincount(minlength=13) / 2000)
    close(shares[0], shares[1], 0.04)


def test_the_numbers_of_a_generation():
    model = made("mamba2")
    options = GREEDY | {"return_dict_in_generate": True}
    solves = model.generate(PADDED, **options).cache.solves
    model.generation_config.window = 4
    output = model.generate(PADDED, **options)
    assert isinstance(output, WindowedOutput)
    assert output.scores is output.logits is output.cache is None
    assert output.generation.converged.all()
    assert output.generation.evaluations < sum(each.stats.evaluations for each in solves[1:])
    assert (output.generation.guessed > 0).all()
    assert torch.equal(output.sequences[:, 7:], output.generation.tokens)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beams"),
        ({"guidance_scale": 2.0, "negative_prompt_ids": IDS}, "guidance calls the model"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
        ({"output_hidden_states": True}, "hidden states"),
        ({"synced_gpus": True}, "equally often"),
    ],
)
def test_what_decodes_one_by_one_says_so(options, reason, monkeypatch):
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)  # of one process
    model = made("llama")
    options = GREEDY | {"max_new_tokens": 3, "return_dict_in_generate": True} | options
    with pytest.warns(UserWarning, match=f"window is not used, .* one by one: .*{reason}"):
        windowed = model.generate(PADDED, window=4, **options)
    assert torch.equal(windowed.sequences, model.generate(PADDED, **options).sequences)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {"window": 0}, "window must be an integer >= 1, got 0"),
        ("llama", {"generation_config": GenerationConfig(windw=8)}, "'windw' .*mean 'window'"),
        ("explicit", {"window": 4}, "window must be 1, got 4: an explicit model"),
    ],
)
def test_windows_that_cannot_be(kind, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        made(kind).generate(PADDED, **GREEDY, **options)


def test_processors_that_leave_no_token_are_refused():
    def none(ids, scores):
        return torch.where(torch.tensor([False, True, False])[:, None], -torch.inf, scores)

    message = r"the logits processors leave no token to choose in rows \[1\]"
    with pytest.raises(ValueError, match=message):
        made("llama").generate(PADDED, window=4, logits_processor=[none], **GREEDY)
