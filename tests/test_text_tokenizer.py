"""Tokenizers: round trips, what is saved is what is loaded, and the bytes each token stands for."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Prepend
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from deqseq.tasks.text import ByteEncoder, PackedText
from deqseq.tasks.text.tokenizer import TokenizerEncoder, load_tokenizer, train_tokenizer

WORDS = ["To be, or not to be, that is the question:\n  Whether 'tis nobler in the mind to suffer — né 🎭 "] * 3
TOKENIZER = train_tokenizer(WORDS, 300)
TEXT = st.text(max_size=40) | st.lists(st.sampled_from(WORDS[0].split(" ")), max_size=20).map(" ".join)
AWKWARD = [
    "",
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
    assert len(TOKENIZER(" be")["input_ids"]) < 3  # merges were learnt


@given(text=TEXT)
@settings(max_examples=200, deadline=None)
def test_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
    ids = TokenizerEncoder(TOKENIZER)([text])[0].ids
    assert TOKENIZER.decode(ids[:-1].astype(int).tolist()) == text


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts(text, tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    encode = TokenizerEncoder(load_tokenizer(str(tmp_path)))
    document = encode([text])[0]
    assert document.ids[-1] == encode.eos == 0
    assert 0 not in document.ids[:-1]  # text, not the end of a document
    assert encode.tokenizer.decode(document.ids[:-1].astype(int).tolist()) == text
    assert document.byte_counts.sum() == len(text.encode())


def test_a_saved_tokenizer_is_the_same(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    for loaded in (load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.get_vocab() == TOKENIZER.get_vocab()
        assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 0)
        assert loaded(WORDS)["input_ids"] == TOKENIZER(WORDS)["input_ids"]


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


@given(texts=st.lists(TEXT, min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_bytes_of_tokens(texts):
    for text, document in zip(texts, TokenizerEncoder(TOKENIZER)(texts), strict=True):
        pieces = TOKENIZER.convert_ids_to_tokens(document.ids[:-1].astype(int).tolist())
        assert document.byte_counts.tolist() == [*byte_counts_by_definition(text, pieces), 0]


def test_bytes_of_a_tokenizer_that_drops_and_adds():
    """White space between words counts with the word after it, the rest with the end of text."""
    words = Tokenizer(WordLevel({"[UNK]": 0, "_to": 1, "bé": 2, "</s>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    words.normalizer = Prepend("_")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    documents = TokenizerEncoder(tokenizer)(["to  bé x \n", " \n"])
    assert [document.ids.tolist() for document in documents] == [[1, 2, 0, 3], [0, 3]]
    assert documents[0].byte_counts.tolist() == [2, 5, 2, 2]
    assert documents[1].byte_counts.sum() == 2


def test_tokens_around_a_text_are_left_out():
    around = Tokenizer(WordLevel({"[BOS]": 0, "be": 1, "</s>": 2}, unk_token="</s>"))
    around.pre_tokenizer = WhitespaceSplit()
    around.post_processor = TemplateProcessing("[BOS] $A", special_tokens=[("[BOS]", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=around, eos_token="</s>", bos_token="[BOS]")
    assert tokenizer(["be"])["input_ids"] == [[0, 1]]
    assert TokenizerEncoder(tokenizer)(["be be"])[0].ids.tolist() == [1, 1, 2]


def test_a_token_that_ends_before_another_adds_nothing(monkeypatch):
    answer = {"input_ids": [[1, 2, 3]], "offset_mapping": [[(0, 3), (0, 1), (3, 4)]]}
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", lambda self, texts, **options: answer)
    assert TokenizerEncoder(TOKENIZER)(["abcdé"])[0].byte_counts.tolist() == [3, 0, 1, 2]


def test_encoded_alone_or_together():
    encode = TokenizerEncoder(TOKENIZER)
    for alone, together in zip([encode([text])[0] for text in AWKWARD], encode(AWKWARD), strict=True):
        assert alone.ids.tolist() == together.ids.tolist()
        assert alone.byte_counts.tolist() == together.byte_counts.tolist()


def test_packed():
    encode = TokenizerEncoder(TOKENIZER)
    text = PackedText.pack(WORDS, encode, length=8)
    assert text.tokens.dtype == np.uint16
    assert text.text_bytes == PackedText.pack(WORDS, ByteEncoder(), length=8).text_bytes
    assert TOKENIZER.decode(text.tokens.astype(int).tolist()) == "<|endoftext|>" + "<|endoftext|>".join([*WORDS, ""])
    assert int(text.tokens.max()) < encode.vocab_size


def test_bad_training():
    with pytest.raises(ValueError, match="vocab_size must be at least 257, got 256"):
        train_tokenizer(WORDS, 256)
    with pytest.raises(ValueError, match="documents must have some text in them, got none"):
        train_tokenizer(["", ""], 300)
    with pytest.raises(TypeError, match="got one string: put it in a list"):
        train_tokenizer("abc", 300)
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at character 1"):
        train_tokenizer(["fine", "a\ud800"], 300)
    with pytest.warns(UserWarning, match="give a vocabulary of 258 only, not 5000"):
        assert len(train_tokenizer(["ab"], 5000)) == 258
    assert len(train_tokenizer(["ab"], 257)) == 257


def test_bad_tokenizers(tmp_path):
    with pytest.raises(OSError, match=r"is neither a folder with a tokenizer nor one of the hub's"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(OSError, match=r"missing' is neither a folder with a tokenizer nor one of the hub's"):
        load_tokenizer(str(tmp_path / "missing"))
    with pytest.raises(TypeError, match="tokenizer must be a fast one, got ByT5Tokenizer"):
        TokenizerEncoder(ByT5Tokenizer())
    plain = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer)
    with pytest.raises(ValueError, match=r"must have an end-of-text token: set tokenizer\.eos_token"):
        TokenizerEncoder(plain)
    with pytest.raises(ValueError, match="lone surrogate"):
        TokenizerEncoder(TOKENIZER)(["a\ud800"])


def test_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "deqseq.tasks.text.tokenizer")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'needs transformers: pip install "deqseq\[hf\]"'):
        import deqseq.tasks.text.tokenizer  # noqa: F401


def test_the_package_imports_no_extra():
    code = (
        "import sys, deqseq.tasks.text\n"
        "print([m for m in ('transformers', 'tokenizers', 'datasets', 'pyarrow') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
