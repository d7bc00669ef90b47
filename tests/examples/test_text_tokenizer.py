"""Tokenizers: round trips, what is saved is what is loaded, and the bytes that each token stands for."""

from pathlib import Path

import numpy as np
import pytest
from common.tokenizer import load_tokenizer, saved_tokenizer, train_tokenizer
from common.tokens import encode
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Prepend
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

WORDS = ["To be, or not to be, that is the question:\n  Whether 'tis nobler in the mind to suffer — né 🎭 "] * 3
TOKENIZER = train_tokenizer(WORDS, 300)
BYTES = load_tokenizer("bytes")
TEXT = st.text(max_size=40) | st.lists(st.sampled_from(WORDS[0].split(" ")), max_size=20).map(" ".join)
AWKWARD = [
    " ",
    "\r\n\t \x00\x7f",
    "<|endoftext|>",
    "a<|endoftext|> b",
    "e\u0301 é \u200d\ufeff\ufffd\U0010ffff",
    "👩‍👩‍👧 . , 's  ",
    "नमस्ते שלום",
]


def test_what_a_tokenizer_has():
    assert len(TOKENIZER) == TOKENIZER.vocab_size == 300
    assert TOKENIZER.eos_token == TOKENIZER.bos_token == TOKENIZER.pad_token == "<|endoftext|>"
    assert TOKENIZER.eos_token_id == 0
    assert TOKENIZER.clean_up_tokenization_spaces is False  # for readers that would take the space out of "a ."
    assert len(TOKENIZER(" be")["input_ids"]) < 3  # merges were learned


@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_round_trip(text):
    for tokenizer in (TOKENIZER, BYTES):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        ids = encode([text], tokenizer).ids
        assert ids[-1] == 0
        assert tokenizer.decode(ids[1:-1].tolist()) == text


