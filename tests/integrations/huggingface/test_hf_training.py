"""Losses, gradients and vocabularies of each model type, implicit and explicit."""

from hf_models import Llama, Mamba2, Retrofit
from training_contract import TrainingContract


class TestImplicitMamba2(Mamba2, TrainingContract):
    pass


class TestImplicitLlama(Llama, TrainingContract):
    pass


class TestRetrofit(Retrofit, TrainingContract):
    test_the_gradient_is_chosen_by_the_configuration = None  # asks for the norm of the paper's injection
    test_where_nothing_can_be_recomputed = None  # prelude and coda are recomputed


class TestExplicitMamba2(Mamba2, TrainingContract):
    implicit = False


class TestExplicitLlama(Llama, TrainingContract):
    implicit = False
