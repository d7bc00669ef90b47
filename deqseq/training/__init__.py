"""Parts of a training loop: phases, parameter groups, a penalty and a check of the loss."""

from deqseq.training.curriculum import Curriculum
from deqseq.training.loop import (
    NonFiniteLoss,
    check_finite,
    jacobian_regularisation,
    parameter_groups,
)
from deqseq.training.phase import Phase, PoissonLogNormal, bounded, free, unrolled
from deqseq.training.sharding import gather_once

__all__ = [
    "Curriculum",
    "NonFiniteLoss",
    "Phase",
    "PoissonLogNormal",
    "bounded",
    "check_finite",
    "free",
    "gather_once",
    "jacobian_regularisation",
    "parameter_groups",
    "unrolled",
]
