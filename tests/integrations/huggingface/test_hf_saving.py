"""Saving, loading and initial weights of each model type, implicit and explicit."""

from hf_models import Llama, Mamba2
from saving_contract import SavingContract


class TestImplicitMamba2(Mamba2, SavingContract):
    pass


class TestImplicitLlama(Llama, SavingContract):
    pass


class TestExplicitMamba2(Mamba2, SavingContract):
    implicit = False


class TestExplicitLlama(Llama, SavingContract):
    implicit = False
