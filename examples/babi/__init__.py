"""bAbI: stories with questions, read from the official files or generated, and CatbAbI's stream of them.

References:
    Weston et al., Towards AI-Complete Question Answering: A Set of Prerequisite Toy Tasks, 2015, arXiv 1502.05698.
    Schlag, Munkhdalai and Schmidhuber, Learning Associative Inference Using Fast Weight Memory, ICLR 2021,
    arXiv 2011.07831 (CatbAbI).
"""

from babi.generation import GENERATORS, SCALES, generate_stories
from babi.scores import count_most_frequent, count_right, score, score_rows
from babi.stories import TASK_NAMES, Line, Story, read_folder, read_stories
from babi.stream import StoryBatch, StoryStream, Vocabulary, encode_story, story_batches

__all__ = [
    "GENERATORS",
    "SCALES",
    "TASK_NAMES",
    "Line",
    "Story",
    "StoryBatch",
    "StoryStream",
    "Vocabulary",
    "count_most_frequent",
    "count_right",
    "encode_story",
    "generate_stories",
    "read_folder",
    "read_stories",
    "score",
    "score_rows",
    "story_batches",
]
