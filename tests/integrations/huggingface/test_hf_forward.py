"""The call of each model type, implicit and explicit."""

from forward_contract import ForwardContract
from hf_models import Llama, Mamba2, Retrofit


class TestImplicitMamba2(Mamba2, ForwardContract):
    pass


class TestImplicitLlama(Llama, ForwardContract):
    pass


class TestRetrofit(Retrofit, ForwardContract):
    pass


class TestExplicitMamba2(Mamba2, ForwardContract):
    implicit = False


class TestExplicitLlama(Llama, ForwardContract):
    implicit = False
