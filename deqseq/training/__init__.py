"""Training: curriculum, learning rate, parameter groups, and checkpoints that survive an interruption."""

from deqseq.training.checkpoint import Checkpoint, DamagedCheckpointWarning, load_latest, save_checkpoint
from deqseq.training.curriculum import Curriculum
from deqseq.training.guard import NonFiniteLoss, check_finite
from deqseq.training.parameter_groups import parameter_groups
from deqseq.training.phase import Phase, bounded, free, unrolled
from deqseq.training.random_state import random_state, restore_random_state
from deqseq.training.schedules import WarmupConstantDecay, warmup_constant_decay

__all__ = [
    "Checkpoint",
    "Curriculum",
    "DamagedCheckpointWarning",
    "NonFiniteLoss",
    "Phase",
    "WarmupConstantDecay",
    "bounded",
    "check_finite",
    "free",
    "load_latest",
    "parameter_groups",
    "random_state",
    "restore_random_state",
    "save_checkpoint",
    "unrolled",
    "warmup_constant_decay",
]
