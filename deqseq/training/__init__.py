"""Training: phases of a curriculum, and checkpoints that survive an interruption."""

from deqseq.training.checkpoint import Checkpoint, load_latest, save_checkpoint
from deqseq.training.curriculum import Curriculum, Phase

__all__ = ["Checkpoint", "Curriculum", "Phase", "load_latest", "save_checkpoint"]
