"""Generation by each model type, implicit and explicit."""

from generation_contract import GenerationContract
from hf_models import Llama, Mamba2, Retrofit


class TestImplicitMamba2(Mamba2, GenerationContract):
    layers = 1


class TestImplicitLlama(Llama, GenerationContract):
    layers = 1


class TestRetrofit(Retrofit, GenerationContract):
    pass


class TestExplicitMamba2(Mamba2, GenerationContract):
    implicit, layers = False, 1


class TestExplicitLlama(Llama, GenerationContract):
    implicit, layers = False, 1
