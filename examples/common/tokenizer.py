"""Tokenizers: a byte-level BPE of one's own, bytes, or one of the Hugging Face hub."""

import warnings
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from common.run import save_whole
from deqseq.check import check_integer

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte and the end of text
FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model")
FILES += ("chat_template*",)
"""What ``save_pretrained`` of a tokenizer writes."""


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE, as GPT-2 and GPT-NeoX use. Every text can be encoded, and decodes to itself.

    Args:
        documents: texts to learn from; the same ones give the same tokenizer.
        vocab_size: number of tokens, the end-of-text token ``<|endoftext|>`` (id 0) among them. 257 merges nothing: a
            token is a byte.

    Returns:
        The tokenizer. It has fewer tokens, with a warning, if the documents have no more pairs to merge.

    Raises:
        ValueError: a vocabulary below 257.

    Example:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 3, vocab_size=260)
        >>> tokenizer.decode(tokenizer("to be or né 🎭").input_ids)
        'to be or né 🎭'
    """
    check_integer("vocab_size", vocab_size, SMALLEST_VOCABULARY)
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[reportAttributeAccessIssue]
    bpe.decoder = ByteLevelDecoder()  # type: ignore[reportAttributeAccessIssue]
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(documents, trainer)
    if (found := bpe.get_vocab_size()) < vocab_size:
        warnings.warn(f"the documents have pairs for {found} tokens only, fewer than {vocab_size}", stacklevel=2)
    special = {f"{role}_token": END_OF_TEXT for role in ("eos", "bos", "pad")}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **special)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer by the path of its folder or by its name on the hub; ``"bytes"`` has a token for each byte.

    Raises:
        OSError: there is none, or the hub cannot be reached.
        ValueError: it is a slow one, which cannot say what text a token stands for, or has no end-of-text token.
    """
    if name == "bytes":
        return train_tokenizer([], SMALLEST_VOCABULARY)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(f"{name!r} is neither a folder with a tokenizer nor one of the hub's: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {name!r} must be a fast one, got {type(tokenizer).__name__}")
    end_of_text(tokenizer)
    return tokenizer


def end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the end-of-text token.

    Raises:
        ValueError: the tokenizer has none.
    """
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError("the tokenizer must have an end-of-text token: set tokenizer.eos_token")
    return tokenizer.eos_token_id


def saved_tokenizer(
    folder: Path, name: str, documents: Iterable[str], vocab_size: int, *, save: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, so that a run that is continued uses the same one; made the first time.

    Args:
        folder: written whole or not at all.
        name: ``"bpe"`` trains one on the documents; see :func:`load_tokenizer` for others.
        documents: texts to learn from.
        vocab_size: of the BPE.
        save: whether to write a new one; False for all processes but the main one.
    """
    if folder.exists():
        return load_tokenizer(str(folder))
    tokenizer = train_tokenizer(documents, vocab_size) if name == "bpe" else load_tokenizer(name)
    if save:
        save_whole(folder, tokenizer)
    return tokenizer
