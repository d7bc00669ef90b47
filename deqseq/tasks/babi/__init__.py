"""bAbI: stories with questions, read from the official files or made from a seed, and CatbAbI's stream of them."""

from deqseq.tasks.babi.files import BabiFormatError, read_folder, read_stories, write_stories
from deqseq.tasks.babi.generation import GENERATORS, SCALES, generate_stories
from deqseq.tasks.babi.scores import Count, count_most_frequent, count_right, merge_counts, total
from deqseq.tasks.babi.story import TASK_NAMES, Fact, Question, Story, split_words
from deqseq.tasks.babi.stream import StoryBatch, encode_story, story_batches, stream_batches
from deqseq.tasks.babi.vocabulary import Vocabulary

__all__ = [
    "GENERATORS",
    "SCALES",
    "TASK_NAMES",
    "BabiFormatError",
    "Count",
    "Fact",
    "Question",
    "Story",
    "StoryBatch",
    "Vocabulary",
    "count_most_frequent",
    "count_right",
    "encode_story",
    "generate_stories",
    "merge_counts",
    "read_folder",
    "read_stories",
    "split_words",
    "story_batches",
    "stream_batches",
    "total",
    "write_stories",
]
