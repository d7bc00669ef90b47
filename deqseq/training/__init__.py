"""What training a fixed point needs besides a loop: phases, parameter groups, a penalty and a check of the loss."""

from deqseq.training.curriculum import Curriculum
from deqseq.training.guard import NonFiniteLoss, check_finite
from deqseq.training.jacobian import jacobian_regularisation
from deqseq.training.parameter_groups import parameter_groups
from deqseq.training.phase import Phase, bounded, free, unrolled

__all__ = [
    "Curriculum",
    "NonFiniteLoss",
    "Phase",
    "bounded",
    "check_finite",
    "free",
    "jacobian_regularisation",
    "parameter_groups",
    "unrolled",
]
