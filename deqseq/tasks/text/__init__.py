"""Text as data: documents, tokens, packed sequences, and questions about a text.

What needs transformers is in :mod:`deqseq.tasks.text.tokenizer`, which is imported by whoever needs it.
"""

from deqseq.tasks.text.batches import PackedBatches
from deqseq.tasks.text.encoders import ByteEncoder, EncodedText, Encoder
from deqseq.tasks.text.hub import HubDocuments
from deqseq.tasks.text.packing import PackedText, TextBatch, bits_per_byte
from deqseq.tasks.text.questions import Choice, Cloze, choice_questions, cloze_questions
from deqseq.tasks.text.reading import LocalDocuments
from deqseq.tasks.text.shakespeare import HELD_OUT, load_shakespeare, split_shakespeare
from deqseq.tasks.text.streaming import Documents, PackedStream

__all__ = [
    "HELD_OUT",
    "ByteEncoder",
    "Choice",
    "Cloze",
    "Documents",
    "EncodedText",
    "Encoder",
    "HubDocuments",
    "LocalDocuments",
    "PackedBatches",
    "PackedStream",
    "PackedText",
    "TextBatch",
    "bits_per_byte",
    "choice_questions",
    "cloze_questions",
    "load_shakespeare",
    "split_shakespeare",
]