@given(text=TEXT)
@settings(max_examples=50, deadline=None)
def test_bytes_are_tokens(text):
    assert len(BYTES) == 257
    found = encode([text], BYTES)
    assert len(found.ids) - 2 == len(text.encode()) or not text
    assert len(set(found.ids[1:-1].tolist())) == len(set(text.encode()))


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts(text, tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    ids, byte_counts = encode([text], tokenizer)
    assert ids[0] == ids[-1] == 0
    assert 0 not in ids[1:-1]  # text, not the end of a document
    assert tokenizer.decode(ids[1:-1].tolist()) == text
    assert byte_counts.sum() == len(text.encode())


def test_a_saved_tokenizer_is_the_same(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    for loaded in (load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == TOKENIZER.get_vocab()
        assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 0)
        assert loaded(WORDS)["input_ids"] == TOKENIZER(WORDS)["input_ids"]


def test_a_run_keeps_its_tokenizer(tmp_path):
    first = saved_tokenizer(tmp_path / "tokenizer", "bpe", WORDS, 290)
    again = saved_tokenizer(tmp_path / "tokenizer", "bpe", ["other words"], 260)
    assert again.get_vocab() == first.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
    other = saved_tokenizer(tmp_path / "another", str(tmp_path / "tokenizer"), [], 260, save=False)
    assert other.get_vocab() == first.get_vocab()
    assert not (tmp_path / "another").exists()


def test_a_disk_that_is_full_while_the_tokenizer_is_written_does_not_hinder_the_next_start(tmp_path, monkeypatch):
    def full(self: object, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text('{"half')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
        with pytest.raises(OSError, match="No space left"):
            saved_tokenizer(tmp_path / "tokenizer", "bpe", WORDS, 290)
    assert not (tmp_path / "tokenizer").exists()
    saved_tokenizer(tmp_path / "tokenizer", "bpe", WORDS, 290)
    assert load_tokenizer(str(tmp_path / "tokenizer")).vocab_size == 290
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_training_is_repeatable():
    again = train_tokenizer(iter(WORDS), 300)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def byte_counts_by_definition(text, pieces):
    """A byte-level token has a letter for each of its bytes; a token's text ends where its last character does."""
    ends = [len(part) for part in ("".join(text[:i]).encode() for i in range(len(text) + 1))]
    reached, counts, total = 0, [], 0
    for piece in pieces:
        total += len(piece)
        furthest = min(end for end in ends if end >= total)
        counts.append(furthest - reached)
        reached = furthest
    return counts


@given(texts=st.lists(TEXT.filter(bool), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_bytes_of_tokens(texts):
    expected = [0]
    for text in texts:
        pieces = TOKENIZER.convert_ids_to_tokens(TOKENIZER(text, split_special_tokens=True)["input_ids"])
        expected += [*byte_counts_by_definition(text, pieces), 0]
    found = encode(texts, TOKENIZER)
    assert found.byte_counts.tolist() == expected
    assert (found.ids == 0).sum() == len(texts) + 1


def test_bytes_of_a_tokenizer_that_drops_and_adds():
    """White space between words counts with the word after it, the rest with the end of text."""
    words = Tokenizer(WordLevel({"[UNK]": 0, "_to": 1, "bé": 2, "</s>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    words.normalizer = Prepend("_")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    ids, byte_counts = encode(["to  bé x \n", " \n"], tokenizer)
    assert ids.tolist() == [3, 1, 2, 0, 3, 0, 3]
    assert byte_counts.tolist()[:5] == [0, 2, 5, 2, 2]
    assert byte_counts[5:].sum() == 2


def test_tokens_around_a_text_are_left_out():
    around = Tokenizer(WordLevel({"[BOS]": 0, "be": 1, "</s>": 2}, unk_token="</s>"))
    around.pre_tokenizer = WhitespaceSplit()
    around.post_processor = TemplateProcessing("[BOS] $A", special_tokens=[("[BOS]", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=around, eos_token="</s>", bos_token="[BOS]")
    assert tokenizer(["be"])["input_ids"] == [[0, 1]]
    assert encode(["be be"], tokenizer).ids.tolist() == [2, 1, 1, 2]


def test_a_token_that_ends_before_another_adds_nothing(monkeypatch):
    answer = {"input_ids": [[1, 2, 3]], "offset_mapping": [[(0, 3), (0, 1), (3, 4)]]}
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", lambda self, texts, **options: answer)
    assert encode(["abcdé"], TOKENIZER).byte_counts.tolist() == [0, 3, 0, 1, 2]


def test_encoded_alone_or_together(monkeypatch):
    together = encode([*AWKWARD, ""], TOKENIZER)
    alone = [encode([text], TOKENIZER) for text in AWKWARD]
    assert together.ids.tolist() == [0, *np.concatenate([part.ids[1:] for part in alone]).tolist()]
    monkeypatch.setattr("common.tokens.GROUP", 5)  # several calls of the tokenizer
    for one, other in zip(together, encode([*AWKWARD, ""], TOKENIZER), strict=True):
        assert one.tolist() == other.tolist()


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="vocab_size must be an integer >= 257, got 256"):
        train_tokenizer(WORDS, 256)
    with pytest.warns(UserWarning, match="258 tokens only, fewer than 5000"):
        assert len(train_tokenizer(["ab"], 5000)) == 258
    for name in (str(tmp_path), str(tmp_path / "missing")):
        with pytest.raises(OSError, match="is neither a folder with a tokenizer nor one of the hub's"):
            load_tokenizer(name)
    PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"end-of-text token: set tokenizer\.eos_token"):
        load_tokenizer(str(tmp_path))
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    with pytest.raises(ValueError, match="must be a fast one, got ByT5Tokenizer"):
        load_tokenizer(str(tmp_path / "slow"))
    with pytest.raises(ValueError, match="documents must be strings, got int"):
        encode([3], TOKENIZER)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        encode(["a\ud800"], TOKENIZER)
