"""Tokenizers of transformers: a byte-level BPE of one's own, or one by name; needs the extra ``hf``."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from deqseq.tasks.text.encoders import EncodedText, groups, smallest_unsigned, utf8

try:
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
except ImportError as error:
    raise ImportError('deqseq.tasks.text.tokenizer needs transformers: pip install "deqseq[hf]"') from error

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte and the end of text


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE, as GPT-2 and GPT-NeoX have.

    Every text has tokens, and decoding them gives it back to the letter. The same documents give the same tokenizer.
    Its ``save_pretrained(folder)`` writes it, :func:`load_tokenizer` or ``AutoTokenizer`` read it.

    Args:
        documents: texts to learn from; empty ones are left out.
        vocab_size: number of tokens, with the end-of-text token ``<|endoftext|>``, id 0, which also serves as
            beginning and padding.

    Returns:
        The tokenizer. ``len(tokenizer)`` falls short of ``vocab_size``, with a warning, if the text has no more pairs
        to merge.

    Raises:
        ValueError: a vocabulary below 257, no documents, or a document that UTF-8 cannot write.

    References:
        Sennrich, Haddow and Birch, Neural Machine Translation of Rare Words with Subword Units, 2016, arXiv 1508.07909.
        Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (bytes as the alphabet).

    Example:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 3, vocab_size=260)
        >>> tokenizer.decode(tokenizer("to be or né 🎭").input_ids)
        'to be or né 🎭'
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size must be at least {SMALLEST_VOCABULARY}, got {vocab_size}")
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[reportAttributeAccessIssue]
    bpe.decoder = ByteLevelDecoder()  # type: ignore[reportAttributeAccessIssue]
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for group in groups(documents) for text in group if utf8(text))
    first = next(texts, None)
    if first is None:
        raise ValueError("documents must have some text in them, got none")
    bpe.train_from_iterator(chain([first], texts), trainer)
    if bpe.get_vocab_size() < vocab_size:
        warnings.warn(
            f"the documents give a vocabulary of {bpe.get_vocab_size()} only, not {vocab_size}: they have no more "
            "pairs of tokens to merge",
            stacklevel=2,
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer by the path of its folder or by its name on the hub.

    Args:
        name: such as ``"runs/tokenizer"`` or ``"EleutherAI/gpt-neox-20b"``.

    Returns:
        The tokenizer.

    Raises:
        OSError: there is none, or the hub cannot be reached.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = train_tokenizer(["to be or not to be"] * 3, vocab_size=260).save_pretrained(folder)
        ...     len(load_tokenizer(folder))
        260
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(f"{name!r} is neither a folder with a tokenizer nor one of the hub's: {error}") from error


class TokenizerEncoder:
    """A tokenizer as :class:`~deqseq.tasks.text.Encoder`.

    Tokens that a tokenizer puts around a text of itself are left out, and the name of a special token, where it stands
    in a document, is text.

    Args:
        tokenizer: of transformers, a fast one, with an end-of-text token.

    Raises:
        TypeError: it is a slow one, which does not tell what part of the text a token stands for.
        ValueError: it has no end-of-text token.

    Example:
        >>> encode = TokenizerEncoder(train_tokenizer(["to be or not to be"] * 3, vocab_size=260))
        >>> document = encode(["to be é"])[0]
        >>> int(document.ids[-1]) == encode.eos, document.byte_counts.tolist()
        (True, [2, 3, 1, 2, 0, 0])
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise TypeError(f"tokenizer must be a fast one, got {type(tokenizer).__name__}")
        if not isinstance(tokenizer.eos_token_id, int):
            raise ValueError("tokenizer must have an end-of-text token: set tokenizer.eos_token")
        self.tokenizer = tokenizer
        self._eos = tokenizer.eos_token_id

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the special ones with them."""
        return len(self.tokenizer)

    @property
    def eos(self) -> int:
        """Id of the end-of-text token."""
        return self._eos

    def __call__(self, texts: Sequence[str], /) -> list[EncodedText]:
        """Each document as tokens that end with :attr:`eos`.

        Args:
            texts: the documents.

        Returns:
            One record a document.

        Raises:
            ValueError: a document has a lone surrogate, which UTF-8 cannot write.
        """
        for text in texts:
            utf8(text)
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        rows = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [self._record(text, ids, [end for _, end in offsets]) for text, ids, offsets in rows]

    def _record(self, text: str, ids: list[int], ends: list[int]) -> EncodedText:
        # the eos stands at the end of the text; a token that ends before another one has ended adds nothing
        furthest = np.maximum.accumulate(_byte_offsets(text)[np.array([*ends, len(text)])])
        byte_counts = np.diff(furthest, prepend=0)
        return EncodedText(smallest_unsigned(np.array([*ids, self._eos])), smallest_unsigned(byte_counts))


def _byte_offsets(text: str) -> np.ndarray:
    """Where each character begins in UTF-8, and where the text ends: ``(characters + 1,)``."""
    if text.isascii():
        return np.arange(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.append(0, np.cumsum(sizes))
