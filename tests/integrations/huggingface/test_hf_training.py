"""Losses, gradients and vocabularies of each model type, implicit and explicit."""

from hf_models import Llama, Mamba2
from training_contract import TrainingContract


class TestImplicitMamba2(Mamba2, TrainingContract):
    pass


class TestImplicitLlama(Llama, TrainingContract):
    pass


class TestExplicitMamba2(Mamba2, TrainingContract):
    implicit = False


class TestExplicitLlama(Llama, TrainingContract):
    implicit = False
